"""What a selection loses on trained models that people use: `make real`, `offload-rt eval real`.

Models are folders (`--models smollm2 qwen` below $OFFLOAD_RT_MODELS). Everything is measured in parts; a part stops
beginning new rows after `--minutes`, what is done is not done again, and its tables are written from what there is: a
second run goes on. Perplexity and ablation are computed layer by layer in bfloat16 with few windows; RULER and question
tasks go through the LM Evaluation Harness and the decode path. Tables: eval/results/MODEL.
"""

from __future__ import annotations

import json
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, InputError
from ...policies.base import Policy
from ...policies.infinigen.policy import InfiniGen
from ...utils.config_fields import check_choice
from ...utils.texts import read_file
from ..core.model_under_test import ModelUnderTest, Variant
from ..core.report import Column, Report, Row
from ..quality.ablation import parts as ablation_parts
from ..quality.lm_eval_tasks import COLUMNS as TASK_COLUMNS
from ..quality.lm_eval_tasks import TasksConfig, run_tasks
from ..quality.perplexity import NOTES, WHAT, PerplexityConfig, measure_all
from ..quality.retrieval import RetrievalConfig, run_retrieval

WINDOW: dict[str, Any] = {"sinks": 4, "recent": 16, "dense_layers": ()}
"""Resident tokens of every policy where budgets are compared. Every layer selects: a budget is a share of all rows."""

ALONE = 1e-4
"""A budget below the window: no exact rows but the resident ones, so that low bits stand alone."""

BUDGETS = (0.05, 0.02)
CONTEXTS = {"smollm2": (4096, 8192), "qwen": (8192, 16384)}
"""Tokens of a window, by model; of any other the first that are below its positions."""

RULER = (
    "ruler_cwe", "ruler_fwe", "ruler_vt", "niah_multikey_2", "niah_multivalue_local", "niah_multiquery_local",
    "niah_multikey_3", "niah_single_1",
)  # fmt: skip
"""Those that a selection of few rows may fail at first."""

TASKS = ("piqa_local", "copa_local", "openbookqa_local", "winogrande_local", "rte_local", "lambada_local")

Say = Callable[[str], None]


@dataclass(frozen=True)
class RealSize:
    """How much is measured. windows, decoded: of a text, and tokens of each that are decoded; limit: documents of a
    task; passages: of needles, of each kind; contexts: tokens of a window (none: the model's own list); texts: kinds
    of text; tasks: of part ruler or tasks (none: all of the part)."""

    windows: int = 3
    decoded: int = 512
    limit: int = 25
    passages: int = 4
    contexts: tuple[int, ...] = ()
    texts: tuple[str, ...] = ("novel", "code", "wikipedia")
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in self.texts:
            check_choice("text", kind, ("novel", "code", "wikipedia"))
        for task in self.tasks:
            check_choice("task", task, (*RULER, *TASKS))


SMALL = RealSize(1, 16, 2, 1, (256,))
"""Shows that all of it runs; measures nothing."""


def compared(budgets: Sequence[float] = BUDGETS) -> list[Variant]:
    """full; infinigen as it is; at every budget infinigen with and without the tail, and the true top tokens; the
    rivals at the first budget; low bits alone; infinigen without a tail, and as in its paper."""
    found = [Variant("full"), Variant("infinigen", {"preset": "default"})]
    for budget in budgets:
        sized = WINDOW | {"budget": budget}
        found += [Variant("infinigen", sized | {"tail": tail}) for tail in ("int4", "int2", "off")]
        found += [Variant("oracle", sized)]
    found += [Variant(policy, WINDOW | {"budget": budgets[0]}) for policy in ("quest", "h2o", "streaming")]
    found += [Variant("infinigen", WINDOW | {"budget": ALONE, "tail": tail}) for tail in ("int4", "int2")]
    return found + [Variant("infinigen", {"preset": name}) for name in ("rows", "paper")]


def looked_up(budget: float = BUDGETS[0]) -> list[Variant]:
    """full; infinigen as it is, and at `budget` with and without the tail; quest and streaming: whether what is asked
    for is still found."""
    sized = WINDOW | {"budget": budget}
    ours = [Variant("infinigen", sized | {"tail": tail}) for tail in ("int4", "off")]
    rivals = [Variant(policy, sized) for policy in ("quest", "streaming")]
    return [Variant("full"), Variant("infinigen", {"preset": "default"}), *ours, *rivals]


