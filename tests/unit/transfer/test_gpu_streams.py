"""Test the synchronization of CUDA streams: tokens must not change if a stream is late.

`test_cuda_path.py` covers the simulated device.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.staged_transfer import with_transfer
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.transfer.cuda import CudaTransfer
from offload_rt.transfer.streams import DeviceStream, Stream

CYCLES = 2_000_000
"""About a millisecond: several steps of a tiny model."""

Wait = Callable[[], None]


class DelayedStream:
    def __init__(self, inner: Stream, wait: Wait) -> None:
        self._inner, self._wait = inner, wait

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        with self._inner.behind_compute():
            self._wait()
            yield
            self._wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Delay:
    """Callable that delays the current stream and counts its calls. If a seed is given, delays are random."""

    def __init__(self, seed: int | None) -> None:
        self._random, self._varies, self.calls = random.Random(seed), seed is not None, 0

    def __call__(self) -> None:
        self.calls += 1
        torch.cuda._sleep(int(CYCLES * (self._random.random() if self._varies else 1)))


def delayed_llm(device: torch.device, policy: str, options: dict[str, Any], late: tuple[str, ...], delay: Delay) -> LLM:
    model = tiny_model("llama").to(device)
    # no CUDA graphs: at the end of a capture, a delay after the last event of a stream would not be joined
    llm = LLM(model, policy=policy, policy_options=options, host_memory="4MiB", cuda_graphs=False)
    runner = llm.runner

    def stream(name: str) -> Any:
        return DelayedStream(DeviceStream(device), delay) if name in late else DeviceStream(device)

    streams = (stream("prefetch"), stream("write-back"))
    llm = with_transfer(llm, CudaTransfer(runner.pool, runner.adapter.geometry, device, streams=streams))
    if "compute" in late:
        for name in ("qkv", "after_attention", "mlp"):
            original = getattr(runner.adapter, name)

            def delayed(*args: Any, original: Any = original, **named: Any) -> Any:
                delay()
                return original(*args, **named)

            setattr(runner.adapter, name, delayed)
    return llm


def generate_tokens(llm: LLM, count: int, batch: int) -> list[list[int]]:
    """Generate twice for the same batch, so that the prefix's blocks are reused, and then sample three forks."""
    stem = tiny_prompt(130)
    prompts = [stem + tiny_prompt(20, seed=i) for i in range(batch)]
    found = [
        c.token_ids for _ in range(2) for c in completed(llm.generate(prompts, SamplingParams(count, temperature=0)))
    ]
    return found + [c.token_ids for c in completed(llm.generate([stem], SamplingParams(count, seed=1, n=3)))]


LATE = [("prefetch",), ("compute",), ("write-back",), ("prefetch", "write-back"), ("prefetch", "compute", "write-back")]
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "window": ("infinigen", {"recent": 8, "sinks": 2}),
    "paper": ("infinigen", {"preset": "paper"}),
}
SIMULATED = not torch.cuda.is_available()
CASES = [("full", LATE[-1])] if SIMULATED else [*itertools.product(POLICIES, LATE)]
"""On a simulated device, one case shows that the test runs."""


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.skipif(SIMULATED and "OFFLOAD_RT_STRESS" not in os.environ, reason="simulated in make stress PART=cuda")
@pytest.mark.parametrize(("policy", "late"), CASES, ids=str)
def test_late_streams_change_no_token(policy: str, late: tuple[str, ...]) -> None:
    device, size = torch.device("cuda"), (3, 2) if SIMULATED else (16, 4)
    plain = generate_tokens(delayed_llm(device, *POLICIES[policy], (), Delay(None)), *size)
    for seed in (None,) if SIMULATED else (None, 0):
        delay = Delay(seed)
        assert generate_tokens(delayed_llm(device, *POLICIES[policy], late, delay), *size) == plain
        assert delay.calls > 100
