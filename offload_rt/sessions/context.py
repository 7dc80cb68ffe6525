"""State shared by the sessions of one store."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.runner import Runner
from ..storage.disk_store import DiskStore
from ..storage.loader import read_buffer_layers
from ..storage.options import StoreOptions
from ..storage.saver import Saver
from .stored_states import StoredStates

SEGMENT_SECONDS = 2.0
"""Target duration of a prefill segment in seconds. A request that ends early loses at most the KV of one segment."""


@dataclass(eq=False)
class SessionContext:
    """State shared by the sessions of one store.

    Attributes:
        states: Reads and writes snapshots of recurrent state on disk. None if the runner keeps no snapshots.
        load_rate: Time to load one byte from disk, in seconds. 0 before the first measurement.
        compute_rate: Time to prefill one token, in seconds. 0 before the first measurement.
    """

    runner: Runner
    storage: DiskStore
    saver: Saver
    options: StoreOptions
    states: StoredStates | None = None
    load_rate: float = 0.0
    compute_rate: float = 0.0

    @property
    def private(self) -> bool:
        """Whether blocks are private to one session and its forks. This is so if the KV cache is quantised."""
        # A prefill attends to new KV before rounding it, so the KV of later tokens depends on where prefills began.
        return not self.runner.pool.format.exact

    def segment_stop(self, start: int, stop: int) -> int:
        """Return the end of the prefill segment that begins at token `start`.

        The prefill of the tokens [start, stop) is split into segments that take about `SEGMENT_SECONDS` each. Segments
        consist of whole chunks (`prefill_chunk_size`). If the request ends early, the KV of complete segments is kept.
        """
        # With streamed weights, each segment would copy all weights. Values of quantised KV depend on the segments.
        if self.private or self.runner.weights is not None:
            return stop
        # Segments are whole chunks. If a segment could end within a chunk, rounding would depend on the measured speed,
        # and the same seed would give different texts.
        chunk = self.runner.slice_tokens
        chunks = int(SEGMENT_SECONDS / (self.compute_rate * chunk)) if self.compute_rate else 1
        return min(stop, start + max(1, chunks) * chunk)

    def read_buffer(self, loaded_bytes: int, new_tokens: int) -> int:
        """Return how many layers must be loaded before a turn starts (see `read_buffer_layers`).

        The KV of the other layers is loaded while the turn computes `new_tokens`. Until the rates have been measured,
        all layers are loaded first.
        """
        layers = self.runner.adapter.geometry.layers
        if not (self.load_rate and self.compute_rate):
            return layers
        return read_buffer_layers(loaded_bytes * self.load_rate, new_tokens * self.compute_rate, layers)
