"""What a request does, as events for whoever watches it: how far the prefill is, and of each step what was attended to,
what crossed the link, and where in the prompt the selected tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..llm import LLM
from ..outputs import RequestOutput

MOST_SEGMENTS = 1024
"""Pieces of a prompt that selections are counted for: a token each where it is short, two or three lines of a long
document."""


class TraceEvents:
    """Of one request. `head` comes first; `of` says what is new in each output."""

    def __init__(self, llm: LLM, text: str, spans: Sequence[tuple[int, int]], tokens: int) -> None:
        """llm: what answers; text: of the prompt; spans: where in it each token stands, none where that is not
        known."""
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
        """The prompt in pieces that together are all of it; none where nobody knows where tokens stand."""
        if not spans:
            return []
        cuts = [0, *(spans[start][0] for start in self._starts[1:]), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def of(self, output: RequestOutput) -> dict[str, Any] | None:
        """What is new; None where nothing is. `selected` is of the steps that are new, by segment: how often a layer
        and KV head selected a token of it; None where no layer selects."""
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
