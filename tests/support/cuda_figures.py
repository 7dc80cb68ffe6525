"""Measure the kernel launches per layer and the peak memory of a decode step on the simulated device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from offload_rt import LLM

from .cuda_cells import BY_NAME
from .cuda_simulator import Late, Lazy, simulated
from .tiny_models import tiny_model, tiny_prompt

PROMPT_TOKENS = 256
"""Length of the sequence in `decode_peak_bytes`."""


def count_layer_launches(name: str) -> Counter[str]:
    """Count kernels and copies by name from one layer's MLP to the next layer's, in a decode step of cell `name`.

    The counts include the speculative fetch for the next layer.
    """
    with simulated(Late()) as sim:
        model, cell = tiny_model("llama", num_hidden_layers=3).to("cuda"), BY_NAME[name]
        llm = LLM(
            model, policy=cell.policy, policy_options=cell.options, device="cuda", host_memory="4MiB",
            missed_mass_every=0,
        )  # fmt: skip
        runner, launched = llm.runner, list[Counter[str]]()
        mlp = runner.adapter.mlp

        def count_launches(layer: int, x: torch.Tensor, *tokens: Any) -> torch.Tensor:
            launched.append(Counter(sim.launched))
            return mlp(layer, x, *tokens)

        sequence = runner.new_sequence(tiny_prompt(42), 42)
        runner.prefill(sequence, 40)
        runner.decode([sequence])
        runner.adapter.mlp = count_launches  # type: ignore[method-assign]
        runner.decode([sequence])
        del runner.adapter.mlp
        runner.free(sequence)
    return launched[1] - launched[0]


def decode_peak_bytes(policy: str, options: dict[str, Any], layers: int) -> int:
    """Return how many bytes of additional device memory a decode step uses.

    Device work starts only when the host waits at the end of the step, so the memory of all layers is in use at once.
    """
    with simulated(Lazy()) as sim:
        model = tiny_model("llama", num_hidden_layers=layers).to("cuda")
        settings: dict[str, Any] = {"host_memory": "16MiB", "cuda_graphs": False}
        runner = LLM(model, policy=policy, policy_options=options, device="cuda", **settings).runner
        sequence = runner.new_sequence(tiny_prompt(PROMPT_TOKENS + 3), PROMPT_TOKENS + 3)
        runner.prefill(sequence, PROMPT_TOKENS)
        runner.decode([sequence]).argmax().item()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = sim.memory.usage.active
        runner.decode([sequence])
        peak: int = sim.memory.usage.active_peak - before
        runner.free(sequence)
    return peak


def layer_kv_bytes() -> int:
    return PROMPT_TOKENS * 2 * 2 * 32 * 4
