"""Recorded selections replayed offline: what a working set on the device would have saved on the link, and what each
victim policy would have thrown out of a smaller pool that was selected later.

Selections are taken as they were: a run that had lost a token would have gone on with others, and its later queries
would differ. Miss rates compare victim policies; they are no perplexities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import EvictionOptions
from ...engine.recording import Recording, RunInfo, StepSelections
from ...errors import ConfigError, InputError
from ...kv_cache.eviction import SlotState, victims
from ...utils.config_fields import check_choice
from ..core.figures import lines, picture
from ..core.report import Column, Report, Row
from .replacement_policies import CACHES, Cache, Shape, make_cache

Say = Callable[[str], None]

CHUNK_STEPS = 64
"""Steps of a point in the pictures."""


@dataclass(frozen=True)
class ReplayConfig:
    """working_sets: rows kept per layer and KV head, as shares of the run's tokens. caches: of CACHES. budgets: pool
    limits, as shares of the run's tokens. evictions: victim policies."""

    working_sets: tuple[float, ...] = (0.05, 0.1, 0.2)
    caches: tuple[str, ...] = CACHES
    budgets: tuple[float, ...] = (0.5, 0.8)
    evictions: tuple[EvictionOptions, ...] = (
        EvictionOptions("fifo", "none"),
        EvictionOptions("fifo"),
        EvictionOptions("lru"),
        EvictionOptions("counter"),
    )

    def __post_init__(self) -> None:
        for name in ("working_sets", "budgets"):
            for share in getattr(self, name):
                if not 0 < share <= 1:
                    raise ConfigError(f"{name}={share} must be in (0, 1], a share of the run's tokens")
        for cache in self.caches:
            check_choice("cache", cache, CACHES)


class ShrunkPool:
    """A pool of `limit` token slots in which each layer overwrites victims of its own, as the runtime's does. The
    prompt is cut to the limit before the first step, when nothing has been selected: oldest first but for what is
    spared."""

    def __init__(self, options: EvictionOptions, limit: int, info: RunInfo) -> None:
        """Raises ConfigError where the limit does not hold what is always spared."""
        self.options, self.limit = options, limit
        self._sinks = info.sinks if options.protect == "window" else 0
        self._recent = info.recent
        if limit <= self._sinks + self._recent:
            raise ConfigError(
                f"a pool of {limit} tokens has none to overwrite: {self._sinks} sinks and {self._recent} recent tokens "
                "are spared; raise --budgets"
            )
        layers, prompt = len(info.selecting), info.prompt_tokens
        self._state = SlotState.empty(layers, max(limit, prompt))
        self._state.fill(range(min(prompt, self._state.position.shape[1])), prompt, self._recent)
        self._slot_of = torch.full((layers, len(info.tokens) + 1), -1)
        self._slot_of[:, :prompt] = torch.arange(prompt)
        self._used = prompt
        self._spare(prompt, prompt - limit)

    def enter(self, position: int) -> None:
        """The token at `position` comes in."""
        if self._used < self.limit:
            slots = torch.full((len(self._slot_of),), self._used)
            self._used += 1
        else:
            slots = self._evict(position, 1)[:, 0]
        self._state.place(slots, position, position, self._recent)
        self._slot_of[:, position] = slots

    def use(self, layer: int, rows: NDArray[np.int32], step: int) -> int:
        """Rows `[Hkv, n]` of a layer are selected; how many of them are gone."""
        slots = self._slot_of[layer][torch.from_numpy(rows).long()]
        self._state.touch(layer, slots[slots >= 0], step)
        return int((slots < 0).sum())

    def _spare(self, position: int, excess: int) -> None:
        """Empties the `excess` slots that give way first."""
        if excess > 0:
            gone = self._evict(position, excess)
            self._state.position.scatter_(1, gone, -1)

    def _evict(self, position: int, count: int) -> torch.Tensor:
        """SlotTable `[layers, count]` of victims, whose tokens are forgotten."""
        held = self._state.position
        protected = (held < self._sinks) | (held >= position - self._recent)
        slots = victims(self.options.policy, self._state, protected, position, count)
        assert bool((slots >= 0).all()), "the limit is above what is spared"
        self._slot_of.scatter_(1, held.gather(1, slots), -1)
        return slots

    def check_integrity(self) -> None:
        """Asserts that both tables agree and the limit holds."""
        held = (self._state.position >= 0).sum(1)
        assert int(held.max()) <= max(self.limit, 1)
        for layer, table in enumerate(self._slot_of):
            there = (table >= 0).nonzero()[:, 0]
            assert torch.equal(self._state.position[layer][table[there]], there)
            assert len(there) == int(held[layer])


