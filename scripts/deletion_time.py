"""Print how long the deletion of sessions takes in a store with many sessions.

    python scripts/deletion_time.py [--sessions 2000] [--tokens 4000]

The store is made in a temporary folder. It contains histories without KV, each in two generations.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from offload_rt.sessions.deletion import remove_session
from offload_rt.sessions.history import History, document_name
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.documents import NamespaceDocuments

DELETIONS = 3
SETTLED_SECONDS = 3
"""Longer than the age from which unchanged files are not read again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of each session")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(Path(folder), "deletions", layers=1)
        fill(store, args.sessions, args.tokens)
        time.sleep(SETTLED_SECONDS)
        for i in range(DELETIONS):
            begun = time.perf_counter()
            remove_session(store, store.root.hex(), document_name(f"s{i}"))
            print(f"deletion {i + 1} of {args.sessions:,} sessions: {time.perf_counter() - begun:.3f} s")
        store.close()


def fill(store: NamespaceDocuments, sessions: int, tokens: int) -> None:
    chance = random.Random(0)
    for i in range(sessions):
        ids = [chance.randrange(50_000) for _ in range(tokens)]
        keys = [chance.randbytes(32).hex() for _ in range(tokens // 64)]
        history = History(f"s{i}", "model", tokens=ids, computed=tokens, keys=keys)
        for _ in range(2):
            store.documents.put(document_name(history.name), history.to_bytes())


if __name__ == "__main__":
    main()
