"""`offload-rt eval MEASURE ...`, and the measures that have a command of their own: `lm-eval`, `bench` and `tune`."""

from __future__ import annotations

import argparse
from typing import Any

from .common import add_passing


def evaluate(args: argparse.Namespace) -> int:
    """Measures perplexity, retrieval, harness tasks, speed and more. `eval --help` lists the measures."""
    from ..eval.cli import run_eval

    return run_eval(args.arguments)


def lm_eval(args: argparse.Namespace) -> int:
    """Runs the LM Evaluation Harness' own command line with our runtime as its model "offload-rt"."""
    return evaluate(argparse.Namespace(arguments=["lm-eval", *args.arguments]))


def bench(args: argparse.Namespace) -> int:
    """Measures a decode step against transformers' caches, on random weights. `bench --help` lists its options."""
    return evaluate(argparse.Namespace(arguments=["bench", *args.arguments]))


def tune(args: argparse.Namespace) -> int:
    """Chooses infinigen's settings that keep a limit on the missed attention mass. `tune --help` lists its options."""
    return evaluate(argparse.Namespace(arguments=["tune", *args.arguments]))


def add(commands: Any) -> None:
    """Enters the subcommands."""
    add_passing(commands, "eval", evaluate)
    add_passing(commands, "lm-eval", lm_eval)
    add_passing(commands, "bench", bench)
    add_passing(commands, "tune", tune)
