"""A trained model's prompts and decode steps beside transformers' own: the same weights from the same folder, the same
tokens, in one process, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from ...config_fields import check_choice
from ...errors import InputError
from ...llm import LLM
from ...models.location import locate
from ...sampling_params import SamplingParams
from ..core.report import Column, Report, Row

COLUMNS = (
    Column("model", "model"),
    Column("prompt", "context", ",d"),
    Column("who", "who"),
    Column("prompt, s", "prefill", ".2f"),
    Column("each", "prefills"),
    Column("transformers' over it", "prefill_ratio", ".2f"),
    Column("a token, ms", "step", ".1f"),
    Column("quarters", "quarters"),
    Column("transformers' over it", "step_ratio", ".2f"),
)
FIRST = "transformers, DynamicCache"

Turn = Iterator[int]
"""Of one competitor: greedy tokens, the first after the prompt."""


@dataclass(frozen=True)
class SpeedConfig:
    """contexts: tokens of the prompts. tokens: decoded after each. repeats: prompts of each length, from other places
    of the text. who: names of `COMPETITORS` beside the first, which all are compared with."""

    contexts: tuple[int, ...] = (2048, 8192)
    tokens: int = 24
    repeats: int = 3
    dtype: str = "bfloat16"
    threads: int = 1
    who: tuple[str, ...] = ("transformers, StaticCache", "full", "infinigen", "auto")

    def __post_init__(self) -> None:
        for name in self.who:
            check_choice("competitor", name, COMPETITORS)


def _ours(policy: str, model: str, config: SpeedConfig) -> Callable[[Sequence[int]], Turn]:
    llm = LLM(model, policy=policy, dtype=config.dtype, prefix_sharing=False)
    params = SamplingParams(max_tokens=config.tokens + 1, temperature=0, ignore_eos=True)

    def turn(prompt: Sequence[int]) -> Turn:
        return (event.token_id for event in llm.stream(list(prompt), params))

    return turn


def _theirs(static: bool, model: str, config: SpeedConfig) -> Callable[[Sequence[int]], Turn]:
    from transformers import DynamicCache, StaticCache
    from transformers.models.auto import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        locate(model).place, dtype=getattr(torch, config.dtype), attn_implementation="sdpa"
    )

    @torch.inference_mode()
    def turn(prompt: Sequence[int]) -> Turn:
        room = len(prompt) + config.tokens + 1
        cache = StaticCache(loaded.config, max_cache_len=room) if static else DynamicCache()
        given = torch.tensor([list(prompt)])
        while True:
            logits = loaded(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            given = logits[:, -1:].argmax(-1)
            yield int(given)

    return turn


COMPETITORS: Mapping[str, Callable[[str, SpeedConfig], Callable[[Sequence[int]], Turn]]] = {
    FIRST: partial(_theirs, False),
    "transformers, StaticCache": partial(_theirs, True),
    **{policy: partial(_ours, policy) for policy in ("full", "infinigen", "auto")},
}


def run_real_speed(model: str, text: str, config: SpeedConfig, out: Path, say: Callable[[str], None]) -> Report:
    """CPU seconds of each competitor; writes real_speed.{json,csv,md} to `out`. Raises InputError where the text is too
    short, and what loading the model raises."""
    torch.set_num_threads(config.threads)
    ids = LLM(model, policy="full", dtype=config.dtype).encode(text)
    if len(ids) < max(config.contexts) + 100 * config.repeats:
        raise InputError(f"the text has {len(ids):,} tokens; it needs {max(config.contexts) + 100 * config.repeats:,}")
    turns = {name: COMPETITORS[name](model, config) for name in (FIRST, *config.who)}
    rows: list[Row] = []
    for context in config.contexts:
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in turns}
        start = (len(ids) - context) // 3
        for repeat in range(config.repeats):
            say(f"{context:,} tokens: repeat {repeat + 1} of {config.repeats}")
            prompt = ids[start + 100 * repeat :][:context]
            order = list(turns)[repeat % len(turns) :] + list(turns)[: repeat % len(turns)]
            for name in order:
                _time(turns[name](prompt), config.tokens, *times[name])
        rows += [_row(model, context, name, *times[name], *times[FIRST]) for name in turns]
    about = {
        "clock": "CPU time of the process", "threads": config.threads, "dtype": config.dtype,
        "tokens decoded": config.tokens, "repeats": f"{config.repeats}, each from another place of the text, in turn",
    }  # fmt: skip
    report = Report("real_speed", f"{Path(model).name}: prompts and steps beside transformers'", about, COLUMNS, rows)
    report.write(out)
    return report


def _time(turn: Turn, tokens: int, prefills: list[float], steps: list[float]) -> None:
    """Enters a prompt's seconds and those of each token behind it."""
    began = time.process_time()
    for i in range(tokens + 1):
        next(turn)
        now = time.process_time()
        (steps if i else prefills).append(now - began)
        began = now


def _row(
    model: str,
    context: int,
    name: str,
    prefills: list[float],
    steps: list[float],
    first_prefills: list[float],
    first_steps: list[float],
) -> Row:
    low, middle, high = (1e3 * part for part in quantiles(steps, n=4, method="inclusive"))
    return {
        "model": Path(model).name, "context": context, "who": name, "prefill": median(prefills),
        "prefills": " / ".join(f"{each:.2f}" for each in prefills), "step": middle,
        "quarters": f"{low:.1f} to {high:.1f}", "prefill_ratio": median(first_prefills) / median(prefills),
        "step_ratio": 1e3 * median(first_steps) / middle, "samples": {"prefills": prefills, "steps": steps},
    }  # fmt: skip
