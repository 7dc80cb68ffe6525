"""Where drafts come from besides the policy, and how long they should be."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

LEAST_NGRAM = 2
"""Tokens that must be found again, at least: what one token was followed by says too little."""

MEMORY = 0.9
"""What is left of an observation after the next one."""

HOPE = 0.6
"""The acceptance that is assumed before anything is known, and that forgotten knowledge goes back to."""


class Lookup:
    """The n-grams of one text, so that what followed its last words before can be found at once (prompt lookup). The
    latest occurrence counts. Grows with the text; memory: one entry for each token and length."""

    def __init__(self, longest: int) -> None:
        """longest: tokens of the n-grams, from `LEAST_NGRAM` up."""
        self._lengths = range(longest, LEAST_NGRAM - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def propose(self, tokens: Seq[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the longest n-gram at the end of `tokens` that occurs in it before; none
        where none does. `tokens` goes on from what it was in the last call."""
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
    """Seconds of a pass over m tokens as `first + more * m`: least squares over observations that are forgotten."""

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
        """Expected seconds; 0 before anything was seen."""
        if not self.weight:
            return 0.0
        mean_tokens, mean_seconds = self.tokens / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - mean_tokens**2
        slope = (self.products / self.weight - mean_tokens * mean_seconds) / spread if spread > 1e-6 else 0.0
        return max(0.0, mean_seconds + max(0.0, slope) * (tokens - mean_tokens))


class Costs:
    """What passes take in one engine, as measured: a verification of m tokens, and a decode step that drafts one."""

    def __init__(self) -> None:
        self._verification = _Cost()
        self._step = _Cost()

    def saw_verification(self, tokens: int, sequences: int, seconds: float) -> None:
        """A pass over so many tokens of so many sequences, which share its cost."""
        self._verification.saw(tokens / sequences, seconds / sequences)

    def saw_drafts(self, tokens: int, seconds: float) -> None:
        """Decode steps that drafted so many tokens, of all sequences of a batch together."""
        self._step.saw(1, seconds / tokens)

    def of(self, drafts: int, *, decoded: bool) -> float:
        """Expected seconds of a round with so many drafts, `decoded` or found."""
        return self._verification.of(drafts + 1) + (drafts * self._step.of(1) if decoded else 0.0)


@dataclass(frozen=True)
class Round:
    """A number of drafts, and the tokens a second that are expected of it."""

    drafts: int
    rate: float


class Acceptance:
    """How often the drafts of one kind for one request are what full attention chooses: a decaying average."""

    def __init__(self) -> None:
        self._rate = HOPE

    def saw(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` were right; whether later ones were is not known."""
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._rate = MEMORY * self._rate + (1 - MEMORY) * right

    def rested(self) -> None:
        """A round drafted nothing of this kind: what was known is forgotten little by little, so that it is tried
        again."""
        self._rate += (1 - MEMORY) / 10 * (HOPE - self._rate)

    def best_round(self, most: int, costs: Costs, *, decoded: bool) -> Round:
        """The one of up to `most` drafts with the most tokens a second: n drafts give 1 + r + ... + r^n tokens,
        where each is right with probability r if the ones before it are."""
        best, tokens, chance = Round(0, 0.0), 0.0, 1.0
        for drafts in range(most + 1):
            tokens, chance = tokens + chance, chance * self._rate
            seconds = costs.of(drafts, decoded=decoded)
            if not seconds:  # nothing was seen: a pass without drafts is what all others are measured by
                return best
            if tokens / seconds > best.rate:
                best = Round(drafts, tokens / seconds)
        return best
