"""Count the work that a decode step does on the simulated device.

`python tests/support/step_counts.py` writes the table for `CONTRIBUTING.md`. Tests compare each row with that page.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from support.architectures import architecture
from support.cuda_cells import DRAFTS, LOW_BITS
from support.cuda_simulator import Late, simulated
from support.tiny_models import tiny_model, tiny_prompt

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BEGIN, END = "<!-- step counts: begin (written by tests/support/step_counts.py) -->", "<!-- step counts: end -->"
VOCAB = 97
ON_DEVICE: dict[str, Any] = {"policy": "full", "policy_options": {}, "device_kv_memory": "1MiB"}
WARM = 2
"""Number of steps before the counted one: one eager step, and one that captures the graph."""


def llama(layers: int) -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=layers)


def gemma3(layers: int) -> PreTrainedModel:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * (layers // 3)
    return architecture("gemma3", num_hidden_layers=layers, layer_types=kinds)


def mixtral(layers: int) -> PreTrainedModel:
    return architecture("mixtral", num_hidden_layers=layers, sliding_window=None)


def gpt_oss(layers: int) -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return architecture("gpt_oss", num_hidden_layers=layers, layer_types=kinds)


def qwen3_5(layers: int) -> PreTrainedModel:
    # The first attention layer selects no tokens by default. A step in which no layer selects is not captured.
    kinds = ["linear_attention", "full_attention"] * (1 + layers // 2)
    return architecture("qwen3_5", num_hidden_layers=2 + layers, layer_types=kinds)


def granite_hybrid(layers: int) -> PreTrainedModel:
    kinds = ["linear_attention", "full_attention"] * (1 + layers // 2)
    return architecture("granite_hybrid", num_hidden_layers=2 + layers, layer_types=kinds)


@dataclass(frozen=True)
class Case:
    """A decode step to measure.

    Attributes:
        period: Number of layers after which the pattern of layer types repeats.
        lengths: Prompt lengths, one per request.
        stem: Length of the prefix that all prompts share.
    """

    name: str
    model: Callable[[int], PreTrainedModel] = llama
    period: int = 1
    lengths: tuple[int, ...] = (72,)
    stem: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> list[list[int]]:
        stem = [token % VOCAB for token in tiny_prompt(self.stem)] if self.stem else []
        tails = (tiny_prompt(length - self.stem, seed=1 + i) for i, length in enumerate(self.lengths))
        return [[*stem, *(token % VOCAB for token in tail)] for tail in tails]

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("default"),
    Case("shared prefix", lengths=(72, 73), stem=66),
    Case("sliding windows (Gemma 3)", gemma3, 3),
    Case("experts (Mixtral)", mixtral),
    Case("experts (gpt-oss)", gpt_oss, 2),
    Case("working set", settings={"working_set": 9}),
    Case("full attention, KV on the device", settings=ON_DEVICE),
    Case("lossless mode", settings={"exact": DRAFTS}),
    Case("batch of 8", lengths=tuple(range(70, 78))),
    Case("gated delta rule (Qwen 3.5)", qwen3_5, 2),
    Case("Mamba-2 with experts (Granite 4)", granite_hybrid, 2),
]


@dataclass(frozen=True)
class StepCounts:
    """Counts for one decode step with greedy sampling.

    Attributes:
        replayed: Whether a graph was replayed.
        nodes: Kernels and copies per layer.
        launches: Launches by the host.
        allocations: Tensors allocated on the device outside graphs.
        waits: Times that the host waits for the device.
    """

    replayed: bool
    nodes: int
    launches: int
    allocations: int
    waits: int


def _measure(case: Case, layers: int) -> StepCounts:
    """Return the counts for one engine step. `nodes` is the sum over all layers."""
    with simulated(Late()) as sim:
        settings = {"policy_options": LOW_BITS} | case.settings
        settings = {"device": "cuda", "host_memory": "4MiB", "missed_mass_every": 0, "verify": "off"} | settings
        llm = LLM(case.model(layers).to("cuda"), **settings)
        engine = llm.make_engine()
        for prompt in case.prompts:
            engine.add(prompt, SamplingParams(max_tokens=40, temperature=0))
        while len(engine.scheduler.running) < len(case.prompts):
            engine.step()
        for _ in range(WARM):
            engine.step()
        launched, allocations, waits = Counter(sim.launched), sim.memory.allocations, len(sim.syncs)
        engine.step()
        launches = (sim.launched - launched).total()
        replayed = sim.launched["graph"] > launched["graph"]
        found = StepCounts(
            replayed, sim.nodes if replayed else launches, launches, sim.memory.allocations - allocations,
            len(sim.syncs) - waits,
        )  # fmt: skip
        for request in list(engine.scheduler.running):
            engine.cancel(request)
        llm.runner.check_integrity()
    return found


def count_step(case: Case) -> StepCounts:
    """Count a step of a model with two periods of layers. The nodes per layer are the difference to a single period."""
    one, two = (_measure(case, case.period * periods) for periods in (1, 2))
    assert one.replayed == two.replayed
    return replace(two, nodes=round((two.nodes - one.nodes) / case.period))


def table(counts: Mapping[str, StepCounts]) -> str:
    head = "step | CUDA graph | nodes per layer | launches | allocations | host waits"
    rows = [[name, *(_shown(getattr(each, one.name)) for one in fields(each))] for name, each in counts.items()]
    lines = [f"| {head} |", f"|---|---|{'---:|' * (len(fields(StepCounts)) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _shown(value: bool | int) -> str:
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"


def documented_counts() -> dict[str, StepCounts]:
    rows = [line.strip("| ").split(" | ") for line in _section(PAGE.read_text("utf-8")).splitlines()[2:]]
    return {name: StepCounts(graph == "yes", *map(int, numbers)) for name, graph, *numbers in rows}


def _section(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    text = PAGE.read_text("utf-8")
    before, rest = text.split(BEGIN)
    counts = {}
    for case in CASES:
        counts[case.name] = count_step(case)
        print(case.name, counts[case.name], flush=True)
    PAGE.write_text(f"{before}{BEGIN}\n{table(counts)}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
