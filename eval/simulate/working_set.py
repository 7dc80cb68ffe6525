"""What a working set saves on the link, and which rows it should keep: selections are recorded while a model goes on
with a book, replayed under every rule, and the runs are repeated with the working set switched on, which must give the
same tokens. `python -P -m offload_rt.eval.simulate.working_set`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...config import KVFormatName
from ...engine.recording import Recording, RunInfo
from ...errors import InputError
from ...llm import LLM
from ...outputs import Stats
from ...sampling_params import SamplingParams
from ...transfer.working_set import rows_within
from ..core.model_under_test import text_digest
from ..core.report import Column, Report, Row
from .replacement_policies import REMEMBERED, Cache, DecayedCache, OptimalCache, RankedCache

DECAYS = (0.5, 0.8, 0.9, 0.95, 1.0)
"""Besides the extremes that `lru` and `lfu` are."""

SIXTEEN_BIT = 2
"""Bytes of a number that the shares of KV are of, whatever the model runs in."""


@dataclass(frozen=True)
class Setup:
    """A way of selecting and of storing rows."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kv_cache_dtype: KVFormatName = "auto"


SETUPS = (
    Setup("preset rows: at most 10 % of the candidates, layer 0 dense", {"preset": "rows"}),
    Setup("4 % attended, no dense layer", {"preset": "rows", "budget": 0.04, "dense_layers": ()}),
    Setup("5 % attended, no dense layer", {"preset": "rows", "budget": 0.05, "dense_layers": ()}),
    Setup("5 % attended, no dense layer, int8 rows", {"preset": "rows", "budget": 0.05, "dense_layers": ()}, "int8"),
    Setup("5 % attended, no dense layer, int4 rows", {"preset": "rows", "budget": 0.05, "dense_layers": ()}, "int4"),
)


@dataclass(frozen=True)
class Sweep:
    """model; texts: token ids to go on from; new_tokens: how many are written for each, drawn at temperature 0.8;
    shares: sizes of the working set, tables included, as shares of the whole context's KV in 16 bit."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    shares: tuple[float, ...]
    setups: tuple[Setup, ...] = SETUPS

    def llm(self, setup: Setup, working_set: int = 0) -> LLM:
        """The model under a setup."""
        options, kv_cache_dtype = setup.options, setup.kv_cache_dtype
        return LLM(
            self.model,
            policy_options=options,
            kv_cache_dtype=kv_cache_dtype,
            working_set=working_set,
            missed_mass_every=0,
        )


@dataclass(frozen=True)
class WorkingSetRun:
    """One prompt gone on with: its new tokens, what it cost, and bytes of the layers that select (a dense layer's rows
    all cross, whatever is kept)."""

    tokens: list[int]
    stats: Stats
    selected_bytes: int


def run(llm: LLM, prompt: Sequence[int], new_tokens: int, record: Path | None = None) -> WorkingSetRun:
    """Goes on with `prompt`."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.8, seed=1, ignore_eos=True)
    tokens = [event.token_id for event in llm.stream(list(prompt), params, record)]
    stats = llm.last_stats
    assert stats is not None
    return WorkingSetRun(tokens, stats, stats.h2d_bytes - _dense_bytes(llm, stats, len(prompt)))


def _dense_bytes(llm: LLM, stats: Stats, prompt: int) -> int:
    """What dense layers fetched: in each step all rows but the resident ones."""
    policy, pool = llm.runner.policy, llm.runner.pool
    rows = sum(max(0, prompt + i + 1 - policy.sinks - policy.recent) for i in range(len(stats.attended_by_step)))
    return rows * len(stats.dense_layers) * llm.geometry.kv_heads * 2 * pool.layout.row_bytes


def sixteen_bit_bytes(llm: LLM, tokens: int) -> int:
    """KV of `tokens` tokens, 16 bit a number."""
    geometry = llm.geometry
    return 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * tokens * SIXTEEN_BIT


def sixteen_bit_row(info: RunInfo, llm: LLM) -> int:
    """Bytes of a row, K and V: a native one as if its numbers had 16 bit, a rounded one as it is."""
    native = llm.runner.pool.format.exact
    return 2 * llm.geometry.head_dim * SIXTEEN_BIT if native else info.row_bytes


def rules(capacity: int, recording: Recording) -> list[Cache]:
    """Every rule that is compared."""
    info = recording.info
    shape = (len(info.selecting), info.kv_heads, len(info.tokens))
    ranked = [RankedCache(name, capacity, shape) for name in ("lru", "lfu", "counter", REMEMBERED)]
    decayed = [DecayedCache(capacity, shape, decay) for decay in DECAYS]
    return [*ranked, *decayed, OptimalCache(capacity, recording)]


def replayed(recording: Recording, capacities: Sequence[int]) -> Iterator[tuple[Cache, int, int]]:
    """(rule, hits, selected rows) of every rule at every capacity."""
    caches = [cache for capacity in capacities for cache in rules(capacity, recording)]
    hits, rows = [0] * len(caches), 0
    for position, step in recording.steps():
        rows += sum(one.size for one in step)
        for i, cache in enumerate(caches):
            hits[i] += sum(cache.use(layer, one, position) for layer, one in enumerate(step))
    for cache, found in zip(caches, hits, strict=True):
        yield cache, found, rows


