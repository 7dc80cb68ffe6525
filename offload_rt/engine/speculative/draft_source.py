"""Prompt lookup for draft tokens, and the choice of the number of draft tokens that gives the highest speed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

MIN_NGRAM = 2  # a single token predicts too little
DECAY = 0.9  # each new observation multiplies the weight of all earlier ones by this factor
INITIAL_RATE = 0.6  # assumed acceptance rate before the first observation


class Lookup:
    """Prompt lookup: finds an earlier occurrence of a text's last n-gram, and proposes the tokens that followed it.

    If there are several occurrences, the latest one is used.

    Args:
        longest: Maximum length n of the n-gram in tokens.
    """

    def __init__(self, longest: int) -> None:
        self._lengths = range(longest, MIN_NGRAM - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def propose(self, tokens: Seq[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the last n-gram of `tokens` earlier in the text.

        The largest n with a match is used. Each call must append tokens to those of the previous call.
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
    """Estimated time of a pass over m tokens in seconds: `a + b * m`, fitted by least squares with decaying weights."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        observed = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        before = (self.weight, self.tokens, self.seconds, self.squares, self.products)
        self.weight, self.tokens, self.seconds, self.squares, self.products = (
            DECAY * old + new for old, new in zip(before, observed, strict=True)
        )

    def seconds_of(self, tokens: int) -> float:
        if not self.weight:
            return 0.0
        mean_tokens, mean_seconds = self.tokens / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - mean_tokens**2
        slope = (self.products / self.weight - mean_tokens * mean_seconds) / spread if spread > 1e-6 else 0.0
        return max(0.0, mean_seconds + max(0.0, slope) * (tokens - mean_tokens))


class Costs:
    """Measured times, in seconds, of verification passes and of decode steps that produce draft tokens."""

    def __init__(self) -> None:
        self._verification = _Cost()
        self._step = _Cost()

    def observe_verification(self, tokens: int, sequences: int, seconds: float) -> None:
        self._verification.observe(tokens / sequences, seconds / sequences)

    def observe_drafts(self, tokens: int, seconds: float) -> None:
        self._step.observe(1, seconds / tokens)

    def round_seconds(self, drafts: int, *, decoded: bool) -> float:
        """Return the expected time of a round in seconds.

        Draft tokens add to this time only if they are `decoded`; looking them up is free.
        """
        return self._verification.seconds_of(drafts + 1) + (drafts * self._step.seconds_of(1) if decoded else 0.0)


@dataclass(frozen=True)
class Round:
    """A number of draft tokens, and the output tokens per second that it is expected to give (`rate`)."""

    drafts: int
    rate: float


class Acceptance:
    """Acceptance rate of a request's draft tokens, as a decaying average."""

    def __init__(self) -> None:
        self._rate = INITIAL_RATE

    def observe(self, drafted: int, accepted: int) -> None:
        # Draft tokens after the first rejected one were never compared.
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._rate = DECAY * self._rate + (1 - DECAY) * right

    def record_unused(self) -> None:
        """Move the rate of an unused source towards the initial rate, so that it is tried again."""
        self._rate += (1 - DECAY) / 10 * (INITIAL_RATE - self._rate)

    def best_round(self, most: int, costs: Costs, *, decoded: bool) -> Round:
        """Return the number of draft tokens, at most `most`, that should give the most output tokens per second.

        With acceptance rate r, n draft tokens give 1 + r + ... + r^n output tokens.
        """
        best, tokens, chance = Round(0, 0.0), 0.0, 1.0
        for drafts in range(most + 1):
            tokens, chance = tokens + chance, chance * self._rate
            seconds = costs.round_seconds(drafts, decoded=decoded)
            if not seconds:  # no pass has been measured yet, so run one without draft tokens first
                return best
            if tokens / seconds > best.rate:
                best = Round(drafts, tokens / seconds)
        return best
