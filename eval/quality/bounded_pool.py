"""Perplexity with a pool smaller than the KV cache, by eviction policy (InfiniGen, Table 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core import CHUNK
from ...errors import ConfigError
from ..core.model_under_test import ModelUnderTest, Variant
from ..core.report import Column, Report, Row
from .perplexity import COST, WHAT, PerplexityConfig, about, compare, measure_all, shown_interval

EVICTIONS: dict[str, Any] = {
    "counter": "counter",
    "lru": "lru",
    "fifo": "fifo",
    "fifo, nothing protected (paper)": {"policy": "fifo", "protect": "none"},
}
"""Eviction policies by their name in the table."""

LIMIT = 0.8
"""Pool size relative to the KV cache of a window, as in the paper."""


@dataclass(frozen=True)
class BoundedPoolConfig:
    """Settings of the evaluation.

    Attributes:
        context: Tokens per window; the first half is prefilled, the second half decoded.
        windows: Number of windows, evenly spaced over the text.
        limit: Pool size as a fraction of the KV cache of a window, rounded down to whole blocks.
    """

    context: int = 2048
    windows: int = 16
    limit: float = LIMIT

    def __post_init__(self) -> None:
        if not 0 < self.limit < 1:
            raise ConfigError(f"limit={self.limit} must be a share in (0, 1)")
        if self.slots <= self.context // 2:
            raise ConfigError(
                f"{self.limit:.0%} of {self.context} tokens are {self.slots} in whole chunks of {CHUNK}, and the "
                f"{self.context // 2} that are prefilled must fit; raise the context or the limit"
            )

    @property
    def slots(self) -> int:
        """Capacity of the pool in tokens."""
        return int(self.limit * self.context) // CHUNK * CHUNK

    @property
    def perplexity(self) -> PerplexityConfig:
        """Window settings. Tokens after the pool is full are also scored separately."""
        return PerplexityConfig(self.context, self.windows, self.context // 2, tail_from=self.slots)


def variants(pool_bytes: int, options: Mapping[str, Any]) -> list[tuple[str, Variant]]:
    """Return (eviction, variant) pairs.

    These are full and infinigen without a limit, and infinigen in `pool_bytes` under each eviction policy.
    """
    bounded = [
        (name, Variant("infinigen", options, {"host_memory": pool_bytes, "eviction": eviction}))
        for name, eviction in EVICTIONS.items()
    ]
    return [("no limit", Variant("full")), ("no limit", Variant("infinigen", options)), *bounded]


def run_bounded_pool(
    tested: ModelUnderTest,
    text: str,
    name: str,
    config: BoundedPoolConfig,
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Measure on `text` (called `name`) and write perplexity_with_a_bounded_pool.json, .csv and .md to `out`.

    Rows already in `out` are reused. `options` are options of infinigen.
    """
    pool_bytes = tested.geometry.kv_bytes(config.slots, tested.loaded.adapter.dtype)
    named = variants(pool_bytes, options or {})
    measured = measure_all(tested, text, name, [variant for _, variant in named], config.perplexity, out, say)
    unlimited = measured[1]
    rows: list[Row] = []
    for (eviction, variant), row in zip(named, measured, strict=True):
        compared = row | {"eviction": eviction} | compare(row, unlimited, "against_unlimited")
        compared |= compare(row, unlimited, "tail_against_unlimited", part="tail_")
        for what in ("against_unlimited", "tail_against_unlimited"):
            compared[f"{what}_shown"] = shown_interval(compared, what)
        compared["pool"] = config.slots / config.context if variant.engine else 1.0
        rows.append(compared)
    title = f"Perplexity of {tested.name} on {name} with a pool of {config.limit:.0%} of the KV cache"
    shared = about(tested, text, name, config.perplexity)
    shared |= {"pool_slots": config.slots, "pool_bytes": pool_bytes}
    report = Report("perplexity_with_a_bounded_pool", title, shared, COLUMNS, rows, NOTES)
    report.write(out)
    return report


COLUMNS = (
    *WHAT[:-1],
    Column("policy", "policy"),
    Column("eviction", "eviction"),
    Column("pool", "pool", ".1%"),
    *COST,
    Column("missed mass", "missed", ".3f"),
    Column("perplexity", "perplexity", ".3f"),
    Column("± SE", "perplexity_error", ".3f"),
    Column("against no limit, all decoded tokens [95 %]", "against_unlimited_shown"),
    Column("perplexity, tokens after the pool is full", "tail_perplexity", ".3f"),
    Column("against no limit [95 %]", "tail_against_unlimited_shown"),
)

NOTES = (
    "The first half of a window is prefilled, the other half decoded; what does not fit the pool overwrites victims,",
    "layer by layer. Attended and link are shares of the rows that the pool holds; missed mass counts what was lost.",
    "Standard errors and paired bootstrap intervals (10,000 draws) are over windows.",
)
