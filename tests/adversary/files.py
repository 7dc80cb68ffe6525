"""Fuzz the files of a session store: damage never causes a wrong token or affects more than the damaged data.

Each case runs a few sessions in a new store, and damages, moves or deletes files between turns and restarts. It checks:

* a session opens with tokens that it had before and its next answer equals the model's, or it raises StoreError;
* no other exception is raised, `check_integrity` passes, and nothing outside the folder changes;
* no file in the store contains tokens of a deleted session, except for damaged documents that the deletion reported.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import warnings
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from support.leftovers import find_leftovers
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.errors import StoreError
from offload_rt.sessions.catalog import delete_stored, read_catalog
from offload_rt.sessions.session import Session
from offload_rt.storage.folder import DOCUMENT_FILE

NAMES = ("ada", "bob", "kitchen.sinks")
PARAMS = SamplingParams(max_tokens=3, temperature=0)
ROUNDS = 5


@cache
def runtime() -> LLM:
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
    return LLM(model, dtype="float32", host_memory="4MiB", policy="full")


@cache
def model_answer(tokens: tuple[int, ...]) -> list[int]:
    """Generate an answer with an engine that shares no state with the sessions."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
    with LLM(model, dtype="float32", host_memory="4MiB", policy="full", enable_prefix_caching=False) as llm:
        return completed(llm.generate([list(tokens)], PARAMS))[0].token_ids


# ------------------------------------------------------------------------------------------------------------- damages


def truncate(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def flip(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3)) if data else 0):
        data[rng.randrange(min(len(data), rng.choice((64, 1 << 30))))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def rename(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    os.replace(path, other.with_name(other.name + rng.choice(("", ".bak", "~"))))


def swap(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    os.replace(path, path.with_name("between"))
    if other.exists():
        os.replace(other, path)
    os.replace(path.with_name("between"), other)


def delete(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    path.unlink()


def duplicate(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    if path != other:
        shutil.copyfile(path, other)


def chmod(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    rng.choice((path, path.parent)).chmod(rng.choice((0o000, 0o444, 0o777)))


def replace_by_link(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice((outside / "victim", other, path, Path("/nowhere"), Path("/dev/zero"))))


def replace_by_fifo(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def add_temporary_file(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    shutil.copyfile(path, path.with_name(f"{path.stem}.{rng.randrange(1, 99999)}.{rng.randrange(99)}.tmp"))


def link_folder_outside(rng: random.Random, path: Path, other: Path, outside: Path) -> None:
    """Replace a folder in the store with a link to an outside folder that contains the same file names."""
    if path.parent.name == "store":
        return
    target = outside / path.parent.name
    if target.exists():
        return
    target.mkdir()
    for name in os.listdir(path.parent):
        (target / name).write_text("the user's own")
    # Use one rename, since the saver thread may be writing to the folder. It may also create the folder again.
    os.replace(path.parent, outside.parent / f"moved-{path.parent.name}")
    with suppress(FileExistsError):
        path.parent.symlink_to(target)


DAMAGES = (
    truncate,
    flip,
    rename,
    swap,
    delete,
    duplicate,
    chmod,
    replace_by_link,
    replace_by_fifo,
    replace_by_folder,
    add_temporary_file,
    link_folder_outside,
)


class Case:
    def __init__(self, rng: random.Random, base: Path) -> None:
        self.rng, self.base, self.store = rng, base, base / "store"
        self.known_states: dict[str, list[list[int]]] = {name: [[]] for name in NAMES}
        self.counts = Counter[str]()
        (base / "outside").mkdir()
        (base / "outside" / "victim").write_text("the user's own")

    def outside(self) -> dict[Path, tuple[int, bytes]]:
        files = [path for path in (self.base / "outside").rglob("*") if path.is_file()]
        return {path: (path.stat().st_mode, path.read_bytes()) for path in files}

    def turn(self, name: str) -> None:
        try:
            session = runtime().session(name, self.store)
        except StoreError:
            self.counts["refused"] += 1
            return
        try:
            assert session.tokens in self.known_states[name], f"{name!r} never had these tokens"
            self.answer(session)
            if self.rng.random() < 0.2 and len(session.tokens) > 100:
                session.truncate(keep_last=70)
                # From now on positions differ from those of a fresh prompt, so the session restarts without its
                # history.
                session.discard()
                self.known_states[name] = [[]]
                return
            self.known_states[name].append(session.tokens)
        except StoreError:
            self.counts["refused"] += 1
            self.known_states[name].append(session.tokens)
        finally:
            try:
                session.close()
            except StoreError:
                self.counts["refused"] += 1

    def answer(self, session: Session) -> None:
        prompt = tiny_prompt(self.rng.choice((5, 70, 140)), seed=self.rng.randrange(5))
        before = session.tokens
        events: list[int] = []
        for event in session.send(prompt, PARAMS):
            if event.token_id is not None:
                events.append(event.token_id)
            if self.rng.random() < 0.05:
                self.damage()
        self.known_states[session.name].append(session.tokens)
        assert events == model_answer((*before, *prompt)), "the answer differs from the model's"
        session.check_integrity()
        self.counts["answers"] += 1

    def damage(self) -> None:
        files = sorted(path for path in self.store.rglob("*") if path.is_file() and not path.is_symlink())
        if not files:
            return
        kind = self.rng.choice(DAMAGES)
        path, other = self.rng.choice(files), self.rng.choice(files)
        # The open store has just renamed the file, or earlier damage has put a folder in the place of the new name.
        with suppress(FileNotFoundError, IsADirectoryError):
            kind(self.rng, path, other, self.base / "outside")
        self.counts[kind.__name__] += 1

    def delete(self, name: str) -> None:
        try:
            removed = delete_stored(self.store, name).removed
        except (StoreError, LookupError, ValueError):
            self.counts["not deleted"] += 1
            return
        deleted_tokens = max(self.known_states[name], key=len)
        remaining_tokens = [tokens for other, all in self.known_states.items() if other != name for tokens in all]
        left = find_leftovers(self.store, deleted_tokens, remaining_tokens)
        # A file renamed to a non-document name belongs to the user. A file renamed to another session's name and then
        # damaged has no known owner, so the deletion must report that it keeps it.
        missed = [path for path in left if DOCUMENT_FILE.fullmatch(path.name) and path.name not in removed.kept]
        assert not missed, left
        self.counts["searched"] += 1
        self.counts["left, and named or renamed"] += len(left)
        self.known_states[name] = [[]]


def run_case(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as base, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(rng, Path(base))
        for name in NAMES:
            case.turn(name)
        for _ in range(ROUNDS):
            for _ in range(rng.choice((0, 1, 1, 2))):
                case.damage()
            before = case.outside()
            if rng.random() < 0.25:
                case.delete(rng.choice(NAMES))
            else:
                case.turn(rng.choice(NAMES))
            read_catalog(case.store)
            now = case.outside()
            assert all(now.get(path) == known for path, known in before.items()), "a file outside the store changed"
        return case.counts
