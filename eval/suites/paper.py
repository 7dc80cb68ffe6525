"""Reproduce Table 2 and Figures 11 to 13, 17 and 19 of the InfiniGen paper with the reference models: `make paper`.

    offload-rt eval paper --out eval/results --book BOOK [--processes 2] [--quick]

Plots and their data are written to a folder named after the model. If a row with the same settings and model
fingerprint exists, it is not measured again. Harness tasks run only if their files are available.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...core import BLOCK_SIZE
from ...skewing.calibrate import cached_artifact
from ...utils.texts import read_file
from ..core.model_under_test import Evaluation, ModelUnderTest
from ..core.plots import lines, picture
from ..core.report import Report, Row, RowStore
from ..core.variants import Variant, grid, text_digest
from ..quality.perplexity import COLUMNS, NOTES, PerplexityConfig, cut_windows, measure_all, run_perplexity
from ..quality.retrieval import RetrievalConfig, run_retrieval

POLICIES = ("infinigen", "quest", "h2o", "streaming", "oracle")
CONTEXTS = (256, 512, 1024, 2048, 4096)
"""Window lengths of Figure 19b in tokens. Lengths above the model's context length are skipped."""

TASKS = ("copa_local", "openbookqa_local", "winogrande_local", "piqa_local", "rte_local")
FORMATS = ("int8", "int4", "int2")
WINDOW: dict[str, Any] = {"sinks": 4, "recent": 16}
"""Resident tokens of every policy in comparisons at equal budgets.

There are few enough of them for the smallest budget.
"""

ROWS: dict[str, Any] = {"preset": "rows"}
"""InfiniGen options for these tables. As in the paper, tokens that are not selected are ignored."""

LIMIT = 0.8
"""Size of the KV pool for Table 2, as a fraction of the KV size of a window."""

EVICTIONS: tuple[Any, ...] = ("counter", "lru", "fifo", {"policy": "fifo", "protect": "none"})
"""Eviction policies of Table 2. The last is FIFO as in the paper."""


def compared(budgets: Sequence[float], options: Mapping[str, Any]) -> list[Variant]:
    made = grid(POLICIES, budgets, options)
    return [replace(v, options=ROWS | dict(v.options)) if v.policy == "infinigen" else v for v in made]


@dataclass(frozen=True)
class PaperSize:
    """Sample sizes of the reproduction.

    Lengths and contexts are given in tokens, and budgets as fractions of the context.
    """

    context: int = 2048
    windows: int = 14
    budgets: tuple[float, ...] = (0.05, 0.1, 0.2)
    length_windows: int = 8  # windows per context of Figure 19b
    pool_windows: int = 12  # windows of Table 2
    lengths: tuple[int, ...] = (1024, 2048)
    passages: int = 14
    limit: int = 25  # documents per harness task
    timed_tokens: int = 32
    also_dense: tuple[tuple[int, ...], ...] = ()  # additional sets of dense layers to compare all policies with


SIBLING = PaperSize(
    windows=12, budgets=(0.1,), also_dense=((0, 1),), length_windows=4, pool_windows=8, lengths=(1024,), passages=10
)
"""Sample sizes for every model except the first.

Policies are also compared with a dense second layer, because the attention of this layer is spread over many tokens in
the OPT model.
"""

QUICK = PaperSize(1024, 4, (0.05, 0.1), 2, 2, (512,), 4, 10, 16)


