"""The link of a machine with device memory, the CPU being that device: its streams work at once."""

from __future__ import annotations

import torch

from offload_rt import LLM
from offload_rt.transfer.cuda import CudaLink
from offload_rt.transfer.streams import InlineStream


def staged(llm: LLM) -> LLM:
    """Puts the link of a machine with device memory into an LLM, the CPU being that device."""
    runner = llm.runner
    link = CudaLink(runner.pool, runner.adapter.geometry, torch.device("cpu"), streams=(InlineStream(), InlineStream()))
    runner.link = link
    return llm
