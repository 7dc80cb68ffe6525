"""State shared by the sessions of one store: the runner, the storage tier and the measured rates."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import StoreOptions
from ..engine.runner import Runner
from ..storage.block_store import StorageTier
from ..storage.loader import read_buffer_layers
from ..storage.saver import Saver
from ..storage.state_blocks import StateBlocks

SEGMENT_SECONDS = 2.0
"""Target duration of a prefill segment. A request that ends early loses at most the segment being computed."""


@dataclass(eq=False)
class SessionContext:
    """State shared by the sessions of one store.

    Attributes:
        runner: Runner of the model.
        storage: Storage tier below host memory, with the blocks and histories of the sessions.
        saver: Writes blocks to the storage tier in the background.
        states: Snapshots of recurrent state in the storage tier, or None if the runner keeps none.
        options: Options of the store.
        load_rate: Seconds to load one byte from the tier, as last measured; 0 before the first measurement.
        compute_rate: Seconds to prefill one token, as last measured; 0 before the first measurement.
    """

    runner: Runner
    storage: StorageTier
    saver: Saver
    options: StoreOptions
    states: StateBlocks | None = None
    load_rate: float = 0.0
    compute_rate: float = 0.0

    @property
    def private(self) -> bool:
        """Whether only a session and its forks may use its blocks. True if the pool stores KV in a rounded format."""
        # A prefill attends to its own KV before rounding, so the KV of later tokens depends on where prefills began.
        return not self.runner.pool.format.exact

    def segment_stop(self, start: int, stop: int) -> int:
        """Return the end of the prefill segment of tokens [start, stop) that begins at `start`.

        A segment consists of whole prefill chunks (`prefill_chunk_size`), the same as without segments. The whole
        prefill is one segment if weights are streamed, because each segment copies them again, or if the KV format is
        rounded, because its KV depends on where prefills begin.
        """
        if self.private or self.runner.weights is not None:
            return stop
        slices = SEGMENT_SECONDS / (self.compute_rate * self.runner.slice_tokens) if self.compute_rate else 1
        return min(stop, start + max(1, int(slices)) * self.runner.slice_tokens)

    def read_buffer(self, loaded_bytes: int, new_tokens: int) -> int:
        """Return the number of layers k to load before a turn starts (`read_buffer_layers`).

        Return the number of all layers if no rates are measured yet.

        Args:
            loaded_bytes: Bytes to load for the turn.
            new_tokens: Tokens to compute in the turn.
        """
        layers = self.runner.adapter.geometry.layers
        if not (self.load_rate and self.compute_rate):
            return layers
        return read_buffer_layers(loaded_bytes * self.load_rate, new_tokens * self.compute_rate, layers)