@dataclass(frozen=True)
class Paper:
    evaluation: Evaluation
    size: PaperSize

    @property
    def title(self) -> str:
        return f"{self.evaluation.tested.name} on {self.evaluation.name}"

    def run(self, steps: Sequence[str]) -> None:
        for name in steps:
            began, step = time.monotonic(), STEPS[name]
            step(self)
            took = time.monotonic() - began
            self.evaluation.say(f"{self.title}: {(step.__doc__ or name).splitlines()[0]} Took {took:.0f} s.")

    def perplexity(self) -> None:
        """Figures 12 and 19a: perplexity by attended fraction and along the text, also with a quantized KV cache."""
        config = PerplexityConfig(self.size.context, self.size.windows)
        run_perplexity(self.evaluation, self._compared(), config)

    def _compared(self) -> list[Variant]:
        """Return the variants for the perplexity figures: each policy at each budget and with each set of dense layers.

        In addition, `full` and `infinigen` (at a budget of 10 %) run with a quantized KV cache in each of the
        `FORMATS`.
        """
        rounded: list[Variant] = []
        for kv_cache_dtype in FORMATS:
            engine = {"kv_cache_dtype": kv_cache_dtype}
            rounded += [Variant("full", {}, engine), Variant("infinigen", ROWS | WINDOW | {"budget": 0.1}, engine)]
        found = compared(self.size.budgets, WINDOW)
        for dense in self.size.also_dense:
            found += compared(self.size.budgets, WINDOW | {"dense_layers": dense})[1:]
        return found + rounded

    def lengths(self) -> None:
        """Figure 19b: perplexity by context length with 64 attended tokens."""
        series: dict[str, list[tuple[float, float]]] = {}
        rows: list[Row] = []
        for context in (c for c in CONTEXTS if c <= self.size.context):
            variants = compared([64 / context], WINDOW)
            config = PerplexityConfig(context, self.size.length_windows)
            measured = measure_all(self.evaluation, variants, config)
            rows += measured
            for row in measured:
                series.setdefault(row["policy"], []).append((context, row["perplexity"]))
        title = f"Perplexity by context with 64 tokens attended, {self.title}"
        with picture(self.evaluation.out / "perplexity_by_context_with_64_tokens.png", title, series) as (axis,):
            lines(axis, series, x="tokens of a window", y="perplexity")
            axis.set_xscale("log", base=2)
        shared = {
            **self.evaluation.tested.identity,
            "text": self.evaluation.name,
            "text_digest": text_digest(self.evaluation.text),
        }
        Report("perplexity_by_context", title, shared, COLUMNS, rows, NOTES).write(self.evaluation.out)

    def pool_limit(self) -> None:
        """Table 2: perplexity and needles with a pool of 80 % of the KV cache."""
        context, title = self.size.context, f"Perplexity of {self.title} with a pool of {LIMIT:.0%} of the KV cache"
        config = PerplexityConfig(context, self.size.pool_windows, context // 2)
        variants = [Variant("infinigen", ROWS), *self._bounded(context), Variant("full")]
        rows = measure_all(self.evaluation, variants, config)
        shown = {"against_full_shown": "against no limit [95 %]"}
        columns = tuple(replace(c, heading=shown.get(c.key, c.heading)) for c in COLUMNS[:-1])
        Report("perplexity_with_a_bounded_pool", title, self.evaluation.about(config), columns, rows, NOTES).write(
            self.evaluation.out
        )
        length, kinds = self.size.lengths[0], ("single", "several queries")
        needles = RetrievalConfig((length,), max(1, self.size.passages // 2), kinds, prefilled=0.6)
        evaluation = replace(self.evaluation, out=self.evaluation.out / "needles_with_a_bounded_pool")
        variants = [Variant("full"), Variant("infinigen", ROWS), *self._bounded(length)]
        run_retrieval(evaluation, variants, needles)

    def _bounded(self, context: int) -> list[Variant]:
        slots = int(LIMIT * context) // BLOCK_SIZE * BLOCK_SIZE
        limit = self.evaluation.tested.geometry.kv_bytes(slots, self.evaluation.tested.loaded.adapter.dtype)
        return [Variant("infinigen", ROWS, {"host_memory": limit, "eviction": e}) for e in EVICTIONS]

    def retrieval(self) -> None:
        """Figure 11 with needles: accuracy by attended fraction."""
        config = RetrievalConfig(self.size.lengths, self.size.passages)
        run_retrieval(self.evaluation, self._compared(), config)

    def sensitivity(self) -> None:
        """Figures 13 and 17: needles found and cost by skew, alpha and partial ratio."""
        ours = ROWS | {"scorer": "partial", "columns": "prompt", "budget": 0.2}
        skews = {skew: Variant("infinigen", ours | {"skew": skew}) for skew in ("svd", "balanced")}
        alphas = [Variant("infinigen", ROWS | {"alpha": float(a), "max_fraction": 1.0}) for a in (1, 2, 3, 4, 5, 7, 9)]
        partial = ROWS | {"scorer": "partial"}
        ratios = [Variant("infinigen", partial | {"partial_ratio": r}) for r in (0.1, 0.2, 0.3, 0.5, 0.9)]
        config = RetrievalConfig(self.size.lengths[:1], max(1, self.size.passages // 2))
        variants = [Variant("full"), *skews.values(), *alphas, *ratios]
        evaluation = replace(self.evaluation, out=self.evaluation.out / "sensitivity")
        rows = run_retrieval(evaluation, variants, config).rows
        found = dict(zip((variant.label for variant in variants), rows, strict=True))
        self._draw_cost({"alpha": alphas, "partial_ratio": ratios}, found)
        plain = run_retrieval(self._unskewed(evaluation.out / "unskewed"), [skews["svd"]], config)
        by_skew = {skew: found[variant.label] for skew, variant in skews.items()} | {"none": plain.rows[0]}
        skewed = {skew: [row[key] for key in ("right", "error", "missed")] for skew, row in by_skew.items()}
        title = f"Needles found by skew, {self.title}"
        with picture(self.evaluation.out / "needles_found_with_and_without_skewing.png", title, skewed) as (axis,):
            axis.bar(list(skewed), [v[0] for v in skewed.values()], yerr=[v[1] for v in skewed.values()], capsize=3)
            axis.axhline(rows[0]["right"], color="#222222", linewidth=0.8, label="full")
            axis.set(xlabel="skew (20 % attended, columns by prompt)", ylabel="needles found")

    def _unskewed(self, out: Path) -> Evaluation:
        """Return an evaluation of the model that uses the identity matrix instead of the skew from the SVD."""
        tested = self.evaluation.tested
        real = cached_artifact(tested.loaded, "svd")
        unit = torch.eye(real.query.shape[-1], dtype=real.query.dtype).expand_as(real.query).clone()
        replace(real, query=unit, key=unit).save(out / "skew.safetensors")
        plain = ModelUnderTest(tested.model, skew=str(out / "skew.safetensors"), batch=tested.batch)
        return replace(self.evaluation, tested=plain, out=out)

    def _draw_cost(self, swept: dict[str, list[Variant]], found: dict[str, Row]) -> None:
        data: dict[str, list[dict[str, Any]]] = {}
        for option, variants in swept.items():
            for variant in variants:
                row = {key: found[variant.label][key] for key in ("right", "error", "fetched", "sparse_attended")}
                cost = self._milliseconds(variant)
                data.setdefault(option, []).append({option: variant.options[option], "ms_per_token": cost, **row})
        title = f"Needles found and cost, {self.title}"
        with picture(
            self.evaluation.out / "needles_and_cost_by_alpha_and_ratio.png", title, data, panels=(2, 2)
        ) as axes:
            for column, (option, points) in enumerate(data.items()):
                right = {"needles found": [(p[option], p["right"]) for p in points]}
                errors = {"needles found": [(p["error"], p["error"]) for p in points]}
                lines(axes[column], right, x=option, y="needles found", percent="y", errors=errors)
                time_of = {"decode on this CPU, one sequence": [(p[option], p["ms_per_token"]) for p in points]}
                lines(axes[2 + column], time_of, x=option, y="ms per token")

    def _milliseconds(self, variant: Variant) -> float:
        """Return the mean time in ms of a decode step with one sequence. It is the median of three runs."""
        length = self.size.lengths[0]
        key = {
            "suite": "cost",
            **self.evaluation.tested.identity,
            "variant": self.evaluation.tested.key(variant),
            "length": length,
        }

        def measure() -> Row:
            config = PerplexityConfig(length, 1, length - self.size.timed_tokens - 1)
            text = cut_windows(self.evaluation.tested, self.evaluation.text, config)[0].text
            llm = self.evaluation.tested.llm(variant)
            prompt, rest = text.tokens[: text.scored_from], text.tokens[text.scored_from :]
            times = []
            for _ in range(3):
                stats = llm.score([prompt], [rest], text.decode_from)[0].stats
                times.append(1000 * stats.decode_seconds / len(stats.attended_by_step))
            return {"ms_per_token": sorted(times)[1]}

        return float(RowStore(self.evaluation.out).once(key, measure)["ms_per_token"])

    def tasks(self) -> None:
        """Figure 11: harness tasks by attended fraction, 5-shot."""
        from ..quality.lm_eval_tasks import TasksConfig, run_tasks

        config = TasksConfig(TASKS, num_fewshot=5, limit=self.size.limit)
        variants = [v for v in compared(self.size.budgets[:2], WINDOW) if v.policy in ("full", "infinigen", "h2o")]
        report = run_tasks(self.evaluation.tested, variants, config, self.evaluation.out, say=self.evaluation.say)
        series: dict[str, list[tuple[float, float]]] = {}
        for row in report.rows:
            name = f"{row['task'].removesuffix('_local')}, {row['policy']}"
            series.setdefault(name, []).append((row["attended"], row["metrics"]["acc"][0]))
        with picture(self.evaluation.out / "task_accuracy_by_attended_share.png", report.title, series) as (axis,):
            lines(axis, series, x="attended share, all layers", y="accuracy", percent="xy")


STEPS: dict[str, Callable[[Paper], None]] = {
    "perplexity": Paper.perplexity,
    "retrieval": Paper.retrieval,
    "pool_limit": Paper.pool_limit,
    "sensitivity": Paper.sensitivity,
    "lengths": Paper.lengths,
    "tasks": Paper.tasks,
}
"""Steps of the reproduction by name. The longest step comes first."""


@dataclass(frozen=True)
class PaperJob:
    model: str
    step: str
    size: PaperSize
    book: Path
    out: Path

    def __call__(self) -> str:
        out = self.out / Path(self.model).name
        book = read_file(str(self.book))
        Paper(Evaluation(ModelUnderTest(self.model), book, self.book.name, out, _say), self.size).run([self.step])
        return f"{self.model}: {self.step}"


def run_jobs(jobs: Sequence[PaperJob], processes: int) -> None:
    """Run jobs in order, up to `processes` at a time.

    If a job fails, the waiting jobs are cancelled, and the error is raised when the running jobs have ended.
    """
    if processes == 1:
        for job in jobs:
            job()
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        began, waiting = time.monotonic(), [pool.submit(job) for job in jobs]
        try:
            for done, future in enumerate(as_completed(waiting), start=1):
                _say(f"{done} of {len(jobs)} done after {(time.monotonic() - began) / 60:.1f} min ({future.result()})")
        finally:
            pool.shutdown(cancel_futures=True)


def run_paper(
    models: Sequence[str], book: Path, out: Path, *, steps: Sequence[str], processes: int = 1, quick: bool = False
) -> None:
    """Run `steps` (keys of `STEPS`) for each model. The first model gets the largest samples.

    Raises InputError if the book cannot be read.
    """
    sizes = [QUICK if quick else SIBLING if i else PaperSize() for i in range(len(models))]
    jobs = [PaperJob(m, step, size, book, out) for m, size in zip(models, sizes, strict=True) for step in steps]
    read_file(str(book))
    run_jobs(jobs, processes)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
