"""Trace events of a request: prefill progress, attention fractions, transferred bytes and selected prompt parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..llm import LLM
from ..outputs import RequestOutput

MOST_SEGMENTS = 1024
"""Maximum number of prompt segments for which selections are counted. A segment has one or more tokens."""


class TraceEvents:
    """Trace events of one request: `head` first, then the results of `of`."""

    def __init__(self, llm: LLM, text: str, spans: Sequence[tuple[int, int]], tokens: int) -> None:
        """Create the first event.

        Args:
            llm: Engine of the request.
            text: Rendered prompt.
            spans: Character span of each prompt token, or empty if unknown.
            tokens: Number of prompt tokens.
        """
        self._size = max(1, -(-tokens // MOST_SEGMENTS))
        self._starts = list(range(0, tokens, self._size))
        self._selected: NDArray[np.int64] = np.zeros(len(self._starts), np.int64)
        self._steps, self._prefilled = 0, -1
        policy, geometry = llm.runner.policy, llm.geometry
        self.head: dict[str, Any] = {
            "policy": policy.name,
            "layers": geometry.layers,
            "kv_heads": geometry.kv_heads,
            "dense_layers": sorted(policy.dense_layers),
            "sinks": policy.sinks,
            "recent": policy.recent,
            "prompt_tokens": tokens,
            "segment_tokens": self._size,
            "segments": self._segments(text, spans),
        }

    def _segments(self, text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Split the prompt text into segments. Empty if the token spans are unknown."""
        if not spans:
            return []
        cuts = [0, *(spans[start][0] for start in self._starts[1:]), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def of(self, output: RequestOutput) -> dict[str, Any] | None:
        """Return the changes since the last output, or None.

        `selected` counts, for each segment, how often a layer and KV head selected a token of it in the new steps.
        """
        trace = output.trace
        if trace is None:
            return None
        new = trace.attended_by_step[self._steps :]
        if not new and trace.layers_prefilled == self._prefilled:
            return None
        counts = np.add.reduceat(trace.selected, self._starts) if len(trace.selected) else self._selected
        gained = counts - self._selected
        self._steps, self._prefilled, self._selected = len(trace.attended_by_step), trace.layers_prefilled, counts
        return {
            "prefill": [trace.layers_prefilled, trace.layers],
            "step": self._steps,
            "attended": [[round(share, 4) for share in step] for step in new],
            "link_bytes": trace.link_bytes,
            "selected": gained.tolist() if new else None,
        }
