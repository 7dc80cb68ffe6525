"""What policies keep of a shared prefix, such as low-bit rows, is made once: a sequence that begins with chunks of
another takes what that one's state knows of them, and its prefill teaches its own state the rest.

What a state knows of a token may depend on its keys and values alone (`PolicyState.fork_prefix`), and these are the
same where the chunk is. Only tokens that a prefill computed are taken: their rows entered the states of all who have
the chunk from there. Where rows are rounded, or overwritten in place (eviction), the runner asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from ..core import CHUNK
from .sequence import Sequence


def learn_from_others(sequence: Sequence, others: Iterable[Sequence]) -> None:
    """Of the first `unlearned` tokens of a sequence, takes as many as possible from the state of one of `others` that
    has the same chunks, and knows them."""
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
    """How many of a sequence's unlearned tokens lie in chunks of `other`, whose state knows them."""
    if other.unlearned or other.interrupted:
        return 0
    pairs = zip(other.blocks.chunks, sequence.blocks.chunks, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(common * CHUNK, other.exact, sequence.unlearned)