def replay(recording: Recording, config: ReplayConfig, say: Say = lambda line: None) -> tuple[list[Row], list[Row]]:
    """Rows of the working sets and rows of the pools, in one pass over the recording. Raises InputError where nothing
    was selected."""
    info = recording.info
    tokens, layers = len(info.tokens), len(info.selecting)
    shape = (layers, info.kv_heads, tokens)
    sets = [make_cache(c, math.ceil(f * tokens), shape) for f in config.working_sets for c in config.caches]
    pools = [ShrunkPool(e, math.ceil(b * tokens), info) for b in config.budgets for e in config.evictions]
    actors: list[Cache | ShrunkPool] = [*sets, *pools]
    tallies = {actor: _Tally() for actor in actors}
    selected: list[int] = []
    for position, step in recording.steps():
        for pool in pools:
            pool.enter(position)
        selected.append(sum(rows.size for rows in step))
        for actor in actors:
            tallies[actor].add(sum(actor.use(layer, rows, position) for layer, rows in enumerate(step)))
        if len(selected) % 500 == 0:
            say(f"{len(selected)} steps")
    if not sum(selected):
        raise InputError(f"{str(recording.folder)!r} holds no selections: the run ended at once or selected nothing")
    for actor in actors:
        actor.check_integrity()
    shared = {"selected_rows": sum(selected), "steps": len(selected), "row_bytes": info.row_bytes}
    return (
        [_set_row(one, tallies[one], selected, tokens, shared, shape) for one in sets],
        [_pool_row(one, tallies[one], selected, tokens, shared) for one in pools],
    )


