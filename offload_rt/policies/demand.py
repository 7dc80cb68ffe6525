"""What a policy takes of the device and of the link, said before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryDemand:
    """Upper bounds of what one policy keeps and fetches, which `planning/` adds up to a plan.

    dense: layers that attend to everything, rising.
    resident: tokens (sinks and recent window) whose rows stay on the device.
    share: largest share of the context that a selecting layer fetches, in [0, 1].
    key_bytes: bytes of selection data for one token of one selecting layer.
    key_page: tokens of a page, where these data lie in pages; 0 where they grow by a sixteenth.
    basis_bytes: bytes that all sequences share and that lie where the scoring keys do.
    guess_bytes: bytes that correct a guessed query; on the device wherever the scoring keys lie.
    weights_at_once: most attention weights of a prompt that the policy computes together; 0 where it computes none.
    whole: contexts of up to so many tokens are fetched as a whole, whatever the share.
    """

    dense: tuple[int, ...]
    resident: int
    share: float
    key_bytes: float = 0.0
    key_page: int = 0
    basis_bytes: int = 0
    guess_bytes: int = 0
    weights_at_once: int = 0
    whole: int = 0

    def scoring_bytes(self, layers: int, context: int) -> int:
        """Bytes of the selection data of `context` tokens in a model of `layers` layers, without what is allocated
        ahead."""
        return int((layers - len(self.dense)) * self.key_bytes * context)
