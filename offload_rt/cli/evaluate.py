"""`offload-rt eval NAME ...`, and its shortcuts `lm-eval`, `bench` and `tune`."""

from __future__ import annotations

import argparse
from typing import Any

from .common import add_passing


def evaluate(args: argparse.Namespace) -> int:
    """Run an evaluation or benchmark: perplexity, retrieval, harness tasks, speed. `eval --help` lists them."""
    from ..eval.cli import run_eval

    return run_eval(args.arguments)


def lm_eval(args: argparse.Namespace) -> int:
    """Run the LM Evaluation Harness with this runtime as the model "offload-rt"."""
    return evaluate(argparse.Namespace(arguments=["lm-eval", *args.arguments]))


def bench(args: argparse.Namespace) -> int:
    """Compare the decode speed with transformers' caches, on random weights. `bench --help` lists the options."""
    return evaluate(argparse.Namespace(arguments=["bench", *args.arguments]))


def tune(args: argparse.Namespace) -> int:
    """Choose infinigen settings for a limit on the missed attention mass. `tune --help` lists the options."""
    return evaluate(argparse.Namespace(arguments=["tune", *args.arguments]))


def add(commands: Any) -> None:
    add_passing(commands, "eval", evaluate)
    add_passing(commands, "lm-eval", lm_eval)
    add_passing(commands, "bench", bench)
    add_passing(commands, "tune", tune)
