"""Test the engine: requests join and leave between steps, wait for memory, and are cancelled or refused."""

from __future__ import annotations

import random

import pytest
import torch
from support.outputs import completed
from support.pools import peak_of
from support.tiny_models import assert_greedy, tiny_model, tiny_prompt

from offload_rt import LLM, InputError, ModelError, PoolFullError, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.engine import Engine
from offload_rt.engine.scheduler import Scheduler
from offload_rt.kv_cache.arena import Arena
from offload_rt.kv_cache.layout import ArenaLayout
from offload_rt.outputs import TokenOutput


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def beams(width: int, count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, num_beams=width)


def make_llm(blocks: int = 64, **options: object) -> LLM:
    model = tiny_model("llama", dtype=torch.float32)
    block_bytes = 2 * 3 * 2 * 32 * 64 * 4
    return LLM(model, policy="full", dtype="float32", host_memory=blocks * block_bytes, **options)  # type: ignore[arg-type]


def test_requests_that_join_mid_decode_get_their_usual_tokens() -> None:
    llm, rng = make_llm(), random.Random(0)
    asked = [(tiny_prompt(rng.randint(1, 90), seed=i), greedy(rng.randint(1, 25))) for i in range(12)]
    alone = [completed(llm.generate([prompt], params))[0].token_ids for prompt, params in asked]
    engine = Engine(llm.runner, max_num_seqs=4)
    got: dict[int, list[int]] = {i: [] for i in range(12)}
    pending, steps, widest = list(asked), 0, 0
    while pending or not engine.idle:
        if pending and steps % 2 == 0:
            engine.add(*pending.pop(0))
        for event in engine.step():
            got[event.request_id].append(event.token_id)
        engine.check_integrity()
        widest = max(widest, len(engine.scheduler.running))
        steps += 1
    assert list(got.values()) == alone
    assert widest == 4
    assert llm.runner.pool.sequence_bytes == 0


def test_a_prefill_does_not_starve_running_decodes() -> None:
    # The prompt has 200 tokens and the model three layers: one layer per step.
    llm = make_llm(max_num_batched_tokens=66)
    engine = Engine(llm.runner, max_num_seqs=2)
    engine.add(tiny_prompt(5), greedy(30))
    engine.step()
    engine.add(tiny_prompt(200, seed=1), greedy(3))
    seen = [{event.request_id for event in engine.step()} for _ in range(3)]
    assert seen == [{0}, {0}, {0, 1}]


def test_requests_wait_if_the_pool_is_full() -> None:
    llm = make_llm(blocks=3)
    peak = peak_of(llm.runner.pool)
    prompts = [tiny_prompt(70, seed=i) for i in range(5)]
    alone = [completed(llm.generate([prompt], greedy(12)))[0].token_ids for prompt in prompts]
    assert [c.token_ids for c in completed(llm.generate(prompts, greedy(12)))] == alone
    assert 0 < peak() <= llm.runner.pool.limit_bytes


def test_samples_without_memory_start_before_younger_requests() -> None:
    engine = Engine(make_llm(blocks=3).runner, max_num_seqs=4)
    samples = engine.add(tiny_prompt(100), SamplingParams(n=3, max_tokens=5, seed=1))
    younger = engine.add(tiny_prompt(20, seed=1), greedy(4))
    engine.step()
    waiting = list(engine.scheduler.waiting)
    assert len(waiting) == 2 and waiting[1] is younger
    while not engine.idle:
        engine.step()
    assert [len(sample.token_ids) for sample in samples.completions()] == [5] * 3


def test_a_prompt_that_never_fits_fails_and_others_continue() -> None:
    llm = make_llm(blocks=2)
    with pytest.raises(PoolFullError, match=r"3 blocks .* are needed, and of 2 only 2 are free .* 1 too few"):
        llm.generate([tiny_prompt(100)], greedy(50))
    engine = Engine(llm.runner, max_num_seqs=2)
    engine.add(tiny_prompt(100), greedy(50))
    engine.add(tiny_prompt(10), greedy(5))
    with pytest.raises(PoolFullError):
        engine.step()
    events: list[TokenOutput] = []
    while not engine.idle:
        events += engine.step()
    assert [event.request_id for event in events] == [1] * 5
    assert llm.runner.pool.sequence_bytes == 0


def test_cancelling_frees_memory_in_any_state_of_a_request() -> None:
    llm = make_llm()
    engine = Engine(llm.runner, max_num_seqs=2)
    running = engine.add(tiny_prompt(5), greedy(50))
    engine.step()
    prefilling = engine.add(tiny_prompt(100), greedy(50))
    waiting = engine.add(tiny_prompt(7), greedy(50))
    engine.step()
    for request in (prefilling, waiting, running, running):
        engine.cancel(request)
        engine.check_integrity()
    assert engine.idle and llm.runner.pool.sequence_bytes == 0
    assert running.completion().finish_reason == "abort"
    assert len(running.new_tokens) == 2 and waiting.stats(llm.runner) is None


