"""Counterparts of the paper's tables and figures for a model of ours: one command, `make paper`.

    python -P -m offload_rt.eval.paper --out eval/results --book BOOK [--models reference ...] [--quick]

Each picture is named by what it shows, has its data beside it, and stands in a folder named by the model. What is done
is not done again. Accuracy axes are needles found and perplexity; harness tasks too where their files are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..core import CHUNK
from ..errors import OffloadError
from .ablation import run_ablation
from .analysis import run_analysis
from .figures import lines, picture
from .perplexity import COLUMNS, NOTES, PerplexityConfig, about, cut_windows, measure_all, run_perplexity
from .report import Column, Report, Row, RowStore
from .retrieval import RetrievalConfig, run_retrieval
from .subject import Subject, Variant, grid, text_digest

POLICIES = ("infinigen", "quest", "h2o", "streaming", "oracle")
TASKS = ("copa_local", "openbookqa_local", "winogrande_local", "piqa_local", "rte_local")
WINDOW: dict[str, Any] = {"sinks": 4, "recent": 16}
"""Resident tokens of every policy where budgets are compared: few enough that the smallest budget can select."""

LIMIT = 0.8
"""Of the full KV cache, in Table 2."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is measured. context: tokens; length: of a needle's passage."""

    context: int = 2048
    windows: int = 16
    length: int = 1024
    passages: int = 16
    budgets: tuple[float, ...] = (0.05, 0.1, 0.2)
    limit: int = 50
    timed_tokens: int = 64


QUICK = Size(context=1024, windows=4, passages=6, budgets=(0.05, 0.1), limit=10, timed_tokens=16)


