"""Suites of evaluations, run by `make paper`, `make gpu` and `make real`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..core.registry import measure
from .flags import add_options, config_of, say_on_stderr, words
from .quality import PACKAGED


def _paper_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("eval") / "results", metavar="DIR", help="(eval/results)")
    parser.add_argument("--book", type=Path, default=Path(PACKAGED), metavar="FILE", help="a text not trained on")
    parser.add_argument("--models", nargs="+", default=["reference"], help="the first is measured most thoroughly")
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="steps to run (default: all but tasks)")
    parser.add_argument("--tasks", action="store_true", help="harness tasks too (files in $OFFLOAD_RT_DATA/tasks)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="steps side by side (1)")
    parser.add_argument("--quick", action="store_true", help="small samples, to check that everything runs")


@measure("paper", "counterparts of the paper's tables and figures (`make paper`)", _paper_flags)
def paper(args: argparse.Namespace) -> int:
    """Reproduce Table 2 and Figures 11 to 13, 17 and 19 of InfiniGen for models given by name or folder. Results go to
    eval/results/MODEL."""
    from ...utils.config_fields import check_choice
    from ..suites.paper import STEPS, run_paper

    for step in args.steps or ():
        check_choice("step", step, STEPS)
    steps = args.steps or [step for step in STEPS if step != "tasks" or args.tasks]
    processes = max(1, args.processes)
    run_paper(args.models, args.book, args.out, steps=steps, processes=processes, quick=args.quick)
    return 0


def _gpu_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", metavar="NAME", help="only this one (default: all, one after another)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, only to check that everything runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="JSON (eval/results/gpu; out/gpu with --small)")


@measure("gpu", "all measurements that need a CUDA device (`make gpu`)", _gpu_flags)
def gpu(args: argparse.Namespace) -> int:
    """Run all measurements that need a CUDA device, in parts of less than ten minutes. Each part writes a JSON file."""
    from ...utils.config_fields import check_choice
    from ..suites.gpu import run_gpu
    from ..suites.gpu_parts import PARTS

    if args.part is not None:
        check_choice("part", args.part, PARTS)
    return run_gpu(args.part, args.device, args.small, args.out)


def _real_flags(parser: argparse.ArgumentParser) -> None:
    from ..suites.real import RealSize

    data = Path(os.environ.get("OFFLOAD_RT_DATA", Path("..") / "shared" / "data"))
    parser.add_argument(
        "--models",
        nargs="+",
        default=["smollm2", "qwen"],
        help="folders or GGUF files, or names below $OFFLOAD_RT_MODELS",
    )
    parser.add_argument(
        "--parts", type=words, metavar="A,B", help="perplexity,divergence,needles,tasks,ruler,extraction"
    )
    parser.add_argument("--minutes", type=float, default=50, metavar="N", help="a part starts no row after this (50)")
    parser.add_argument("--out", type=Path, default=Path("eval") / "results", metavar="DIR", help="(eval/results)")
    parser.add_argument("--data", type=Path, default=data, metavar="DIR", help="books/, wikitext-2/, tasks/")
    add_options(parser, RealSize)
    parser.add_argument(
        "--variant", action="append", default=[], metavar="'POLICY KEY=VALUE ...'",
        help="a variant to compare with full, instead of the default variants; may be repeated",
    )  # fmt: skip


@measure("real", "quality loss of selection on published models (`make real`)", _real_flags)
def real(args: argparse.Namespace) -> int:
    """Evaluate models given by folder with every policy at fixed budgets: perplexity on a novel, code and Wikipedia,
    needles, RULER and question tasks. Finished rows are reused."""
    from ..core.variants import make_variants
    from ..suites.real import PARTS, RealSize, run_real

    size, parts, say = config_of(args, RealSize), args.parts or list(PARTS), say_on_stderr()
    chosen = make_variants((), (), (), args.variant) if args.variant else ()
    run_real(args.models, parts, args.out, data=args.data, minutes=args.minutes, size=size, say=say, chosen=chosen)
    return 0
