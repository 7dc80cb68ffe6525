"""What a policy's state does where the policy has nothing to do: nothing."""

from __future__ import annotations

import torch

from ..core import Selection, Visible
from .base import PolicyState
from .infinigen.scoring_keys import ScoringKeys


class PassiveState:
    """A `PolicyState` without `select` and `fork`, that learns nothing and holds nothing."""

    @property
    def device_bytes(self) -> int:
        """Nothing is held."""
        return 0

    @property
    def tail_bytes(self) -> int:
        """Nothing is estimated."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Nothing is held."""
        return 0

    @property
    def scoring_keys(self) -> ScoringKeys | None:
        """None that lists could be made of."""
        return None

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        """Nothing to learn from prompt queries `[H, m, d]`."""

    def on_keys(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Nothing to learn from keys `[Hkv, m, d]`."""

    def on_values(self, layer: int, v: torch.Tensor, start: int) -> None:
        """Nothing to learn from values `[Hkv, m, d]`."""

    def on_moved(self, layer: int, source: int, target: int) -> None:
        """Nothing is remembered by slot."""

    def repair(self, layer: int, q: torch.Tensor, visible: Visible, selection: Selection) -> Selection | None:
        """Nothing is added."""
        return None

    def tail(
        self, layer: int, q: torch.Tensor, visible: Visible, selection: Selection
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What was not selected is left out."""
        return None

    def on_attended(self, layer: int, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        """Nothing to learn from attention weights `[Hkv, n]`."""

    def fork_prefix(self, tokens: int) -> PolicyState | None:
        """Learned anew, if there is anything."""
        return None

    def check_integrity(self) -> None:
        """There is nothing to check."""
