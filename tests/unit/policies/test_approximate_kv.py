"""Test approximate (low-bit) KV in whole models: it estimates the attention to all tokens that were not selected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import NAMES, assert_greedy, tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, SamplingParams
from offload_rt.core import Selection, VisibleTokens
from offload_rt.kernels.reference import merge_lse
from offload_rt.policies.infinigen.approximate_kv import ApproximateKV
from offload_rt.policies.infinigen.policy import InfiniGenState
from offload_rt.policies.options import InfiniGenOptions

GREEDY = SamplingParams(max_tokens=24, temperature=0)


def make_llm(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float32, **more: Any) -> LLM:
    model = tiny_model(name, dtype=dtype)
    kind = str(dtype).removeprefix("torch.")
    return LLM(model, policy="infinigen", policy_options=options, dtype=kind, host_memory="32MiB", **more)


def full_tokens(name: str, prompt: list[int]) -> list[int]:
    llm = LLM(tiny_model(name), policy="full", dtype="float32", host_memory="32MiB")
    return list(completed(llm.generate([prompt], GREEDY))[0].token_ids)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_with_a_full_budget_nothing_is_approximated(name: str) -> None:
    options = {"approximate_kv": "int2", "budget": 1.0, "dense_layers": (), "recent": 8}
    prompt = tiny_prompt(150)
    [found] = completed(make_llm(name, options).generate([prompt], GREEDY))
    assert list(found.token_ids) == full_tokens(name, prompt)


def merge_exactly(kept: dict[int, tuple[torch.Tensor, torch.Tensor]], scales: tuple[float, ...]) -> Any:
    """Return a replacement of `InfiniGenState.merge_approximate` that uses unquantised KV."""

    def merge(
        self: InfiniGenState,
        layer: int,
        q: torch.Tensor,
        visible: VisibleTokens,
        selection: Selection,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (k, v), tokens = kept[layer], visible.candidates
        scores = torch.einsum("hgd,hnd->hgn", q.view(len(k), -1, q.shape[1]), k) * scales[layer]
        shown = torch.zeros(k.shape[:2], dtype=torch.bool)
        shown[:, tokens.start : tokens.stop] = True
        shown.scatter_(1, selection.tokens, False)
        scores = scores.masked_fill(~shown.unsqueeze(1), -torch.inf)
        other = (scores.softmax(-1).nan_to_num() @ v).reshape(q.shape)
        return merge_lse((out, other), (lse, scores.logsumexp(-1).flatten()))

    return merge


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "mistral"])
@pytest.mark.parametrize(("budget", "source"), [(1e-6, "residual"), (0.3, "query"), (0.3, "residual")])
def test_approximate_kv_without_rounding_gives_full_attention(
    name: str, budget: float, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With unquantised KV in place of approximate KV, any selection gives full attention."""
    # Only models with full-attention layers: Mistral has none, so it selects no tokens.
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    write = ApproximateKV.write

    def spy(self: ApproximateKV, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        before = [rows[:, :start] for rows in kept.get(layer, ())] or [k[:, :0], v[:, :0]]
        kept[layer] = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        write(self, layer, k, v, start)

    options = {"approximate_kv": "int2", "budget": budget, "dense_layers": (), "recent": 8, "source": source}
    llm, prompt = make_llm(name, options), tiny_prompt(150)
    monkeypatch.setattr(ApproximateKV, "write", spy)
    scales = llm.runner.adapter.geometry.scales
    monkeypatch.setattr(InfiniGenState, "merge_approximate", merge_exactly(kept, scales))
    [found] = completed(llm.generate([prompt], GREEDY))
    assert list(found.token_ids) == full_tokens(name, prompt)
    assert found.stats.exact_fraction < 0.4


def test_samples_and_beams_equal_those_of_each_alone() -> None:
    """Forks share low-bit KV until one of them writes."""
    options = {"approximate_kv": "int2", "budget": 0.3, "recent": 8, "dense_layers": ()}
    llm, prompt = make_llm("llama", options, torch.float32), tiny_prompt(100)
    drawn = SamplingParams(max_tokens=16, temperature=1.0, seed=5, n=3)
    samples = [c.token_ids for c in completed(llm.generate([prompt], drawn))]
    first = SamplingParams(max_tokens=16, temperature=1.0, seed=5)
    assert samples[0] == completed(llm.generate([prompt], first))[0].token_ids
    assert len({tuple(sample) for sample in samples}) == 3
    beams = SamplingParams(max_tokens=16, temperature=0, num_beams=3, n=1)
    [best] = completed(llm.generate([prompt], beams))
    assert best.token_ids == completed(make_llm("llama", options, torch.float32).generate([prompt], beams))[0].token_ids
    llm.runner.check_integrity()


def test_low_bit_kv_has_the_documented_size() -> None:
    """Keys take 4 bits, values 2 or 4, each with one byte for the scale, in pages of 512 tokens."""
    for tail, bits in (("int2", 2), ("int4", 4)):
        llm = make_llm("llama", {"approximate_kv": tail, "dense_layers": (0,)})
        [found] = completed(llm.generate([tiny_prompt(520)], GREEDY))
        geometry = llm.runner.adapter.geometry
        row = geometry.head_dim * (4 + bits) // 8 + 2
        assert found.stats.scoring_bytes_device == (geometry.layers - 1) * geometry.kv_heads * row * 1024
        assert found.stats.approximate_bytes_device == found.stats.scoring_bytes_device
        assert found.stats.approximate_fraction == pytest.approx(1 - found.stats.sparse_exact_fraction)
        assert 0.5 < found.stats.approximate_fraction < 1
    [plain] = completed(make_llm("llama", {"preset": "rows"}).generate([tiny_prompt(90)], GREEDY))
    assert plain.stats.approximate_bytes_device == plain.stats.approximate_fraction == 0


def test_approximate_kv_refuses_other_scoring_keys() -> None:
    """Other scoring keys need another preset, which the error message names."""
    for wrong in ({"scorer": "partial"}, {"scorer": "int8"}, {"columns": "prompt"}):
        for tail in ({}, {"approximate_kv": "int2"}):
            with pytest.raises(
                ConfigError, match=r"needs approximate_kv='off' \(or preset='rows'\).* scores with its own keys"
            ):
                make_llm("llama", {**tail, **wrong})
        wanted = {"scorer": "partial", **wrong}
        assert make_llm("llama", {"preset": "rows", **wanted}).runner.policy.name == "infinigen"
    assert InfiniGenOptions().keys == InfiniGenOptions.preset("rows").keys == "int8"
    assert InfiniGenOptions.preset("paper").keys == "partial"
    with pytest.raises(ConfigError, match="approximate_kv='int3'"):
        make_llm("llama", {"approximate_kv": "int3"})


def test_the_default_approximates_tokens_that_it_does_not_select() -> None:
    """Each layer copies at most 2 % of the candidates to the device, and approximates all others."""
    llm = make_llm("llama", {})
    [found] = completed(llm.generate([tiny_prompt(600)], GREEDY))
    assert found.stats.dense_layers == () and found.stats.approximate_bytes_device > 0
    assert 0 < found.stats.fetched_fraction <= 0.02
    assert found.stats.approximate_fraction == pytest.approx(1 - found.stats.exact_fraction)
    assert found.stats.approximate_fraction > 0.85


def test_provenance_keys_equal_those_of_earlier_versions() -> None:
    """A changed key would make stored sessions of earlier versions unusable."""
    before = (
        "InfiniGenOptions(alpha=None, partial_ratio=0.3, max_fraction=0.1, source='residual', corrected=True, "
        "scorer='int8', columns='calibration', skew='balanced', sinks=4, recent=64, dense_layers=(0,), "
        "max_missed_mass=None, budget=None)"
    )
    assert InfiniGenOptions.preset("rows").provenance_text() == before
    assert InfiniGenOptions.preset("rows", scorer="int8").provenance_text() == before
    tailed = before.replace("0.1", "0.02").replace("(0,)", "()").replace("budget=None", "budget=None, tail='int4'")
    assert InfiniGenOptions().provenance_text() == tailed


def test_a_working_set_and_streamed_weights_change_no_token(tmp_path: Path) -> None:
    options = {"approximate_kv": "int2", "budget": 0.3, "recent": 8}
    prompt = tiny_prompt(150)
    model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    [plain] = completed(make_llm("llama", options, torch.float32).generate([prompt], GREEDY))
    for more in ({"working_set": 32}, {"device_memory": "5.7MiB", "max_model_len": 256}):
        llm = LLM(
            str(tmp_path), policy="infinigen", policy_options=options, dtype="float32", host_memory="32MiB", **more
        )
        [found] = completed(llm.generate([prompt], GREEDY))
        assert found.token_ids == plain.token_ids
        assert (found.stats.h2d_weight_bytes > 0) == ("device_memory" in more)
        llm.runner.check_integrity()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("head_dim", [2, 6, 10, 34])
def test_default_takes_any_even_head_dim(head_dim: int) -> None:
    """With a budget of 1.0, tokens equal full attention."""
    model, prompt = tiny_model("llama", head_dim=head_dim), tiny_prompt(150)
    options = ({}, {"budget": 1.0, "dense_layers": (), "recent": 8})
    found = [
        completed(LLM(model, host_memory="8MiB", verify="off", policy_options=each).generate([prompt], GREEDY))
        for each in options
    ]
    assert all(len(one.token_ids) == GREEDY.max_tokens for [one] in found)
    assert_greedy(model, prompt, list(found[1][0].token_ids))


def test_head_dims_that_cannot_be_packed_are_refused() -> None:
    options = {"approximate_kv": "int2"}
    with pytest.raises(
        ConfigError, match=r"approximate_kv='int2' .* head_dim=6 .* use approximate_kv='int4', approximate_kv='off'"
    ):
        LLM(tiny_model("llama", head_dim=6), policy="infinigen", policy_options=options, host_memory="8MiB")
