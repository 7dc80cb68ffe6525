"""Test models with sliding-window layers.

These layers keep only the KV of their windows. Prefix sharing, forks, eviction, swapping, sessions and truncation work
as in other models.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.outputs import completed
from support.plain_decode import Kept, assert_evicts_oldest, plain_step
from support.staged_transfer import staged
from support.tiny_models import VOCAB, assert_greedy, tiny_model, tiny_prompt
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.core import BLOCK_SIZE, BlockTable
from offload_rt.engine.engine import Engine
from offload_rt.engine.swap import Swap
from offload_rt.kv_cache.layer_groups import LayerGroups
from offload_rt.models.registry import adapter_for
from offload_rt.sessions.session import Session
from offload_rt.storage.saver import layer_data

WINDOW = 48
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all slide": ("mistral", {"num_hidden_layers": 2}),
    "half slide": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2}),
    "room to spare": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 5}),
    "one slides": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 3}),
    "narrow rows": ("gemma4_moe", {}),
    "many heads": ("mimo_v2_flash", {}),
    "shared": ("gemma4_e2b", {"vocab_size_per_layer_input": VOCAB}),
    "shared after sliding": ("gemma4_e4b", {"vocab_size_per_layer_input": VOCAB}),
}
TWO_SHAPES = ("narrow rows", "many heads", "shared", "shared after sliding")
"""Models whose sliding-window layers have another row shape than their full-attention layers."""
MIXED = [name for name in MODELS if name != "all slide"]
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "everything": {"policy": "infinigen", "policy_options": {"budget": 1.0, "recent": 8, "dense_layers": ()}},
}


BOUNDS = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest error. C kernels run in float32, which rounds values of about 10."""


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    name, config = MODELS[kind]
    if kind in TWO_SHAPES:
        config = {"vocab_size": VOCAB, "sliding_window": WINDOW, "max_position_embeddings": 4096} | config
        return architecture(name, dtype=dtype, **config)
    return tiny_model(name, dtype=dtype, **config)


def make_llm(kind: str, *, memory: int | str = "64MiB", dtype: torch.dtype = torch.float32, **options: Any) -> LLM:
    return LLM(model_of(kind, dtype), **({"dtype": dtype, "host_memory": memory, "policy": "full"} | options))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def max_window_blocks(llm: LLM) -> int:
    """Return the largest number of window blocks of an open sequence."""
    return max((len(sequence.blocks.windows) for sequence in llm.runner._open.values()), default=0)


