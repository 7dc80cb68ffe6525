"""The part "prefill" of `make gpu`: time to the first token and device memory, for random models."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...llm import LLM
from ...sampling_params import SamplingParams
from ..speed.baselines import SHAPES
from .gpu_job import GpuJob, PrefillPoint, Results


def run_prefill(job: GpuJob) -> Iterator[Results]:
    rows: list[dict[str, Any]] = []
    for point in job.size.prefills:
        shape = SHAPES[point.shape]
        model = shape.model(point.tokens + 64, job.device)
        prompt = torch.randint(1, shape.vocab, (point.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        for program in point.programs:
            made = (
                _transformers(job, model, prompt) if program == "transformers" else _ours(job, model, program, prompt)
            )
            rows.append(
                {"shape": point.shape, "tokens": point.tokens, "program": program} | _measured(job, point, made)
            )
            yield {"rows": rows}
            del made
        del model


def _transformers(job: GpuJob, model: Any, prompt: list[int]) -> Callable[[], dict[str, Any]]:
    given = torch.tensor([prompt], device=job.device)

    @torch.inference_mode()
    def run() -> dict[str, Any]:
        model(given, use_cache=True, logits_to_keep=1)
        return {}

    return run


def _ours(job: GpuJob, model: Any, policy: str, prompt: list[int]) -> Callable[[], dict[str, Any]]:
    llm = LLM(model, policy=policy, host_memory=job.size.host_memory, enable_prefix_caching=False)

    def run() -> dict[str, Any]:
        [output] = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
        stats = output.outputs[0].stats
        assert stats is not None
        names = ("peak_device_bytes", "weight_bytes", "d2h_bytes")
        return {name: getattr(stats, name) for name in names}

    return run


def _measured(job: GpuJob, point: PrefillPoint, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `run` once untimed, then several times with timing. Return all times, their median, and the last result."""
    run()
    if job.cuda:
        torch.cuda.reset_peak_memory_stats()
    timed = [job.timed(run) for _ in range(point.repeats)]
    seconds = [each for each, _ in timed]
    median = statistics.median(seconds)
    return {"seconds": median, "seconds_of_each": seconds, "tokens_per_second": point.tokens / median} | timed[-1][1]
