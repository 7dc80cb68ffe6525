"""Replace a runtime's transfers, for example to simulate device memory on the CPU."""

from __future__ import annotations

import torch

from offload_rt import LLM
from offload_rt.engine.runner import Runner
from offload_rt.transfer.base import Transfer
from offload_rt.transfer.cuda import CudaTransfer
from offload_rt.transfer.streams import InlineStream


def with_transfer(llm: LLM, transfer: Transfer) -> LLM:
    old = llm.runner
    other = LLM.__new__(LLM)
    other._begin(Runner(old.model, old.policy, old.pool, transfer, old.config, old.plan, old.weights), llm._family)
    return other


def staged(llm: LLM) -> LLM:
    """Simulate transfers to device memory on the CPU."""
    runner, inline = llm.runner, (InlineStream(), InlineStream())
    return with_transfer(llm, CudaTransfer(runner.pool, runner.adapter.geometry, torch.device("cpu"), streams=inline))