@pytest.mark.parametrize(
    ("kind", "layers", "group", "storage_layer", "sliding"),
    [
        ("all slide", 2, (1, 1), (0, 1), 1),
        ("half slide", 1, (0, 1), (0, 0), 1),
        ("room to spare", 2, (0, 0, 1, 1, 2), (0, 1, 0, 1, 0), 2),
        ("one slides", 2, (0, 0, 1), (0, 1, 0), 1),
        ("narrow rows", 2, (1, 0, 2, 0), (0, 0, 0, 1), 2),
        ("many heads", 2, (1, 0, 2), (0, 0, 0), 2),
        ("shared", 1, (1, 0, 1, 1, 0, 0), (0, 0, 0, 0, 0, 0), 1),
        ("shared after sliding", 1, (1, 0, 2, 2, 0, 2, 0), (0, 0, 0, 0, 0, 0, 0), 2),
    ],
)
def test_layer_groups_of_each_model(
    kind: str, layers: int, group: tuple[int, ...], storage_layer: tuple[int, ...], sliding: int
) -> None:
    geometry = adapter_for(model_of(kind)).geometry
    window_storage_layers = 2 if kind in ("narrow rows", "many heads") else 1
    assert LayerGroups.from_geometry(geometry) == LayerGroups(
        layers, group, storage_layer, sliding, WINDOW, window_storage_layers
    )


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130])
def test_number_of_blocks_that_a_window_overlaps(window: int) -> None:
    groups = LayerGroups(1, (0, 1), (0, 0), 1, window)
    seen = [p // BLOCK_SIZE - groups.first_seen(p) // BLOCK_SIZE + 1 for p in range(1000)]
    assert max(seen) == groups.window_blocks


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130])
def test_reserved_next_window_needs_no_more_blocks(window: int) -> None:
    groups = LayerGroups(1, (0, 1), (0, 0), 1, window)
    for p in range(1000):
        kept, reserved = groups.window_indices(p, p + 1), groups.window_indices(p, p + 1, next_window=True)
        assert kept <= reserved and len(reserved) == groups.window_blocks


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "policy", "device"),
    [(kind, "full", "host") for kind in MODELS]
    + [
        ("half slide", "everything", "host"),
        ("room to spare", "everything", "staged"),
        ("all slide", "full", "staged"),
        ("narrow rows", "full", "staged"),
        ("shared", "everything", "staged"),
    ],
)
def test_greedy_tokens_equal_transformers_far_beyond_the_window(kind: str, policy: str, device: str) -> None:
    llm = make_llm(kind, **POLICIES[policy])
    if device == "staged":
        llm = staged(llm)
    prompts = [tiny_prompt(length, seed=length) for length in (30, 47, 220)]
    reference = model_of(kind)
    for prompt, completion in zip(prompts, completed(llm.generate(prompts, greedy(12))), strict=True):
        assert len(completion.token_ids) == 12
        assert_greedy(reference, prompt, completion.token_ids)
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", MODELS)
def test_sliding_layers_keep_only_their_window(kind: str) -> None:
    llm = make_llm(kind, enable_prefix_caching=False)
    pool = llm.runner.pool
    window_blocks = pool.groups.sliding * pool.groups.window_blocks
    for event in llm.stream(tiny_prompt(310), greedy(30)):
        blocks_per_layer = -(-(310 + event.index) // BLOCK_SIZE)
        assert max_window_blocks(llm) <= pool.groups.window_blocks
        full_blocks = pool.bytes_used // pool.block_bytes - window_blocks
        assert full_blocks <= pool.groups.full * (blocks_per_layer + 4), (
            "slots for all 340 tokens were reserved at the start"
        )
    assert pool.bytes_peak <= (pool.groups.full * 6 + window_blocks) * pool.block_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", MODELS)
def test_prompts_share_kv_of_their_common_prefix(kind: str) -> None:
    llm = make_llm(kind)
    document = tiny_prompt(400)
    prompts = [document + tiny_prompt(108, seed=seed) for seed in (1, 2)]
    first, second = (completed(llm.generate([prompt], greedy(8)))[0] for prompt in prompts)
    for prompt, completion in zip(prompts, (first, second), strict=True):
        assert len(completion.token_ids) == 8
        assert_greedy(model_of(kind), prompt, completion.token_ids)
    assert first.stats.reused_tokens == 0 and second.stats.reused_tokens == 400 // BLOCK_SIZE * BLOCK_SIZE
    llm.runner.check_integrity()
    together = completed(llm.generate(prompts, greedy(8)))
    assert [completion.token_ids for completion in together] == [first.token_ids, second.token_ids]
    assert llm.runner.pool.sequence_bytes == 0


def test_cached_window_blocks_are_evicted_if_memory_is_needed() -> None:
    llm = make_llm("half slide")
    pool, needed = llm.runner.pool, llm.runner.pool.groups.blocks(330)
    small_llm = make_llm("half slide", memory=needed * pool.block_bytes)
    for seed in range(4):
        prompt = tiny_prompt(300, seed=seed)
        assert_greedy(model_of("half slide"), prompt, completed(small_llm.generate([prompt], greedy(30)))[0].token_ids)
        small_llm.runner.check_integrity()


@pytest.mark.parametrize(("kind", "dtype"), [("all slide", torch.float64), ("room to spare", torch.float32)], ids=str)
def test_forks_of_samples_and_beams_give_correct_logprobs(kind: str, dtype: torch.dtype) -> None:
    prompt = tiny_prompt(120)
    llm = make_llm(kind, dtype=dtype)
    for completion in completed(llm.generate([prompt], SamplingParams(max_tokens=12, n=3, seed=5))):
        continued = prompt + completion.token_ids
        logits = model_of(kind, dtype)(torch.tensor([continued])).logits[0, len(prompt) - 1 : -1].double()
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        [score] = make_llm(kind, dtype=dtype).score([prompt], [completion.token_ids], len(prompt) - 1)
        assert score.logprobs == pytest.approx(logprobs.tolist(), abs=BOUNDS[dtype])
    ids = torch.tensor([prompt])
    expected: Any = model_of(kind, dtype).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, num_beams=3,
        num_return_sequences=3, pad_token_id=0,
    )  # fmt: skip
    beams = completed(llm.generate([prompt], SamplingParams(max_tokens=12, num_beams=3, n=3, temperature=0)))
    assert [beam.token_ids for beam in beams] == expected[:, len(prompt) :].tolist()
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


# ----------------------------------------------------------------------------------------------------------- eviction


