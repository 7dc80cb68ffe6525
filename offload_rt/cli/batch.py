"""`offload-rt batch`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .common import add_command, stderr_console
from .engine_flags import add_engine_flags, engine_config
from .sampling_flags import add_sampling_flags, sampling_given


def run(args: argparse.Namespace) -> int:
    """Process the requests of a file and write the results to another file. Each line of IN is a JSON object with
    "prompt" or "messages", and optionally "id", "max_tokens" and other sampling options. OUT gets a line for each
    request. Requests with a result in OUT are skipped, so an interrupted batch can be resumed. The exit code is 1 if a
    request failed."""
    from .batch_files import Answers, answer_all, read_requests

    if args.at_once < 1 or (args.ray is not None and args.ray < 1):
        raise ConfigError(f"--at-once {args.at_once} and --ray must be at least 1")
    config, sampling, console = engine_config(args), sampling_given(args), stderr_console(args.quiet)
    requests = read_requests(Path(args.input), sampling)
    answers = Answers(Path(args.output))
    try:
        left = [request for request in requests if request.id not in answers.done]
        console.print(f"{len(left):,} of {len(requests):,} requests to process", markup=False)
        if not left:
            return 0
        from ..utils.progress import Progress

        with Progress(enabled=not args.quiet).bar("requests") as show:
            if args.ray is not None:
                from .batch_ray import answer_on_ray

                failed = answer_on_ray(args.model, config, left, sampling, answers, args.at_once, args.ray, show)
            else:
                from ..llm import LLM

                with LLM(args.model, config) as llm:
                    failed = answer_all(llm, left, sampling, answers, args.at_once, show)
    finally:
        answers.close()
    if failed:
        console.print(f"{failed:,} requests failed: see the field 'error' of their results", markup=False)
    return 1 if failed else 0


def add(commands: Any) -> None:
    parser = add_command(commands, "batch", run)
    parser.add_argument("input", metavar="IN.jsonl", help="requests, one per line")
    parser.add_argument("output", metavar="OUT.jsonl", help="results; existing lines are kept")
    parser.add_argument(
        "--at-once",
        type=int,
        default=64,
        metavar="N",
        help="requests per batch; results are written after each batch (default: 64)",
    )
    parser.add_argument(
        "--ray", type=int, metavar="N", help="N engines on a Ray cluster (RAY_ADDRESS, or a new local one)"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing on stderr")
    add_engine_flags(parser)
    add_sampling_flags(parser, several=False)
