"""Test the warnings, statistics, errors and `repr` of sessions, and the size limit of the store."""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.disk_blocks import FILE_BYTES, block_name, load, open_store, padded_name, save
from support.outputs import completed
from support.sessions import take_turn
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, EngineError, InputError, PoolFullError, SamplingParams, StoreError
from offload_rt.engine.runner import Runner
from offload_rt.sessions.catalog import read_catalog
from offload_rt.storage.block_file import StoredBlock
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.documents import DocumentStore

SHORT = SamplingParams(max_tokens=8, temperature=0)


pytestmark = pytest.mark.usefixtures("no_fsync")


def make_llm(blocks: int = 100, **options: Any) -> LLM:
    model, size = tiny_model("llama", dtype=torch.float32), 3 * 2 * 2 * 64 * 32 * 4
    return LLM(model, dtype="float32", host_memory=blocks * size, **({"policy": "full"} | options))


answer = partial(take_turn, params=SHORT)


def test_forks_with_the_same_tokens_are_saved_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncating one fork deletes a block that both forks use, so the other fork must store this block again."""
    gate, real = threading.Event(), DiskStore.begin
    gate.set()

    def begin(self: DiskStore, *arguments: Any, **padded_name: Any) -> Any:
        assert gate.wait(60)
        return real(self, *arguments, **padded_name)

    monkeypatch.setattr(DiskStore, "begin", begin)
    session = make_llm().session("one", tmp_path)
    answer(session, tiny_prompt(200, seed=1))
    twin = session.fork("twin")
    gate.clear()
    assert answer(session, tiny_prompt(30, seed=2)) == answer(twin, tiny_prompt(30, seed=2))
    gate.set()
    session.truncate(keep_last=50)
    length = len(twin.tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.close()
        twin.close()
    restored = make_llm().session("twin", tmp_path)
    answer(restored, tiny_prompt(5, seed=3))
    assert restored.loaded_tokens == length - 1 and restored.host.stats.computed_tokens == 0
    restored.close()


@pytest.mark.parametrize("options", [{"eviction": "counter"}, {}], ids=["eviction", "no eviction"])
def test_prompt_that_does_not_fit_is_refused_before_computation(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, computed = make_llm(4, **options), []
    real = Runner.advance_prefill
    monkeypatch.setattr(Runner, "advance_prefill", lambda self, prefill: (computed.append(1), real(self, prefill)))
    message = "a prompt of 300 tokens does not fit, and eviction begins" if options else "the host pool is full"
    with pytest.raises(PoolFullError, match=message):
        llm.generate([tiny_prompt(100, seed=1), tiny_prompt(300, seed=2)], SHORT)
    assert computed == []
    long = SamplingParams(max_tokens=40, temperature=0)
    if options:
        assert len(completed(llm.generate([tiny_prompt(254, seed=1)], long))[0].token_ids) == 40


# ---------------------------------------------------------------------------------------------------- reuse statistics


def reuse_stats(llm: LLM, prompt: list[int]) -> tuple[int, int | None]:
    stats = completed(llm.generate([prompt], SHORT))[0].stats
    return stats.reused_tokens, stats.diverged_at


def test_statistics_report_reuse_and_divergence() -> None:
    llm, book = make_llm(), tiny_prompt(200, seed=1)
    assert reuse_stats(llm, book) == (0, 0)
    assert reuse_stats(llm, book) == (192, 192), "partly filled blocks are not cached"
    assert reuse_stats(llm, book[:150]) == (128, None), (
        "the whole prompt is cached, but its last partial block is recomputed"
    )
    assert reuse_stats(llm, [*book[:100], *tiny_prompt(90, seed=2)]) == (64, 100)
    assert reuse_stats(llm, tiny_prompt(90, seed=3)) == (0, 0)
    assert reuse_stats(make_llm(enable_prefix_caching=False), book) == (0, None)


@pytest.mark.parametrize("lost", ["nothing", "one block", "everything"])
def test_statistics_report_lost_blocks(lost: str, tmp_path: Path) -> None:
    session = make_llm().session("s", tmp_path)
    answer(session, tiny_prompt(200, seed=1))
    keys = session.history.keys
    session.close()
    for key in {"nothing": [], "one block": keys[1:2], "everything": keys}[lost]:
        next(tmp_path.rglob(f"{key}.kv")).unlink()
    with make_llm().session("s", tmp_path) as session:
        answer(session, tiny_prompt(30, seed=2))
        stats, reused = session.last_stats, {"nothing": 207, "one block": 64, "everything": 0}[lost]
        assert stats is not None and (stats.reused_tokens, stats.diverged_at) == (reused, reused)
        host_stats = session.host.stats
        assert (host_stats.disk_tokens, host_stats.computed_tokens) == (reused, 207 - reused)


def test_statistics_count_only_the_successful_attempt_of_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_llm().session("s", tmp_path)
    answer(session, tiny_prompt(200, seed=1))
    session.close()
    session = make_llm().session("s", tmp_path)
    real, broken = StoredBlock.read_layer, session.history.block_keys[2]
    monkeypatch.setattr(StoredBlock, "read_layer", lambda c, n, into: real(c, n, into) and (n < 2 or c.key != broken))
    answer(session, tiny_prompt(30, seed=2))
    stats = session.last_stats
    assert stats is not None and (stats.reused_tokens, stats.diverged_at) == (128, 128)
    assert session.host.stats.disk_tokens + session.host.stats.host_tokens == 128 and session.host.stats.turns == 1
    session.close()


def test_loader_error_fails_only_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_llm().session("s", tmp_path)
    answer(session, tiny_prompt(200, seed=1))
    session.close()
    session = make_llm().session("s", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(StoredBlock, "read_layer", lambda *args: 1 // 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            answer(session, tiny_prompt(30, seed=2))
    session.check_integrity()
    answer(session, tiny_prompt(30, seed=2))
    assert session.loaded_tokens > 128
    session.close()


def test_opening_a_store_counts_all_files_and_enforces_the_limit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(6):
        save(store, number)
    store.documents.put(padded_name("one"), bytes(500))
    store.documents.put(padded_name("one"), bytes(600))
    bytes_used = store.bytes_used
    store.close()
    next(tmp_path.rglob("*.kv")).with_suffix(".7.1.tmp").write_bytes(bytes(5000))
    reopened = open_store(tmp_path)
    assert (
        reopened.bytes_used
        == bytes_used
        == sum(path.stat().st_size for path in tmp_path.glob("*/**/*.*") if path.is_file())
    )
    reopened.close()
    limited = open_store(tmp_path, 3 * FILE_BYTES)
    assert limited.bytes_used <= 3 * FILE_BYTES and limited.documents.get(padded_name("one")) is not None
    limited.check_integrity()
    limited.close()


def test_entry_above_the_limit_evicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, 3 * FILE_BYTES)
    assert save(store, 1) and save(store, 2)
    assert store.begin(block_name(store, 9), 4 * FILE_BYTES) is None
    with pytest.raises(StoreError, match="is full"):
        store.documents.put(padded_name("huge"), bytes(4 * FILE_BYTES))
    assert load(store, 1) and load(store, 2)
    with monkeypatch.context() as patch:  # if files cannot be removed, no space is freed
        patch.setattr(Path, "unlink", lambda *args, **options: os.rmdir(tmp_path / "none"))
        assert not save(store, 3) or store.bytes_used <= 3 * FILE_BYTES
        assert not save(store, 4)
    assert save(store, 5)
    store.check_integrity()
    store.close()


# ---------------------------------------------------------------------------------------------------- repr and closing


def test_reprs_are_one_line(tmp_path: Path) -> None:
    llm = make_llm()
    [completion] = completed(llm.generate([tiny_prompt(20)], SHORT))
    assert repr(completion) == "CompletionOutput('', tokens=8, finish_reason='length')"
    long = dataclasses.replace(completion, text="word " * 100)
    assert len(repr(long)) < 120 and "…" in repr(long)
    assert repr(llm) == f"LLM({llm.name!r}, policy='full', device='cpu', dtype='float32', host_memory='9.38 MiB')"
    session = llm.session("s", tmp_path)
    events = session.send(tiny_prompt(9), SHORT)
    next(events)
    assert repr(session) == f"Session('s', {llm.name!r}, turns=0, tokens=9, answering)"
    list(events)
    assert repr(session) == f"Session('s', {llm.name!r}, turns=1, tokens=17, open)"
    session.close()
    assert repr(session).endswith("closed)")


def test_sessions_that_could_not_be_created_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise StoreError("the disk is full")

    llm = make_llm()
    with pytest.raises(InputError, match="no chat template"):
        llm.session("new", tmp_path, system="Be brief.")
    llm.session("one", tmp_path).close()
    with pytest.raises(InputError, match="no chat template"):
        llm.session("one", tmp_path, system="Be brief.")
    assert [stored.history.name for stored in read_catalog(tmp_path).sessions] == ["one"], "it was stored before"
    session = llm.session("one", tmp_path)
    answer(session, tiny_prompt(70, seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(DocumentStore, "put", refuse)
        with pytest.raises(StoreError, match="full"):
            session.fork("twin")
    session.fork("twin").close()
    session.close()
    assert [stored.history.name for stored in read_catalog(tmp_path).sessions] == ["one", "twin"]
    llm.runner.check_integrity()
    with make_llm() as other:
        other.session("one", tmp_path).close()  # the store was closed


def test_leaving_a_with_block_saves_sessions_and_refuses_later_calls(tmp_path: Path) -> None:
    with make_llm() as llm:
        with llm.session("one", tmp_path) as session:
            answer(session, tiny_prompt(70, seed=1))
        with pytest.raises(InputError, match="closed"):
            session.send([1], SHORT)
        half, queue = llm.session("half", tmp_path), llm.turns(tmp_path)
        events = half.send(tiny_prompt(80, seed=2), SHORT)
        tokens = [next(events).token_id for _ in range(3)]
        queued = queue.add("queued", tiny_prompt(50, seed=3), SHORT)
        queue.step()
        with pytest.raises(InputError, match="answering"):
            queued.session.close()
    assert list(events) == [] and queued.finish_reason == "abort"
    llm.close()
    for call in (lambda: llm.generate([[1]]), lambda: llm.stream([1]), lambda: llm.session("x", tmp_path)):
        with pytest.raises(InputError, match=r"LLM\(.*\) is closed"):
            call()
    with pytest.raises(InputError, match="is closed"):
        llm.score([[1]], [[2]])
    llm.runner.check_integrity()
    with make_llm() as other, other.session("half", tmp_path) as restored:
        assert restored.tokens == [*tiny_prompt(80, seed=2), *tokens]
