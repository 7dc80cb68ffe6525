"""Test that sessions restored from host memory or disk give the same tokens as uninterrupted sessions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.disk_blocks import block_files
from support.outputs import completed
from support.sessions import take_turn
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, InputError, SamplingParams, StoreError
from offload_rt.sessions.session import Session
from offload_rt.storage import saver
from offload_rt.storage.block_file import StoredBlock
from offload_rt.storage.loader import BlockLoader, read_buffer_layers

GREEDY = SamplingParams(max_tokens=12, temperature=0)
TURNS = [tiny_prompt(150, seed=1), tiny_prompt(25, seed=2), tiny_prompt(75, seed=3), tiny_prompt(28, seed=4)]
"""Turns. Block boundaries are in the second answer, in the third turn, and in the fourth answer."""
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "infinigen": {"policy": "infinigen", "policy_options": {"recent": 16, "alpha": 2.0}},
    "int4 keys": {"policy": "infinigen", "policy_options": {"preset": "rows", "recent": 16, "scorer": "int4"}},
    "tail": {"policy": "infinigen", "policy_options": {"recent": 16, "approximate_kv": "int4", "budget": 0.3}},
    "int8 KV": {"policy": "full", "kv_cache_dtype": "int8"},
    "int4 KV": {"policy": "full", "kv_cache_dtype": "int4"},
}


def make_llm(name: str = "llama", memory: int | str = "64MiB", **options: Any) -> LLM:
    chosen = {"policy": "full"} | options
    return LLM(tiny_model(name, dtype=torch.float32), dtype="float32", host_memory=memory, **chosen)


answer = partial(take_turn, params=GREEDY)


def run_turns(session: Session, turns: list[list[int]]) -> list[list[int]]:
    return [answer(session, turn) for turn in turns]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("where", ["host", "disk", "disk read anew"])
def test_restored_session_continues_unchanged(options: dict[str, Any], where: str, tmp_path: Path) -> None:
    llm = make_llm(**options)
    uninterrupted = llm.session("straight", tmp_path / "a")
    expected = run_turns(uninterrupted, TURNS)
    uninterrupted.close()
    if where == "host":  # in another store: no block is on disk, but the prefix tree has the full blocks
        llm = make_llm(**options)
    for turn, expected_answer in zip(TURNS, expected, strict=True):
        session = llm.session("s", tmp_path / "b")
        assert answer(session, turn) == expected_answer
        if turn is not TURNS[0] and where != "host":
            assert session.loaded_tokens > 100
        session.close()
        if where != "host":
            llm = make_llm(**options)
    assert llm.runner.pool.bytes_used == llm.runner.pool.idle_blocks * llm.runner.pool.block_bytes


def test_session_answers_equal_prompts_of_the_whole_conversation(tmp_path: Path) -> None:
    llm = make_llm()
    session = llm.session("s", tmp_path)
    first, second = answer(session, TURNS[0]), answer(session, TURNS[1])
    plain = make_llm(enable_prefix_caching=False)
    assert completed(plain.generate([TURNS[0]], GREEDY))[0].token_ids == first
    assert completed(plain.generate([TURNS[0] + first + TURNS[1]], GREEDY))[0].token_ids == second
    assert session.tokens == TURNS[0] + first + TURNS[1] + second
    stats = session.last_stats
    assert stats is not None and stats.new_tokens == 12 and stats.reused_tokens == len(TURNS[0] + first) - 1


def test_blocks_larger_than_the_write_buffer_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "WRITE_BUFFER", 1)
    session = make_llm().session("s", tmp_path)
    answer(session, tiny_prompt(200))
    session.close()
    restored = make_llm().session("s", tmp_path)
    answer(restored, [5])
    assert restored.loaded_tokens == 200 + 12 - 1
    restored.close()


def test_sessions_with_a_common_prefix_store_it_once(tmp_path: Path) -> None:
    llm, book = make_llm(), tiny_prompt(640, seed=9)
    first = llm.session("one", tmp_path)
    answer(first, [*book, 5])
    first.save()
    before = block_files(tmp_path)
    second = llm.session("two", tmp_path)
    answer(second, [*book, 7])
    second.save()
    assert block_files(tmp_path) - before <= 2, "only blocks after the book"
    for session in (first, second):
        session.close()
    fresh = make_llm()
    third = fresh.session("three", tmp_path)
    answer(third, [*book, 8])
    assert third.loaded_tokens == 640, "a new session loads the book from disk"
    third.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("damage", ["bits", "truncated", "empty", "removed", "late"])
@pytest.mark.parametrize("policy", ["full", "infinigen"])
def test_damaged_kv_is_recomputed(damage: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(**POLICIES[policy])
    session = llm.session("s", tmp_path)
    run_turns(session, TURNS[:2])
    history = session.tokens
    session.close()
    rng = random.Random(3)
    paths = sorted(tmp_path.rglob("*.kv"))
    if damage == "late":
        real, calls = BlockLoader._fill, []

        def fill(self: BlockLoader, block: Any, layer: int, *where: Any) -> bool:
            calls.append(layer)
            return real(self, block, layer, *where) and not (layer == 2 and len(calls) == 2 * len(self._placed) + 2)

        monkeypatch.setattr(BlockLoader, "_fill", fill)
    for path in paths if damage != "late" else []:
        data = bytearray(path.read_bytes())
        data[rng.randrange(4200, len(data))] ^= 1
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes({"bits": data, "truncated": data[:-9], "empty": b""}[damage])
    llm = make_llm(**POLICIES[policy])
    session = llm.session("s", tmp_path)
    new_tokens = answer(session, TURNS[2])
    # With selection, the KV of decoded tokens depends on the selection. Damage that is found late changes it.
    if policy == "full" or damage != "late":
        plain = make_llm(enable_prefix_caching=False, **POLICIES[policy])
        assert new_tokens == completed(plain.generate([history + TURNS[2]], GREEDY))[0].token_ids
    session.close()
    again = make_llm(**POLICIES[policy]).session("s", tmp_path)
    assert again.tokens == history + TURNS[2] + new_tokens
    answer(again, TURNS[3])
    assert again.loaded_tokens == len(history + TURNS[2] + new_tokens) - 1, "the damaged block has been stored again"
    again.close()


def test_forks_are_independent(tmp_path: Path) -> None:
    llm = make_llm(**POLICIES["infinigen"])
    session = llm.session("a", tmp_path)
    answer(session, TURNS[0])
    twin = session.fork("b")
    with pytest.raises(InputError, match="already"):
        session.fork("b")
    answer_a, answer_b = answer(session, TURNS[1]), answer(twin, TURNS[2])
    session.close()
    twin.close()
    llm = make_llm(**POLICIES["infinigen"])
    reference = llm.session("c", tmp_path / "other")
    answer(reference, TURNS[0])
    assert answer(reference.fork("d"), TURNS[2]) == answer_b
    assert answer(reference, TURNS[1]) == answer_a
    for name, turn in (("a", answer_a), ("b", answer_b)):
        assert llm.session(name, tmp_path).tokens[-12:] == turn


def test_session_keeps_tokens_of_an_interrupted_answer(tmp_path: Path) -> None:
    llm = make_llm()
    session = llm.session("s", tmp_path)
    whole = answer(llm.session("whole", tmp_path), TURNS[0])
    events = session.send(TURNS[0], GREEDY)
    new_tokens = [next(events).token_id for _ in range(7)]
    with pytest.raises(InputError, match="is answering"):
        session.send([1])
    events.close()  # type: ignore[attr-defined]
    assert session.tokens == TURNS[0] + new_tokens == TURNS[0] + whole[:7]
    before = session.tokens
    plain = make_llm(enable_prefix_caching=False)
    [expected] = completed(plain.generate([before + TURNS[1]], GREEDY))
    assert answer(session, TURNS[1]) == expected.token_ids
    assert session.tokens == before + TURNS[1] + expected.token_ids
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.send([1])


def test_interrupted_prefill_does_not_change_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    session = llm.session("s", tmp_path)
    answers = run_turns(session, TURNS[:2])
    session.close()
    llm = make_llm()
    session = llm.session("s", tmp_path)
    real = llm.runner.advance_prefill

    def stop(prefill: Any) -> None:
        if prefill.finished_layers == 2:
            raise KeyboardInterrupt
        real(prefill)

    before = session.tokens
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "advance_prefill", stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                answer(session, TURNS[2])
            assert session.tokens == before
    plain = make_llm(enable_prefix_caching=False)
    expected = completed(plain.generate([TURNS[0] + answers[0] + TURNS[1] + answers[1] + TURNS[2]], GREEDY))[
        0
    ].token_ids
    assert answer(session, TURNS[2]) == expected
    session.close()


def test_unsupported_sessions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learns from every query"):
        make_llm(policy="h2o").session("s", tmp_path)
    with pytest.raises(ConfigError, match="learns from every query"):
        make_llm(policy="infinigen", policy_options={"preset": "paper"}).session("s", tmp_path)
    with pytest.raises(ConfigError, match="eviction"):
        make_llm(eviction="lru").session("s", tmp_path)
    llm = make_llm()
    with pytest.raises(InputError, match="1 to 200"):
        llm.session("", tmp_path)
    session = llm.session("ä/b ..", tmp_path)
    with pytest.raises(InputError, match="open already"):
        llm.session("ä/b ..", tmp_path)
    with pytest.raises(StoreError, match="another process"):
        make_llm().session("t", tmp_path)
    with pytest.raises(InputError, match="no tokenizer"):
        session.send("text")
    with pytest.raises(InputError, match="token id"):
        session.send([199])
    with pytest.raises(InputError, match="one response"):
        session.send([1], SamplingParams(n=2))
    session.close()
    make_llm().session("t", tmp_path).close()


def test_full_store_never_exceeds_its_limit(tmp_path: Path) -> None:
    llm = make_llm()
    session = llm.session("s", tmp_path, limit="300KiB")
    answers = run_turns(session, TURNS[:2])
    with pytest.warns(UserWarning, match="not saved completely"):
        session.close()
    assert (
        sum(path.stat().st_size for path in tmp_path.rglob("*") if path.name != "lock" and path.is_file()) <= 300 << 10
    )
    session = make_llm().session("s", tmp_path)
    assert session.tokens == TURNS[0] + answers[0] + TURNS[1] + answers[1]
    expected = completed(make_llm(enable_prefix_caching=False).generate([session.tokens + TURNS[2]], GREEDY))[
        0
    ].token_ids
    assert answer(session, TURNS[2]) == expected and session.loaded_tokens > 0
    session.close()


# ------------------------------------------------------------------------------------------------------ order of events


def test_layers_load_during_computation_and_saving_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read buffer holds one layer, so layer l + 1 is loaded while layer l is computed."""

    llm = make_llm()
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    session.close()
    llm = make_llm()
    session = llm.session("s", tmp_path)
    events: list[tuple[str, int]] = []
    adapter, gate = llm.runner.adapter, threading.Event()
    monkeypatch.setattr(session.context, "read_buffer", lambda size, tokens: 1)

    def log(owner: Any, name: str, event: str, place: int, before: Callable[[], Any] = lambda: None) -> None:
        real = getattr(owner, name)

        def logged(*args: Any) -> Any:
            before()
            if (event, args[place]) not in events:
                events.append((event, args[place]))
            return real(*args)

        monkeypatch.setattr(owner, name, logged)

    log(StoredBlock, "read_layer", "load", 1)
    log(adapter, "after_attention", "compute", 0)
    log(session.context.saver, "_write", "save", 1, before=gate.wait)
    generation = session.send(TURNS[2], GREEDY)
    next(generation)
    computed = [layer for event, layer in events if event == "compute"]
    assert computed == [0, 1, 2] and not [e for e in events if e[0] == "save"], "saving is still blocked"
    assert session.context.saver._waiting > 0
    at = {event: i for i, event in enumerate(events)}
    for layer in range(3):
        assert at["load", layer] < at["compute", layer]
        if layer >= 2:
            assert at["load", layer] > at["compute", layer - 2], "the buffer has one layer"
    gate.set()
    list(generation)
    session.save()
    assert session.context.saver._waiting == 0
    session.close()


