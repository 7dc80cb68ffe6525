"""What the sessions of one store share: the runner, the tier below host memory, and how fast it has been."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import StoreOptions
from ..engine.runner import Runner
from ..storage.chunk_store import StorageTier
from ..storage.loader import read_buffer_layers
from ..storage.saver import Saver


@dataclass(eq=False)
class SessionContext:
    """Everything that a session needs besides its own history.

    storage: the tier below host memory, with the sessions' chunks and histories; saver: writes to it behind the
    computation. load_rate: seconds to load a byte from the tier, compute_rate: seconds to prefill a token, both as
    measured last, 0 before that.
    """

    runner: Runner
    storage: StorageTier
    saver: Saver
    options: StoreOptions
    load_rate: float = 0.0
    compute_rate: float = 0.0

    @property
    def private(self) -> bool:
        """Whether chunks belong to one session and its forks alone, because the pool rounds rows: a prefill attends to
        its own rows as they were before rounding, so that what follows depends on where prefills began."""
        return not self.runner.pool.format.exact

    def read_buffer(self, loaded_bytes: int, new_tokens: int) -> int:
        """Returns k, the layers that loading has to be ahead by, for a turn that loads `loaded_bytes` bytes and
        computes `new_tokens` tokens (`read_buffer_layers`), from the rates measured last; all layers before there are
        any."""
        layers = self.runner.adapter.geometry.layers
        if not (self.load_rate and self.compute_rate):
            return layers
        return read_buffer_layers(loaded_bytes * self.load_rate, new_tokens * self.compute_rate, layers)
