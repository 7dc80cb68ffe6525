"""Count the work that a prefill does per layer on the simulated device."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from offload_rt import LLM, SamplingParams

from .cuda_simulator import Late, simulated
from .step_counts import VOCAB
from .tiny_models import tiny_model, tiny_prompt


@dataclass(frozen=True)
class PrefillCounts:
    """Counts for one layer of a prefill.

    Attributes:
        kernels: Kernel launches, including copies within the device.
        copies: Copies between host and device.
        allocations: Tensors allocated on the device.
        waits: Times that the host waits for the device.
    """

    kernels: int
    copies: int
    allocations: int
    waits: int


@cache
def count_prefill(tokens: int, **settings: Any) -> PrefillCounts:
    """Create an `LLM` with `settings`, warm it up, and return the counts for one layer."""
    one, two = (_measure(tokens, layers, settings) for layers in (1, 2))
    return PrefillCounts(*(b - a for a, b in zip(astuple(one), astuple(two), strict=True)))


def _measure(tokens: int, layers: int, settings: dict[str, Any]) -> PrefillCounts:
    with simulated(Late()) as sim:
        # Equal positions for all lengths: the skew artifact is shared.
        model = tiny_model("llama", num_hidden_layers=layers, max_position_embeddings=8192)
        llm = LLM(
            model.to("cuda"), device="cuda", host_memory="64MiB", missed_mass_every=0, enable_prefix_caching=False,
            verify="off",
            **settings,
        )  # fmt: skip
        llm.generate([tiny_prompt(70)], SamplingParams(max_tokens=1, temperature=0))
        engine = llm.make_engine()
        engine.add([token % VOCAB for token in tiny_prompt(tokens)], SamplingParams(max_tokens=9, temperature=0))
        launched, allocations, waits = Counter(sim.launched), sim.memory.allocations, len(sim.syncs)
        while not engine.scheduler.running:
            engine.step()
        found = sim.launched - launched
        counts = PrefillCounts(
            found.total() - found["copy"], found["copy"], sim.memory.allocations - allocations, len(sim.syncs) - waits
        )
        for request in list(engine.scheduler.running):
            engine.cancel(request)
        llm.runner.check_integrity()
    return counts
