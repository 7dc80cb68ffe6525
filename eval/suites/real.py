"""Quality evaluation on widely used trained models: `make real`, `offload-rt eval real`.

Models are folders (`--models smollm2 qwen` below $OFFLOAD_RT_MODELS) and run in bfloat16. The evaluation consists of
parts (`PARTS`). When the time limit `--minutes` is reached, a part writes the rows measured so far to
eval/results/MODEL. The next run measures the missing rows. RULER and question tasks run in the LM Evaluation Harness.
"""

from __future__ import annotations

import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from ...config import DType
from ...errors import InputError
from ...utils.config_fields import check_choice, option
from ...utils.texts import read_file
from ..core.model_under_test import Evaluation, ModelUnderTest
from ..core.report import Column, Report, Row, Say, say_nothing
from ..core.variants import Variant
from ..quality import divergence
from ..quality.lm_eval_tasks import COLUMNS as TASK_COLUMNS
from ..quality.lm_eval_tasks import TasksConfig, run_tasks
from ..quality.perplexity import NOTES, WHAT, PerplexityConfig, measure_all
from ..quality.retrieval import RetrievalConfig, run_retrieval

WINDOW: dict[str, Any] = {"sinks": 4, "recent": 16, "dense_layers": ()}
"""Options of every policy in comparisons at equal budgets.

There are no dense layers, so the budget applies to all layers.
"""

RESIDENT_ONLY = 1e-4
"""A budget smaller than the resident window, so that all other tokens are represented only by approximate KV."""

KV_INT4 = Variant("full", {}, {"kv_cache_dtype": "int4"})

RIVALS = ("quest", "landmarks", "snapkv", "h2o", "streaming")
"""Selection policies of other publications."""

BUDGETS = (0.05, 0.02)
CONTEXTS = {"smollm2": (4096, 8192), "qwen": (8192, 16384)}
"""Window lengths in tokens, by model. Lengths above the model's maximum context length are skipped."""

RULER = (
    "ruler_cwe", "ruler_fwe", "ruler_vt", "niah_multikey_2", "niah_multivalue_local", "niah_multiquery_local",
    "niah_multikey_3", "niah_single_1",
)  # fmt: skip
"""The RULER tasks whose scores drop most when few tokens are selected."""

EXTRACTION = ("text2json_16", "text2json_64", "text2json_128", "longproc_routes", "longproc_pages")
"""Tasks with long outputs that depend on much of the context."""

TASKS = ("piqa_local", "copa_local", "openbookqa_local", "winogrande_local", "rte_local", "lambada_local")


@dataclass(frozen=True)
class RealSize:
    """Sample sizes, and the dtype of the models. Divergence tables use float32 to exclude rounding errors."""

    windows: int = option(3, help="windows per text", metavar="N")
    decoded: int = option(512, help="decoded tokens per window", metavar="N")
    limit: int = option(25, help="documents per task", metavar="N")
    passages: int = option(4, help="passages with needles of each kind", metavar="N")
    contexts: tuple[int, ...] = option((), help="tokens per window (by model)", metavar="4k,8k")
    texts: tuple[str, ...] = option(("novel", "code", "wikipedia"), help="kinds of text", metavar="A,B")
    tasks: tuple[str, ...] = option((), help="tasks of the parts ruler, extraction and tasks (all)", metavar="A,B")
    dtype: str = option("bfloat16", help="dtype of the models", metavar="NAME")

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, get_args(DType))
        for kind in self.texts:
            check_choice("text", kind, ("novel", "code", "wikipedia"))
        for task in self.tasks:
            check_choice("task", task, (*RULER, *TASKS, *EXTRACTION))


def compared(budgets: Sequence[float] = BUDGETS) -> list[Variant]:
    """Return the variants for the perplexity tables.

    Policies other than `infinigen` and `oracle` are measured only at the first budget.
    """
    found = [Variant("full"), Variant("infinigen", {"preset": "default"})]
    for budget in budgets:
        sized = WINDOW | {"budget": budget}
        found += [Variant("infinigen", sized | {"approximate_kv": tail}) for tail in ("int4", "int2", "off")]
        found += [Variant("oracle", sized)]
    found += [Variant(policy, WINDOW | {"budget": budgets[0]}) for policy in RIVALS]
    found += [
        Variant("infinigen", WINDOW | {"budget": RESIDENT_ONLY, "approximate_kv": tail}) for tail in ("int4", "int2")
    ]
    return found + [Variant("infinigen", {"preset": name}) for name in ("rows", "paper")]


def diverging() -> list[Variant]:
    """Return the variants for the divergence tables, including full attention with 4-bit and 8-bit KV caches."""
    found = [Variant("full"), Variant("infinigen", {"preset": "default"})]
    for budget in (0.02, 0.05, 0.1):
        found += [Variant("infinigen", WINDOW | {"budget": budget, "approximate_kv": kv}) for kv in ("int4", "off")]
    found += [Variant(policy, WINDOW | {"budget": 0.05}) for policy in ("oracle", *RIVALS)]
    return [*found, Variant("full", {}, {"kv_cache_dtype": "int8"}), KV_INT4]


def looked_up() -> list[Variant]:
    """Return the variants for the retrieval and task tables. Most policies are measured only at the first budget."""
    sized = WINDOW | {"budget": BUDGETS[0]}
    ours = [Variant("infinigen", sized | {"approximate_kv": tail}) for tail in ("int4", "off")]
    rivals = [Variant(policy, sized) for policy in ("quest", "landmarks", "streaming")]
    return [Variant("full"), Variant("infinigen", {"preset": "default"}), *ours, *rivals]


