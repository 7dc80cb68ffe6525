"""The contract of the link: one object moves rows between the host pool and the compute device and says how many bytes.

What is counted is what must cross on a machine whose device memory is its own: on the CPU, where rows are attended in
place, the same numbers appear as on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..core import BlockTable, KVPart, Selection, Visible
from .row_lists import RowLists


@dataclass(frozen=True)
class PrefilledLayer:
    """K and V of tokens [0, stop) of one layer, contiguous, valid until the next layer is taken; and what crossed the
    link for them: rows before `start` that had to be loaded, new rows written back."""

    kv: KVPart
    bytes_to_device: int
    bytes_to_host: int


@dataclass(frozen=True)
class Spared:
    """Of `asked` token rows of a ticket (of all KV heads) those that need not cross the link, counted on the device
    (int64 without axes): `rows` in all, `hits` of them because the working set has them, the others because another
    sequence asks for them first, or because only `sought` were meant."""

    asked: int
    sought: torch.Tensor
    rows: torch.Tensor
    hits: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is on the device."""
        return self.sought, self.rows, self.hits


class Ticket(Protocol):
    """Rows on their way to the device."""

    @property
    def bytes(self) -> int:
        """Of the rows that were asked for and are not resident: what crosses the link, but for `spared`."""
        ...

    @property
    def spared(self) -> Spared | None:
        """What of it does not cross, valid like the rows after `wait`; None where nothing can be spared."""
        ...

    def wait(self) -> list[KVPart]:
        """The rows, on the device. Of `fetch`: everything the layer attends to for this sequence, each token once, in
        the order sinks, recent, selected (dense: in any order), the newest token included, so `append` of the layer
        must come first. Of `fetch_more`: its rows only. Orders the compute stream behind the copies and never blocks
        the host on CUDA. The parts of a selection are valid until the next `wait` of a ticket from the same method,
        those of everything (`fetch` without a selection, `fetch_range`) for as long as they are held."""
        ...


class Link(Protocol):
    """Moves rows for any number of sequences. Not thread-safe: one engine, one link."""

    @property
    def device_bytes(self) -> int:
        """Bytes of resident rows, working sets and staging buffers that a device of its own holds for all open
        sequences."""
        ...

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """Bytes of the working set of a sequence, its tables included."""
        ...

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """A sequence starts; `sinks` and `recent` of its tokens stay resident. `origin`: an open block table with the
        same tokens, sinks and window; what of these is on the device is copied there."""
        ...

    def close(self, blocks: BlockTable) -> None:
        """A sequence ends; its resident rows are dropped."""
        ...

    def settle(self, blocks: BlockTable) -> None:
        """Waits until everything appended is in the pool: before its chunks are shared with another sequence."""
        ...

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """New rows k, v `[Hkv, m, d]` in the slots [start, start + m): the resident ones stay, all are written back to
        the pool asynchronously. Returns the bytes written back."""
        ...

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """The row in slot `source`, resident until now, replaces the one in slot `target` of the pool: it leaves the
        window, and the next `append` takes its place."""
        ...

    def fetch(self, blocks: BlockTable, layer: int, visible: Visible, selection: Selection | None) -> Ticket:
        """Starts moving the selected candidates (None: all of them). Resident rows cost nothing. Of a selection with
        counts the rows are a part of their own, with the same counts."""
        ...

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> Ticket:
        """Starts moving all rows of `tokens`, resident or not, for all sequences that hold the same chunks."""
        ...

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[Visible],
        selections: Sequence[Selection],
    ) -> list[Ticket]:
        """Like `fetch` of each, but rows of shared chunks that several selected cross once: to all but the first one's
        ticket they are spared. Each ticket still gives its own sequence's rows and no others."""
        ...

    def row_lists(self, batch: int, tokens: int) -> RowLists | None:
        """Lists of `batch` sequences of up to `tokens` tokens each, for selections whose counts stay on the device;
        None where rows are attended to where they lie."""
        ...

    def hold(self, lists: RowLists, block_tables: Sequence[BlockTable]) -> None:
        """Before a step: the lists are of these open sequences, as they are now."""
        ...

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> Ticket:
        """Starts moving rows that a repair asks for, in addition to a ticket's."""
        ...

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Takes K and V of tokens [start, ...) slice by slice, in token order, writes each back as it comes, keeps
        those that will be resident, and returns all rows of the layer, on the device."""
        ...

    def check_integrity(self) -> None:
        """Asserts that what is on the device for open sequences is what the pool has. Waits for everything."""
        ...
