"""Speculative decoding of a trained model with each kind of draft, compared with the policy "full".

Measures the acceptance rate, the KV bytes transferred per token, and the time per token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError
from ...llm import LLM
from ...sampling_params import SamplingParams
from ...utils.config_fields import check_choice
from ..core.report import Column, Report, Row

FULL = "full"
"""Baseline without drafts."""


@dataclass(frozen=True)
class Kind:
    """A policy with its options, and the argument `exact` of `LLM`."""

    policy: str
    options: Mapping[str, Any]
    exact: Mapping[str, Any]


_SPARSE, _WIDER = {"method": "sparse"}, {"max_fraction": 0.05, "tail": "int2"}
KINDS: dict[str, Kind] = {
    "sparse": Kind("infinigen", {}, _SPARSE | {"adaptive": False}),
    "sparse-5%": Kind("infinigen", _WIDER, _SPARSE | {"adaptive": False}),
    "sparse-4": Kind("infinigen", {}, _SPARSE | {"adaptive": False, "tokens": 4}),
    "sparse-16": Kind("infinigen", {}, _SPARSE | {"adaptive": False, "tokens": 16}),
    "sparse-adaptive": Kind("infinigen", {}, _SPARSE),
    "lookup": Kind("full", {}, {"method": "lookup", "adaptive": False}),
    "lookup-adaptive": Kind("full", {}, {"method": "lookup"}),
    "both": Kind("infinigen", {}, {"method": "both", "adaptive": False}),
    "default": Kind("infinigen", {}, {}),
}
"""Kinds of drafts by name.

The number of drafts is 8 unless the name contains 4, 16 or adaptive. Sparse drafts attend to 2 % or 5 % of the tokens
exactly, and to approximate KV otherwise. "default" is `exact=True`.
"""

COLUMNS = (
    Column("text", "text"),
    Column("context", "context", ",d"),
    Column("temperature", "temperature"),
    Column("drafts", "kind"),
    Column("accepted", "accepted", ".1%"),
    Column("tokens of a pass", "length", ".2f"),
    Column("link, MiB a token", "mebibytes", ".2f"),
    Column("of full's", "bytes_share", ".1%"),
    Column("ms a token", "milliseconds", ".1f"),
    Column("full's over it", "ratio", ".2f"),
    Column("tokens before it parts from full's", "same"),
)


@dataclass(frozen=True)
class DraftsConfig:
    """Settings of the measurement.

    Attributes:
        contexts: Prompt lengths in tokens. A prompt starts at one third of the text.
        tokens: Number of tokens decoded after the prompt.
        temperatures: Sampling temperatures; 0 is greedy. The seed is 1.
        kinds: Keys of `KINDS`.
        dtype: Data type of the model.
        threads: Number of threads.
    """

    contexts: tuple[int, ...] = (16_384,)
    tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 0.8)
    kinds: tuple[str, ...] = tuple(KINDS)
    dtype: str = "bfloat16"
    threads: int = 1

    def __post_init__(self) -> None:
        for name in self.kinds:
            check_choice("drafts", name, KINDS)


def run_drafts(model: str, name: str, text: str, config: DraftsConfig, out: Path, say: Callable[[str], None]) -> Report:
    """Measure all kinds on one text and merge the rows into drafts.{json,csv,md} in `out`.

    Each prompt is prefilled once for all kinds. Raises InputError if the text is too short; errors of loading the model
    propagate.
    """
    torch.set_num_threads(config.threads)
    full = LLM(model, policy="full", dtype=config.dtype)
    kinds = {FULL: full} | {name: _under(full, KINDS[name]) for name in config.kinds}
    ids, device = full.encode(text), full.runner.adapter.device
    about = {
        "model": Path(model).name, "dtype": config.dtype, "threads": config.threads,
        "clock": f"{'CPU time of the process' if device.type == 'cpu' else 'wall time'}, tokens behind the first",
        "device": str(device), "tokens decoded": config.tokens,
    }  # fmt: skip
    for context in config.contexts:
        start = len(ids) // 3
        if start + context > len(ids):
            raise InputError(
                f"the text has {len(ids):,} tokens; {context:,} from its third on need {context * 3 // 2:,}"
            )
        for temperature in config.temperatures:
            params = SamplingParams(max_tokens=config.tokens, temperature=temperature, seed=1, ignore_eos=True)
            base: Row | None = None
            for kind, llm in kinds.items():
                row = _measure(llm, ids[start : start + context], params) | {"kind": kind}
                base = row if base is None else base
                report = _entered(about, _beside(row, base) | {"text": name, "context": context}, out)
                report.write(out)
                say(f"{name}, {context:,}, temperature {temperature}, {kind}: {_told(row)}")
    return report


def _under(full: LLM, kind: Kind) -> LLM:
    return full.under(kind.policy, kind.options, exact=kind.exact)


def _measure(llm: LLM, prompt: list[int], params: SamplingParams) -> Row:
    """Measure the tokens after the first one, which belongs to the prefill."""
    tokens: list[int] = []
    read = _clock(llm)
    for event in llm.stream(prompt, params):
        if not tokens:
            assert llm.last_stats is not None
            before, began = llm.last_stats.h2d_bytes, read()
        tokens.append(event.token_id)
    seconds, stats = read() - began, llm.last_stats
    assert stats is not None
    count = len(tokens) - 1
    return {
        "temperature": params.temperature, "accepted": stats.acceptance_rate, "length": stats.mean_accepted_length,
        "mebibytes": (stats.h2d_bytes - before) / count / 2**20, "milliseconds": 1e3 * seconds / count,
        "tokens": count, "samples": tokens,
    }  # fmt: skip


def _clock(llm: LLM) -> Callable[[], float]:
    """Return the clock: CPU time of the process, or wall time on an accelerator."""
    return time.process_time if llm.runner.adapter.device.type == "cpu" else time.perf_counter


def _told(row: Row) -> str:
    accepted = "" if row["accepted"] is None else f"{row['accepted']:.1%} accepted, "
    return f"{accepted}{row['milliseconds']:.0f} ms a token"


def _beside(row: Row, full: Row) -> Row:
    """Add the columns relative to `full` to a row."""
    pairs = enumerate(zip(row["samples"], full["samples"], strict=True))
    parts = next((i for i, (mine, theirs) in pairs if mine != theirs), None)
    return row | {
        "bytes_share": row["mebibytes"] / full["mebibytes"], "ratio": full["milliseconds"] / row["milliseconds"],
        "same": "all" if parts is None else parts,
    }  # fmt: skip


def _entered(about: dict[str, Any], row: Row, out: Path) -> Report:
    """Load the report in `out`, and add `row` or replace the row with the same key."""
    try:
        held = json.loads((out / "drafts.json").read_text(encoding="utf-8"))
        rows: list[Row] = held["rows"] if held["about"] == about else []
    except (OSError, ValueError, KeyError):
        rows = []
    others = [one for one in rows if _what(one) != _what(row)]
    ordered = sorted([*others, row], key=lambda one: _what(one)[:3])
    return Report("drafts", f"{about['model']}: exact decoding from drafts", about, COLUMNS, ordered)


def _what(row: Row) -> tuple[Any, ...]:
    return row["context"], row["text"], row["temperature"], row["kind"]
