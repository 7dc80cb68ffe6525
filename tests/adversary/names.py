"""Test random session names against a dictionary: an operation on one session never changes another.

Each case chooses names that resemble the store's own files, paths, or one another. It creates, reopens, forks, lists,
exports and deletes sessions, while a dictionary keeps the expected tokens by name. At the end, all sessions are
deleted, and no file may be left.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from support.leftovers import find_leftovers
from support.tiny_models import tiny_model

from offload_rt import LLM, InputError, SamplingParams
from offload_rt.cli import main
from offload_rt.sessions.catalog import delete_stored, export_text, find_stored, read_catalog
from offload_rt.sessions.history import document_name

PARAMS = SamplingParams(max_tokens=2, temperature=0)
STEPS = 8
PIECES = [
    "kitchen", "session", "sinks", ".sinks", ".doc", ".before", ".damaged", ".tmp", ".kv", ".1.1.tmp", "lock", "/",
    "..", ".", "@", "@llama", "%2F", "%", "\\", "\0", "\n", "\r", "\x1b[31m", "\x7f", "\u202e", "\u200b", "\ufeff", " ",
    "-", "[red]", "[/]", "é", "e\u0301", "ﬁ", "fi", "İ", "i", "I", "ß", "SS", "🦊", "\U0010ffff", "null", "'",
    '"', "*", "?", "{}", "0" * 32, "con", "~", "$HOME", "-rf", "{name}",
]  # fmt: skip


@cache
def runtime() -> LLM:
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1)
    return LLM(model, dtype="float32", host_memory="4MiB", policy="full")


def random_name(rng: random.Random, known: list[str]) -> str:
    """Return a new name that file systems or parsers may confuse with a known name."""
    if known and rng.random() < 0.5:
        name = rng.choice(known)
        changes = [
            str.upper, str.lower, str.swapcase, str.title, document_name, str.strip,
            lambda text: unicodedata.normalize(rng.choice(("NFC", "NFD", "NFKC", "NFKD")), text),
            lambda text: text + rng.choice(PIECES), lambda text: rng.choice(PIECES) + text, lambda text: text[:-1],
            lambda text: f"sinks-{'0' * 32}-{len(text):x}", lambda text: text * 2,
        ]  # fmt: skip
        name = rng.choice(changes)(name)
    elif rng.random() < 0.7:
        name = "".join(rng.choices(PIECES, k=rng.randint(1, 4)))
    else:
        name = "".join(chr(rng.choice((rng.randrange(0x80), rng.randrange(0xD800)))) for _ in range(rng.randint(1, 40)))
    return (name * (200 if rng.random() < 0.05 else 1))[:200]


class Sessions:
    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.folder = rng, folder
        self.expected: dict[str, list[int]] = {}

    def turn(self, name: str) -> None:
        with runtime().session(name, self.folder) as session:
            assert session.tokens == self.expected.get(name, []), f"{name!r} is another session"
            list(session.send([self.rng.randrange(199) for _ in range(self.rng.choice((3, 70)))], PARAMS))
            self.expected[name] = session.tokens

    def fork(self, name: str, new: str) -> None:
        with runtime().session(name, self.folder) as session:
            if new in self.expected:
                with contextlib.suppress(InputError):
                    session.fork(new).close()
                    raise AssertionError(f"{new!r} was forked over a session")
            else:
                session.fork(new).close()
                self.expected[new] = list(self.expected[name])

    def delete(self, name: str) -> None:
        method = self.rng.randrange(3)
        if method == 0:
            runtime().session(name, self.folder).discard()
        elif method == 1:
            delete_stored(self.folder, name)
        elif run_sessions_command("delete", name, self.folder) != 0:
            assert name.startswith("-"), "only names that look like options are refused"
            delete_stored(self.folder, name)
        deleted_tokens = self.expected.pop(name)
        assert find_leftovers(self.folder, deleted_tokens, self.expected.values()) == {}

    def check(self) -> None:
        if not self.folder.exists():
            assert not self.expected
            return
        catalog = read_catalog(self.folder)
        assert {one.history.name: one.history.tokens for one in catalog.sessions} == self.expected
        assert len(catalog.sessions) == len(self.expected) and not catalog.damaged
        assert run_sessions_command("list", None, self.folder) == 0
        for name in self.expected:
            assert find_stored(self.folder, name).history.name == name
            export_text(find_stored(self.folder, name).history)


def run_sessions_command(action: str, name: str | None, folder: Path) -> int:
    """Run `offload-rt sessions` and return its exit status. Fail if a name's control characters reach the terminal."""
    arguments = ["sessions", action, *(() if name is None else (name,)), "--store", str(folder)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    printed = out.getvalue() + err.getvalue()
    assert status or all(c.isprintable() or c in "\n " for c in printed), printed
    return status


def run_case(seed: int) -> Counter[str]:
    rng, done = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        sessions = Sessions(rng, Path(place) / "store")
        for _ in range(STEPS):
            known = list(sessions.expected)
            kind = rng.choice(("turn", "turn", "repeat", "fork", "delete")) if known else "turn"
            if kind == "turn":
                sessions.turn(random_name(rng, known) or "x")
            elif kind == "repeat":
                sessions.turn(rng.choice(known))
            elif kind == "fork":
                sessions.fork(rng.choice(known), random_name(rng, known) or "x")
            else:
                sessions.delete(rng.choice(known))
            done[kind] += 1
            sessions.check()
        for name in list(sessions.expected):
            sessions.delete(name)
            sessions.check()
        left = [path for path in sessions.folder.rglob("*") if path.is_file()]
        assert [path.name for path in left] == ["lock"], left
        assert os.listdir(place) == ["store"]
    return done
