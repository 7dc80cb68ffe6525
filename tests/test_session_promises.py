"""What sessions say is so: no false alarm, honest counts, nothing computed for a request that cannot be answered."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, PoolFullError, SamplingParams
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
