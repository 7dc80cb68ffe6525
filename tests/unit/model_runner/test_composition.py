"""Test combinations of policy, KV format, eviction, sharing, restart, fork and truncation.

Each combination gives the same tokens as the conversation without eviction, sharing, restart and fork, or raises a
clear error. `eval/results/store/composition.md` contains this matrix.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, SamplingParams

MATRIX_FILE = Path(__file__).parents[3] / "eval" / "results" / "store" / "composition.md"
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "infinigen": {"policy": "infinigen", "policy_options": {"preset": "rows", "recent": 16, "scorer": "int4"}},
    "infinigen, tail": {
        "policy": "infinigen",
        "policy_options": {"recent": 16, "approximate_kv": "int2", "budget": 0.5},
    },
    "infinigen, paper": {"policy": "infinigen", "policy_options": {"preset": "paper"}},
    "oracle": {"policy": "oracle", "policy_options": {"budget": 0.5, "recent": 16}},
    "streaming": {"policy": "streaming", "policy_options": {"budget": 0.5}},
    "quest": {"policy": "quest", "policy_options": {"budget": 0.5, "recent": 16}},
    "h2o": {"policy": "h2o", "policy_options": {"budget": 0.5, "recent": 16}},
}
SLIDING = ", sliding"
POLICIES |= {name + SLIDING: POLICIES[name] for name in ("full", "infinigen", "infinigen, tail", "oracle")}
"""Policies whose names end with this suffix run on a model whose last layer is a sliding layer."""

LEARNS_FROM_QUERIES = ("infinigen, paper", "h2o")
POSITION_DEPENDENT = ("streaming", "quest", "h2o")
TURNS = [tiny_prompt(90, seed=1), tiny_prompt(20, seed=2)]
SHORT = SamplingParams(max_tokens=6, temperature=0)


@dataclass(frozen=True)
class Cell:
    policy: str
    rows: str = "auto"
    eviction: bool = False
    sharing: bool = False
    restart: bool = False
    fork: bool = False
    overflow: bool = False

    @property
    def session(self) -> bool:
        return self.restart or self.fork or self.overflow

    @property
    def expected_error(self) -> str:
        """Text of the expected error. If it is empty, the tokens must equal the reference."""
        if self.eviction and self.policy in POSITION_DEPENDENT:
            return "does not support eviction"
        if self.session and self.policy in LEARNS_FROM_QUERIES:
            return "learns from every query"
        if self.session and self.eviction:
            return "eviction overwrites tokens in place"
        return ""

    def __str__(self) -> str:
        on = [name for name in SWITCHES if getattr(self, name)]
        return "-".join([self.policy.replace(", ", "_"), self.rows, *on])

    @property
    def slides(self) -> bool:
        return self.policy.endswith(SLIDING)


CELLS = [
    Cell(policy, rows, *flags)
    for policy, rows in itertools.product(POLICIES, ("auto", "int4"))
    for flags in itertools.product((False, True), repeat=5)
]
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
SLIDING_MODEL = tiny_model(
    "qwen2", dtype=torch.float32, num_hidden_layers=3, use_sliding_window=True, max_window_layers=2, sliding_window=16
)
SWITCHES = ("eviction", "sharing", "restart", "fork", "overflow")
VALID = [cell for cell in CELLS if not cell.expected_error]


def make_llm(cell: Cell) -> LLM:
    return LLM(
        SLIDING_MODEL if cell.slides else MODEL, dtype="float32", host_memory="8MiB", kv_cache_dtype=cell.rows,
        enable_prefix_caching=cell.sharing, eviction="lru" if cell.eviction else None, **POLICIES[cell.policy],
    )  # fmt: skip


def converse(cell: Cell, folder: Path) -> list[list[int]]:
    llm = make_llm(cell)
    if cell.sharing:
        llm.generate([TURNS[0] + [3]], SHORT)
    if not cell.session:
        return [completed(llm.generate([TURNS[0]], SHORT))[0].token_ids]
    session = llm.session("s", folder)
    answers = [[event.token_id for event in session.send(TURNS[0], SHORT)]]
    if cell.overflow:
        session.truncate(keep_last=60)
    if cell.fork:
        forked = session.fork("t")
        list(session.send(TURNS[1][:5], SHORT))
        session.close()
        session = forked
    if cell.restart:
        session.close()
        llm = make_llm(cell)
        session = llm.session(session.name, folder)
    answers.append([event.token_id for event in session.send(TURNS[1], SHORT)])
    session.check_integrity()
    llm.runner.check_integrity()
    session.close()
    return answers


@functools.cache
def reference(cell: Cell) -> list[list[int]]:
    """Return the answers of the same conversation with no restart, fork or sharing."""
    with tempfile.TemporaryDirectory() as folder:
        if cell.policy in LEARNS_FROM_QUERIES:
            return [completed(make_llm(cell).generate([TURNS[0]], SHORT))[0].token_ids]
        session = make_llm(cell).session("s", folder)
        answers = [[event.token_id for event in session.send(TURNS[0], SHORT)]]
        if cell.overflow:
            session.truncate(keep_last=60)
        answers.append([event.token_id for event in session.send(TURNS[1], SHORT)])
        session.close()
        return answers


def features(cell: Cell) -> set[Any]:
    """Return what a sample of the cells must contain: each policy, and each pair of values of format and switches."""
    return {cell.policy, *itertools.combinations([(name, getattr(cell, name)) for name in ("rows", *SWITCHES)], 2)}


@pytest.mark.sampled(features=features)
@pytest.mark.parametrize("cell", VALID, ids=str)
def test_cell_equals_its_reference(cell: Cell, tmp_path: Path) -> None:
    reference_cell = Cell(cell.policy, cell.rows, overflow=cell.overflow)
    answers = converse(cell, tmp_path)
    assert answers == reference(reference_cell)[: len(answers)]


@pytest.mark.sampled(features=lambda cell: {(cell.policy, cell.expected_error), cell.rows})
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.expected_error], ids=str)
def test_unsupported_cell_is_an_error(cell: Cell, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=cell.expected_error):
        converse(cell, tmp_path)


def test_matrix_file_is_up_to_date() -> None:
    """To update the file, run this test with `OFFLOAD_RT_PRINT=1`."""
    if os.environ.get("OFFLOAD_RT_PRINT"):
        MATRIX_FILE.write_text(matrix(), encoding="utf-8")
    assert MATRIX_FILE.read_text(encoding="utf-8") == matrix()


def matrix() -> str:
    """Return the matrix. Each row is a policy, KV format and eviction. Columns are operations on the sequence."""
    columns = [Cell("full", restart=r, fork=f, overflow=o) for r, f, o in itertools.product((False, True), repeat=3)]
    heads = [
        "prompt" if not column.session else str(column).removeprefix("full-auto-").replace("-", " + ")
        for column in columns
    ]
    notes: Counter[str] = Counter()
    lines = []
    for policy, rows, eviction in itertools.product(POLICIES, ("auto", "int4"), (False, True)):
        texts = []
        for column in columns:
            reason = replace(column, policy=policy, rows=rows, eviction=eviction).expected_error
            notes[reason] += 1
            texts.append(f"refused ({[*dict.fromkeys(REASONS)].index(reason) + 1})" if reason else "equal")
        lines.append(f"| {policy} | {rows} | {'lru' if eviction else 'none'} | " + " | ".join(texts) + " |")
    return "\n".join(
        [
            "# What goes with what",
            "",
            "Each cell, with prefix sharing and without it: *equal* gives, token for token, the answers of the same",
            "conversation in one piece, alone, without sharing; *refused* is a `ConfigError` that says why.",
            "",
            "| policy | KV format | eviction | " + " | ".join(heads) + " |",
            "|" + "---|" * (3 + len(heads)),
            *lines,
            "",
            *(f"{i}. {reason}" for i, reason in enumerate(REASONS, start=1)),
            "",
        ]
    )


REASONS = ("does not support eviction", "learns from every query", "eviction overwrites tokens in place")