@dataclass(frozen=True)
class Paper:
    """One model's counterparts. `book` is called `name`; results go to `out`."""

    subject: Subject
    book: str
    name: str
    size: Size
    out: Path
    say: Say

    @property
    def title(self) -> str:
        """For pictures."""
        return f"{self.subject.name} on {self.name}"

    def run(self, tasks: bool) -> None:
        """Everything; harness tasks only with `tasks`."""
        steps = [
            self.attention,
            self.grid_of_policies,
            self.lengths,
            self.pool_limit,
            self.retrieval,
            self.sensitivity,
            self.ablation,
        ]
        for step in [*steps, *([self.tasks] if tasks else [])]:
            began = time.monotonic()
            self.say(f"{self.title}: {(step.__doc__ or step.__name__).splitlines()[0]}")
            step()
            self.say(f"  took {time.monotonic() - began:.0f} s")

    def attention(self) -> None:
        """Table 1, Figures 4, 5, 13, 17b, 20: what attention looks like."""
        context = self.size.context
        config = PerplexityConfig(context, max(1, self.size.windows // 8), decode_from=context // 8)
        run_analysis(self.subject, self.book, self.name, config, self.out, self.say)

    def grid_of_policies(self) -> None:
        """Figures 12 and 19a: perplexity by attended share, and along the text; full with rounded KV beside it."""
        config = PerplexityConfig(self.size.context, self.size.windows)
        run_perplexity(
            self.subject, self.book, self.name, grid(POLICIES, self.size.budgets, WINDOW), config, self.out, self.say
        )

    def lengths(self) -> None:
        """Figure 19b: perplexity by context, 64 tokens attended."""
        series: dict[str, list[tuple[float, float]]] = {}
        rows: list[Row] = []
        contexts = [c for c in (256, 512, 1024, 2048, 4096) if c <= self.size.context]
        for context in contexts:
            options: dict[str, Any] = WINDOW | {"budget": 64 / context}
            variants = [Variant("full"), *(Variant(policy, options) for policy in POLICIES)]
            config = PerplexityConfig(context, self.size.windows)
            measured = measure_all(self.subject, self.book, variants, config, self.out, self.say)
            rows += [row | {"context": context} for row in measured]
            for row in measured:
                series.setdefault(row["policy"], []).append((context, row["perplexity"]))
        title = f"Perplexity by context with 64 tokens attended, {self.title}"
        with picture(self.out / "perplexity_by_context_with_64_tokens.png", title, series) as (axis,):
            lines(axis, series, x="tokens of a window", y="perplexity")
            axis.set_xscale("log", base=2)
        columns = (Column("context", "context"), *COLUMNS)
        shared = {**self.subject.identity, "text": self.name, "text_digest": text_digest(self.book)}
        Report("perplexity_by_context", title, shared, columns, rows, NOTES).write(self.out)

    def pool_limit(self) -> None:
        """Table 2: a pool of 80 % of the KV cache; perplexity, and needles that are old when they are asked for."""
        config = PerplexityConfig(self.size.context, max(2, self.size.windows // 4), self.size.context // 2)
        variants, limit = self._bounded(self.size.context)
        rows = measure_all(self.subject, self.book, variants, config, self.out, self.say)
        title = f"Perplexity with a pool of {LIMIT:.0%} of the KV cache, {self.title}"
        shared = about(self.subject, self.book, self.name, config) | {"pool_bytes": limit}
        Report("perplexity_with_a_bounded_pool", title, shared, COLUMNS, rows, NOTES).write(self.out)
        kinds = ("single", "several queries")
        passages = max(1, self.size.passages // 2)
        needles = RetrievalConfig((self.size.length,), passages, kinds, prefilled=0.6)
        variants, _ = self._bounded(self.size.length)
        out = self.out / "needles_with_a_bounded_pool"
        run_retrieval(self.subject, self.book, self.name, variants, needles, out, self.say)

    def _bounded(self, context: int) -> tuple[list[Variant], int]:
        """full, infinigen without a limit and with each eviction policy; the limit in bytes, whole chunks."""
        chunks = int(LIMIT * context) // CHUNK
        limit = chunks * self.subject.geometry.kv_bytes(CHUNK, self.subject.loaded.adapter.dtype)
        evictions: list[Any] = ["counter", "lru", "fifo", {"policy": "fifo", "protect": "none"}]
        bounded = [Variant("infinigen", {}, {"host_memory": limit, "eviction": eviction}) for eviction in evictions]
        return [Variant("full"), Variant("infinigen"), *bounded], limit

    def retrieval(self) -> None:
        """Figure 11's question on needles: accuracy by attended share."""
        config = RetrievalConfig((self.size.length,), self.size.passages)
        run_retrieval(
            self.subject, self.book, self.name, grid(POLICIES, self.size.budgets, WINDOW), config, self.out, self.say
        )

    def sensitivity(self) -> None:
        """Figures 13 and 17: needles found by skew, alpha and partial ratio, with the cost of each."""
        ours = {"scorer": "partial", "columns": "prompt"}
        skews = [Variant("infinigen", ours | {"budget": 0.2, "skew": skew}) for skew in ("svd", "balanced", "none")]
        alphas = [Variant("infinigen", {"alpha": float(a), "max_fraction": 1.0}) for a in (1, 2, 3, 4, 5, 7, 9)]
        ratios = [Variant("infinigen", {"scorer": "partial", "partial_ratio": r}) for r in (0.1, 0.2, 0.3, 0.5, 0.9)]
        config = RetrievalConfig((self.size.length,), self.size.passages)
        variants = [Variant("full"), *skews, *alphas, *ratios]
        out = self.out / "sensitivity"
        rows = run_retrieval(self.subject, self.book, self.name, variants, config, out, self.say).rows
        found = dict(zip((variant.label for variant in variants), rows, strict=True))
        self._draw_cost({"alpha": alphas, "partial_ratio": ratios}, found)
        skewed = {v.options["skew"]: [found[v.label][key] for key in ("right", "error", "missed")] for v in skews}
        title = f"Needles found by skew, {self.title}"
        with picture(self.out / "needles_found_with_and_without_skewing.png", title, skewed) as (axis,):
            axis.bar(list(skewed), [v[0] for v in skewed.values()], yerr=[v[1] for v in skewed.values()], capsize=3)
            axis.axhline(rows[0]["right"], color="#222222", linewidth=0.8, label="full")
            axis.set(xlabel="skew (20 % attended, columns by prompt)", ylabel="needles found")

    def _draw_cost(self, swept: dict[str, list[Variant]], found: dict[str, Row]) -> None:
        """Accuracy above, time of a decode step below, for each swept option (Figure 17 with its latency axis)."""
        data: dict[str, list[dict[str, Any]]] = {}
        for option, variants in swept.items():
            for variant in variants:
                row = {key: found[variant.label][key] for key in ("right", "error", "link", "sparse_attended")}
                cost = self._milliseconds(variant)
                data.setdefault(option, []).append({option: variant.options[option], "ms_per_token": cost, **row})
        title = f"Needles found and cost, {self.title}"
        with picture(self.out / "needles_and_cost_by_alpha_and_ratio.png", title, data, panels=(2, 2)) as axes:
            for column, (option, points) in enumerate(data.items()):
                right = {"needles found": [(p[option], p["right"]) for p in points]}
                errors = {"needles found": [(p["error"], p["error"]) for p in points]}
                lines(axes[column], right, x=option, y="needles found", percent="y", errors=errors)
                time_of = {"decode on this CPU, one sequence": [(p[option], p["ms_per_token"]) for p in points]}
                lines(axes[2 + column], time_of, x=option, y="ms per token")

    def _milliseconds(self, variant: Variant) -> float:
        """Mean of a decode step on this machine, one sequence; the median of three runs."""
        store = RowStore(self.out)
        key = {
            "suite": "cost",
            **self.subject.identity,
            "variant": self.subject.key(variant),
            "length": self.size.length,
        }
        row = store.get(key)
        if row is None:
            tokens = self.size.timed_tokens
            config = PerplexityConfig(self.size.length, 1, self.size.length - tokens - 1)
            text = cut_windows(self.subject, self.book, config)[0].text
            llm = self.subject.llm(variant)
            prompt, rest = text.tokens[: text.scored_from], text.tokens[text.scored_from :]
            times = []
            for _ in range(3):
                stats = llm.score([prompt], [rest], text.decode_from)[0].stats
                times.append(1000 * stats.decode_seconds / len(stats.attended_by_step))
            row = {"ms_per_token": sorted(times)[1]}
            store.put(key, row)
        return float(row["ms_per_token"])

    def ablation(self) -> None:
        """Figure 13's question: each part of the selection replaced."""
        config = PerplexityConfig(self.size.context, max(2, self.size.windows // 2))
        run_ablation(self.subject, self.book, self.name, (0.1, 0.2), config, self.out, self.say)

    def tasks(self) -> None:
        """Figure 11: harness tasks by attended share, 5-shot."""
        from .harness import TasksConfig, run_tasks

        config = TasksConfig(TASKS, num_fewshot=5, limit=self.size.limit)
        variants = grid(("infinigen", "h2o"), self.size.budgets[:2], WINDOW)
        report = run_tasks(self.subject, variants, config, self.out, own_class=True, say=self.say)
        series: dict[str, list[tuple[float, float]]] = {}
        for row in report.rows:
            if row["attended"] is not None:
                name = f"{row['task'].removesuffix('_local')}, {row['variant'].split()[0]}"
                series.setdefault(name, []).append((row["attended"], row["metrics"]["acc"][0]))
        with picture(self.out / "task_accuracy_by_attended_share.png", report.title, series) as (axis,):
            lines(axis, series, x="attended share, all layers", y="accuracy", percent="xy")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("eval") / "results")
    parser.add_argument("--book", type=Path, help="a text the model was not trained on (default: the packaged one)")
    parser.add_argument("--models", nargs="+", default=["reference"])
    parser.add_argument("--tasks", action="store_true", help="harness tasks too (files in $OFFLOAD_RT_DATA/tasks)")
    parser.add_argument("--quick", action="store_true", help="small samples, to see that everything runs")
    args = parser.parse_args(arguments)
    path = args.book or Path(str(files("offload_rt").joinpath("data", "black_arrow.txt")))
    try:
        book = path.read_text(encoding="utf-8")
        for model in args.models:
            size = QUICK if args.quick else Size()
            out = args.out / Path(model).name
            Paper(Subject(model, batch=1), book, path.name, size, out, _say).run(args.tasks)
    except (OffloadError, OSError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
