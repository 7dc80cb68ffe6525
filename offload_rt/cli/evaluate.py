"""`offload-rt eval NAME ...`, and its shortcuts `lm-eval`, `bench` and `tune`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

SUMMARIES = {
    "eval": "Run an evaluation or benchmark: perplexity, retrieval, harness tasks, speed",
    "lm-eval": 'Run the LM Evaluation Harness with this runtime as the model "offload-rt"',
    "bench": "Compare the decode speed with transformers' caches, on random weights",
    "tune": "Choose infinigen settings for a limit on the missed attention mass",
}


def add(commands: Any) -> None:
    """Add the subcommands. Each passes all of its arguments, including `--help`, to the evaluation program."""
    for name, summary in SUMMARIES.items():
        parser = commands.add_parser(name, help=summary, add_help=False, prefix_chars="\0")
        parser.add_argument("arguments", nargs="*")
        parser.set_defaults(run=_runner([] if name == "eval" else [name]))


def _runner(shortcut: list[str]) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        from ..eval.cli import run_eval

        return run_eval([*shortcut, *args.arguments])

    return run