def measure(sweep: Sweep, setup: Setup, scratch: Path) -> tuple[list[Row], list[Row]]:
    """Of one setup: rows of the rules that were replayed, and of the runs that were repeated."""
    llm, plain, recordings = sweep.llm(setup), [], []
    for i, prompt in enumerate(sweep.prompts):
        plain.append(run(sweep.llm(setup), prompt, sweep.new_tokens, scratch / str(i)))
        recordings.append(Recording.open(scratch / str(i)))
    context = len(sweep.prompts[0]) + sweep.new_tokens
    whole, info = sixteen_bit_bytes(llm, context), recordings[0].info
    layers, row = len(info.selecting), sixteen_bit_row(info, llm)
    sizes = {rows_within(int(share * whole), layers, info.kv_heads, row): share for share in sweep.shares}
    sizes.pop(0, None)
    shared = {"setup": setup.name, "selected_rows": _mean_rows(recordings)}
    if not shared["selected_rows"]:
        raise InputError(f"nothing is selected of {context} tokens ({setup.name}): give a longer --context")
    tallies: dict[tuple[str, int], list[int]] = {}
    for recording in recordings:
        for cache, hits, rows in replayed(recording, list(sizes)):
            tally = tallies.setdefault((cache.policy, cache.capacity), [0, 0])
            tally[0], tally[1] = tally[0] + hits, tally[1] + rows
    ruled = [
        shared | {"rule": rule, "rows_kept": kept, "share": sizes[kept], "hit_rate": hits / rows,
                  "link_bytes": (rows - hits) * info.row_bytes, "link_bytes_without": rows * info.row_bytes}
        for (rule, kept), (hits, rows) in tallies.items()
    ]  # fmt: skip
    return ruled, [shared | _repeated(sweep, setup, kept, plain) | {"share": sizes[kept]} for kept in sizes]


def _mean_rows(recordings: Sequence[Recording]) -> float:
    """Rows that a layer selects per KV head and step."""
    steps = [one for recording in recordings for _, step in recording.steps() for one in step]
    return float(sum(one.shape[1] for one in steps)) / len(steps)


def _repeated(sweep: Sweep, setup: Setup, kept: int, plain: Sequence[WorkingSetRun]) -> Row:
    """The runs with a working set against those without."""
    again = [run(sweep.llm(setup, kept), prompt, sweep.new_tokens) for prompt in sweep.prompts]
    without, crossed = (sum(one.selected_bytes for one in runs) for runs in (plain, again))
    everything, left = (sum(one.stats.h2d_bytes for one in runs) for runs in (plain, again))
    rates = [one.stats.working_set_hit_rate or 0.0 for one in again]
    return {
        "rows_kept": kept,
        "device_bytes": again[0].stats.working_set_bytes,
        "hit_rate": sum(rates) / len(rates),
        "link_bytes_without": without,
        "link_bytes": crossed,
        "ratio": crossed / without,
        "ratio_all_layers": left / everything,
        "same_tokens": all(a.tokens == b.tokens for a, b in zip(plain, again, strict=True)),
    }


RULES = (
    Column("setup", "setup"),
    Column("selected rows a step", "selected_rows", ".0f"),
    Column("working set of KV", "share", ".1%"),
    Column("rows kept", "rows_kept"),
    Column("rule", "rule"),
    Column("hit rate", "hit_rate", ".1%"),
    Column("link bytes", "link_bytes", ",d"),
    Column("without", "link_bytes_without", ",d"),
)

RUNS = (
    Column("setup", "setup"),
    Column("selected rows a step", "selected_rows", ".0f"),
    Column("working set of KV", "share", ".1%"),
    Column("rows kept", "rows_kept"),
    Column("hit rate", "hit_rate", ".1%"),
    Column("link bytes, selecting layers", "link_bytes", ",d"),
    Column("without", "link_bytes_without", ",d"),
    Column("ratio", "ratio", ".1%"),
    Column("ratio with dense layers", "ratio_all_layers", ".1%"),
    Column("same tokens", "same_tokens"),
)

NOTES = (
    "Rows are per layer that selects and KV head. The size of a working set, tables included, is a share of the KV of",
    "the whole context at 16 bit a number; native rows count as 16 bit, rounded rows as they are stored.",
)


def report(sweep: Sweep, about: dict[str, Any], out: Path) -> list[Report]:
    """Measures everything and writes working_set_rules and working_set as .json, .csv and .md."""
    ruled: list[Row] = []
    repeated: list[Row] = []
    for setup in sweep.setups:
        with TemporaryDirectory() as scratch:
            rules_of, runs_of = measure(sweep, setup, Path(scratch))
        ruled, repeated = ruled + rules_of, repeated + runs_of
    reports = [
        Report("working_set", "A working set on the device", about, RUNS, repeated, NOTES),
        Report("working_set_rules", "Which rows a working set should keep", about, RULES, ruled, NOTES),
    ]
    for one in reports:
        one.write(out)
    return reports


def run_working_set(
    model: str,
    text: str,
    name: str,
    out: Path,
    *,
    context: int | None = None,
    new_tokens: int = 256,
    starts: Sequence[float] = (0.3, 0.7),
    shares: Sequence[float] = (0.01, 0.02, 0.04, 0.08),
) -> list[Report]:
    """`context` tokens (None: all positions of the model), the last `new_tokens` of them generated, from each of
    `starts`, shares of `text` (called `name`), on; working sets of `shares` of 16-bit KV. Raises InputError where the
    text is too short."""
    llm = LLM(model, policy="full")
    context, ids = context or llm.geometry.max_positions, llm.encode(text)
    prompts = tuple(tuple(ids[int(s * len(ids)) :][: context - new_tokens]) for s in starts)
    told = ",".join(map(str, starts))
    if new_tokens >= context or any(len(prompt) < context - new_tokens for prompt in prompts):
        raise InputError(f"the text has {len(ids)} tokens: too few for {context} from {told} of it on")
    about = {
        "model": model,
        "text": f"{name} ({text_digest(text)}), from {told} of it on",
        "context": f"{context} tokens, the last {new_tokens} of them new, temperature 0.8, seed 1",
    }
    return report(Sweep(model, prompts, new_tokens, tuple(shares)), about, out)
