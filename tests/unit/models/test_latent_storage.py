"""Test that latent attention stores and copies one vector per token and layer, which serves as both key and value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import LATENT, VOCAB, architecture
from support.outputs import completed
from support.staged_transfer import staged
from support.tiny_models import assert_greedy

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.core import BLOCK_SIZE
from offload_rt.kv_cache.disk.file_layout import FileLayout
from offload_rt.models.registry import adapter_for
from offload_rt.models.shape import load_shape
from offload_rt.outputs import CompletionOutput
from offload_rt.planning.device_plan import costs_for
from offload_rt.planning.memory_model import requirements
from offload_rt.policies.infinigen.approximate_kv import ApproximateKV

RANK, ROTATED, LAYERS = 24, 8, 3
WIDTH = (RANK + ROTATED) * torch.float32.itemsize
EVERYTHING = {"dense_layers": (), "sinks": 2, "recent": 5}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "rows": ("infinigen", EVERYTHING | {"preset": "rows", "alpha": math.inf, "max_fraction": 1.0}),
    "tail": ("infinigen", EVERYTHING | {"budget": 1.0}),
    "h2o": ("h2o", EVERYTHING | {"budget": 1.0}),
}
PREFIX = torch.randint(1, VOCAB, (130,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [PREFIX, [*PREFIX[:128], 7, 8, 9], PREFIX[:3]]
"""Two prompts that share two blocks, and one that is shorter than the window of recent tokens."""
GREEDY = SamplingParams(max_tokens=8, temperature=0)


def make_llm(policy: str = "full", name: str = "youtu", **options: Any) -> LLM:
    chosen, own = POLICIES[policy]
    fixed = {"policy": chosen, "policy_options": own, "host_memory": "16MiB", "verify": "off", "dtype": "float32"}
    return LLM(architecture(name), **(fixed | options))


def outputs(llm: LLM) -> list[CompletionOutput]:
    found = completed(llm.generate(PROMPTS, GREEDY))
    llm.runner.check_integrity()
    return found


def tokens_of(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in outputs(llm)]


@pytest.mark.parametrize("name", LATENT)
def test_bytes_per_token(name: str) -> None:
    """In memory, in plans and in files, each token has (rank + rotated) numbers per layer."""
    model = architecture(name)
    config, geometry = model.config.get_text_config(), adapter_for(model).geometry
    per_token = geometry.layers * (config.kv_lora_rank + config.qk_rope_head_dim) * torch.float32.itemsize
    assert geometry.kv_bytes(1, torch.float32) == per_token and geometry.value_dim == config.kv_lora_rank
    llm = make_llm(name=name)
    pool, costs = llm.runner.pool, costs_for(EngineConfig(policy="full"), load_shape(model))
    assert pool.block_bytes == BLOCK_SIZE * per_token and pool.token_bytes(0) * geometry.layers == per_token
    assert FileLayout(pool.layout).entry_bytes * geometry.layers == per_token
    assert requirements(costs, 0, 1000).kv_per_token == per_token
    quantised = make_llm(name=name, kv_cache_dtype="int8").runner.pool
    assert quantised.block_bytes == BLOCK_SIZE * geometry.layers * quantised.format.width


@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"working_set": 40}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}])
def test_device_transfers_give_the_same_tokens(policy: str, options: dict[str, Any]) -> None:
    cached = "working_set" in options  # with device transfers on any device
    found = outputs(make_llm(policy, **({} if cached else options)))
    if "kv_cache_dtype" not in options:
        model = architecture("youtu")
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert_greedy(model, prompt, one.token_ids)
    llm = make_llm(policy, **options)
    copied = outputs(llm if cached else staged(llm))
    assert [one.token_ids for one in copied] == [one.token_ids for one in found]
    if not options:
        for one, other in zip(copied, found, strict=True):
            assert (one.stats.h2d_bytes, one.stats.d2h_bytes) == (other.stats.h2d_bytes, other.stats.d2h_bytes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_pool_on_disk_gives_the_same_tokens(policy: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    expected = tokens_of(make_llm(policy, kv_cache_dtype=kv_cache_dtype))
    llm = make_llm(policy, kv_cache_dtype=kv_cache_dtype, disk=tmp_path, disk_limit="8MiB")
    assert llm.runner.pool.file is not None and tokens_of(llm) == expected


@pytest.mark.parametrize("copies", [False, True])
def test_dense_step_transfers_one_vector_per_token(copies: bool) -> None:
    prompt, new = PREFIX, 6
    llm = make_llm()
    geometry, window = llm.runner.adapter.geometry, llm.runner.policy.sinks + llm.runner.policy.recent
    assert geometry.layers == LAYERS
    llm = staged(llm) if copies else llm
    [one] = completed(llm.generate([prompt], SamplingParams(max_tokens=new, temperature=0)))
    candidates = sum(max(0, len(prompt) + step - window) for step in range(1, new))
    assert one.stats.h2d_bytes == candidates * LAYERS * WIDTH
    assert one.stats.d2h_bytes == (len(prompt) + new - 1) * LAYERS * WIDTH


def test_window_and_working_set_store_one_vector_per_token() -> None:
    runner = make_llm("rows", working_set=40).runner
    sequence = runner.new_sequence(PREFIX, len(PREFIX) + 1)
    sequence.tokens.append(5)
    runner.prefill(sequence, len(PREFIX))
    resident = runner.policy.sinks + runner.policy.recent
    assert runner.transfer.device_bytes == resident * LAYERS * WIDTH
    runner.decode([sequence])
    table = 8  # bytes per token: its number and its score
    assert runner.transfer.working_set_bytes(sequence.blocks) == LAYERS * 41 * (WIDTH + table)
    runner.check_integrity()
    runner.free(sequence)


def test_approximate_values_exclude_the_rotated_part() -> None:
    """The rotated part would make the values' quantisation steps larger."""
    keys = make_llm("tail").runner.new_sequence(PREFIX, len(PREFIX)).state.scoring_keys
    assert isinstance(keys, ApproximateKV) and len(keys.bases) == LAYERS
    rows = torch.randn(1, 9, RANK + ROTATED, generator=torch.Generator().manual_seed(1))
    for own in keys.bases.values():
        restored = rows @ own.mixing @ own.unmixing
        torch.testing.assert_close(restored[..., :RANK], rows[..., :RANK], rtol=0, atol=1e-5)
        assert not restored[..., RANK:].any()