def test_the_prefill_after_a_cached_prefix_does_not_count_as_steps() -> None:
    llm = make_llm()
    first, again = (completed(llm.generate([tiny_prompt(150)], greedy(5)))[0].stats for _ in range(2))
    assert again.reused_tokens == 128 and again.h2d_bytes > first.h2d_bytes
    assert again.h2d_bytes_steps == first.h2d_bytes_steps == first.h2d_bytes


def test_closing_a_stream_keeps_its_statistics() -> None:
    llm = make_llm()
    stream = llm.stream(tiny_prompt(40), greedy(100))
    texts = [next(stream) for _ in range(10)]
    stream.close()  # type: ignore[attr-defined]
    stats = llm.last_stats
    assert stats is not None and (stats.prompt_tokens, stats.new_tokens) == (40, 10) and len(texts) == 10
    assert llm.runner.pool.sequence_bytes == 0
    llm.generate([tiny_prompt(9)], greedy(2))
    assert llm.last_stats is None, "`generate` clears the statistics of the stream"


def test_statistics_count_the_transfers_of_full() -> None:
    llm = make_llm()
    [completion] = completed(llm.generate([tiny_prompt(50)], greedy(11)))
    stats = completion.stats
    row_pair = 2 * 32 * 4
    # A step copies all KV entries but the newest, which is already on the device.
    assert stats.h2d_bytes == stats.h2d_bytes_steps == sum(range(50, 60)) * 3 * 2 * row_pair
    assert stats.d2h_bytes == 60 * 3 * 2 * row_pair
    assert stats.exact_fraction == 1 and stats.fetched_fraction == pytest.approx(1, abs=0.02)
    assert stats.dense_layers == (0, 1, 2) and stats.missed_mass is None
    assert stats.kv_bytes_host == 64 * 3 * 2 * row_pair
    assert set(stats.to_dict()) >= {"prefill_seconds", "decode_seconds", "peak_device_bytes", "scoring_bytes_device"}


def test_generation_over_many_blocks_equals_transformers() -> None:
    model = tiny_model("llama")
    llm = LLM(model, policy="full", host_memory="4MiB")
    [done] = completed(llm.generate(tiny_prompt(3), greedy(260)))
    assert len(done.token_ids) == 260
    assert_greedy(model, tiny_prompt(3), done.token_ids)


def test_bad_prompts_are_refused_before_memory_is_allocated() -> None:
    llm = make_llm()
    with pytest.raises(InputError, match="empty"):
        llm.stream([])
    with pytest.raises(InputError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(InputError, match="token id 199"):
        llm.generate([[5, 199]])
    with pytest.raises(InputError, match="2 prompts but 1"):
        llm.score([[1], [2]], [[3]])
    with pytest.raises(InputError, match="empty"):
        llm.score([[1]], [[]])
    gpt2 = LLM(tiny_model("gpt2"), policy="full", host_memory="8MiB")
    with pytest.raises(ModelError, match=r"1030 positions, .* has 1024"):
        gpt2.generate([tiny_prompt(1000)], greedy(30))
    whole = tiny_prompt(1025)
    assert len(gpt2.score([whole[:1000]], [whole[1000:]])[0].logprobs) == 25, "the last token needs no position"
    short = LLM(tiny_model("llama", max_position_embeddings=64), policy="full", host_memory="8MiB")
    with pytest.warns(UserWarning, match="trained for 64"):
        short.generate([tiny_prompt(60)], greedy(10))
    assert llm.runner.pool.sequence_bytes == 0


@pytest.mark.slow
def test_memory_is_allocated_only_at_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning memory takes so long that doing it early would delay all running requests."""
    fit, activate, admit = ArenaLayout.fit, Arena.activate, Scheduler.admit
    monkeypatch.setattr(
        ArenaLayout, "fit", lambda geometry, dtype, limit, _: fit(geometry, dtype, limit, slab_tokens=2 * BLOCK_SIZE)
    )
    llm = LLM(tiny_model("llama", num_hidden_layers=2), policy="full", host_memory="8MiB")
    peak = peak_of(llm.runner.pool)
    ready: list[bool] = []
    admitting = []

    def record_admit(scheduler: Scheduler) -> None:
        admitting.append(scheduler)
        admit(scheduler)
        admitting.pop()

    def record_activate(arena: Arena) -> None:
        ready.append(bool(admitting))
        activate(arena)

    monkeypatch.setattr(Scheduler, "admit", record_admit)
    monkeypatch.setattr(Arena, "activate", record_activate)
    engine = Engine(llm.runner, max_num_seqs=16)
    sampled = SamplingParams(max_tokens=200, n=3, seed=1)
    asked = [(100, greedy(150)), (130, sampled), (64, beams(3, 140)), (63, greedy(1)), (5, greedy(260))]
    for length, params in asked:
        engine.add(tiny_prompt(length, seed=length), params)
        for _ in range(40):
            engine.step()
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert len(ready) >= 14 and all(ready)
    assert peak() >= (len(ready) - 8) * 2 * llm.runner.pool.block_bytes, "little more memory is allocated than used"
