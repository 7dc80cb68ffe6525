"""Test truncated sessions: kept KV and positions, and rotated keys of attention sinks."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import take_turn
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, InputError, ModelError, SamplingParams
from offload_rt.sessions import truncate as truncation
from offload_rt.sessions.history import History

GREEDY = SamplingParams(max_tokens=12, temperature=0)
TURNS = [tiny_prompt(150, seed=1), tiny_prompt(25, seed=2), tiny_prompt(75, seed=3), tiny_prompt(28, seed=4)]
"""Block boundaries lie in the answer of the second turn, in the third turn and in the answer of the fourth."""


def make_llm(name: str = "llama", memory: int | str = "64MiB", **options: Any) -> LLM:
    chosen = {"policy": "full"} | options
    return LLM(tiny_model(name, dtype=torch.float32), dtype="float32", host_memory=memory, **chosen)


answer = partial(take_turn, params=GREEDY)


def truncated_reference_logits(
    llm: LLM, tokens: list[int], kept: list[int], new_tokens: list[int], rotation: int = 0
) -> torch.Tensor:
    """Compute reference logits for a truncated session with transformers.

    Args:
        llm: Provides the adapter that rotates keys.
        tokens: Tokens before the truncation.
        kept: Indices of the kept tokens.
        new_tokens: New tokens, whose positions continue after `tokens`.
        rotation: Number of positions by which the first four keys are rotated.

    Returns:
        Logits after the last new token.
    """
    model: Any = tiny_model("llama", dtype=torch.float32)
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([tokens]), past_key_values=cache)
        kept_cache = DynamicCache()
        for layer in range(3):
            k, v = cache.layers[layer].keys[:, :, kept], cache.layers[layer].values[:, :, kept]
            if rotation:
                k = k.clone()
                k[0, :, :4] = llm.runner.adapter.rotate_keys(layer, k[0, :, :4], rotation)
            kept_cache.update(k, v, layer)
        positions = torch.arange(len(tokens), len(tokens) + len(new_tokens))[None]
        mask = torch.ones(1, len(kept) + len(new_tokens), dtype=torch.long)
        out = model(torch.tensor([new_tokens]), past_key_values=kept_cache, position_ids=positions, attention_mask=mask)
    return out.logits[0, -1]


@pytest.mark.sampled
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("method", ["keep_last", "drop"])
def test_truncation_keeps_kv_and_positions(method: str, restart: bool, tmp_path: Path) -> None:
    llm = make_llm()
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    computed = len(session.tokens) - 1
    tokens, last = session.tokens[:computed], session.tokens[computed:]
    kept = [*range(4), *range(computed - 70, computed)] if method == "keep_last" else [*range(30), *range(60, computed)]
    if restart:
        session.close()
        llm = make_llm()
        session = llm.session("s", tmp_path)
    removed = session.truncate(keep_last=70) if method == "keep_last" else session.truncate(drop=range(30, 60))
    assert removed == computed - len(kept) and session.tokens == [tokens[i] for i in kept] + last
    if restart:
        session.close()
        llm = make_llm()
        session = llm.session("s", tmp_path)
    expected = int(truncated_reference_logits(llm, tokens, kept, last + TURNS[1]).argmax())
    assert answer(session, TURNS[1])[0] == expected
    assert session.loaded_tokens == (len(kept) if restart else session.loaded_tokens)
    session.close()


def test_sink_keys_are_rotated_by_the_gap_beyond_the_trained_context(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32, max_position_embeddings=200)
    llm = LLM(model, dtype="float32", policy="full", host_memory="16MiB")
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    computed = len(session.tokens) - 1
    tokens, last = session.tokens[:computed], session.tokens[computed:]
    kept = [*range(4), *range(computed - 70, computed)]
    session.truncate(keep_last=70)
    new_tokens = last + TURNS[2]
    expected = truncated_reference_logits(llm, tokens, kept, new_tokens, rotation=computed - 74)
    assert session.history.sink_shift == 0
    assert answer(session, TURNS[2])[0] == int(expected.argmax())
    assert session.history.sink_shift == computed - 74
    session.close()
    restored = LLM(model, dtype="float32", policy="full", host_memory="16MiB").session("s", tmp_path)
    assert len(answer(restored, [5])) == 12 and restored.loaded_tokens > 100
    restored.close()


def test_fifty_truncations_rotate_sink_keys_without_drift(tmp_path: Path) -> None:
    model = tiny_model("llama", max_position_embeddings=200)
    llm = LLM(model, policy="full", host_memory="16MiB")
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0][:100], params=SamplingParams(max_tokens=5, temperature=0))
    original = llm.runner.pool.stored(session.kv.sequence.blocks, 1, range(4))[0].k.clone()  # type: ignore[union-attr]
    for i in range(50):
        session.truncate(keep_last=60)
        answer(session, tiny_prompt(95, seed=i), params=SamplingParams(max_tokens=5, temperature=0))
    history, sequence = session.history, session.kv.sequence
    assert history.shift > 4000 and history.sink_shift > 3500 and sequence is not None
    now = llm.runner.pool.stored(sequence.blocks, 1, range(4))[0].k
    torch.testing.assert_close(now, llm.runner.adapter.rotate_keys(1, original, history.sink_shift), rtol=0, atol=0)
    assert float((now.norm(dim=-1) / original.norm(dim=-1) - 1).abs().max()) < 1e-5
    session.close()


def test_unsupported_truncations_are_refused(tmp_path: Path) -> None:
    for name, message in (("gpt2", "absolute positions"), ("opt", "absolute positions")):
        session = make_llm(name).session("s", tmp_path / name)
        answer(session, TURNS[0])
        with pytest.raises(ModelError, match=message):
            session.truncate(keep_last=10)
        session.close()
    session = make_llm().session("s", tmp_path)
    answer(session, TURNS[1])
    every = range(session.history.computed)
    for wrong in ({}, {"keep_last": 5, "drop": [1]}, {"keep_last": 0}, {"drop": [999]}):
        with pytest.raises(InputError):
            session.truncate(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="drop has every token"):
        session.truncate(drop=every)
    with pytest.raises(InputError, match="sinks"):
        session.truncate(keep_last=5, sinks=64)
    assert session.truncate(keep_last=1000) == 0
    session.close()


def test_forget_from_keeps_earlier_decoded_ranges() -> None:
    history = History("s", "m", tokens=list(range(200)), computed=200, decoded=[(64, 100), (150, 180)])
    history.forget_from(90)
    assert (history.computed, history.decoded) == (90, [(64, 90)])


def test_truncation_waits_for_pending_write_backs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, calls = make_llm(), []
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    storage, settle, copy = llm.runner.transfer.storage, llm.runner.transfer.storage.settle, truncation.copy_kv

    def recording_settle(blocks: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # the saver thread calls `settle` too
            calls.append(("settle", id(blocks)))
        settle(blocks)

    monkeypatch.setattr(storage, "settle", recording_settle)

    def recording_copy(pool: Any, source: Any, target: Any, kept: Any) -> None:
        calls.append(("copy", id(source)))
        copy(pool, source, target, kept)

    monkeypatch.setattr(truncation, "copy_kv", recording_copy)
    session.truncate(keep_last=64)
    at = next(i for i, (name, _) in enumerate(calls) if name == "copy")
    assert ("settle", calls[at][1]) in calls[:at], "the copy waits for its source"
    session.close()
