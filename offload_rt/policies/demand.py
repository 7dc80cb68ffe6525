"""Upper bounds on a policy's memory and transfers, which are computed before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import ModelGeometry


@dataclass(frozen=True)
class MemoryDemand:
    """Upper bounds on the memory and transfers of one policy, used by the memory plan (`planning/`).

    *Selection data* means scoring keys, or other stored data by which tokens are scored. All sizes are in bytes.
    """

    dense: tuple[int, ...]  # layers that attend to all tokens, in ascending order
    resident: int  # number of tokens (sinks and recent window) whose KV stays on the device
    fetched_fraction: float  # maximum fraction of the context, in [0, 1], that a sparse layer fetches
    key_bytes: float = 0.0  # size of the selection data per token and sparse layer
    # Number of tokens per page if selection data is allocated in pages, or 0 if it is stored in a `GrowingTensor`.
    page_tokens: int = 0
    slot_tokens: int = 1  # number of tokens per slot, if selection data is stored in a `GrowingTensor`
    sequence_bytes: int = 0  # size per sequence of the selection data that does not depend on the number of tokens
    scratch_bytes: float = 0.0  # size per token of temporary copies of selection data while a layer scores tokens
    basis_bytes: int = 0  # size of the matrices that all sequences share, in the same memory as the selection data
    correction_bytes: int = 0  # size of the tensors that correct predicted queries; they are always on the device
    max_prefill_weights: int = 0  # maximum number of attention weights that the policy computes at a time in a prefill
    always_dense_until: int = 0  # length in tokens of the longest context for which every layer fetches all KV

    def scored_layers(self, geometry: ModelGeometry) -> int:
        """Return the number of sparse layers that store KV and therefore also selection data."""
        return len(set(geometry.kv_layers) - set(self.dense))

    def scoring_bytes(self, layers: int, context: int) -> int:
        return int(layers * self.key_bytes * context)