@pytest.mark.parametrize(("policy", "on_disk"), [("full", True), ("tail", False)])
def test_session_continues_after_a_restart(policy: str, on_disk: bool, tmp_path: Path) -> None:
    options = {"disk": tmp_path / "rows", "disk_limit": "8MiB"} if on_disk else {}

    def turns(restart: bool, folder: Path) -> list[int]:
        session = make_llm(policy, **options).session("s", folder)
        list(session.send(PREFIX, GREEDY))
        if restart:
            session.close()
            session = make_llm(policy, **options).session("s", folder)
        answer = [event.token_id for event in session.send([3, 1, 4], GREEDY)]
        assert not restart or session.loaded_tokens >= len(PREFIX)
        session.check_integrity()
        session.close()
        return answer

    assert turns(True, tmp_path / "a") == turns(False, tmp_path / "b")


def test_preempted_requests_are_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.engine.swap.Swap._recompute_seconds", lambda *_: math.inf)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain = make_llm()
    small_llm = make_llm(host_memory=3 * plain.runner.pool.block_bytes, swap=tmp_path)
    prompts = [[seed, *PREFIX[:59]] for seed in range(1, 4)]
    engine = small_llm.make_engine()
    requests = [engine.add(prompt, params) for prompt in prompts]
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.preemptions and engine.scheduler.restored
    assert [one.new_tokens for one in requests] == [one.token_ids for one in completed(plain.generate(prompts, params))]
