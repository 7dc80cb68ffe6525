"""The sequences of a decode step, with everything that does not change during the step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from ..core import VisibleTokens
from ..models.adapter import ModelAdapter
from ..models.recurrent import RecurrentState
from ..policies.base import Policy, QuerySource, source_between
from ..transfer.base import Transfer
from .sequence import Sequence
from .shared_prefix import Sharing

Attend = Callable[[torch.Tensor], torch.Tensor]
"""Attention of one layer, whose KV is being fetched.

Takes the true queries q `[H, B, d]` and returns the attention output `[B, H * d]`. The newest KV of the layer must have
been appended before.
"""


class DecodeBatch:
    """The sequences of one decode step, with the model adapter, policy and transfers that they use.

    Attributes:
        sharing: Prefixes that the sequences share. `sequences` are in its tree order: sequences with a common prefix
            are adjacent.
        dense: For each sequence, whether it is so short that every layer attends to all of its tokens.
        learning: Layers in which the policy selects, now or in a later step. The policy needs their new KV.
        selecting: Layers that select tokens in this step for at least one sequence.
        visible: Tokens that the newest token of each sequence can attend to, `[layers][B]`.
        slots: Slot of each sequence's newest token, `[layers][B]`. In sliding-window layers, token t is in slot t.
    """

    def __init__(
        self,
        sequences: Seq[Sequence],
        adapter: ModelAdapter,
        policy: Policy,
        transfer: Transfer,
        sharing: Sharing,
    ) -> None:
        self.sequences, self.adapter, self.policy, self.transfer = sequences, adapter, policy, transfer
        self.sharing, self.geometry = sharing, adapter.geometry
        self.block_tables = [s.blocks for s in sequences]
        self.dense = [s.slots.context <= policy.dense_until for s in sequences]
        self.learning = frozenset(range(self.geometry.layers)) - policy.dense_layers
        self.selecting = frozenset[int]() if all(self.dense) else self.learning
        layers, windows = self.geometry.layer_of_window, self.geometry.windows
        visible = {window: self._visible(layer) for window, layer in layers.items()}
        newest = [s.slots.newest for s in sequences], [s.position for s in sequences]
        self.visible = [visible[window] for window in windows]
        self.slots = [newest[window is not None] for window in windows]

    @property
    def tokens(self) -> list[int]:
        """The newest token of each sequence, which this step computes."""
        return [s.tokens[s.position] for s in self.sequences]

    @property
    def positions(self) -> list[int]:
        """Positions of the newest tokens in `tokens`."""
        return [s.position + s.shift for s in self.sequences]

    def query_source(self, layer: int) -> QuerySource | None:
        """Return the source of the query with which `layer` selects tokens, or None if it selects none in this step."""
        if layer not in self.selecting:
            return None
        return source_between(self.policy.query_source, self.geometry.between(layer))

    def state(self) -> RecurrentState | None:
        """Return the recurrent state of the sequences for this step, or None if the model has none."""
        slots = self.sequences[0].state_slots
        return None if slots is None else slots.view([s.state_slot for s in self.sequences])

    def _visible(self, layer: int) -> list[VisibleTokens]:
        slides = self.geometry.windows[layer] is not None
        sinks, recent = self.geometry.resident(layer, self.policy.sinks, self.policy.recent)
        return [
            VisibleTokens.of(
                s.position + 1 if slides else s.slots.context,
                sinks=sinks,
                recent=recent,
                window=self.geometry.window_at(layer, s.position + s.shift),
                floor=s.blocks.floor,
            )
            for s in self.sequences
        ]
