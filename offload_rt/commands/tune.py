"""`offload-rt tune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import add_command, given, read_text, stderr_console


def run(args: argparse.Namespace) -> int:
    """Chooses infinigen's scorer, source, window, skew and threshold, which keep a limit on the missed attention mass
    at the fewest bytes on a text, and saves them with the skew artifact: 'generate --skew DIR' takes them as defaults.
    """
    from ..eval.core.model_under_test import ModelUnderTest
    from ..eval.quality.tune import TuneConfig, most_trials, run_tune
    from ..progress import Progress

    config = TuneConfig(**given(args, ("max_missed_mass", "context", "scored")))
    text = read_text(args.prompt_file)
    console = stderr_console(args.quiet)
    tested = ModelUnderTest(args.model, device=args.device, dtype=args.dtype)
    with Progress(enabled=not args.quiet).items("tune", most_trials()) as done:
        report, tuned = run_tune(tested, text, Path(args.prompt_file).name, config, Path(args.out), done)
    print(report.markdown(), flush=True)
    if not tuned.measured["kept"]:
        console.print(f"No setting tried keeps {config.max_missed_mass:.2%}: this one misses least.")
    console.print(f"wrote {args.out}: use it with --skew {args.out}", soft_wrap=True, markup=False)
    return 0


def add(commands: Any) -> None:
    """Enters the subcommand."""
    parser = add_command(commands, "tune", run)
    parser.add_argument("--prompt-file", required=True, metavar="BOOK", help="text to measure on (UTF-8)")
    parser.add_argument("--out", required=True, metavar="DIR", help="skew.safetensors, policy.json and all trials")
    parser.add_argument("--max-missed-mass", type=float, metavar="M", help="limit, worst layer's mean (0.01)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of the text taken (2048)")
    parser.add_argument("--scored", type=int, metavar="N", help="of them, the last ones, decoded and measured (128)")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
