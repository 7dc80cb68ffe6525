"""Test contexts on disk when writes fail or processes are killed.

The KV file is deleted when its process ends, but the tokens of sessions are durable. A disk error ends only the
requests that need the lost KV.

`make stress PART=disk` simulates a failure at every write and kills a hundred processes.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.disk_blocks import KILLS
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.engine.engine import Engine
from offload_rt.engine.speculative import decoder
from offload_rt.errors import DiskError
from offload_rt.kv_cache.disk.direct_file import BlockFile
from offload_rt.model_runner import prefill as prefill_module
from offload_rt.sessions.session import Session

EVERY = "OFFLOAD_RT_STRESS" in os.environ
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
TURNS = [tiny_prompt(150, seed=i) for i in range(4)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def make_llm(folder: Path | None, policy: str = "infinigen", **options: Any) -> LLM:
    """Create a runtime. If `folder` is given, host memory has room for only a quarter of the context's KV."""
    limits = {} if folder is None else {"disk": folder, "host_memory": "128KiB", "disk_limit": "1MiB"}
    chosen = {"recent": 8, "budget": 0.2} if policy == "infinigen" else {}
    return LLM(MODEL, dtype="float32", prefill_chunk_size=32, policy=policy, policy_options=chosen, **limits, **options)


def generate_tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY)]


def send(session: Session, turn: list[int]) -> None:
    list(session.send(turn, GREEDY))
    session.check_integrity()


