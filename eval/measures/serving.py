"""Serving measures: savings by shared prefixes."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..core.registry import measure
from .flags import words


def _sharing_flags(parser: argparse.ArgumentParser) -> None:
    tables = "attention,levels,steps,workload,fragmentation,questions,poisson"
    parser.add_argument("--out", default="out", metavar="DIR", help="for tables (default: out)")
    parser.add_argument("--only", type=words, default=words(tables), metavar="A,B", help=f"of {tables} (default: all)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="of each baseline, at least (7)")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that all of it runs, measures nothing")


@measure("sharing", "what shared prefixes save: attention, steps, memory, requests that arrive", _sharing_flags)
def sharing(args: argparse.Namespace) -> int:
    """Measure the savings by shared prefixes on one CPU thread: attention of a step, whole steps, a workload, memory,
    questions about one document, and requests that arrive at random."""
    from ..serving.prefix_attention import run_sharing

    for report in run_sharing(args.only, args.repeats, Path(args.out), small=args.small):
        print(report.markdown(), flush=True)
    return 0
