"""What is new in each state of a request."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ..outputs import FinishReason, Logprobs, RequestOutput, StopReason


@dataclass(frozen=True)
class Usage:
    """Tokens of a request so far: `cached` of the prompt's had been computed before."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt + other.prompt, self.cached + other.cached, self.generated + other.generated)


@dataclass(frozen=True)
class Delta:
    """What a completion gained: text, tokens `[t]` with their log-probabilities, and why it ended, once it has."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: FinishReason | None
    stop_reason: StopReason


@dataclass
class Deltas:
    """Remembers what of each completion has been given out."""

    _characters: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _ended: set[int] = field(default_factory=set)

    def of(self, output: RequestOutput) -> list[Delta]:
        """What is new since the last state, of each completion that gained anything."""
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
    """What a state of a request counts."""
    generated = sum(len(each.token_ids) for each in output.outputs)
    return Usage(len(output.prompt_token_ids), output.num_cached_tokens, generated)