@pytest.fixture(scope="module")
def expected_tokens(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Return the tokens of a session after all turns, computed in host memory."""
    with make_llm(None) as llm:
        session = llm.session("s", tmp_path_factory.mktemp("right"))
        for turn in TURNS:
            send(session, turn)
        return session.tokens


# ------------------------------------------------------------------------------------------------------------- killed


def completed_turns(session: Session) -> int:
    """Return the number of completed turns. Fail if a turn is incomplete."""
    turns, rest = divmod(len(session.tokens), len(TURNS[0]) + 12)
    assert not rest
    return turns


def fork_session(rows: Path, store: Path) -> tuple[int, int]:
    """Fork a process that runs a session's remaining turns. Return the process id, and a pipe that reports progress.

    The process writes "p" when it begins a prompt, "d" for each token, and "t" at the end of a turn.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork of a process with threads
        child = os.fork()
    if child == 0:
        try:
            session: Any = make_llm(rows).session("s", store)
            for turn in TURNS[completed_turns(session) :]:
                os.write(writing, b"p")
                for _ in session.send(turn, GREEDY):
                    os.write(writing, b"d")
                os.write(writing, b"t")
        finally:
            os._exit(1)
    os.close(writing)
    return child, reading


def kill_in_phase(child: int, pipe: int, phase: str, steps: int, seconds: float) -> str:
    """Wait for at least `steps` reports, the last one equal to `phase`. Kill the process after `seconds` more.

    Return all reports.
    """
    reports = os.read(pipe, 1).decode()
    while len(reports) < steps or not reports.endswith(phase):
        if not (more := os.read(pipe, 1).decode()):
            break
        reports += more
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(pipe, 100).decode():
        reports += more
    os.close(pipe)
    return reports


@pytest.mark.slow
def test_complete_turns_survive_kills_during_prefill_and_decoding(
    expected_tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kill at random times of prefill (in segments) and decoding. A new session begins after the last turn.
    monkeypatch.setitem(prefill_module.SEGMENT_BYTES, "cpu", 1)
    rng, rows, number, last = random.Random(4), tmp_path / "rows", 0, set()
    with make_llm(rows) as llm:
        for kill in range(max(4, KILLS // 2 * EVERY)):
            store = tmp_path / f"store{number}"
            reports = kill_in_phase(*fork_session(rows, store), "pd"[kill % 2], rng.randrange(14), 0.01 * rng.random())
            last.add(reports[-1:])
            assert list(rows.iterdir()) == [], "all its KV is deleted"
            session = llm.session("s", store)
            assert reports.count("t") <= completed_turns(session), "complete turns are durable"
            assert session.tokens == expected_tokens[: len(session.tokens)] and not list(store.rglob("*.tmp"))
            session.context.storage.check_integrity()
            number += completed_turns(session) == len(TURNS)
            session.close()
        assert {"p", "d"} <= last
        session = llm.session("s", store)
        for turn in TURNS[completed_turns(session) :]:
            send(session, turn)
        assert session.tokens == expected_tokens
        llm.runner.check_integrity()


# ---------------------------------------------------------------------------------------------------------- full disk


class FullDisk:
    """Disk on which KV writes fail after the first `at` writes, until `free` is called."""

    def __init__(self, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.writes = at, 0
        real = BlockFile.write

        def write(file: BlockFile, offset: int, data: torch.Tensor) -> None:
            self.writes += 1
            if self.writes > self.at:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(file, offset, data)

        monkeypatch.setattr(BlockFile, "write", write)

    def free(self) -> None:
        self.at = 1 << 30


@pytest.mark.parametrize(("policy", "places"), [("full", (3, 20)), ("infinigen", (12,))])
def test_full_disk_fails_requests_and_frees_their_blocks(
    policy: str, places: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, failed = TURNS[:2], 0
    expected = generate_tokens(make_llm(None, policy), prompts)
    for at in range(60) if EVERY else places:
        with make_llm(tmp_path, policy) as llm, monkeypatch.context() as patch:
            full = FullDisk(at, patch)
            try:
                assert generate_tokens(llm, prompts) == expected
            except DiskError as error:
                failed += "No space left" in str(error)
            full.free()
            assert llm.runner.pool.sequence_bytes == 0
            assert generate_tokens(llm, prompts) == expected
            llm.runner.check_integrity()
            assert not llm.runner.pool.lost
    assert failed > 15 if EVERY else failed == len(places)


@pytest.mark.parametrize("at", range(20) if EVERY else (2, 8))
def test_session_continues_after_a_full_disk(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_llm(None, "full")
    with make_llm(tmp_path / "rows", "full") as llm:
        session = llm.session("s", tmp_path / "store")
        send(session, TURNS[0])
        full = FullDisk(at, monkeypatch)
        with suppress(DiskError):
            send(session, TURNS[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the session is not saved completely
            session.save()
        full.free()
        for turn in TURNS[2:]:
            [expected] = generate_tokens(memory, [[*session.tokens, *turn]])
            send(session, turn)
            assert session.tokens[-12:] == expected
        tokens = session.tokens
        llm.runner.check_integrity()
        session.close()
    with make_llm(tmp_path / "rows", "full") as llm:
        assert llm.session("s", tmp_path / "store").tokens == tokens


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify", "reload"])
def test_disk_error_ends_only_the_requests_that_need_the_kv(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, ended = [], {}
    drafts: Any = {"exact": {"method": "sparse", "adaptive": False}} if phase in ("verify", "reload") else {}
    with make_llm(tmp_path, **drafts) as llm:
        engine = Engine(llm.runner, max_num_seqs=2, on_failure=lambda request, error: failed.append((request, error)))
        first = engine.add(TURNS[0], GREEDY)
        while not first.completions()[0].token_ids:
            engine.step()
        others = [engine.add(turn, GREEDY) for turn in TURNS[1:3]]

        def fail(*args: object) -> None:
            monkeypatch.undo()
            raise DiskError("cannot read KV")

        where, name = {"prefill": (llm.runner, "advance_prefill"), "decode": (llm.runner, "decode"),
                       "verify": (decoder, "verify"), "reload": (llm.runner, "reload")}[phase]  # fmt: skip
        monkeypatch.setattr(where, name, fail)
        while not engine.idle:
            ended |= {event.request_id: event for event in engine.step() if event.finish_reason}
        expected_failures = others[:1] if phase == "prefill" else [first]
        assert [request for request, _ in failed] == expected_failures and isinstance(failed[0][1], DiskError)
        remaining = [one for one in (first, *others) if one not in expected_failures]
        assert len(ended) == len(remaining) == 2 and llm.runner.pool.sequence_bytes == 0
        tokens = [one.completions()[0].token_ids for one in remaining]
        assert tokens == generate_tokens(llm, [list(one.prompt.token_ids) for one in remaining])
        engine.check_integrity()