@dataclass(frozen=True)
class Real:
    """One model's tables. `out`: its folder; `until`: when no new row is begun, of `time.monotonic`; `chosen`: the rows
    that are measured, full first, where they are not each part's own."""

    tested: ModelUnderTest
    size: RealSize
    out: Path
    data: Path
    until: float
    say: Say
    chosen: Sequence[Variant] = ()

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of windows, at most the model's positions."""
        most = self.tested.geometry.max_positions
        wanted = self.size.contexts or CONTEXTS.get(self.tested.name, (4096, 8192))
        return tuple(context for context in wanted if context <= most)

    def late(self) -> bool:
        """Whether no new row is to be begun."""
        return time.monotonic() > self.until

    def texts(self) -> list[tuple[str, str, str]]:
        """(kind, name, text): a held-out novel, code, Wikipedia. Code is Python source of the installed standard
        library, since no corpus is at hand: the models may have seen it, so it shows code's attention, not skill."""
        novel, wiki = self.data / "books" / "war_and_peace.txt", self.data / "wikitext-2" / "valid_raw.txt"
        library = Path(sysconfig.get_paths()["stdlib"])
        sources = (library / name for name in ("argparse.py", "tarfile.py", "typing.py", "subprocess.py", "ast.py"))
        code = "\n\n".join(read_file(str(source)) for source in sources)
        found = [
            ("novel", novel.name, read_file(str(novel))),
            ("code", "standard library (Python)", code),
            ("wikipedia", f"wikitext-2 {wiki.name}", read_file(str(wiki))),
        ]
        return [text for text in found if text[0] in self.size.texts]

    def perplexity(self) -> None:
        """Perplexity of three kinds of text under every policy at stated budgets."""
        rows: list[Row] = []
        for context in self.contexts:
            config = PerplexityConfig(context, self.size.windows, context - self.size.decoded)
            for _, name, text in self.texts():
                rows += self._rows(text, name, self.chosen or compared(), config)
        self._write("perplexity", f"Perplexity of {self.tested.name} under each policy", rows)

    def ablation(self) -> None:
        """Each part of the selection replaced in turn at 5 %, on a novel."""
        _, name, text = self.texts()[0]
        config = PerplexityConfig(self.contexts[0], self.size.windows, self.contexts[0] - self.size.decoded)
        variants = [Variant("full"), *(variant for _, variant in ablation_parts(BUDGETS[0]))]
        rows = self._rows(text, name, variants, config)
        self._write("ablation", f"Parts of the selection replaced, {self.tested.name}", rows)

    def bytes(self) -> None:
        """Low bits alone and with exact rows: what each point costs and loses, on a novel."""
        _, name, text = self.texts()[0]
        config = PerplexityConfig(self.contexts[0], self.size.windows, self.contexts[0] - self.size.decoded)
        rounded = [Variant("full", {}, {"kv_cache_dtype": bits}) for bits in ("int8", "int4", "int2")]
        points = [(0.02, "int4"), (0.05, "int4"), (0.05, "int2"), (0.01, "int4"), (0.1, "off")]
        tails = [Variant("infinigen", WINDOW | {"budget": budget, "tail": tail}) for budget, tail in points]
        rows = self._rows(text, name, [Variant("full"), *rounded, *tails], config)
        self._write("bytes", f"Low bits with and without exact rows, {self.tested.name}", rows)

    def needles(self) -> None:
        """Needles in a held-out novel, 5 % attended."""
        _, name, text = self.texts()[0]
        config = RetrievalConfig(self.contexts[:1], self.size.passages)
        run_retrieval(self.tested, text, name, self.chosen or looked_up(), config, self.out, self.say, self.late)

    def ruler(self) -> None:
        """RULER's tasks that need no download."""
        lengths = tuple(context for context in self.contexts if context >= 4096)[:1]
        self._tasks("ruler", TasksConfig(self._of(RULER), limit=self.size.limit, lengths=lengths or (4096,)))

    def tasks(self) -> None:
        """Question tasks with five examples."""
        self._tasks("questions", TasksConfig(self._of(TASKS), num_fewshot=5, limit=self.size.limit))

    def _of(self, tasks: Sequence[str]) -> tuple[str, ...]:
        """Those of `tasks` that were asked for."""
        return tuple(task for task in tasks if task in self.size.tasks) or tuple(tasks)

    def _tasks(self, name: str, config: TasksConfig) -> None:
        """Harness tasks one by one, each under every variant, as far as the time goes."""
        done = run_tasks(self.tested, self.chosen or looked_up(), config, self.out / name, say=self.say, late=self.late)
        about = {**self.tested.identity, **config.about}
        Report(name, f"{name} under {self.tested.name}", about, TASK_COLUMNS, done.rows).write(self.out)

    def _rows(self, text: str, name: str, variants: Sequence[Variant], config: PerplexityConfig) -> list[Row]:
        """Rows of the variants that were measured before the time was up, or in an earlier run."""
        rows: list[Row] = []
        for variant in variants[1:]:
            both = [variants[0], variant]
            pair = measure_all(self.tested, text, name, both, config, self.out, lambda line: None, self.late)
            if len(pair) < len(both):
                continue
            pair[1]["low_bits"] = estimated(self.tested.policy(variant), pair[1]["sparse_attended"])
            rows += pair[1:] if rows else pair
            self.say(f"{name}, {config.context} tokens, {variant.label}: {pair[1]['against_full_shown']}")
        return rows

    def _write(self, name: str, title: str, rows: list[Row]) -> None:
        """The table of `rows`, and of what it held of other texts, contexts, sizes and variants."""
        found = {_what(row): row for row in rows}
        for row in self._held(name):
            found.setdefault(_what(row), row)
        ordered = sorted(found.values(), key=lambda row: (row["context"], row["text"], row["scored_tokens"]))
        Report(name, title, self.tested.identity, COLUMNS, ordered, NOTES).write(self.out)

    def _held(self, name: str) -> list[Row]:
        """Rows of the table that an earlier run wrote, as far as their model and words mean today what they meant."""
        try:
            rows: list[Row] = json.loads((self.out / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError, KeyError):
            return []
        same = [row for row in rows if all(row[key] == value for key, value in self.tested.identity.items())]
        return [row for row in same if self._lineage(row) == row["lineage"]]

    def _lineage(self, row: Row) -> str | None:
        """What the words of a row mean today; None where they mean nothing."""
        try:
            return self.tested.policy(Variant(row["policy"], row["options"], row["engine"])).lineage
        except ConfigError:
            return None


def _what(row: Row) -> tuple[Any, ...]:
    """What tells a row of a table from its others."""
    return tuple(row[name] for name in ("text", "context", "windows", "scored_tokens", "variant"))


def estimated(policy: Policy, exact: float) -> float:
    """Share of the rows of selecting layers that are read in low bits: with a tail all that are not read exactly."""
    options = policy.options if isinstance(policy, InfiniGen) else None
    return 0.0 if options is None or options.tail == "off" else 1.0 - exact


PARTS: dict[str, Callable[[Real], None]] = {
    "perplexity": Real.perplexity,
    "needles": Real.needles,
    "ablation": Real.ablation,
    "bytes": Real.bytes,
    "tasks": Real.tasks,
    "ruler": Real.ruler,
}
"""What `PART=` may say."""

COLUMNS = (
    *WHAT,
    Column("windows", "windows"),
    Column("tokens decoded", "scored_tokens"),
    Column("exact rows, selecting layers", "sparse_attended", ".1%"),
    Column("all layers", "attended", ".1%"),
    Column("rows in low bits", "low_bits", ".1%"),
    Column("over the link", "link", ".1%"),
    Column("missed mass", "missed", ".3f"),
    Column("worst layer", "missed_worst", ".3f"),
    Column("perplexity", "perplexity", ".3f"),
    Column("against full [95 %]", "against_full_shown"),
)


def model_folders(names: Sequence[str], folder: Path | None = None) -> list[Path]:
    """The models' folders: paths as they are, names below `folder` (default: $OFFLOAD_RT_MODELS). Raises InputError
    with what to do where one is not there."""
    place = folder or Path(os.environ.get("OFFLOAD_RT_MODELS", Path.home() / ".cache" / "offload-rt-models"))
    found = [Path(name) if Path(name).is_dir() else place / name for name in names]
    for path in found:
        if not (path / "config.json").is_file():
            raise InputError(
                f"there is no model in {str(path)!r}: `make real` fetches it, or give a folder that holds one"
            )
    return found


def run_real(
    names: Sequence[str],
    parts: Sequence[str],
    out: Path,
    *,
    data: Path,
    minutes: float,
    size: RealSize,
    say: Say,
    chosen: Sequence[Variant] = (),
) -> None:
    """Runs `parts` for each model, each within `minutes`, with the rows `chosen` where there are any. Raises InputError
    where a model or text is missing."""
    for part in parts:
        check_choice("part", part, PARTS)
    for folder in model_folders(names):
        tested = ModelUnderTest(str(folder), dtype="bfloat16", batch=4)
        for part in parts:
            until = time.monotonic() + 60 * minutes
            say(f"{folder.name}: {part}")
            PARTS[part](Real(tested, size, out / folder.name, data, until, say, chosen))
