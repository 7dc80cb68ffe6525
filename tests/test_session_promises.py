"""What sessions say is so: no false alarm, honest counts, nothing computed for a request that cannot be answered."""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, InputError, PoolFullError, SamplingParams
from offload_rt.engine.runner import Runner
from offload_rt.sessions.session import Session
from offload_rt.storage.disk_store import DiskStore

SHORT = SamplingParams(max_new_tokens=8, temperature=0)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about what survives the machine."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def make_llm(chunks: int = 100, **options: Any) -> LLM:
    model, size = tiny_model("llama", dtype=torch.float64), 4 * 2 * 2 * 64 * 16 * 8
    return LLM(model, dtype="float64", host_memory=chunks * size, **({"policy": "full"} | options))


def answer(session: Session, turn: list[int]) -> list[int]:
    found = [event.token_id for event in session.send(turn, SHORT)]
    session.check_integrity()
    return found


def test_forks_that_say_the_same_are_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hand over the same last chunk while the disk is slow; truncating the one removes it, and the other, which
    has it in memory still, writes it again instead of complaining of a full store."""
    gate, real = threading.Event(), DiskStore.begin
    gate.set()

    def begin(self: DiskStore, *arguments: Any) -> Any:
        assert gate.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(DiskStore, "begin", begin)
    one = make_llm().session("one", tmp_path)
    answer(one, tiny_prompt(200, seed=1))
    twin = one.fork("twin")
    gate.clear()
    assert answer(one, tiny_prompt(30, seed=2)) == answer(twin, tiny_prompt(30, seed=2))
    gate.set()
    one.truncate(keep_last=50)
    held = len(twin.tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.close()
        twin.close()
    again = make_llm().session("twin", tmp_path)
    answer(again, tiny_prompt(5, seed=3))
    assert again.loaded_tokens == held - 1 and again.host.stats.computed_tokens == 0
    again.close()


@pytest.mark.parametrize("options", [{"eviction": "counter"}, {}], ids=["eviction", "no eviction"])
def test_a_prompt_that_cannot_fit_is_refused_before_anything_is_computed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, computed = make_llm(4, **options), []
    real = Runner.advance_prefill
    monkeypatch.setattr(Runner, "advance_prefill", lambda self, prefill: (computed.append(1), real(self, prefill)))
    message = "a prompt of 300 tokens does not fit, and eviction begins" if options else "the host pool is full"
    with pytest.raises(PoolFullError, match=message):
        llm.generate([tiny_prompt(100, seed=1), tiny_prompt(300, seed=2)], SHORT)
    assert computed == []
    long = SamplingParams(max_new_tokens=40, temperature=0)
    if options:
        assert len(llm.generate([tiny_prompt(254, seed=1)], long)[0].token_ids) == 40


# ------------------------------------------------------------------------------------------- ends, and how they look


def test_everything_has_one_line_to_be_seen_by(tmp_path: Path) -> None:
    llm = make_llm()
    [completion] = llm.generate([tiny_prompt(20)], SHORT)
    assert repr(completion) == "Completion('', tokens=8, finish_reason='length')"
    long = dataclasses.replace(completion, text="word " * 100)
    assert len(repr(long)) < 120 and "…" in repr(long)
    assert repr(llm) == f"LLM({llm.name!r}, policy='full', device='cpu', dtype='float64', host_memory='12.5 MiB')"
    session = llm.session("s", tmp_path)
    events = session.send(tiny_prompt(9), SHORT)
    next(events)
    assert repr(session) == f"Session('s', {llm.name!r}, turns=0, tokens=9, answering)"
    list(events)
    assert repr(session) == f"Session('s', {llm.name!r}, turns=1, tokens=17, open)"
    session.close()
    assert repr(session).endswith("closed)")


def test_blocks_close_what_they_open(tmp_path: Path) -> None:
    """Also with an answer half read and turns in a queue: everything that was said is saved, another process may write,
    and what is closed says so."""
    with make_llm() as llm:
        with llm.session("one", tmp_path) as session:
            answer(session, tiny_prompt(70, seed=1))
        with pytest.raises(InputError, match="closed"):
            session.send([1], SHORT)
        half, queue = llm.session("half", tmp_path), llm.turns(tmp_path)
        events = half.send(tiny_prompt(80, seed=2), SHORT)
        read = [next(events).token_id for _ in range(3)]
        queued = queue.add("queued", tiny_prompt(50, seed=3), SHORT)
        queue.step()
        with pytest.raises(InputError, match="answering"):
            queued.session.close()
    assert list(events) == [] and queued.finish_reason == "cancelled"
    llm.close()
    for call in (lambda: llm.generate([[1]]), lambda: llm.stream([1]), lambda: llm.session("x", tmp_path)):
        with pytest.raises(InputError, match=r"LLM\(.*\) is closed"):
            call()
    with pytest.raises(InputError, match="is closed"):
        llm.score([[1]], [[2]])
    llm.runner.check_integrity()
    with make_llm() as other, other.session("half", tmp_path) as again:
        assert again.tokens == [*tiny_prompt(80, seed=2), *read]