def test_read_buffer_size_equals_the_paper() -> None:
    """S_buf = B (T_load L_hist - T_pref L_new), in layers (CachedAttention)."""
    assert read_buffer_layers(8.0, 8.0, 32) == 1 and read_buffer_layers(0.0, 1.0, 32) == 1
    assert read_buffer_layers(8.0, 2.0, 32) == 24 and read_buffer_layers(8.0, 0.0, 32) == 32


def test_prefetch_loads_kv_before_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    session = llm.session("s", tmp_path)
    answers = run_turns(session, TURNS[:2])
    session.close()
    llm = make_llm()
    session = llm.session("s", tmp_path)
    read, read_layer = list[int](), StoredBlock.read_layer

    def record_read(block: StoredBlock, layer: int, into: memoryview) -> bool:
        read.append(layer)
        return read_layer(block, layer, into)

    monkeypatch.setattr(StoredBlock, "read_layer", record_read)
    session.prefetch()
    loader = session.kv.loader
    assert loader is not None
    loader._thread.join(20)
    assert loader.finished, "without measurements, the buffer has all layers"
    blocks = len(session.history.keys)
    assert sorted(read) == sorted([*range(3)] * blocks) and blocks > 1
    plain = make_llm(enable_prefix_caching=False)
    expected = completed(plain.generate([TURNS[0] + answers[0] + TURNS[1] + answers[1] + TURNS[2]], GREEDY))[
        0
    ].token_ids
    assert answer(session, TURNS[2]) == expected
    assert len(read) == 3 * blocks, "the turn reads nothing"
    session.close()


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"kv_cache_dtype": "int8"}])
def test_session_of_another_dtype_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """Without this error, a session would silently start empty if the default dtype changed."""
    model = tiny_model("llama", dtype=torch.float64)

    def load(**options: Any) -> LLM:
        return LLM(model.to(torch.float64), policy="full", host_memory="16MiB", **({"dtype": "float64"} | options))

    with load() as llm:
        answer(llm.session("s", tmp_path), tiny_prompt(70))
    if options.get("dtype"):
        model.to(torch.float32)
    with LLM(model, policy="full", host_memory="16MiB", **({"dtype": "float64"} | options)) as llm:
        with pytest.raises(
            StoreError, match=r"stored with dtype='float64' and kv_cache_dtype='auto'.*Load the model with"
        ):
            llm.session("s", tmp_path)
        assert llm.session("another", tmp_path).tokens == []
    with load() as llm:
        assert llm.session("s", tmp_path).tokens[:70] == tiny_prompt(70)


def test_extend_after_another_turn_keeps_the_other_turn(tmp_path: Path) -> None:
    session = make_llm().session("ada", tmp_path)
    answer(session, TURNS[0])
    events = session.extend(TURNS[1], GREEDY)
    answer(session, TURNS[2])
    before = session.tokens
    new_tokens = [event.token_id for event in events]
    assert session.tokens == [*before, *TURNS[1], *new_tokens]
