"""Trace a request for its client: progress of the prefill, and how often each prompt token is selected."""

from __future__ import annotations

import numpy as np
import torch

from ..model_runner.trace import Trace
from ..outputs import RequestTrace
from .request import Request


class Watch:
    """Recorder of the first completion of a prompt."""

    def __init__(self, prompt_tokens: int, layers: int) -> None:
        self._selected = np.zeros(prompt_tokens, np.int64)
        self._layers, self.layers_prefilled = layers, 0
        self._trace: Trace | None = None

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        """Count selected tokens `[Hkv, n]` that belong to the prompt."""
        found = tokens.detach().cpu().numpy().ravel()
        size = len(self._selected)
        self._selected += np.bincount(found[found < size], minlength=size)

    def trace(self, request: Request) -> RequestTrace:
        """Return the trace so far. May wait for the device."""
        for sequence in request.sequences[:1]:  # no sequence before the start and after the end
            self._trace = sequence.trace
        trace = self._trace
        return RequestTrace(
            layers_prefilled=self.layers_prefilled,
            layers=self._layers,
            h2d_bytes=0 if trace is None else trace.bytes_to_device,  # waits for counts on the device
            attended_by_step=[] if trace is None else [list(step) for step in trace.attended],
            selected=self._selected.copy(),
        )
