"""Share policy state, such as approximate KV, between sequences with a common prefix.

The state of a token depends only on its key and value (`PolicyState.fork_prefix`), which are equal in shared blocks.
State is shared only for tokens that were computed by a prefill. State is not shared if KV is quantised or tokens are
evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from ..core import BLOCK_SIZE
from .sequence import Sequence


def learn_from_others(sequence: Sequence, others: Iterable[Sequence]) -> None:
    """Copy policy state for cached tokens of `sequence` from another sequence that uses the same blocks.

    Of `others`, the sequence whose state covers the most `unlearned` tokens is used.
    """
    found = max(
        ((_known(other, sequence), -other.id, other) for other in others if other is not sequence), default=None
    )
    if found is None or found[0] <= sequence.learned:
        return
    tokens, _, other = found
    state = other.state.fork_prefix(tokens)
    if state is not None:
        sequence.state, sequence.learned = state, tokens


def _known(other: Sequence, sequence: Sequence) -> int:
    """Return how many of `sequence.unlearned` tokens are in the policy state of `other` with the same blocks."""
    if other.unlearned or other.interrupted:
        return 0
    pairs = zip(other.blocks.ids, sequence.blocks.ids, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(common * BLOCK_SIZE, other.exact, sequence.unlearned)
