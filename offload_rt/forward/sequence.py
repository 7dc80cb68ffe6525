"""A sequence on its way: its tokens, its hold on the pool, and what the policy remembers of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core import Lease
from ..pool.pool import HostPool
from ..select.base import KeyReader, PolicyState
from .slot_table import Slots
from .trace import Trace


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and what was generated. The first `position` of them have been computed in every layer; a decode
    step computes the next one. The rows of the first `exact` come from exact attention; those of the first `unlearned`
    from the prefix tree, and the policy's state learns their keys with the next prefill. `slots` says where rows lie in
    `lease`. The sequence owns lease, slots and state; all three fork with it.

    `shift` is how many tokens have been cut out of it: token t, if it is yet to be computed, has position t + shift.
    `cut` names what was cut: it belongs to the lineage of every chunk. `torn`: a step on it was interrupted, so that
    resident rows and policy state may be a token ahead in some layers (rows in the pool below `position` are right)."""

    id: int
    tokens: list[int]
    lease: Lease
    slots: Slots
    keys: KeyReader
    state: PolicyState
    trace: Trace
    position: int = 0
    exact: int = 0
    unlearned: int = 0
    shift: int = 0
    cut: str = ""
    torn: bool = False

    def check_integrity(self) -> None:
        """Asserts that tokens, lease and policy state agree."""
        assert self.lease.length <= self.position <= len(self.tokens)
        assert self.lease.length == min(self.position, self.lease.capacity)
        self.state.check_integrity()


def key_reader(pool: HostPool, lease: Lease) -> KeyReader:
    """Reads a lease's keys `[Hkv, n, d]` where they lie: a view if the chunks are one run, else a copy."""

    def read(layer: int, tokens: range) -> torch.Tensor:
        parts = pool.runs(lease, layer, tokens)
        return parts[0].k if len(parts) == 1 else torch.cat([part.k for part in parts], dim=1)

    return read
