"""Default methods of a policy state: no-ops."""

from __future__ import annotations

import torch

from ..core import Selection, VisibleTokens
from .base import PolicyState
from .infinigen.scoring_keys import ScoringKeys


class PassiveState:
    """Base class of policy states. Implements every method except `select` and `fork`, as a no-op."""

    @property
    def device_bytes(self) -> int:
        return 0

    @property
    def approximate_bytes(self) -> int:
        return 0

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def scoring_keys(self) -> ScoringKeys | None:
        return None

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        """Ignore prompt queries `[H, m, d]`."""

    def on_keys(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Ignore keys `[Hkv, m, d]`."""

    def on_values(self, layer: int, v: torch.Tensor, start: int) -> None:
        """Ignore values `[Hkv, m, d]`."""

    def on_moved(self, layer: int, source: int, target: int) -> None:
        """Do nothing: no data is stored by slot."""

    def repair(self, layer: int, q: torch.Tensor, visible: VisibleTokens, selection: Selection) -> Selection | None:
        return None

    def merge_approximate(
        self,
        layer: int,
        q: torch.Tensor,
        visible: VisibleTokens,
        selection: Selection,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return out, lse

    def on_attended(self, layer: int, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        """Ignore attention weights `[Hkv, n]`."""

    def fork_prefix(self, tokens: int) -> PolicyState | None:
        return None

    def check_integrity(self) -> None:
        """Do nothing: there is no data."""
