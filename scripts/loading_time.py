"""Print where the seconds of a start of `offload-rt serve` go, as a table in Markdown.

    python scripts/loading_time.py MODEL [--cold]

MODEL is the folder of a checkpoint that was loaded once before, so that verification and calibration are cached. Before
the start, its files are read once, to compare. With --cold, they are removed from the page cache before each reading.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

LIBRARIES = "import torch, transformers.modeling_utils"
BEGINNING = "interpreter, command line, check of the folder"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--cold", action="store_true", help="remove the files from the page cache before reading them")
    args = parser.parse_args()
    files = sorted(args.model.glob("*.safetensors")) if args.model.is_dir() else [args.model]
    if args.cold:
        drop(files)
    reading = seconds_of(lambda: read(files))
    libraries = seconds_of(lambda: subprocess.run([sys.executable, "-c", LIBRARIES], check=True))
    if args.cold:
        drop(files)
    parts = start(args.model)
    print("| part of the start | seconds |\n|---|---|")
    for name, seconds in [*parts, ("all, until the model is loaded", sum(seconds for _, seconds in parts))]:
        print(f"| {name} | {seconds:.1f} |")
    print(f"| for comparison: `{LIBRARIES}` in Python | {libraries:.1f} |")
    size = sum(path.stat().st_size for path in files)
    print(f"| for comparison: reading the {size / 1e9:.1f} GB of weights | {reading:.1f} |")


def start(model: Path) -> list[tuple[str, float]]:
    """Start the server, wait until the model is loaded, and stop it. Return the tasks of its log with their seconds."""
    command = ["-m", "offload_rt", "serve", str(model), "--port", "0", "--no-store", "--log-format", "json"]
    begun, name, parts = time.time(), BEGINNING, list[tuple[str, float]]()
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") not in ("loading", "loaded"):
                continue
            now = datetime.fromisoformat(event["time"]).timestamp()
            if event.get("task") != name:
                parts.append((name, now - begun))
                begun, name = now, event.get("task", "")
            if event["event"] == "loaded":
                break
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    return parts


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def read(files: list[Path]) -> None:
    buffer = bytearray(8 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