class _Tally:
    """Rows counted in each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def add(self, rows: int) -> None:
        self.steps.append(rows)

    def curve(self, selected: Sequence[int]) -> list[tuple[float, float]]:
        """(step, share of the selected rows) of each CHUNK_STEPS steps."""
        points = []
        for start in range(0, len(self.steps), CHUNK_STEPS):
            part = slice(start, start + CHUNK_STEPS)
            if total := sum(selected[part]):
                points.append((start + len(self.steps[part]) / 2, sum(self.steps[part]) / total))
        return points


def _set_row(one: Cache, tally: _Tally, selected: list[int], tokens: int, shared: Row, shape: Shape) -> Row:
    hits, rows = sum(tally.steps), sum(selected)
    row_bytes = shared["row_bytes"]
    return {
        **shared,
        "cache": one.policy,
        "rows_kept": one.capacity,
        "share_kept": one.capacity / tokens,
        "device_bytes": one.capacity * shape[0] * shape[1] * row_bytes,
        "hit_rate": hits / rows,
        "link_bytes": rows * row_bytes,
        "link_bytes_saved": hits * row_bytes,
        "samples": {"hit_rate": tally.curve(selected)},
    }


def _pool_row(one: ShrunkPool, tally: _Tally, selected: list[int], tokens: int, shared: Row) -> Row:
    return {
        **shared,
        "eviction": one.options.policy,
        "protect": one.options.protect,
        "limit_tokens": one.limit,
        "limit_share": one.limit / tokens,
        "missed_rows": sum(tally.steps),
        "miss_rate": sum(tally.steps) / sum(selected),
        "steps_with_misses": sum(rows > 0 for rows in tally.steps) / len(tally.steps),
        "samples": {"miss_rate": tally.curve(selected)},
    }


SET_COLUMNS = (
    Column("leaves first", "cache"),
    Column("rows per layer and head", "rows_kept"),
    Column("share of the tokens", "share_kept", ".1%"),
    Column("device bytes", "device_bytes", ",d"),
    Column("hit rate", "hit_rate", ".1%"),
    Column("link bytes", "link_bytes", ",d"),
    Column("saved", "link_bytes_saved", ",d"),
)

POOL_COLUMNS = (
    Column("eviction", "eviction"),
    Column("protect", "protect"),
    Column("pool, tokens", "limit_tokens"),
    Column("share of the tokens", "limit_share", ".1%"),
    Column("selected rows that were gone", "miss_rate", ".2%"),
    Column("steps with any", "steps_with_misses", ".1%"),
)

SET_NOTES = (
    "A row is K and V of one token, layer and KV head. Link bytes are those of the layers that select, repairs",
    "included; hits need no link. The working set costs device memory as stated.",
)

POOL_NOTES = (
    "Selections are replayed as recorded: a run that had lost these rows would have chosen others. Where the prompt is",
    "longer than the pool, it is cut to it before the first step, oldest first but for what is protected.",
)


def run_replay(recording: Recording, config: ReplayConfig, out: Path, say: Say = lambda line: None) -> list[Report]:
    """`replay`, written as working_set.json, .csv, .md, .png and eviction.*; the reports. Empty tables are left out."""
    info = recording.info
    sets, pools = replay(recording, config, say)
    about = {
        "model": info.model,
        "fingerprint": info.fingerprint,
        "policy": info.policy,
        "options": dict(info.options),
        "prompt_tokens": info.prompt_tokens,
        "tokens": len(info.tokens),
        "layers_that_select": list(info.selecting),
        "layers": info.layers,
        "sinks": info.sinks,
        "recent": info.recent,
    }
    title = f"{info.model}, {info.policy}, {len(info.tokens):,} tokens"
    made = []
    if sets:
        made.append(Report("working_set", f"A working set on the device: {title}", about, SET_COLUMNS, sets, SET_NOTES))
    if pools:
        made.append(Report("eviction", f"A smaller pool: {title}", about, POOL_COLUMNS, pools, POOL_NOTES))
    for report in made:
        report.write(out)
    if sets:
        _draw(made[0], out / "working_set.png", "hit_rate", "share of selected rows on the device")
    if pools:
        _draw(made[-1], out / "eviction.png", "miss_rate", "share of selected rows that were gone")
    return made


def _draw(report: Report, path: Path, value: str, y: str) -> None:
    """The value along the run, and over the size of cache or pool."""
    along = {" ".join(_names(row)): row["samples"][value] for row in report.rows}
    by_size: dict[str, list[tuple[float, float]]] = {}
    for row in report.rows:
        size = "share_kept" if "cache" in row else "limit_share"
        by_size.setdefault(_names(row)[0], []).append((row[size], row[value]))
    data: dict[str, Any] = {"along_the_run": along, "by_size": by_size}
    with picture(path, report.title, data, panels=(1, 2)) as (left, right):
        lines(left, by_size, x="share of the run's tokens that fit", y=y, percent="xy")
        lines(right, along, x=f"step (means of {CHUNK_STEPS})", y=y, percent="y")


def _names(row: Row) -> tuple[str, str]:
    """Name of the policy, and of the size."""
    if "cache" in row:
        return row["cache"], f"{row['share_kept']:.0%}"
    spared = "" if row["protect"] == "window" else " protect=none"
    return f"{row['eviction']}{spared}", f"{row['limit_share']:.0%}"


def reads(recording: Recording) -> Iterator[tuple[int, StepSelections]]:
    """Steps of the recording with the token that each one wrote: (position of the written token, selections)."""
    for position, step in recording.steps():
        if position + 1 < len(recording.info.tokens):
            yield position + 1, step
