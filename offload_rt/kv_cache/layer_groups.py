"""Assignment of layers to blocks. Full-attention layers share blocks; sliding-window layers have separate blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..core import BLOCK_SIZE, ModelGeometry


@dataclass(frozen=True)
class LayerGroups:
    """Division of a model's layers into groups. A block contains the KV of 64 tokens in all layers of one group.

    Group 0 contains the full-attention layers. Sliding-window layers form the groups 1 to `sliding`, which have blocks
    only for tokens inside a window. All blocks have the same size. If all layers use sliding windows, group 0 has no
    layers, and no memory belongs to its block ids.

    A block consists of `layers` *storage layers*, each as large as the KV of one full-attention layer. A full-attention
    layer takes one storage layer. A sliding-window layer with a different row shape takes one or more consecutive
    storage layers (see `ArenaLayout.window_part`). A layer that reuses the KV of an earlier layer has the same group
    and the same storage layers as the earlier layer.
    """

    layers: int  # number of storage layers per block
    group: tuple[int, ...]  # group number of each layer, `[L]`
    storage_layer: tuple[int, ...]  # index of the first storage layer of each layer, `[L]`
    sliding: int  # number of groups of sliding-window layers
    window: int  # length in tokens of the longest sliding window; 0 if there is none
    window_storage_layers: int = 1  # number of storage layers that a sliding-window layer takes

    @classmethod
    def from_geometry(cls, geometry: ModelGeometry) -> LayerGroups:
        stored = geometry.kv_layers
        sliding = [layer for layer in stored if geometry.windows[layer] is not None]
        full = [layer for layer in stored if geometry.windows[layer] is None]
        each = _window_storage_layers(geometry)
        size = max(len(full), each) if full else len(stored)
        at_once = size // each
        group, storage_layer = [0] * geometry.layers, [0] * geometry.layers
        for i, layer in enumerate(full):
            storage_layer[layer] = i
        for i, layer in enumerate(sliding):
            group[layer], storage_layer[layer] = 1 + i // at_once, i % at_once * each
        for layer, source in enumerate(geometry.kv_from):
            group[layer], storage_layer[layer] = group[source], storage_layer[source]
        window = max((window for window in geometry.windows if window is not None), default=0)
        return cls(size, tuple(group), tuple(storage_layer), -(-len(sliding) // at_once), window, each)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Indices of the layers that store their own KV instead of reusing the KV of an earlier layer."""
        first: dict[tuple[int, int], int] = {}
        for layer, place in enumerate(zip(self.group, self.storage_layer, strict=True)):
            first.setdefault(place, layer)
        return tuple(first.values())

    @property
    def full(self) -> bool:
        return 0 in self.group

    @property
    def groups(self) -> range:
        return range(0 if self.full else 1, 1 + self.sliding)

    def layers_of(self, group: int) -> list[int]:
        return [layer for layer in self.kv_layers if self.group[layer] == group]

    def storage_layers(self, layer: int) -> range:
        first = self.storage_layer[layer]
        return range(first, first + (self.window_storage_layers if self.group[layer] else 1))

    def used_storage_layers(self, group: int) -> int:
        """Return how many storage layers the blocks of `group` use. Unused storage layers come last in a block."""
        return max(self.storage_layers(layer).stop for layer in self.layers_of(group))

    def first_seen(self, position: int, floor: int = 0) -> int:
        """Return the first token that the token at `position` attends to in sliding-window layers, at least `floor`."""
        return max(floor, 0, position + 1 - self.window)

    @property
    def window_blocks(self) -> int:
        """Maximum number of blocks that a sliding window can overlap."""
        return (self.window + BLOCK_SIZE - 2) // BLOCK_SIZE + 1 if self.sliding else 0

    def window_indices(self, start: int, stop: int, floor: int = 0, *, next_window: bool = False) -> set[int]:
        """Return the indices of the window blocks that a sequence needs to compute the tokens [start, stop).

        These are the blocks of earlier tokens that token `start` attends to, and the blocks of new tokens that token
        `stop` will attend to. If `next_window`, the blocks of the next complete window are added.
        """
        before = range(self.first_seen(start, floor) // BLOCK_SIZE, -(-start // BLOCK_SIZE))
        end = -(-stop // BLOCK_SIZE)
        if next_window:
            end = max(end, self.first_seen(stop - 1, floor) // BLOCK_SIZE + self.window_blocks)
        return {*before, *range(max(start, self.first_seen(stop, floor)) // BLOCK_SIZE, end)}

    def prefill_ends(self, start: int, stop: int, floor: int = 0, *, slice_tokens: int = BLOCK_SIZE) -> Iterator[int]:
        """Yield possible ends of the first part of a prefill of the tokens [start, stop).

        The first end is `stop`. Each further end needs fewer window blocks (`window_indices`) than the ends before it.
        Ends at multiples of `slice_tokens` after `start` come first, and ends at block boundaries follow. If the part
        stops at the last end, neither this part nor a later part needs more window blocks than a decode step.
        """
        yield stop
        fewest, limit = len(self.window_indices(start, stop, floor)), min(stop, start + self.window + BLOCK_SIZE)
        slice_ends = range(start + slice_tokens, limit, slice_tokens)
        block_ends = range((start // BLOCK_SIZE + 1) * BLOCK_SIZE, limit, BLOCK_SIZE)
        for end in (*reversed(slice_ends), *reversed(block_ends)) if self.sliding else ():
            if fewest <= self.window_blocks:
                return
            if (needed := len(self.window_indices(start, end, floor))) < fewest:
                fewest = needed
                yield end

    def blocks(self, tokens: int) -> int:
        """Return the maximum number of blocks in all groups together that `tokens` tokens can need."""
        count = -(-tokens // BLOCK_SIZE)
        return self.full * count + self.sliding * min(count, self.window_blocks)

    @property
    def blocks_at_once(self) -> int:
        """Number of blocks in all groups together that a sequence needs for 64 more tokens."""
        return self.full + self.sliding


def _window_storage_layers(geometry: ModelGeometry) -> int:
    if (own := geometry.window_rows) is None:
        return 1
    planes = own.kv_heads if own.head_dim < geometry.head_dim else 2 * own.kv_heads
    return math.ceil(planes / (2 * geometry.kv_heads))
