"""`offload-rt eval`, `lm-eval`, `bench` and `bench-sharing`: their flags stand beside what they measure."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ConfigError
from .common import add_command, add_passing, read_text, stderr_console


def evaluate(args: argparse.Namespace) -> int:
    """Measures perplexity, retrieval, harness tasks or attention under each policy; tables go to stdout and --out."""
    from ..eval.cli import run_eval

    console = stderr_console(args.quiet)
    return run_eval(args, read_text, lambda line: console.print(line, soft_wrap=True, markup=False))


def lm_eval(args: argparse.Namespace) -> int:
    """Runs the LM Evaluation Harness' own command line with our runtime as its model "offload-rt"."""
    try:
        from ..eval.quality.lm_eval_adapter import main as harness
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'offload-rt[eval]'") from error
    return harness(args.arguments)


def bench(args: argparse.Namespace) -> int:
    """Measures a decode step against transformers' caches, on random weights. `bench --help` lists its options."""
    from ..eval.speed.bench import bench as measure_bench

    return measure_bench(args.arguments)


def bench_sharing(args: argparse.Namespace) -> int:
    """Measures what shared prefixes save, on the CPU. `bench-sharing --help` lists its options."""
    from ..eval.serving import prefix_attention

    return prefix_attention.bench_sharing(args.arguments)


def add(commands: Any) -> None:
    """Enters the subcommands."""
    from ..eval.cli import eval_flags

    eval_flags(add_command(commands, "eval", evaluate))
    add_passing(commands, "lm-eval", lm_eval)
    add_passing(commands, "bench", bench)  # reading its flags loads transformers
    add_passing(commands, "bench-sharing", bench_sharing)
