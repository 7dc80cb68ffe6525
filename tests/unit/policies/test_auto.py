"""Test policy "auto": full attention as long as it is cheaper, then selection from the whole context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.outputs import completed
from support.staged_transfer import staged
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.engine import build
from offload_rt.policies import auto
from offload_rt.policies.infinigen.key_lists import Rule
from offload_rt.policies.infinigen.policy import InfiniGen
from offload_rt.policies.options import AutoOptions

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SMALL_BUDGET: dict[str, Any] = {"budget": 0.1, "sinks": 2, "recent": 8, "approximate_kv": "int4", "source": "residual"}
FRACTION: dict[str, Any] = SMALL_BUDGET | {"budget": None, "max_fraction": 0.1}
MODEL = tiny_model("llama")


def make_llm(policy: str, **options: Any) -> LLM:
    return LLM(MODEL, policy=policy, policy_options=options, host_memory="16MiB")


def generate(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    outputs = completed(llm.generate(prompts, GREEDY))
    llm.runner.check_integrity()
    return outputs


def test_auto_uses_full_attention_below_the_limit_and_infinigen_above() -> None:
    prompt, calls = tiny_prompt(120), []
    llm = make_llm("auto", dense_until=1000, **SMALL_BUDGET)
    # Full attention must not call any selection code.
    llm.runner.policy.correct_prediction = lambda layer, x: calls.append(layer) or x  # type: ignore[method-assign]
    [below], [full] = generate(llm, [prompt]), generate(make_llm("full"), [prompt])
    assert below.token_ids == full.token_ids and below.stats.exact_fraction == 1 and not calls
    [above], [infinigen] = (
        generate(make_llm("auto", dense_until=0, **SMALL_BUDGET), [prompt]),
        generate(make_llm("infinigen", **SMALL_BUDGET), [prompt]),
    )
    assert above.token_ids == infinigen.token_ids and above.stats.attended_by_step == infinigen.stats.attended_by_step


def test_sequence_of_a_batch_switches_to_selection_at_the_limit() -> None:
    prompts, options = (
        [tiny_prompt(120), tiny_prompt(300, seed=1), tiny_prompt(60, seed=2)],
        SMALL_BUDGET | {"dense_until": 130},
    )
    batched = generate(make_llm("auto", **options), prompts)
    single = [generate(make_llm("auto", **options), [prompt])[0] for prompt in prompts]
    assert [output.token_ids for output in batched] == [output.token_ids for output in single]
    shares = [sum(step) / len(step) for step in single[0].stats.attended_by_step]
    assert shares[:10] == [1.0] * 10 and max(shares[10:]) < 1
    assert (
        min(shares) < 1
        and max(sum(step) for step in batched[1].stats.attended_by_step) < MODEL.config.num_hidden_layers
    )
    assert batched[2].stats.exact_fraction == 1
    # The sequence continues like one with a prompt of that length.
    longer_prompt = [*prompts[0], *single[0].token_ids[:10]]
    restarted = generate(make_llm("auto", **options), [longer_prompt])[0]
    assert restarted.token_ids[:14] == single[0].token_ids[10:]


def test_short_sequences_of_a_batch_attend_to_all_tokens() -> None:
    """On a GPU, all sequences in a batch select tokens together, even short ones."""
    prompts, llm = [tiny_prompt(60), tiny_prompt(300, seed=1)], staged(make_llm("auto", dense_until=130, **FRACTION))
    policy = llm.runner.policy
    assert isinstance(policy, InfiniGen)
    policy.rule = Rule(policy.alpha, policy.options.max_fraction)
    short, long = generate(llm, prompts)
    assert short.stats.exact_fraction == 1 and long.stats.exact_fraction < 1
    [single] = generate(llm, prompts[1:])
    assert long.token_ids == single.token_ids


@pytest.mark.parametrize(("device", "expected"), [("cpu", 64), ("cuda", 0)])
def test_limit_depends_on_kv_size_and_device(device: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, full attention is used until a layer's KV reaches a certain size. On a GPU, it is never used."""
    geometry = make_llm("full").runner.adapter.geometry
    monkeypatch.setattr(auto, "MAX_DENSE_BYTES", 64 * geometry.kv_bytes(1, torch.float32) // geometry.layers)
    assert auto.dense_limit(AutoOptions(), geometry, torch.device(device), torch.float32) == expected
    assert auto.dense_limit(AutoOptions(dense_until=7), geometry, torch.device(device), torch.float32) == 7


def test_measured_length_is_not_part_of_the_provenance_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored KV must stay usable if a different length is measured. A length set by the user takes precedence."""
    policies = []
    for measured in (128, 512, 1 << 50):
        monkeypatch.setattr(build, "measured_dense_until", lambda *_, found=measured, **__: found)
        policies.append(make_llm("auto").runner.policy)
    limit = auto.dense_limit(AutoOptions(), policies[0].geometry, torch.device("cpu"), torch.float32)
    assert [policy.dense_until for policy in policies] == [128, 512, limit]
    assert len({policy.provenance_key for policy in policies}) == 1
    assert make_llm("auto", dense_until=7).runner.policy.dense_until == 7
    [output] = generate(make_llm("auto", dense_until=300), [tiny_prompt(60)])
    assert output.stats.dense_until == 300
