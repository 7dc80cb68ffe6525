"""A running sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ..core import BLOCK_SIZE, BlockTable
from ..kv_cache.pool import HostPool
from ..models.recurrent import RollbackState, StateSlots
from ..policies.base import KeyReader, PolicyState
from ..transfer.base import KVStorage
from ..utils.prefixes import common_prefix
from .slot_table import SlotTable
from .trace import Trace


@dataclass(eq=False)
class Sequence:
    """A running sequence. It owns its block table, slots and policy state. A fork of the sequence also forks these."""

    id: int
    tokens: list[int]  # prompt and generated tokens
    blocks: BlockTable
    slots: SlotTable
    keys: KeyReader
    state: PolicyState
    trace: Trace
    # Number of tokens that all layers have computed. The next decode step computes the token at this index.
    position: int = 0
    exact: int = 0  # number of leading tokens whose KV comes from exact attention
    # Number of leading tokens whose KV is cached but not part of the policy state yet. The next prefill passes their KV
    # to the policy.
    unobserved: int = 0
    observed: int = 0  # how many of the `unobserved` tokens have policy state that was copied from another sequence
    shift: int = 0  # number of tokens removed by truncation; a token t that is computed later has position t + shift
    provenance: str = ""  # the part of the KV provenance key that identifies weights, cache salt and truncations
    # Whether a step was interrupted. If so, the resident KV and the policy state of some layers may already include the
    # next token. In the pool, the KV before `position` is valid.
    interrupted: bool = False
    expected: int = 0  # expected maximum length in tokens
    forks: int = 0  # number of forks that will be created from this sequence, each of which may reach `expected` tokens
    # Position of the first draft token that may be rejected, or None. The sliding windows at this position are kept.
    draft_start: int | None = None
    drafter: Sequence | None = None  # sequence with the same text in the draft model's KV cache
    state_slots: StateSlots | None = None  # recurrent state of all sequences; None if the model has none
    state_slot: int = -1  # slot of this sequence in `state_slots`; -1 if it has none
    # Recurrent state before the draft tokens. None if the sequence has never had draft tokens.
    rollback: RollbackState | None = None
    shared_tokens: int = 0  # number of leading tokens (in full blocks) whose KV was cached when the sequence began
    # Whether a session will continue after the last full block (only set for hybrid models). If so, snapshots are also
    # taken after decode steps, although the state may be approximate, and the sliding windows at the end of the last
    # full block are kept.
    keeps_decoded: bool = False
    # Snapshots of recurrent state that are not published yet, as slots in the state pool by number of tokens.
    snapshots: dict[int, int] = field(default_factory=dict)

    @property
    def blocks_ahead(self) -> int:
        """Number of blocks that this sequence and its forks still need until each of them has `expected` tokens."""
        blocks, shared = -(-self.expected // BLOCK_SIZE), (len(self.tokens) - 1) // BLOCK_SIZE
        return max(0, blocks - len(self.blocks.ids)) + self.forks * max(0, blocks - shared)

    def share_state(self, others: Iterable[Sequence]) -> None:
        """Copy the policy state of cached tokens, such as approximate KV, from a sequence with the same blocks."""
        # The policy state of a token depends only on its key and value, which are equal in shared blocks.
        candidates = ((self._tokens_observed_by(other), -other.id, other) for other in others if other is not self)
        tokens, _, best = max(candidates, default=(0, 0, self))
        if tokens > self.observed and (state := best.state.fork_prefix(tokens)) is not None:
            self.state, self.observed = state, tokens

    def _tokens_observed_by(self, other: Sequence) -> int:
        if other.unobserved or other.interrupted:
            return 0
        # The two sequences have equal policy states for blocks that both of them use.
        return min(common_prefix(other.blocks.ids, self.blocks.ids) * BLOCK_SIZE, other.exact, self.unobserved)

    def check_integrity(self) -> None:
        assert self.blocks.length <= self.position <= len(self.tokens)
        assert self.blocks.length == min(self.position, self.blocks.capacity)
        self.state.check_integrity()
        self.check_state()

    def check_state(self) -> None:
        """Assert that every recurrent layer has processed exactly the tokens before `position`."""
        if self.state_slots is not None and self.state_slot >= 0 and not self.interrupted:
            self.state_slots.check(self.state_slot, self.position)


def key_reader(pool: HostPool, storage: KVStorage, blocks: BlockTable) -> KeyReader:
    """Return a function that waits for pending write-backs and then reads keys `[Hkv, n, d]` from the pool.

    The result is a view if the keys are in contiguous blocks, and a copy otherwise.
    """

    def read(layer: int, tokens: range) -> torch.Tensor:
        storage.settle(blocks)
        parts = pool.runs(blocks, layer, tokens)
        return parts[0].k if len(parts) == 1 else torch.cat([part.k for part in parts], dim=1)

    return read
