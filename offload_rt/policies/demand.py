"""Upper bounds of a policy's memory and transfers, computed before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import ModelGeometry


@dataclass(frozen=True)
class MemoryDemand:
    """Upper bounds on the memory and transfers of one policy, input to the memory plan (`planning/`).

    Attributes:
        dense: Layers that attend to all tokens, in ascending order.
        resident: Number of tokens (sinks and recent window) whose KV stays on the device.
        fetched_fraction: Largest fraction of the context, in [0, 1], that a layer fetches if it selects tokens.
        key_bytes: Size in bytes of scoring keys or other selection data, per token and layer that selects tokens.
        page_tokens: Tokens per page if selection data is allocated in pages; 0 if it is stored in a `GrowingTensor`.
        scratch_bytes: Size in bytes per token of temporary copies of selection data while a layer scores tokens.
        basis_bytes: Size in bytes of matrices shared by all sequences. They are in the same memory as the scoring keys.
        correction_bytes: Size in bytes of the tensors that correct predicted queries. They are always on the device.
        max_prefill_weights: Largest number of attention weights that the policy computes at a time in prefill; 0 if it
            computes none.
        always_dense_until: Longest context, in tokens, for which every layer fetches all KV.
    """

    dense: tuple[int, ...]
    resident: int
    fetched_fraction: float
    key_bytes: float = 0.0
    page_tokens: int = 0
    scratch_bytes: float = 0.0
    basis_bytes: int = 0
    correction_bytes: int = 0
    max_prefill_weights: int = 0
    always_dense_until: int = 0

    def scored_layers(self, geometry: ModelGeometry) -> int:
        """Return the number of layers with selection data: sparse layers that store KV."""
        return len(set(geometry.kv_layers) - set(self.dense))

    def scoring_bytes(self, layers: int, context: int) -> int:
        """Return the size in bytes of the selection data of `context` tokens, without spare capacity.

        `layers` is the number of layers with selection data.
        """
        return int(layers * self.key_bytes * context)
