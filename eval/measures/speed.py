"""Benchmarks of speed: decode steps, prompts, threads, C kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...utils.texts import read_text
from ..core.registry import measure
from .flags import add_options, add_text_flag, config_of, counts, say_on_stderr, show


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.bench import BenchConfig

    parser.add_argument("--out", default="out", metavar="DIR", help="folder of the results (default: out)")
    add_options(parser, BenchConfig)


@measure("bench", "a decode step against transformers' caches, on random weights", _bench_flags)
def bench(args: argparse.Namespace) -> int:
    """Compare the time of a decode step with the caches of transformers. All baselines run in one process, one after
    another. Times are CPU time, or synchronized wall time on CUDA, as medians and quartiles. Counterparts of
    InfiniGen's figures: Figure 14 with --batches 1,2,4,8, Figure 15 with --contexts 8k,16k, Figure 16 with --shape A,B.
    """
    from ..speed.bench import BenchConfig, run_bench

    say = say_on_stderr()
    return show(run_bench(config_of(args, BenchConfig), Path(args.out), say), args.out, say)


def _real_speed_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.competitors import COMPETITORS, SpeedConfig

    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(";")) if text != "all" else tuple(COMPETITORS)

    _trained_model_flags(parser)
    add_options(parser, SpeedConfig)
    parser.add_argument(
        "--runtimes",
        type=names,
        default=SpeedConfig.runtimes,
        metavar="A;B",
        help=f"runtimes to compare with the first of them: all, or some of {'; '.join(COMPETITORS)}",
    )


@measure("real-speed", "prompt and decode times of a trained model compared with other runtimes", _real_speed_flags)
def real_speed(args: argparse.Namespace) -> int:
    """Compare transformers' caches, the policies of this package, and kvpress and llama.cpp if installed, on the same
    model and text. Reports the time to the first token, the time of each further token, memory, and agreement with
    float32. Each competitor runs in its own process, and they take turns. Times are CPU time."""
    from ..speed.competitors import SpeedConfig
    from ..speed.real_speed import run_real_speed

    config, say = config_of(args, SpeedConfig, runtimes=args.runtimes), say_on_stderr()
    return show(run_real_speed(args.model, read_text(args.text), config, Path(args.out), say), args.out, say)


def _threads_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.threads import ThreadsConfig

    _trained_model_flags(parser)
    add_options(parser, ThreadsConfig)


@measure("threads", "wall time of a token by number of threads, idle and with another busy process", _threads_flags)
def threads(args: argparse.Namespace) -> int:
    """Measure the wall time of a token by number of threads, on an idle machine and with another busy process.
    As in most programs, torch is imported before this package."""
    from ..speed.threads import ThreadsConfig, run_threads

    say = say_on_stderr()
    report = run_threads(args.model, read_text(args.text), config_of(args, ThreadsConfig), say)
    report.write(Path(args.out))
    return show(report, args.out, say)


def _trained_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a local folder or a hub id of a trained model")
    add_text_flag(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the results")


def _cpu_kernels_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--tokens", type=counts, default=(8192, 32_768, 131_072), metavar="8k,32k", help="in context")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="repeats; the fastest counts")


@measure("cpu-kernels", "C kernels at each instruction set level against lower time bounds", _cpu_kernels_flags)
def cpu_kernels(args: argparse.Namespace) -> int:
    """Compare the time of each C kernel of a decode step with lower bounds, at each instruction set level of this
    processor, or only at the level set by OFFLOAD_RT_CPU_LEVEL."""
    from ..speed.cpu_kernels import kernel_report

    report = kernel_report(args.tokens, args.repeats)
    report.write(Path(args.out))
    return show(report, args.out, say_on_stderr())
