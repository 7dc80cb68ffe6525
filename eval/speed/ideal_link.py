"""The link of the benchmark's "ideal": every row is on the device, so nothing crosses. What the link costs a policy is
the distance to it (the paper's Figure 18 has it as "Ideal")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...core import BlockTable, KVPart, ModelGeometry, Selection, Visible
from ...pool.pool import HostPool
from ...transfer.link import PrefilledLayer, Spared, Ticket
from ...transfer.row_lists import RowLists


@dataclass(frozen=True)
class _Ticket:
    """Rows `[2, Hkv, room, d]` of a layer, of which `tokens` are attended to: the candidates (None: all of `all`), with
    `counts` of them meant, and the resident ones."""

    rows: torch.Tensor
    all: range
    visible: Visible | None = None
    selection: Selection | None = None
    bytes: int = 0
    spared: Spared | None = None

    def wait(self) -> list[KVPart]:
        """As `Ticket.wait`."""
        if self.selection is None:
            k, v = self.rows[:, :, self.all.start : self.all.stop]
            return [KVPart(k, v)]
        ranges = () if self.visible is None else (self.visible.sinks, self.visible.recent)
        resident = [KVPart(*self.rows[:, :, r.start : r.stop]) for r in ranges if r]
        tokens, room = self.selection.tokens, self.rows.shape[2]
        if not tokens.shape[1]:
            return resident
        heads = torch.arange(0, 2 * len(tokens) * room, room, device=tokens.device).view(2, -1, 1)
        picked = self.rows.flatten(0, 2).index_select(0, (heads + tokens).flatten()).view(2, *tokens.shape, -1)
        return [*resident, KVPart(picked[0], picked[1], self.selection.counts)]


class IdealLink:
    """`Link` whose rows `[L, 2, Hkv, room, d]` of each open sequence are on the device, copied there when it opens; the
    pool gets none of the new ones. For decoding only: it neither prefills nor moves rows."""

    def __init__(self, pool: HostPool, geometry: ModelGeometry, device: torch.device, room: int) -> None:
        """room: tokens that a sequence may come to."""
        self._pool, self._geometry, self._device, self._room = pool, geometry, device, room
        self._rows: dict[int, torch.Tensor] = {}

    @property
    def device_bytes(self) -> int:
        """Rows of all open sequences."""
        return sum(rows.nbytes for rows in self._rows.values())

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """There is none."""
        return 0

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """See `Link.open`."""
        geometry = self._geometry
        shape = (geometry.layers, 2, geometry.kv_heads, self._room, geometry.head_dim)
        rows = torch.empty(shape, dtype=self._pool.format.dtype, device=self._device)
        for layer in range(geometry.layers):
            at = 0
            for run in self._pool.runs(blocks, layer, range(blocks.length)):
                rows[layer, 0, :, at : at + run.k.shape[1]] = run.k.to(self._device)
                rows[layer, 1, :, at : at + run.k.shape[1]] = run.v.to(self._device)
                at += run.k.shape[1]
        self._rows[id(blocks)] = rows

    def close(self, blocks: BlockTable) -> None:
        """See `Link.close`."""
        del self._rows[id(blocks)]

    def settle(self, blocks: BlockTable) -> None:
        """See `Link.settle`: nothing is on its way."""

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """See `Link.append`: k, v `[Hkv, m, d]`; nothing is written back."""
        rows = self._rows[id(blocks)][layer]
        rows[0, :, start : start + k.shape[1]] = k
        rows[1, :, start : start + k.shape[1]] = v
        return 0

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Never asked: the benchmark does not evict."""
        raise AssertionError("rows on the device are not moved")

    def fetch(self, blocks: BlockTable, layer: int, visible: Visible, selection: Selection | None) -> _Ticket:
        """See `Link.fetch`."""
        return _Ticket(self._rows[id(blocks)][layer], visible.all, visible, selection)

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> _Ticket:
        """See `Link.fetch_range`."""
        return _Ticket(self._rows[id(blocks)][layer], tokens)

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[Visible],
        selections: Sequence[Selection],
    ) -> list[Ticket]:
        """See `Link.fetch_together`."""
        each = zip(block_tables, visible, selections, strict=True)
        return [self.fetch(blocks, layer, seen, selection) for blocks, seen, selection in each]

    def row_lists(self, batch: int, tokens: int) -> None:
        """See `Link.row_lists`: there are none."""

    def hold(self, lists: RowLists, block_tables: Sequence[BlockTable]) -> None:
        """Never asked: there are no lists."""
        raise AssertionError("this link has no lists")

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> _Ticket:
        """See `Link.fetch_more`."""
        return _Ticket(self._rows[id(blocks)][layer], range(0), None, extra)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Never asked: the benchmark's context is there already."""
        raise AssertionError("rows on the device are not prefilled")

    def check_integrity(self) -> None:
        """There is nothing to check."""
