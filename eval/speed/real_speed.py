"""Compare prompt and decode times of this runtime with those of other runtimes on a trained model.

All competitors use the same weights and tokens. Each runs in its own process, and the processes take turns.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from ...errors import InputError
from ...llm import LLM
from ..core.report import Column, Report, Row, Say
from .competitors import FLOAT32, SpeedConfig
from .worker import Result, SubprocessCompetitor

COLUMNS = (
    Column("model", "model"),
    Column("prompt", "context", ",d"),
    Column("runtime", "runtime"),
    Column("prompt, s", "prefill", ".2f"),
    Column("repeats, s", "prefills"),
    Column("times as fast", "prefill_ratio", ".2f"),
    Column("ms per token", "step", ".1f"),
    Column("quartiles, ms", "quarters"),
    Column("times as fast", "step_ratio", ".2f"),
    Column("peak RSS, MiB", "peak", ",.0f"),
    Column("tokens equal to float32", "same"),
)


def run_real_speed(model: str, text: str, config: SpeedConfig, out: Path, say: Say) -> Report:
    """Measure CPU time, memory and tokens of each competitor. Write real_speed.{json,csv,md} to `out`.

    Competitors that fail to start are left out. The files are written after each context length.

    Raises:
        InputError: The text is too short, or a competitor fails to generate.
    """
    ids = LLM(model, policy="full", dtype=config.dtype).encode(text)
    if len(ids) < max(config.contexts) + 100 * config.repeats:
        raise InputError(
            f"the text has {len(ids):,} tokens; at least {max(config.contexts) + 100 * config.repeats:,} are needed"
        )
    about = {
        "clock": "CPU time of one process per runtime; runtimes take turns", "threads": config.threads,
        "dtype": config.dtype, "tokens decoded": config.tokens,
        "repeats": f"{config.repeats}, from different positions of the text",
        "tokens equal to float32": f"common prefix with '{FLOAT32}' in the first repeat",
        "times as fast": f"relative to {config.runtimes[0]}",
    }  # fmt: skip
    if config.gguf is not None:
        about["llama.cpp"] = f"weights of {Path(config.gguf).name}"
    title = f"{Path(model).name}: prompt and decode times"
    report = Report("real_speed", title, about, COLUMNS, [])
    with ExitStack() as ends:
        workers = _started(model, config, say, ends)
        for context in config.contexts:
            results = _asked(workers, ids, context, config, say)
            report.rows.extend(_row(Path(model).name, context, name, results) for name in workers)
            report.write(out)
    return report


def _started(model: str, config: SpeedConfig, say: Say, ends: ExitStack) -> dict[str, SubprocessCompetitor]:
    workers: dict[str, SubprocessCompetitor] = {}
    for name in config.runtimes:
        try:
            workers[name] = SubprocessCompetitor(name, model, config)
        except InputError as error:
            if name == config.runtimes[0]:
                raise
            say(f"left out: {error}")
        else:
            ends.callback(workers[name].close)
    return workers


def _asked(
    workers: dict[str, SubprocessCompetitor], ids: list[int], context: int, config: SpeedConfig, say: Say
) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {name: [] for name in workers}
    begin, names = (len(ids) - context) // 3, list(workers)
    for repeat in range(config.repeats):
        prompt = ids[begin + 100 * repeat :][:context]
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            if repeat and name == FLOAT32:
                continue
            results[name].append(workers[name].ask(prompt))
            last = results[name][-1]
            say(f"{context:,} tokens, {name}: {last.prefill:.2f} s, then {1e3 * median(last.steps):.1f} ms a token")
    return results


def _row(model: str, context: int, name: str, results: dict[str, list[Result]]) -> Row:
    first = next(iter(results))
    prefills, first_prefills = ([one.prefill for one in results[runtime]] for runtime in (name, first))
    steps, first_steps = ([step for one in results[runtime] for step in one.steps] for runtime in (name, first))
    low, middle, high = (1e3 * part for part in quantiles(steps, n=4, method="inclusive"))
    return {
        "model": model, "context": context, "runtime": name, "prefill": median(prefills),
        "prefills": " / ".join(f"{each:.2f}" for each in prefills), "step": middle,
        "quarters": f"{low:.1f} to {high:.1f}", "prefill_ratio": median(first_prefills) / median(prefills),
        "step_ratio": 1e3 * median(first_steps) / middle, "peak": max(one.peak_bytes for one in results[name]) / 2**20,
        "same": _equal_tokens(results[name][0].tokens, results[FLOAT32][0].tokens) if FLOAT32 in results else None,
        "samples": {"prefills": prefills, "steps": steps, "tokens": results[name][0].tokens},
    }  # fmt: skip


def _equal_tokens(tokens: list[int], right: list[int]) -> str:
    pairs = enumerate(zip(tokens, right, strict=True))
    count = next((i for i, (mine, theirs) in pairs if mine != theirs), len(tokens))
    return f"{count} of {len(tokens)}"
