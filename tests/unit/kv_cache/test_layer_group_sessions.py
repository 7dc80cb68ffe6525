"""Test sessions, truncation and swapping of models with sliding-window layers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layer_groups import BOUNDS, MODELS, greedy, make_llm, model_of
from support.plain_decode import LayerKV, plain_step
from support.staged_transfer import staged
from support.tiny_models import assert_greedy, tiny_prompt

from offload_rt import LLM
from offload_rt.core import BLOCK_SIZE, BlockTable
from offload_rt.engine.engine import Engine
from offload_rt.engine.swap import Swap
from offload_rt.sessions.session import Session
from offload_rt.storage.saver import layer_data

MIXED = [name for name in MODELS if name != "all slide"]
TURNS = [tiny_prompt(150, seed=1), tiny_prompt(25, seed=2), tiny_prompt(75, seed=3)]


def answer(session: Session, turn: list[int], count: int = 7) -> list[int]:
    tokens = [event.token_id for event in session.send(turn, greedy(count))]
    session.check_integrity()
    session.kv.runner.check_integrity()
    return tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "kv_cache_dtype"), [*((kind, "auto") for kind in MODELS), ("room to spare", "int8")])
def test_stored_session_continues_with_equal_tokens(kind: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    uninterrupted = make_llm(kind, kv_cache_dtype=kv_cache_dtype).session("s", tmp_path / "straight")
    expected = [answer(uninterrupted, turn) for turn in TURNS]
    uninterrupted.close()
    for turn, expected_answer in zip(TURNS, expected, strict=True):
        session = make_llm(kind, kv_cache_dtype=kv_cache_dtype).session("s", tmp_path / "stored")
        before = session.history.computed
        assert answer(session, turn) == expected_answer
        assert session.loaded_tokens == before, "nothing is computed again"
        session.close()
    files = list((tmp_path / "stored").glob("*/*/*.kv"))
    session = make_llm(kind, kv_cache_dtype=kv_cache_dtype).session("s", tmp_path / "stored")
    groups = session.kv.runner.pool.groups
    computed = session.history.computed
    window_blocks = -(-computed // BLOCK_SIZE) - groups.first_seen(computed) // BLOCK_SIZE
    assert len(session.history.keys) == groups.full * -(-computed // BLOCK_SIZE) + groups.sliding * window_blocks
    assert set(session.history.keys) <= {file.stem for file in files}
    session.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", MODELS)
def test_session_without_its_windows_is_recomputed(kind: str, tmp_path: Path) -> None:
    session = make_llm(kind).session("s", tmp_path / "a")
    expected = [answer(session, turn) for turn in TURNS[:2]]
    session.close()
    llm = make_llm(kind)
    session = llm.session("s", tmp_path / "b")
    assert answer(session, TURNS[0]) == expected[0]
    session.close()
    stored = make_llm(kind).session("s", tmp_path / "b")
    missing = stored.kv.blocks.window_names(stored.history.computed)[0]
    stored.close()
    next((tmp_path / "b").glob(f"*/*/{missing.key.hex()}.kv")).unlink()
    session = make_llm(kind).session("s", tmp_path / "b")
    assert answer(session, TURNS[1]) == expected[1]
    assert session.loaded_tokens == 0
    session.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", MODELS)
def test_fork_of_a_session_is_independent(kind: str, tmp_path: Path) -> None:
    llm = make_llm(kind)
    session = llm.session("s", tmp_path)
    before = answer(session, TURNS[0])
    fork = session.fork("t")
    answers = {"s": answer(session, TURNS[1]), "t": answer(fork, TURNS[2])}
    session.close()
    fork.close()
    for name, turn in (("s", TURNS[1]), ("t", TURNS[2])):
        reference = make_llm(kind).session(name, tmp_path / "without forks")
        assert [answer(reference, TURNS[0]), answer(reference, turn)] == [before, answers[name]]
        reference.close()


def test_replaced_last_block_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partly filled last block may be replaced while a slow disk is still writing it."""

    def slow(*args: Any) -> memoryview:
        time.sleep(0.02)
        return layer_data(*args)

    monkeypatch.setattr("offload_rt.storage.saver.layer_data", slow)
    session = make_llm("half slide").session("s", tmp_path)
    for turn in ([1, 2, 3], [4, 5], [6]):
        answer(session, turn, count=4)
    tails = [session.history.tail, *session.history.tail_windows]
    assert len(tails) == 2 and session.history.keys == tails
    session.close()
    assert {file.stem for file in tmp_path.glob("*/*/*.kv")} == set(tails)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("cut", [{"keep_last": 100, "sinks": 4}, {"keep_last": 30}, {"drop": range(60, 150)}])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_sliding_layers_ignore_tokens_before_a_truncation_gap(
    kind: str, cut: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    if kind in ("narrow rows", "many heads") and dtype is torch.float64:
        pytest.skip("transformers' experts do not run in float64")
    llm = make_llm(kind, dtype=dtype)
    session = llm.session("s", tmp_path)
    answer(session, tiny_prompt(200), count=11)
    tokens, computed = list(session.history.tokens), session.history.computed
    adapter = llm.runner.adapter
    rows: LayerKV = [[] for _ in range(adapter.geometry.layers)]
    plain_step(adapter, tokens[:computed], 0, rows)
    session.truncate(**cut)
    floor, history = session.history.floor, session.history
    dropped = computed - history.computed
    kept = [i for i in range(computed) if i in _kept_indices(computed, cut)]
    assert len(kept) == history.computed and dropped > 0
    for layer in adapter.geometry.kv_layers:
        slides = adapter.geometry.windows[layer] is not None
        rows[layer] = [rows[layer][i] for i in (kept[floor:] if slides else kept)]
    expected = plain_step(adapter, [tokens[computed]], computed, rows)
    session.close()
    session = make_llm(kind, dtype=dtype).session("s", tmp_path)
    sequence = session.kv.ready(len(session.history.tokens))
    session.kv.load_all()
    logits = session.kv.runner.decode([sequence])[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=BOUNDS[dtype])
    session.close()


def _kept_indices(computed: int, cut: dict[str, Any]) -> set[int]:
    if "drop" in cut:
        return set(range(computed)) - set(cut["drop"])
    return {*range(cut.get("sinks", 4)), *range(computed - cut["keep_last"], computed)}


@pytest.mark.parametrize("kind", ["all slide", "shared"])
def test_preempted_sequences_are_restored_from_disk(kind: str, tmp_path: Path) -> None:
    pool = make_llm(kind).runner.pool
    each, step = pool.groups.blocks(150), pool.groups.blocks_at_once
    llm = make_llm(kind, memory=(3 * each - step) * pool.block_bytes, enable_prefix_caching=False)
    swap = Swap(llm.runner, tmp_path)
    swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0
    engine = Engine(llm.runner, max_num_seqs=4, swap=swap)
    prompts = [tiny_prompt(118, seed=seed) for seed in range(4)]
    requests = [engine.add(prompt, greedy(14)) for prompt in prompts]
    while not engine.idle:
        engine.step()
        swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0
    assert engine.scheduler.preemptions > 0 and engine.scheduler.restored > 0
    for prompt, request in zip(prompts, requests, strict=True):
        [completion] = request.completions()
        assert_greedy(model_of(kind), prompt, completion.token_ids)
    assert llm.runner.pool.sequence_bytes == 0 and swap.bytes_used == 0


@pytest.mark.parametrize("kind", ["all slide", "room to spare"])
def test_sequence_is_restored_to_a_pool_with_memory_for_one(kind: str, tmp_path: Path) -> None:
    """Sliding layers need memory only for their windows."""
    pool = make_llm(kind).runner.pool
    llm = make_llm(kind, memory=pool.groups.blocks(150) * pool.block_bytes, enable_prefix_caching=False)
    swap = Swap(llm.runner, tmp_path)
    swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0
    engine, prompt = Engine(llm.runner, max_num_seqs=4, swap=swap), tiny_prompt(110)
    request = engine.add(prompt, greedy(40))
    while len(request.completions()[0].token_ids) < 30:
        engine.step()
    engine.scheduler.preempt(request)
    while not engine.idle:
        engine.step()
    assert engine.scheduler.restored == 1
    assert_greedy(model_of(kind), prompt, request.completions()[0].token_ids)


def test_loader_restores_kv_of_each_layer_group(tmp_path: Path) -> None:
    llm = make_llm("room to spare")
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    pool, blocks = llm.runner.pool, session.kv.sequence.blocks  # type: ignore[union-attr]
    assert isinstance(blocks, BlockTable)
    length = blocks.length
    saved = {layer: _visible_kv(llm, blocks, layer, length) for layer in range(5)}
    session.close()
    other = make_llm("room to spare")
    session = other.session("s", tmp_path)
    session.kv.fetch(all_layers=True)
    session.kv.load_all()
    assert session.kv.loader is None
    restored = session.kv.sequence
    assert restored is not None and pool.groups == other.runner.pool.groups
    for layer, rows in saved.items():
        assert torch.equal(_visible_kv(other, restored.blocks, layer, length), rows)
    session.close()


def _visible_kv(llm: LLM, blocks: BlockTable, layer: int, length: int) -> torch.Tensor:
    """Return the K and V `[2, Hkv, n, d]` that the token at position `length` attends to in `layer`."""
    pool = llm.runner.pool
    first = pool.groups.first_seen(length) if pool.groups.group[layer] else 0
    parts = pool.runs(blocks, layer, range(first, length))
    return torch.stack([torch.cat([part.k for part in parts], 1), torch.cat([part.v for part in parts], 1)])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("first", [BLOCK_SIZE, 100])
@pytest.mark.parametrize("kind", ["all slide", "half slide"])
@pytest.mark.parametrize("path", ["in place", "copied", "int8", "working set"])
def test_long_turn_after_a_short_turn(kind: str, path: str, first: int, tmp_path: Path) -> None:
    """In sliding layers, the last block of a prefill chunk may be outside the window."""
    select_all = {"policy_options": {"budget": 1.0, "dense_layers": ()}}
    options: dict[str, dict[str, Any]] = {
        "copied": {"prefill_chunk_size": BLOCK_SIZE},
        "int8": {"kv_cache_dtype": "int8"},
        "working set": {"policy": "infinigen", "working_set": 24} | select_all,
    }
    llm = make_llm(kind, **options.get(path, {}))
    llm = staged(llm) if path == "copied" else llm
    for name, turns in {"long": (first, 700), "same start": (first + 80, 30)}.items():
        session = llm.session(name, tmp_path)
        for seed, length in enumerate(turns):
            turn = tiny_prompt(length, seed=seed)
            before = [*session.tokens, *turn]
            found = answer(session, turn, 6)
            if path != "int8":  # int8 quantises K and V
                assert_greedy(model_of(kind), before, found)
        session.close()
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0
