"""Working sets of all sequences in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..kernels import dispatch
from ..kernels.h2d_copy import copy_into
from ..kernels.pointer_table import FIELDS, PointerTable, entry
from .working_set import LayerSet, LookUp, WorkingSet, look_up


class WorkingLists:
    """Working sets of up to `batch` sequences. All methods must be called in the prefetch stream.

    `hold` sets the sequences. Kernels read the addresses of the working sets from a table, so a CUDA graph can be
    replayed for other sequences. The first look-up in a layer allocates memory, which a graph cannot capture, unless
    `use` was called for the layer before `hold`.
    """

    def __init__(self, layers: int, batch: int, capacity: int, device: torch.device) -> None:
        self._entries = capacity + 1
        # For each layer, the addresses of the look-up tables and of the cached KV.
        self._tables = torch.zeros(layers, 2, batch, FIELDS, dtype=torch.int64, device=device)
        # Number of table entries of each sequence. For padding, it is 0, so that kernels do not write to these tables.
        self._entry_counts = torch.zeros(batch, dtype=torch.int32, device=device)
        self._used: set[int] = set()
        self._sets: dict[int, list[LayerSet]] = {}
        self._working_sets: Sequence[WorkingSet] = ()

    def use(self, layers: Iterable[int]) -> None:
        """Make `hold` allocate the working sets of `layers`, so that a graph can capture look-ups."""
        self._used.update(layers)

    def hold(self, working_sets: Sequence[WorkingSet], padding: int) -> None:
        """Set the sequences of a batch. Look-ups do not change the working sets of the last `padding` sequences."""
        self._working_sets = working_sets
        counts = [self._entries] * (len(working_sets) - padding) + [0] * padding
        copy_into(torch.tensor(counts, dtype=torch.int32), self._entry_counts)
        self._bind()

    def release(self) -> None:
        self._working_sets, self._sets = (), {}

    def _bind(self) -> None:
        self._sets = {layer: [one.layer(layer) for one in self._working_sets] for layer in self._used}
        addresses = torch.zeros(self._tables.shape, dtype=torch.int64)
        for layer, sets in self._sets.items():
            addresses[layer] = torch.tensor([[entry(one.table) for one in sets], [entry(one.rows) for one in sets]])
        copy_into(addresses, self._tables)

    def look_up(self, layer: int, tokens: torch.Tensor, valid: torch.Tensor | None) -> LookUp:
        """Look up which of the tokens `[P, n]` are cached. Afterwards, call `take` and then `put`."""
        if layer not in self._used:
            self._used.add(layer)
            self._bind()
        stored = PointerTable(tuple(one.table for one in self._sets[layer]), self._tables[layer, 0])
        tables = dispatch.read_lists(stored, self._entries, self._entry_counts)
        found = look_up(tables, tokens, valid)
        dispatch.write_lists(tables, stored, self._entry_counts)
        return found

    def take(self, layer: int, found: LookUp, out: torch.Tensor) -> None:
        """Copy the KV of cached tokens to their positions in `out` `[planes, P, n, width]`, with P = B * Hkv."""
        dispatch.gather_slots(self._rows(layer), found.slots, out)

    def put(self, layer: int, found: LookUp, rows: torch.Tensor) -> None:
        """Store the KV of missing tokens in the slots that `found` assigns. `rows` is `[planes, P, n, width]`."""
        dispatch.scatter_slots(self._rows(layer), found.into, rows)

    def _rows(self, layer: int) -> PointerTable:
        return PointerTable(tuple(one.rows for one in self._sets[layer]), self._tables[layer, 1])