@dataclass(frozen=True)
class Real:
    tested: ModelUnderTest
    size: RealSize
    out: Path
    data: Path
    until: float
    say: Say
    chosen: Sequence[Variant] = ()

    @property
    def contexts(self) -> tuple[int, ...]:
        most = self.tested.geometry.max_positions
        wanted = self.size.contexts or CONTEXTS.get(self.tested.name, (4096, 8192))
        return tuple(context for context in wanted if context <= most)

    def deadline_passed(self) -> bool:
        return time.monotonic() > self.until

    def texts(self) -> list[tuple[str, str, str]]:
        """Load the texts (a held-out novel, code, Wikipedia), each as (kind, name, text)."""
        # The code is the Python standard library, which the models may have been trained on. It shows attention
        # patterns on code, but not how well a model writes code.
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
        rows: list[Row] = []
        for context in self.contexts:
            config = PerplexityConfig(context, self.size.windows, context - self.size.decoded)
            for _, name, text in self.texts():
                rows += self._rows(self._evaluation(text, name), self.chosen or compared(), config)
        title = f"Perplexity of {self.tested.name} under each policy"
        Report("perplexity", title, self.tested.identity, COLUMNS, rows, NOTES).write(self.out)

    def divergence(self) -> None:
        rows: list[Row] = []
        for context in self.contexts:
            config = PerplexityConfig(context, self.size.windows, context - self.size.decoded)
            for _, name, text in self.texts():
                rows += divergence.measure_all(self._evaluation(text, name), self.chosen or diverging(), config)
        title = f"Divergence of {self.tested.name} from full attention"
        Report("divergence", title, self.tested.identity, divergence.COLUMNS, rows, divergence.NOTES).write(self.out)

    def needles(self) -> None:
        _, name, text = self.texts()[0]
        config = RetrievalConfig(self.contexts[:1], self.size.passages)
        run_retrieval(self._evaluation(text, name), self.chosen or looked_up(), config)

    def ruler(self) -> None:
        lengths = tuple(context for context in self.contexts if context >= 4096)[:1]
        self._tasks("ruler", TasksConfig(self._requested(RULER), limit=self.size.limit, lengths=lengths or (4096,)))

    def extraction(self) -> None:
        self._tasks("extraction", TasksConfig(self._requested(EXTRACTION), limit=self.size.limit), (KV_INT4,))

    def tasks(self) -> None:
        self._tasks("questions", TasksConfig(self._requested(TASKS), num_fewshot=5, limit=self.size.limit))

    def _requested(self, tasks: Sequence[str]) -> tuple[str, ...]:
        """Return the requested tasks, or all `tasks` if none were requested."""
        return tuple(task for task in tasks if task in self.size.tasks) or tuple(tasks)

    def _tasks(self, name: str, config: TasksConfig, more: Sequence[Variant] = ()) -> None:
        variants = self.chosen or [*looked_up(), *more]
        done = run_tasks(
            self.tested, variants, config, self.out / name, say=self.say, deadline_passed=self.deadline_passed
        )
        about = {**self.tested.identity, **config.about}
        Report(name, f"{name} under {self.tested.name}", about, TASK_COLUMNS, done.rows).write(self.out)

    def _evaluation(self, text: str, name: str) -> Evaluation:
        return Evaluation(self.tested, text, name, self.out, self.say, self.deadline_passed)

    def _rows(self, evaluation: Evaluation, variants: Sequence[Variant], config: PerplexityConfig) -> list[Row]:
        rows: list[Row] = []
        for variant in variants[1:]:
            both = [variants[0], variant]
            pair = measure_all(replace(evaluation, say=say_nothing), both, config)
            if len(pair) < len(both):
                continue
            rows += pair[1:] if rows else pair
            self.say(f"{evaluation.name}, {config.context} tokens, {variant.label}: {pair[1]['against_full_shown']}")
        return rows


PARTS: dict[str, Callable[[Real], None]] = {
    "perplexity": Real.perplexity,
    "divergence": Real.divergence,
    "needles": Real.needles,
    "tasks": Real.tasks,
    "ruler": Real.ruler,
    "extraction": Real.extraction,
}

COLUMNS = (
    *WHAT,
    Column("windows", "windows"),
    Column("tokens decoded", "scored_tokens"),
    Column("exact fraction, sparse layers", "sparse_attended", ".1%"),
    Column("all layers", "attended", ".1%"),
    Column("fetched", "fetched", ".1%"),
    Column("missed mass", "missed", ".3f"),
    Column("worst layer", "missed_worst", ".3f"),
    Column("perplexity", "perplexity", ".3f"),
    Column("against full [95 %]", "against_full_shown"),
)


def model_paths(names: Sequence[str]) -> list[Path]:
    """Return the paths of the models `names`.

    Each name is an existing path, or the name of a folder or GGUF file below $OFFLOAD_RT_MODELS.

    Raises InputError if a model does not exist.
    """
    place = Path(os.environ.get("OFFLOAD_RT_MODELS", Path.home() / ".cache" / "offload-rt-models"))
    found = [Path(name) if Path(name).exists() else place / name for name in names]
    for path in found:
        if not (path.is_file() and path.suffix == ".gguf") and not (path / "config.json").is_file():
            raise InputError(f"there is no model in {str(path)!r}: run `make real` to fetch it, or name another model")
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
    """Run `parts` (keys of `PARTS`) for each model.

    After `minutes`, no new row is started. If `chosen` is given, it replaces the default variants of every part.

    Raises:
        InputError: A model or a text is missing.
    """
    for part in parts:
        check_choice("part", part, PARTS)
    for path in model_paths(names):
        tested = ModelUnderTest(str(path), dtype=cast(DType, size.dtype), batch=4)
        for part in parts:
            until = time.monotonic() + 60 * minutes
            say(f"{path.name}: {part}")
            PARTS[part](Real(tested, size, out / path.name, data, until, say, chosen))
