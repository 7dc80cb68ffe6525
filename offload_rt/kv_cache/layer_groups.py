"""Assignment of layers to blocks. Full-attention layers share blocks; sliding-window layers have separate blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import BLOCK_SIZE, ModelGeometry


@dataclass(frozen=True)
class LayerGroups:
    """Assignment of a model's layers to groups of at most `layers` layers. A block has 64 tokens of one group.

    Group 0 contains the full-attention layers, with one block per 64 tokens of a sequence. Sliding-window layers form
    the groups 1 to `sliding`. Each of these groups has one block per 64 tokens inside a window. Blocks of the last
    group may have unused space. All blocks have the same size, so one arena, limit and allocator serve all groups. If
    all layers use sliding windows, group 0 has no layers, and its block ids have no memory.

    Attributes:
        layers: Number of layers per block.
        group: Group number of each layer, `[L]`.
        place: Index of each layer within its blocks, `[L]`.
        sliding: Number of groups of sliding-window layers.
        window: Length in tokens of the longest sliding window; 0 if there is none.
    """

    layers: int
    group: tuple[int, ...]
    place: tuple[int, ...]
    sliding: int
    window: int

    @classmethod
    def from_geometry(cls, geometry: ModelGeometry) -> LayerGroups:
        sliding = geometry.sliding
        full = [layer for layer in range(geometry.layers) if layer not in sliding]
        size = len(full) or geometry.layers
        group, place = [0] * geometry.layers, [0] * geometry.layers
        for i, layer in enumerate(full):
            place[layer] = i
        for i, layer in enumerate(sliding):
            group[layer], place[layer] = 1 + i // size, i % size
        window = max((window for window in geometry.windows if window is not None), default=0)
        return cls(size, tuple(group), tuple(place), -(-len(sliding) // size), window)

    @property
    def full(self) -> bool:
        return 0 in self.group

    @property
    def groups(self) -> range:
        return range(0 if self.full else 1, 1 + self.sliding)

    def layers_of(self, group: int) -> list[int]:
        return [layer for layer, own in enumerate(self.group) if own == group]

    def first_seen(self, position: int, floor: int = 0) -> int:
        """Return the first token that the token at `position` sees in a sliding-window layer, but at least `floor`."""
        return max(floor, 0, position + 1 - self.window)

    @property
    def window_blocks(self) -> int:
        """Maximum number of consecutive 64-token blocks that a sliding window overlaps."""
        return (self.window + BLOCK_SIZE - 2) // BLOCK_SIZE + 1 if self.sliding else 0

    def blocks(self, tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of `tokens` tokens needs, summed over all groups."""
        places = -(-tokens // BLOCK_SIZE)
        return self.full * places + self.sliding * min(places, self.window_blocks)

    @property
    def blocks_at_once(self) -> int:
        """Number of blocks that 64 additional tokens of a sequence need, summed over all groups."""
        return self.full + self.sliding
