"""Prompt lookup, and the choice of the number of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

MIN_NGRAM = 2  # a single token predicts too little
MEMORY = 0.9  # decay of observations
HOPE = 0.6  # assumed acceptance rate before any observation


class Lookup:
    """Prompt lookup: find the continuation of the latest earlier occurrence of a text's last n-gram.

    Memory grows by one entry per token and n-gram length.
    """

    def __init__(self, longest: int) -> None:
        """`longest`: length of the longest n-gram."""
        self._lengths = range(longest, MIN_NGRAM - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def propose(self, tokens: Seq[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest matching n-gram at the end of `tokens`.

        `tokens` must continue the tokens of the last call.
        """
        end = len(tokens)
        for stop in range(self._known, end):
            for n in self._lengths:
                if n <= stop:
                    self._after[tuple(tokens[stop - n : stop])] = stop
        self._known = end
        for n in self._lengths:
            at = self._after.get(tuple(tokens[end - n : end])) if n <= end else None
            if at is not None:
                return list(tokens[at : at + most])
        return []


@dataclass
class _Cost:
    """Seconds of a pass over m tokens, estimated as `a + b * m` by least squares with decaying weights."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def saw(self, tokens: float, seconds: float) -> None:
        observed = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        before = (self.weight, self.tokens, self.seconds, self.squares, self.products)
        self.weight, self.tokens, self.seconds, self.squares, self.products = (
            MEMORY * old + new for old, new in zip(before, observed, strict=True)
        )

    def of(self, tokens: int) -> float:
        """Return the expected seconds; 0 without observations."""
        if not self.weight:
            return 0.0
        mean_tokens, mean_seconds = self.tokens / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - mean_tokens**2
        slope = (self.products / self.weight - mean_tokens * mean_seconds) / spread if spread > 1e-6 else 0.0
        return max(0.0, mean_seconds + max(0.0, slope) * (tokens - mean_tokens))


class Costs:
    """Measured seconds of verification passes and of decode steps that draft."""

    def __init__(self) -> None:
        self._verification = _Cost()
        self._step = _Cost()

    def saw_verification(self, tokens: int, sequences: int, seconds: float) -> None:
        """Record a verification pass. Each sequence counts as an equal share of it."""
        self._verification.saw(tokens / sequences, seconds / sequences)

    def saw_drafts(self, tokens: int, seconds: float) -> None:
        """Record decode steps that drafted `tokens` tokens in total."""
        self._step.saw(1, seconds / tokens)

    def of(self, drafts: int, *, decoded: bool) -> float:
        """Return the expected seconds of a round with `drafts` draft tokens, decoded or looked up."""
        return self._verification.of(drafts + 1) + (drafts * self._step.of(1) if decoded else 0.0)


@dataclass(frozen=True)
class Round:
    """A number of draft tokens, and the expected tokens per second."""

    drafts: int
    rate: float


class Acceptance:
    """Acceptance rate of a request's drafts of one kind, as a decaying average."""

    def __init__(self) -> None:
        self._rate = HOPE

    def saw(self, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted. Later ones are unknown."""
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._rate = MEMORY * self._rate + (1 - MEMORY) * right

    def rested(self) -> None:
        """Record a round without drafts of this kind. The rate moves towards `HOPE`, so that it is tried again."""
        self._rate += (1 - MEMORY) / 10 * (HOPE - self._rate)

    def best_round(self, most: int, costs: Costs, *, decoded: bool) -> Round:
        """Return the number of drafts with the most tokens per second: n drafts give 1 + r + ... + r^n tokens.

        r is the probability that a draft token is accepted if all before it were.
        """
        best, tokens, chance = Round(0, 0.0), 0.0, 1.0
        for drafts in range(most + 1):
            tokens, chance = tokens + chance, chance * self._rate
            seconds = costs.of(drafts, decoded=decoded)
            if not seconds:  # no observation yet: run a pass without drafts first
                return best
            if tokens / seconds > best.rate:
                best = Round(drafts, tokens / seconds)
        return best
