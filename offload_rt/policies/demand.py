"""Upper bounds of a policy's memory and transfers, known before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryDemand:
    """Upper bounds on the memory and transfers of one policy, input to the memory plan (`planning/`).

    Attributes:
        dense: Layers that attend to all tokens, in ascending order.
        resident: Number of tokens (sinks and recent window) whose KV stays on the device.
        share: Largest fraction of the context that a sparse layer fetches, in [0, 1].
        key_bytes: Size in bytes of selection data per token and sparse layer.
        key_page: Tokens per page if selection data is allocated in pages. 0 if it is a `GrowingTensor`, whose capacity
            grows by a sixteenth.
        copied_bytes: Bytes per token of the copies of selection data that a layer makes to score tokens.
        basis_bytes: Bytes shared by all sequences, in the same memory as the scoring keys.
        guess_bytes: Size in bytes of the corrections for predicted queries, always on the device.
        weights_at_once: Largest number of attention weights of a prompt computed at a time; 0 if none are computed.
        whole: Longest context, in tokens, that is fetched entirely regardless of `share`.
    """

    dense: tuple[int, ...]
    resident: int
    share: float
    key_bytes: float = 0.0
    key_page: int = 0
    copied_bytes: float = 0.0
    basis_bytes: int = 0
    guess_bytes: int = 0
    weights_at_once: int = 0
    whole: int = 0

    def scoring_bytes(self, layers: int, context: int) -> int:
        """Return the size in bytes of selection data of `context` tokens in `layers` layers, without spare room."""
        return int((layers - len(self.dense)) * self.key_bytes * context)
