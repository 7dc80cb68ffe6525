"""Incremental outputs and token counts of a request."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ..outputs import FinishReason, Logprobs, RequestOutput, StopReason


@dataclass(frozen=True)
class Usage:
    """Token counts of a request so far. `cached`: prompt tokens found in the prefix cache."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt + other.prompt, self.cached + other.cached, self.generated + other.generated)


@dataclass(frozen=True)
class Delta:
    """New text and tokens `[t]` of a completion. The reasons are set when it finishes."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: FinishReason | None
    stop_reason: StopReason


@dataclass
class ChatStream:
    """Compute deltas from successive outputs of a request."""

    _characters: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _ended: set[int] = field(default_factory=set)

    def of(self, output: RequestOutput) -> list[Delta]:
        """Return a delta for each completion that has changed since the last call."""
        found = []
        for each in output.outputs:
            i, text, tokens = (
                each.index,
                each.text[self._characters[each.index] :],
                each.token_ids[self._tokens[each.index] :],
            )
            ends = each.finish_reason is not None and i not in self._ended
            if not (text or tokens or ends):
                continue
            logprobs = None if each.logprobs is None else each.logprobs[self._tokens[i] :]
            self._characters[i], self._tokens[i] = len(each.text), len(each.token_ids)
            if ends:
                self._ended.add(i)
            reason, stop = (each.finish_reason, each.stop_reason) if ends else (None, None)
            found.append(Delta(i, text, tokens, logprobs, reason, stop))
        return found


def usage_of(output: RequestOutput) -> Usage:
    """Return the token counts of an output."""
    generated = sum(len(each.token_ids) for each in output.outputs)
    return Usage(len(output.prompt_token_ids), output.num_cached_tokens, generated)
