"""Run tasks of the LM Evaluation Harness under each policy.

Prompts and metrics are the harness's own. Every policy is compared with `full`, document by document. `full` itself is
compared with the harness's transformers class.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError
from ...utils.config_fields import option
from ..core.report import Column, Report, Row, RowStore, say_nothing
from ..core.stats import mean_or_none, paired_bootstrap, perplexity_change
from ..core.variants import Variant
from .ruler import begin_documents, first_documents, without_downloads

if TYPE_CHECKING:
    from ..core.model_under_test import ModelUnderTest
    from ..core.report import Say
    from .lm_eval_adapter import OffloadLM


@dataclass(frozen=True)
class TasksConfig:
    tasks: tuple[str, ...]
    num_fewshot: int | None = option(None, help="examples per request (default of each task)", metavar="N")
    limit: int | None = option(None, help="documents per task (all)", metavar="N")
    decode_from: int | None = option(
        None, help="maximum number of prefilled tokens of a request; 1 decodes all (all but the last)", metavar="N"
    )
    include_path: str | None = option(None, help="folder with further task files of the harness", metavar="DIR")
    seed: int = option(1234, help="seed of the harness", metavar="N")
    lengths: tuple[int, ...] = option((), help="tokens of RULER's documents", metavar="4k,8k")

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("name at least one task, such as piqa_local")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit} must be at least 1")

    @property
    def about(self) -> dict[str, Any]:
        # If `lengths` is empty, it is omitted, so that rows stored without this field stay valid.
        found = asdict(self)
        return found if self.lengths else {name: value for name, value in found.items() if name != "lengths"}

    @property
    def jobs(self) -> list[tuple[str, int | None, str]]:
        """The tasks to run: (task, document length in tokens or None, name in tables)."""
        pairs = [(task, length) for task in self.tasks for length in self.lengths or (None,)]
        return [(task, length, task if length is None else f"{task}, {length:,} tokens") for task, length in pairs]


def run_tasks(
    tested: ModelUnderTest,
    variants: Sequence[Variant],
    config: TasksConfig,
    out: Path,
    *,
    say: Say = say_nothing,
    deadline_passed: Callable[[], bool] = lambda: False,
) -> Report:
    """Run every task with every variant, and write tasks.json, .csv and .md to `out`.

    Rows that already exist in `out` are reused.

    All variants are compared with the first variant, which should be `full`. After the deadline, no new row is
    measured.
    """
    store, models = RowStore(out), Models(tested, config)
    shared = {"suite": "tasks", **tested.identity, **config.about}
    rows: list[Row] = []
    for task, length, name in config.jobs:
        base: Row | None = None
        for variant in variants:
            key = (
                shared
                | {"tasks": task}
                | ({} if length is None else {"lengths": [length]})
                | {"variant": tested.key(variant)}
            )
            if deadline_passed() and store.get(key) is None:
                if base is None:
                    break
                continue
            row = store.once(key, functools.partial(models.measure, variant, task, length))
            row = tested.describe(variant) | row | {"task": name}
            base = base or row
            rows.append(row | compare(row, base))
            say(f"{name}, {variant.label}: {rows[-1]['metrics_shown']}")
    about = {**tested.identity, **config.about, "harness": "lm-eval 0.4"}
    report = Report("tasks", f"Harness tasks under {tested.name}", about, COLUMNS, rows, NOTES)
    report.write(out)
    return report


class Models:
    def __init__(self, tested: ModelUnderTest, config: TasksConfig) -> None:
        self._tested, self._config = tested, config
        self._made: dict[str, OffloadLM] = {}

    def under(self, variant: Variant) -> OffloadLM:
        """Return the harness model of a variant. Later calls reuse it."""
        from .lm_eval_adapter import OffloadLM

        if variant.label not in self._made:
            llm = self._tested.llm(variant)
            made = OffloadLM.around(llm, decode_from=self._config.decode_from, batch_size=self._tested.batch)
            self._made[variant.label] = made
        return self._made[variant.label]

    def measure(self, variant: Variant, task: str, length: int | None) -> Row:
        return measure(self.under(variant), task, self._config, length, self._tested.model)


def measure(model: OffloadLM, task: str, config: TasksConfig, length: int | None = None, tokenizer: str = "") -> Row:
    """Run one task. `length` is the length of RULER documents, in tokens of the model `tokenizer`.

    Returns:
        A row with `metrics` {name: [value, standard error]}, the numbers of documents, and the mean exact attention and
        fetched fractions. The column `samples` contains each document's metrics and responses.
    """
    from lm_eval import simple_evaluate

    from .lm_eval_adapter import TASKS

    model.fractions.clear()
    folders = (str(TASKS), *([config.include_path] if config.include_path else []))
    manager = _task_manager(*folders, length=length, tokenizer=tokenizer, limit=config.limit)
    with without_downloads():
        done = simple_evaluate(
            model=model,
            tasks=[_loaded(manager, task, config.seed)],
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=1000,
            random_seed=config.seed,
            numpy_random_seed=config.seed,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
        )
    found = done["results"][task]
    names = [key.removesuffix(",none") for key in found if key.endswith(",none") and "_stderr" not in key]
    names = [name for name in names if length is None or name == str(length)]  # RULER reports -1 for other lengths
    samples = done["samples"][task]
    return {
        "metrics": {name: [float(found[f"{name},none"]), _number(found.get(f"{name}_stderr,none"))] for name in names},
        "documents": len(samples),
        "requests": sum(len(sample["resps"]) for sample in samples),
        "attended": mean_or_none(attended for attended, _ in model.fractions),
        "fetched": mean_or_none(fetched for _, fetched in model.fractions),
        "samples": [
            {"metrics": {n: sample[n] for n in names if n in sample}, "responses": _responses(sample)}
            for sample in samples
        ],
    }


@functools.cache
def _task_manager(*folders: str, length: int | None, tokenizer: str, limit: int | None = None) -> Any:
    """Return the harness's task manager, set up to find the task files in `folders` as well.

    If `length` is set, RULER generates `limit` documents (None: the default number). Each has `length` tokens, as
    counted by `tokenizer`.
    """
    # Cached because the harness takes seconds to read its thousands of task files.
    from lm_eval.tasks import TaskManager

    from ...models.source import find_source

    about = {"max_seq_lengths": [length], "tokenizer": find_source(tokenizer).name_or_path}
    metadata = None if length is None else about | ({} if limit is None else {"samples": limit})
    return TaskManager(include_path=list(folders), metadata=metadata)


@functools.cache
def _loaded(manager: Any, task: str, seed: int) -> Any:
    # Cached because RULER generates the documents on every load.
    begin_documents(seed)
    with without_downloads(), first_documents((manager.metadata or {}).get("samples")):
        return manager.load([task])["tasks"][task]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _responses(sample: Mapping[str, Any]) -> list[Any]:
    """Return the log-likelihoods of a document's requests, or the generated texts if it belongs to a generation
    task.
    """
    found = []
    for (response,) in (responses[:1] for responses in sample["resps"]):
        found.append(response[0] if isinstance(response, (tuple, list)) else response)
    return [float(value) if isinstance(value, (int, float)) else value for value in found]


def compare(row: Row, base: Row) -> Row:
    """Compare the results `row` of a variant with `base`, the results of the first variant.

    Returns:
        The fraction of equal answers, the absolute differences between log-likelihoods, and the difference in each
        metric, with its paired 95 % interval over documents.
    """
    mine, other = ([s["responses"] for s in r["samples"]] for r in (row, base))
    same = [_choice(a) == _choice(b) for a, b in zip(mine, other, strict=True)]
    flat = [(a, b) for x, y in zip(mine, other, strict=True) for a, b in zip(x, y, strict=True) if isinstance(a, float)]
    deltas = [abs(a - b) for a, b in flat]
    shown = [f"{name} {value:.4f}{'' if error is None else f' ± {error:.4f}'}" for name, (value, error) in metrics(row)]
    changes = {}
    for name, _ in metrics(row):
        a, b = ([s["metrics"].get(name) for s in r["samples"]] for r in (row, base))
        if all(value is not None for value in (*a, *b)):
            changes[name] = _change(name, a, b)
    return {
        "agreement": sum(same) / len(same),
        "mean_difference": sum(deltas) / len(deltas) if deltas else None,
        "largest_difference": max(deltas, default=None),
        "metrics_shown": ", ".join(shown),
        "changes": changes,
        "changes_shown": ", ".join(f"{n} {v:+.4f} [{lo:+.4f}, {hi:+.4f}]" for n, (v, lo, hi) in changes.items()),
    }


def metrics(row: Row) -> list[tuple[str, tuple[float, float | None]]]:
    return [(name, (value, error)) for name, (value, error) in row["metrics"].items()]


def _choice(responses: Sequence[Any]) -> Any:
    """Return the answer to a document: the index of the most likely choice, the generated text, or None if there is
    neither.
    """
    if len(responses) > 1:
        return max(range(len(responses)), key=lambda i: responses[i])
    return responses[0] if responses and isinstance(responses[0], str) else None


def _change(name: str, values: Sequence[Any], base: Sequence[Any]) -> list[float]:
    """Return the change of a metric from `base` as [difference, low, high], with its 95 % interval.

    For perplexities, the change is relative. `values` and `base` contain one entry per document: a number, or
    (log-likelihood, weight) for tasks that score whole texts.
    """
    if isinstance(values[0], (list, tuple)):
        weights = np.array([v[1] for v in values], float)
        nats, other = (-np.array([v[0] for v in part], float) for part in (values, base))
        if "perplexity" in name:
            interval = paired_bootstrap(nats, other, weights, change=perplexity_change)
        else:
            interval = paired_bootstrap(nats, other, weights * math.log(2))
    else:
        numbers, other = (np.array(part, float) for part in (values, base))
        ones = np.ones(len(numbers))
        if name == "perplexity":
            interval = paired_bootstrap(-numbers, -other, ones, change=perplexity_change)
        else:
            interval = paired_bootstrap(numbers, other, ones)
    return [interval.value, interval.low, interval.high]


COLUMNS = (
    Column("model", "model"),
    Column("task", "task"),
    Column("policy", "variant"),
    Column("dense layers", "dense_layers"),
    Column("attended", "attended", ".1%"),
    Column("fetched", "fetched", ".1%"),
    Column("documents", "documents"),
    Column("requests", "requests"),
    Column("metrics ± SE", "metrics_shown"),
    Column("against full [95 %]", "changes_shown"),
    Column("same answer as full", "agreement", ".1%"),
    Column("mean abs. difference of log-likelihoods", "mean_difference", ".2e"),
    Column("largest", "largest_difference", ".2e"),
)

NOTES = (
    "Metrics, prompts and standard errors are the harness' own; differences are paired over documents (perplexities:",
    "relative). Agreement is the fraction of documents with the same most likely choice as full. A small model is",
    "near chance on these tasks: there agreement and log-likelihoods tell policies apart, accuracies do not.",
)
