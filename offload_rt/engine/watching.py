"""What a request does, for those who watch it: a recorder that counts, and the trace made of it."""

from __future__ import annotations

import numpy as np
import torch

from ..model_runner.trace import Trace
from ..outputs import RequestTrace
from .request import Request


class Watch:
    """Of the first completion of one prompt: how often each of its tokens is selected, and how far its prefill is. The
    recorder of that completion's sequence."""

    def __init__(self, prompt_tokens: int, layers: int) -> None:
        self._selected = np.zeros(prompt_tokens, np.int64)
        self._layers, self.layers_prefilled = layers, 0
        self._trace: Trace | None = None

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        """Counts the tokens `[Hkv, n]` that lie in the prompt."""
        found = tokens.detach().cpu().numpy().ravel()
        size = len(self._selected)
        self._selected += np.bincount(found[found < size], minlength=size)

    def trace(self, request: Request) -> RequestTrace:
        """What is known now; asks the device for what only it knows."""
        for sequence in request.sequences[:1]:  # none before it starts, and when it has ended
            self._trace = sequence.trace
        trace = self._trace
        return RequestTrace(
            layers_prefilled=self.layers_prefilled,
            layers=self._layers,
            link_bytes=0 if trace is None else trace.bytes_to_device,  # settles what only the device knows
            attended_by_step=[] if trace is None else [list(step) for step in trace.attended],
            selected=self._selected.copy(),
        )
