"""Create runners for a tiny Llama with batched selection, and sequences that are already prefilled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload_rt import LLM
from offload_rt.engine.runner import Runner
from offload_rt.kernels import dispatch
from offload_rt.model_runner.sequence import Sequence
from offload_rt.policies.infinigen.policy import InfiniGen

from .staged_transfer import staged
from .tiny_models import tiny_model, tiny_prompt

OPTIONS: dict[str, Any] = {
    "preset": "rows", "sinks": 2, "recent": 8, "dense_layers": (), "alpha": 2.0, "max_fraction": 0.3,
}  # fmt: skip
"""Options that disable approximate KV. Tests that need it enable it."""


def make_runner(counted: bool = True, **options: Any) -> Runner:
    model = tiny_model("llama", num_hidden_layers=2)
    llm = staged(LLM(model, policy_options=OPTIONS | options, host_memory="4MiB", missed_mass_every=0))
    policy = llm.runner.policy
    assert isinstance(policy, InfiniGen)
    policy.rule = policy.selection if counted else None
    return llm.runner


def prefilled_sequence(runner: Runner, length: int, seed: int = 0) -> Sequence:
    sequence = runner.new_sequence(tiny_prompt(length + 40, seed=seed), length + 40)
    runner.prefill(sequence, length)
    return sequence


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton's interpreter for all operations."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled on this machine")
    monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: tensor.dtype != torch.float64)
