"""Test approximate (low-bit) KV in whole models, where it estimates the attention to tokens that were not selected."""

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


def make_llm(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float32, **settings: Any) -> LLM:
    model = tiny_model(name, dtype=dtype)
    dtype_name = str(dtype).removeprefix("torch.")
    return LLM(model, policy="infinigen", policy_options=options, dtype=dtype_name, host_memory="32MiB", **settings)


def full_tokens(name: str, prompt: list[int]) -> list[int]:
    llm = LLM(tiny_model(name), policy="full", dtype="float32", host_memory="32MiB")
    return list(completed(llm.generate([prompt], GREEDY))[0].token_ids)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_full_budget_equals_full_attention(name: str) -> None:
    options = {"approximate_kv": "int2", "budget": 1.0, "dense_layers": (), "recent": 8}
    prompt = tiny_prompt(150)
    [output] = completed(make_llm(name, options).generate([prompt], GREEDY))
    assert list(output.token_ids) == full_tokens(name, prompt)


def merge_exactly(stored_kv: dict[int, tuple[torch.Tensor, torch.Tensor]], scales: tuple[float, ...]) -> Any:
    """Return a replacement for `InfiniGenState.merge_approximate` that uses unquantised KV."""

    def merge(
        self: InfiniGenState,
        layer: int,
        q: torch.Tensor,
        visible: VisibleTokens,
        selection: Selection,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (k, v), tokens = stored_kv[layer], visible.candidates
        scores = torch.einsum("hgd,hnd->hgn", q.view(len(k), -1, q.shape[1]), k) * scales[layer]
        mask = torch.zeros(k.shape[:2], dtype=torch.bool)
        mask[:, tokens.start : tokens.stop] = True
        mask.scatter_(1, selection.tokens, False)
        scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
        other_out = (scores.softmax(-1).nan_to_num() @ v).reshape(q.shape)
        return merge_lse((out, other_out), (lse, scores.logsumexp(-1).flatten()))

    return merge


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "mistral"])
@pytest.mark.parametrize(("budget", "source"), [(1e-6, "residual"), (0.3, "query"), (0.3, "residual")])
def test_approximate_kv_without_rounding_gives_full_attention(
    name: str, budget: float, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only models with full-attention layers. Mistral has none, so it never selects tokens.
    stored_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    write = ApproximateKV.write

    def write_and_store(self: ApproximateKV, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        before = [rows[:, :start] for rows in stored_kv.get(layer, ())] or [k[:, :0], v[:, :0]]
        stored_kv[layer] = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        write(self, layer, k, v, start)

    options = {"approximate_kv": "int2", "budget": budget, "dense_layers": (), "recent": 8, "source": source}
    llm, prompt = make_llm(name, options), tiny_prompt(150)
    monkeypatch.setattr(ApproximateKV, "write", write_and_store)
    scales = llm.runner.adapter.geometry.scales
    monkeypatch.setattr(InfiniGenState, "merge_approximate", merge_exactly(stored_kv, scales))
    [output] = completed(llm.generate([prompt], GREEDY))
    assert list(output.token_ids) == full_tokens(name, prompt)
    assert output.stats.exact_fraction < 0.4


def test_samples_and_beams_equal_those_of_single_requests() -> None:
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
    for name, bits in (("int2", 2), ("int4", 4)):
        llm = make_llm("llama", {"approximate_kv": name, "dense_layers": (0,)})
        [output] = completed(llm.generate([tiny_prompt(520)], GREEDY))
        geometry = llm.runner.adapter.geometry
        # 4 bits per key, `bits` per value, one byte for each scale, pages of 512 tokens
        row_bytes = geometry.head_dim * (4 + bits) // 8 + 2
        assert output.stats.scoring_bytes_device == (geometry.layers - 1) * geometry.kv_heads * row_bytes * 1024
        assert output.stats.approximate_bytes_device == output.stats.scoring_bytes_device
        assert output.stats.approximate_fraction == pytest.approx(1 - output.stats.sparse_exact_fraction)
        assert 0.5 < output.stats.approximate_fraction < 1
    [without_approximation] = completed(make_llm("llama", {"preset": "rows"}).generate([tiny_prompt(90)], GREEDY))
    assert without_approximation.stats.approximate_bytes_device == without_approximation.stats.approximate_fraction == 0


def test_approximate_kv_with_other_scoring_keys_is_an_error() -> None:
    for other in ({"scorer": "partial"}, {"scorer": "int8"}, {"columns": "prompt"}):
        for approximate in ({}, {"approximate_kv": "int2"}):
            with pytest.raises(
                ConfigError, match=r"needs approximate_kv='off' \(or preset='rows'\).* scores with its own keys"
            ):
                make_llm("llama", {**approximate, **other})
        wanted = {"scorer": "partial", **other}
        assert make_llm("llama", {"preset": "rows", **wanted}).runner.policy.name == "infinigen"
    assert InfiniGenOptions().keys == InfiniGenOptions.preset("rows").keys == "int8"
    assert InfiniGenOptions.preset("paper").keys == "partial"
    with pytest.raises(ConfigError, match="approximate_kv='int3'"):
        make_llm("llama", {"approximate_kv": "int3"})


def test_default_approximates_tokens_that_are_not_selected() -> None:
    llm = make_llm("llama", {})
    [output] = completed(llm.generate([tiny_prompt(600)], GREEDY))
    assert output.stats.dense_layers == () and output.stats.approximate_bytes_device > 0
    assert 0 < output.stats.fetched_fraction <= 0.02
    assert output.stats.approximate_fraction == pytest.approx(1 - output.stats.exact_fraction)
    assert output.stats.approximate_fraction > 0.85


def test_provenance_keys_equal_those_of_earlier_versions() -> None:
    """If the keys changed, sessions stored by earlier versions could no longer be used."""
    earlier = (
        "InfiniGenOptions(alpha=None, partial_ratio=0.3, max_fraction=0.1, source='residual', corrected=True, "
        "scorer='int8', columns='calibration', skew='balanced', sinks=4, recent=64, dense_layers=(0,), "
        "max_missed_mass=None, budget=None)"
    )
    assert InfiniGenOptions.preset("rows").provenance_text() == earlier
    assert InfiniGenOptions.preset("rows", scorer="int8").provenance_text() == earlier
    earlier_default = (
        earlier.replace("0.1", "0.02").replace("(0,)", "()").replace("budget=None", "budget=None, tail='int4'")
    )
    assert InfiniGenOptions().provenance_text() == earlier_default


def test_working_set_and_streamed_weights_do_not_change_tokens(tmp_path: Path) -> None:
    options = {"approximate_kv": "int2", "budget": 0.3, "recent": 8}
    prompt = tiny_prompt(150)
    model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    [expected] = completed(make_llm("llama", options, torch.float32).generate([prompt], GREEDY))
    for settings in ({"working_set": 32}, {"device_memory": "5.7MiB", "max_model_len": 256}):
        llm = LLM(
            str(tmp_path), policy="infinigen", policy_options=options, dtype="float32", host_memory="32MiB", **settings
        )
        [output] = completed(llm.generate([prompt], GREEDY))
        assert output.token_ids == expected.token_ids
        assert (output.stats.h2d_weight_bytes > 0) == ("device_memory" in settings)
        llm.runner.check_integrity()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head_dim", [2, 6, 10, 34])
def test_default_supports_any_even_head_dim(head_dim: int) -> None:
    model, prompt = tiny_model("llama", head_dim=head_dim), tiny_prompt(150)
    options = ({}, {"budget": 1.0, "dense_layers": (), "recent": 8})
    outputs = [
        completed(
            LLM(model, host_memory="8MiB", verify="off", policy_options=policy_options).generate([prompt], GREEDY)
        )
        for policy_options in options
    ]
    assert all(len(output.token_ids) == GREEDY.max_tokens for [output] in outputs)
    assert_greedy(model, prompt, list(outputs[1][0].token_ids))  # a budget of 1.0 is full attention


def test_head_dims_that_cannot_be_packed_are_errors() -> None:
    options = {"approximate_kv": "int2"}
    with pytest.raises(
        ConfigError, match=r"approximate_kv='int2' .* head_dim=6 .* use approximate_kv='int4', approximate_kv='off'"
    ):
        LLM(tiny_model("llama", head_dim=6), policy="infinigen", policy_options=options, host_memory="8MiB")
