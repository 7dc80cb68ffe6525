"""How rows should lie on a disk: recorded selections, and which blocks and requests they would be.

A row is K and V of a token and KV head. By head: the rows of one layer and head in a run, by position. Heads together:
those of a token's heads side by side. By clusters: as by head, tokens whose keys are near each other next to each other
(`key_clusters`). What was used lately is kept in memory (LRFU, as the pool on disk keeps it);
what is missing is read, in requests that go on over gaps that take less than beginning another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...engine.recording import Recording
from ...kv_cache.disk.requests import BLOCK, merged
from ...kv_cache.disk.row_cache import DECAY
from ...kv_cache.disk.speed import DiskSpeed
from ..core.report import Column, Report, Row
from .key_clusters import Places

WARM_UP = 20
"""Steps that fill the memory and are not counted."""


@dataclass
class _Tally:
    """Blocks that hold a row, and requests with the bytes that they read."""

    blocks: int = 0
    requests: int = 0
    bytes: int = 0

    def add(self, tokens: NDArray[np.int64], row: int, gap: int) -> None:
        """Rows of `row` bytes at `tokens` of a run."""
        if len(tokens):
            first, last = tokens * row // BLOCK, (tokens * row + row - 1) // BLOCK
            found = merged(tokens * row, row, gap, most=1 << 62).requests
            self.blocks += len(np.union1d(first, last))
            self.requests += len(found.size)
            self.bytes += int(found.size.sum())


class _Kept:
    """Rows in memory of each layer and head, at most `capacity`."""

    def __init__(self, lists: int, tokens: int, capacity: int) -> None:
        self._scores, self._held = np.zeros((lists, tokens)), np.zeros((lists, tokens), bool)
        self._capacity = capacity

    def missing(self, own: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of `tokens` that are not here; they are from now on."""
        scores, held = self._scores[own], self._held[own]
        gone: NDArray[np.int64] = tokens[~held[tokens]]
        if self._capacity:
            scores *= DECAY
            scores[tokens] += 1
            held[gone] = True
            if (over := int(held.sum()) - self._capacity) > 0:
                every = np.flatnonzero(held)
                held[every[np.argpartition(scores[every], over)[:over]]] = False
                scores[~held] = 0
        return gone


def replayed(
    recording: Recording, pair_bytes: int, share: float, speed: DiskSpeed, clusters: Sequence[Places] = ()
) -> list[Row]:
    """With `share` of all rows in memory, what each layout would read, means over steps. clusters: of each layer that
    selects, where tokens lie by clusters; of none: without that layout."""
    info, gap = recording.info, speed.gap
    heads, tokens = info.kv_heads, info.prompt_tokens
    kept = _Kept(len(info.selecting) * heads, tokens, int(share * tokens))
    tallies = {"by head": _Tally(), "heads together": _Tally(), **({"by clusters": _Tally()} if clusters else {})}
    steps = wanted = missed = 0
    for number, (_, step) in enumerate(recording.steps()):
        for layer, selected in enumerate(step):
            own = [row[row < tokens].astype(np.int64) for row in selected]
            gone = [kept.missing(layer * heads + head, row) for head, row in enumerate(own)]
            if number < WARM_UP:
                continue
            wanted, missed = wanted + sum(map(len, own)), missed + sum(map(len, gone))
            for head, row in enumerate(gone):
                tallies["by head"].add(row, pair_bytes, gap)
                if clusters:
                    tallies["by clusters"].add(clusters[layer][head, row], pair_bytes, gap)
            tallies["heads together"].add(np.unique(np.concatenate(gone)), pair_bytes * heads, gap)
        steps += number >= WARM_UP
    whole = tokens * heads * len(info.selecting) * pair_bytes
    rows = []
    for layout, tally in tallies.items():
        took = speed.seconds(tally.requests, tally.bytes) / steps
        rows.append(
            {"model": info.model.rsplit("/", 1)[-1], "context": tokens, "kept": share, "layout": layout,
             "wanted": wanted * pair_bytes / steps / whole, "hit_rate": 1 - missed / wanted,
             "missed": missed * pair_bytes / steps / whole, "blocks": tally.blocks * BLOCK / steps / whole,
             "requests": tally.requests / steps, "read": tally.bytes / steps / whole,
             "time": took / speed.seconds(0, whole)}
        )  # fmt: skip
    return rows


COLUMNS = (
    Column("model", "model"),
    Column("context", "context", ",d"),
    Column("rows in memory", "kept", ".0%"),
    Column("layout", "layout"),
    Column("wanted, of KV", "wanted", ".2%"),
    Column("from memory", "hit_rate", ".1%"),
    Column("missing, of KV", "missed", ".2%"),
    Column("their blocks, of KV", "blocks", ".1%"),
    Column("requests a step", "requests", ",.0f"),
    Column("read, of KV", "read", ".1%"),
    Column("time, of reading everything", "time", ".1%"),
)


def report(
    recordings: Sequence[Recording],
    pair_bytes: int,
    shares: Sequence[float],
    speed: DiskSpeed,
    clusters: Sequence[Sequence[Places]],
) -> Report:
    """All recordings, every share of rows in memory, every layout. clusters: of each recording, or nothing."""
    each = zip(recordings, clusters, strict=True)
    rows = [row for one, own in each for share in shares for row in replayed(one, pair_bytes, share, speed, own)]
    about = {
        "row": f"{pair_bytes} bytes, K and V of a token and head; blocks of {BLOCK}",
        "disk": f"a request {1e6 * speed.seek:.0f} us, {1e-6 / speed.byte:,.0f} MB a second: gaps of {speed.gap:,} "
        "bytes are read through",
    }
    return Report("disk_layout", "How rows should lie on a disk", about, COLUMNS, rows)
