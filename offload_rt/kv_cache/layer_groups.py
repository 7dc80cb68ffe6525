"""Which layers' rows lie together: layers that see everything in one chunk, sliding layers in chunks of their own,
which are given back when their tokens leave the window."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import CHUNK, ModelGeometry


@dataclass(frozen=True)
class LayerGroups:
    """How the layers of a model share out the chunks of the pool, all of which have rows of `layers` layers.

    Group 0 are the layers that see everything: one chunk for every 64 tokens, for as long as anybody holds it. Sliding
    layers make up the groups 1 .. `sliding`, each of as many layers (the last one's chunks may have room to spare): a
    chunk of each for every 64 tokens that a window can show. All chunks are alike, so that one arena, one limit
    and one table serve both. In a model whose layers all slide group 0 is empty, and its chunks are mere names.

    group, place: of each layer, its group and its place among the chunk's layers, `[L]`.
    window: tokens of the longest sliding window; 0 where no layer slides.
    """

    layers: int
    group: tuple[int, ...]
    place: tuple[int, ...]
    sliding: int
    window: int

    @classmethod
    def of(cls, geometry: ModelGeometry) -> LayerGroups:
        """The groups of a model's layers."""
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
        """Whether any layer sees everything."""
        return 0 in self.group

    @property
    def groups(self) -> range:
        """The groups that have layers."""
        return range(0 if self.full else 1, 1 + self.sliding)

    def layers_of(self, group: int) -> list[int]:
        """The layers of a group, by their places."""
        return [layer for layer, own in enumerate(self.group) if own == group]

    def first_seen(self, position: int, floor: int = 0) -> int:
        """The first token that a sliding layer may show to the token at `position`."""
        return max(floor, 0, position + 1 - self.window)

    @property
    def window_chunks(self) -> int:
        """The most neighbouring places that a window reaches into."""
        return (self.window + CHUNK - 2) // CHUNK + 1 if self.sliding else 0

    def chunks(self, tokens: int) -> int:
        """The most chunks that one sequence of `tokens` tokens holds, of all groups."""
        places = -(-tokens // CHUNK)
        return self.full * places + self.sliding * min(places, self.window_chunks)

    @property
    def chunks_at_once(self) -> int:
        """The chunks that a sequence takes when it begins another 64 tokens."""
        return self.full + self.sliding