@pytest.mark.parametrize(("kind", "dtype"), [("room to spare", torch.float32), ("one slides", torch.float64)], ids=str)
def test_eviction_affects_only_full_attention_layers(kind: str, dtype: torch.dtype) -> None:
    pool = make_llm(kind, dtype=dtype).runner.pool
    memory = pool.block_bytes * (2 + pool.groups.sliding * pool.groups.window_blocks)
    llm = make_llm(kind, memory=memory, dtype=dtype, eviction={"policy": "fifo", "protect": "none"})
    near = partial(torch.testing.assert_close, rtol=0, atol=BOUNDS[dtype])
    assert_evicts_oldest(llm.runner, tiny_prompt(150), 120, near)


@pytest.mark.parametrize(
    ("kind", "eviction"),
    [("all slide", "lru"), ("room to spare", "counter"), ("shared", "lru")],
)
def test_generation_continues_far_past_the_limit(kind: str, eviction: str) -> None:
    pool = make_llm(kind).runner.pool
    memory = pool.block_bytes * (2 * pool.groups.full + pool.groups.sliding * pool.groups.window_blocks)
    options = {"policy": "infinigen", "policy_options": {"recent": 8, "alpha": 2.0}}
    llm = make_llm(kind, memory=memory, eviction=eviction, **options)
    for event in llm.stream(tiny_prompt(50), greedy(110)):
        assert llm.runner.pool.bytes_used <= memory
        if event.index % 50 == 0:
            llm.runner.check_integrity()
    assert llm.last_stats is not None and llm.last_stats.new_tokens == 110 and llm.runner.pool.sequence_bytes == 0


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_scoring_in_a_small_pool_equals_scoring_in_a_large_one(name: str) -> None:
    """Scored sequences allocate window blocks as their windows move, without a reservation."""
    more = {"use_sliding_window": True, "max_window_layers": 1} if name == "qwen2" else {}
    model = tiny_model(name, num_hidden_layers=2, **more)
    prompts, continuations = (
        [tiny_prompt(60, seed=i // 2) for i in range(6)],
        [tiny_prompt(70, seed=9 + i) for i in range(6)],
    )
    small_llm, large_llm = (LLM(model, policy="full", host_memory=size, verify="off") for size in ("288KiB", "8MiB"))
    small_scores, large_scores = (
        [score.logprobs for score in llm.score(prompts, continuations)] for llm in (small_llm, large_llm)
    )
    assert all(small == pytest.approx(large, abs=1e-4) for small, large in zip(small_scores, large_scores, strict=True))
    assert small_llm.runner.pool.sequence_bytes == 0


# ------------------------------------------------------------------------------------------- sessions, swap, truncation

TURNS = [tiny_prompt(150, seed=1), tiny_prompt(25, seed=2), tiny_prompt(75, seed=3)]


def answer(session: Session, turn: list[int], count: int = 12) -> list[int]:
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


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
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
    """A partly filled last block may be replaced while a slow disk still writes it."""

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


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("cut", [{"keep_last": 100, "sinks": 4}, {"keep_last": 30}, {"drop": range(60, 150)}])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_sliding_layers_ignore_tokens_before_a_truncation_gap(
    kind: str, cut: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    if kind == "narrow rows" and dtype is torch.float64:
        pytest.skip("transformers' experts do not run in float64")
    llm = make_llm(kind, dtype=dtype)
    session = llm.session("s", tmp_path)
    answer(session, tiny_prompt(200), count=11)
    tokens, computed = list(session.history.tokens), session.history.computed
    adapter = llm.runner.adapter
    rows: Kept = [[] for _ in range(adapter.geometry.layers)]
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
    prompts = [tiny_prompt(50, seed=seed) for seed in range(4)]
    requests = [engine.add(prompt, greedy(100)) for prompt in prompts]
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
    engine, prompt = Engine(llm.runner, max_num_seqs=4, swap=swap), tiny_prompt(50)
    request = engine.add(prompt, greedy(100))
    while len(request.completions()[0].token_ids) < 90:
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
    """Return K and V `[2, Hkv, n, d]` that `layer` attends to for the token at position `length`."""
    pool = llm.runner.pool
    first = pool.groups.first_seen(length) if pool.groups.group[layer] else 0
    parts = pool.runs(blocks, layer, range(first, length))
    return torch.stack([torch.cat([part.k for part in parts], 1), torch.cat([part.v for part in parts], 1)])


@pytest.mark.sampled(3)
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
