"""Compare selection with token counts on the device, as CUDA uses, with selection with token counts on the host.

These tests run on a CPU, with torch and with interpreted Triton kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.host_sync import NoHostSync
from support.outputs import completed
from support.staged_transfer import staged
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.engine.runner import Runner
from offload_rt.errors import EngineError
from offload_rt.kernels import dispatch
from offload_rt.outputs import CompletionOutput
from offload_rt.policies.infinigen.key_lists import Rule
from offload_rt.policies.infinigen.policy import InfiniGen

OPTIONS: dict[str, Any] = {"preset": "rows", "sinks": 2, "recent": 8}


def make_llm(counted: bool, dtype: torch.dtype, options: dict[str, Any], working_set: int = 0, **settings: Any) -> LLM:
    model = tiny_model("llama", dtype=dtype)
    name: Any = str(dtype).removeprefix("torch.")
    llm = LLM(
        model, policy_options=OPTIONS | options, host_memory="16MiB", dtype=name, working_set=working_set, **settings
    )
    llm = llm if working_set or settings else staged(llm)
    policy = llm.runner.policy
    assert isinstance(policy, InfiniGen)
    policy.rule = Rule(policy.alpha, policy.options.max_fraction) if counted else None
    return llm


def comparable_stats(outputs: list[CompletionOutput]) -> list[Any]:
    stats = []
    for output in outputs:
        s = output.stats
        shares = [
            s.fetched_fraction,
            s.sparse_fetched_fraction,
            *(share for step in s.attended_by_step for share in step),
        ]
        # The last bits of fractions may differ.
        stats.append((output.token_ids, s.h2d_bytes, s.working_set_hit_rate, [round(x, 12) for x in shares]))
    return stats


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "working_set", "settings"),
    [
        ({}, 0, {}),
        ({"scorer": "partial", "alpha": 1.0}, 9, {}),
        ({"scorer": "int4", "source": "attention_input", "max_fraction": 0.4, "alpha": 2.0}, 0, {}),
        ({"preset": "paper", "alpha": 1.5}, 30, {}),
        ({"alpha": 1.0}, 9, {"kv_cache_dtype": "int4"}),
        ({"alpha": 1.0}, 9, {"eviction": "lru"}),
    ],
)
def test_counts_on_the_device_give_the_same_tokens_and_stats(
    options: dict[str, Any], working_set: int, settings: dict[str, Any]
) -> None:
    # The last two prompts have a common prefix.
    prompts = [tiny_prompt(1), tiny_prompt(150), tiny_prompt(130) + tiny_prompt(9, seed=1)]
    params = SamplingParams(max_tokens=6, temperature=0)
    runs = [
        completed(make_llm(counted, torch.float64, options, working_set, **settings).generate(prompts, params))
        for counted in (True, False)
    ]
    assert comparable_stats(runs[0]) == comparable_stats(runs[1])


def test_interpreted_kernels_give_the_same_tokens_without_host_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled on this machine")
    options, prompt = {"dense_layers": (), "alpha": 2.0, "max_fraction": 0.3}, tiny_prompt(90)
    params = SamplingParams(max_tokens=4, temperature=0)
    [expected] = completed(
        make_llm(False, torch.float32, options, missed_mass_every=0, kv_cache_dtype="auto").generate([prompt], params)
    )
    llm = make_llm(True, torch.float32, options, 7, missed_mass_every=0)
    monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: tensor.dtype != torch.float64)
    decode, steps = Runner.decode, []

    def decode_without_syncs(self: Runner, *args: Any) -> torch.Tensor:
        with NoHostSync():
            steps.append(decode(self, *args))
        return steps[-1]

    monkeypatch.setattr(Runner, "decode", decode_without_syncs)
    [output] = completed(llm.generate([prompt], params))
    assert len(steps) == 3 and output.token_ids == expected.token_ids
    assert output.stats.exact_fraction == expected.stats.exact_fraction
    assert 0 < (output.stats.working_set_hit_rate or 0) < 1

    with pytest.raises(EngineError, match="HostSyncError"):  # eviction reads the selected tokens on the host
        make_llm(True, torch.float32, options, eviction="lru").generate([prompt], params)


@pytest.mark.gpu
@pytest.mark.hardware
def test_sparse_decode_step_never_waits_for_the_gpu() -> None:
    from torch.profiler import ProfilerActivity, profile

    options = OPTIONS | {"dense_layers": ()}
    model = tiny_model("llama").to("cuda")
    llm = LLM(model, policy_options=options, device="cuda", working_set=9, missed_mass_every=0)
    runner = llm.runner
    sequence = runner.new_sequence(tiny_prompt(220), 256)
    runner.prefill(sequence, 200)
    for _ in range(5):  # compile the kernels
        runner.decode([sequence])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
        runner.decode([sequence])
    names = [event.name for event in trace.events()]
    runner.free(sequence)
    assert any("Launch" in name for name in names), "the profiler saw no kernels"
    # Ignore the final wait for the whole device, which the profiler itself causes.
    waiting = ("cudaStreamSynchronize", "cudaEventSynchronize", "_local_scalar_dense", "nonzero")
    assert not [name for name in names if any(word in name for word in waiting)]
