"""Runtimes with another link than their own; such as the link of a machine with device memory, the CPU being that
device, whose streams work at once."""

from __future__ import annotations

import torch

from offload_rt import LLM
from offload_rt.engine.runner import Runner
from offload_rt.transfer.cuda import CudaLink
from offload_rt.transfer.link import Link
from offload_rt.transfer.streams import InlineStream


def linked(llm: LLM, link: Link) -> LLM:
    """The same runtime, of which nothing has been asked, with another link in all its parts."""
    old = llm.runner
    other = LLM.__new__(LLM)
    other._begin(Runner(old.model, old.policy, old.pool, link, old.config, old.plan, old.weights), llm._family)
    return other


def staged(llm: LLM) -> LLM:
    """With the link of a machine with device memory."""
    runner, inline = llm.runner, (InlineStream(), InlineStream())
    return linked(llm, CudaLink(runner.pool, runner.adapter.geometry, torch.device("cpu"), streams=inline))
