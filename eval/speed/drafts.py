"""Exact decoding of a trained model from each kind of draft: what full attention accepts of them, the bytes of rows
that a token takes, and its time, beside policy "full" on the same prompt."""

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
"""Without drafts: what all kinds are compared with."""


@dataclass(frozen=True)
class Kind:
    """A policy with its options, and `LLM`'s field `exact`."""

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
"""By name. 8 drafts each time but where the name says 4, 16, or adaptive; 2 % of the rows exact beside a tail, or 5 %.
"default" is `exact=True`."""

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
    """contexts: tokens of the prompt, which begins a third into the text. tokens: decoded behind it. temperatures: 0 is
    greedy; sampled texts have seed 1. kinds: of `KINDS`."""

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
    """Rows of one text, which go into drafts.{json,csv,md} in `out` beside those of other texts and contexts. A prompt
    is prefilled once, for all kinds. Raises InputError where the text is too short, and what loading raises."""
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
    """Of the tokens behind the first, which the prefill gives."""
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
    """The process' CPU time; on a device wall time, which a token that is there has waited for."""
    return time.process_time if llm.runner.adapter.device.type == "cpu" else time.perf_counter


def _told(row: Row) -> str:
    accepted = "" if row["accepted"] is None else f"{row['accepted']:.1%} accepted, "
    return f"{accepted}{row['milliseconds']:.0f} ms a token"


def _beside(row: Row, full: Row) -> Row:
    """A row with what it is of `full`'s."""
    pairs = enumerate(zip(row["samples"], full["samples"], strict=True))
    parts = next((i for i, (mine, theirs) in pairs if mine != theirs), None)
    return row | {
        "bytes_share": row["mebibytes"] / full["mebibytes"], "ratio": full["milliseconds"] / row["milliseconds"],
        "same": "all" if parts is None else parts,
    }  # fmt: skip


def _entered(about: dict[str, Any], row: Row, out: Path) -> Report:
    """The report that `out` holds, with `row` in it in place of what it held of the same."""
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
