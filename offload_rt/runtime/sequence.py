"""A sequence on its way: its tokens, its hold on the pool, and what the policy remembers of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core import Lease
from ..pool.pool import HostPool
from ..select.base import KeyReader, PolicyState
from .metrics import Trace


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and what was generated. The first `lease.length` of them have K and V in every layer; a decode
    step computes the next one. The sequence owns `lease` and `state`; both fork with it."""

    id: int
    tokens: list[int]
    lease: Lease
    keys: KeyReader
    state: PolicyState
    trace: Trace

    @property
    def position(self) -> int:
        """Index of the token that the next decode step computes."""
        return self.lease.length

    def check_integrity(self) -> None:
        """Asserts that tokens, lease and policy state agree."""
        assert self.lease.length <= len(self.tokens)
        assert self.lease.length <= self.lease.capacity
        self.state.check_integrity()


def key_reader(pool: HostPool, lease: Lease) -> KeyReader:
    """Reads a lease's keys `[Hkv, n, d]` where they lie: a view if the chunks are one run, else a copy."""

    def read(layer: int, tokens: range) -> torch.Tensor:
        parts = pool.runs(lease, layer, tokens)
        return parts[0].k if len(parts) == 1 else torch.cat([part.k for part in parts], dim=1)

    return read
