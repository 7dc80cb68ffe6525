"""Test policy "auto": full attention while it is cheaper, then selection over the whole context."""

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
SMALL: dict[str, Any] = {"budget": 0.1, "sinks": 2, "recent": 8, "approximate_kv": "int4", "source": "residual"}
FRACTION: dict[str, Any] = SMALL | {"budget": None, "max_fraction": 0.1}
MODEL = tiny_model("llama")


def runtime(policy: str, **options: Any) -> LLM:
    return LLM(MODEL, policy=policy, policy_options=options, host_memory="16MiB")


def texts(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    found = completed(llm.generate(prompts, GREEDY))
    llm.runner.check_integrity()
    return found


def test_auto_is_full_below_the_limit_and_infinigen_above() -> None:
    """During full attention, the selection code of the policy is not called."""
    prompt, calls = tiny_prompt(120), []
    llm = runtime("auto", dense_until=1000, **SMALL)
    llm.runner.policy.correct_prediction = lambda layer, x: calls.append(layer) or x  # type: ignore[method-assign]
    [whole], [full] = texts(llm, [prompt]), texts(runtime("full"), [prompt])
    assert whole.token_ids == full.token_ids and whole.stats.exact_fraction == 1 and not calls
    [after], [infinigen] = (
        texts(runtime("auto", dense_until=0, **SMALL), [prompt]),
        texts(runtime("infinigen", **SMALL), [prompt]),
    )
    assert after.token_ids == infinigen.token_ids and after.stats.attended_by_step == infinigen.stats.attended_by_step


def test_selection_begins_within_a_text_and_in_a_batch() -> None:
    """A sequence that outgrows the limit continues as after a prompt of that length."""
    prompts, options = (
        [tiny_prompt(120), tiny_prompt(300, seed=1), tiny_prompt(60, seed=2)],
        SMALL | {"dense_until": 130},
    )
    together = texts(runtime("auto", **options), prompts)
    alone = [texts(runtime("auto", **options), [prompt])[0] for prompt in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    shares = [sum(step) / len(step) for step in alone[0].stats.attended_by_step]
    assert shares[:10] == [1.0] * 10 and max(shares[10:]) < 1
    assert (
        min(shares) < 1
        and max(sum(step) for step in together[1].stats.attended_by_step) < MODEL.config.num_hidden_layers
    )
    assert together[2].stats.exact_fraction == 1
    start = [*prompts[0], *alone[0].token_ids[:10]]
    fresh = texts(runtime("auto", **options), [start])[0]
    assert fresh.token_ids[:14] == alone[0].token_ids[10:]


def test_short_sequences_of_a_batch_attend_to_all_tokens() -> None:
    """On a device, sequences of a batch select together. Short ones still attend to all tokens."""
    prompts, llm = [tiny_prompt(60), tiny_prompt(300, seed=1)], staged(runtime("auto", dense_until=130, **FRACTION))
    policy = llm.runner.policy
    assert isinstance(policy, InfiniGen)
    policy.rule = Rule(policy.alpha, policy.options.max_fraction)
    short, long = texts(llm, prompts)
    assert short.stats.exact_fraction == 1 and long.stats.exact_fraction < 1
    [alone] = texts(llm, prompts[1:])
    assert long.token_ids == alone.token_ids


@pytest.mark.parametrize(("device", "expected"), [("cpu", 64), ("cuda", 0)])
def test_the_limit_depends_on_shapes(device: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, the limit is a number of bytes of one layer's KV. On a device, which copies each KV entry, it is 0."""
    geometry = runtime("full").runner.adapter.geometry
    monkeypatch.setattr(auto, "MAX_DENSE_BYTES", 64 * geometry.kv_bytes(1, torch.float32) // geometry.layers)
    assert auto.dense_limit(AutoOptions(), geometry, torch.device(device), torch.float32) == expected
    assert auto.dense_limit(AutoOptions(dense_until=7), geometry, torch.device(device), torch.float32) == 7


def test_the_measured_length_is_not_part_of_the_provenance_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length set by the user has priority. Stored KV can be used where another length was measured."""
    policies = []
    for measured in (128, 512, 1 << 50):
        monkeypatch.setattr(build, "measured_dense_until", lambda *_, found=measured, **__: found)
        policies.append(runtime("auto").runner.policy)
    limit = auto.dense_limit(AutoOptions(), policies[0].geometry, torch.device("cpu"), torch.float32)
    assert [policy.dense_until for policy in policies] == [128, 512, limit]
    assert len({policy.provenance_key for policy in policies}) == 1
    assert runtime("auto", dense_until=7).runner.policy.dense_until == 7
    [text] = texts(runtime("auto", dense_until=300), [tiny_prompt(60)])
    assert text.stats.dense_until == 300
