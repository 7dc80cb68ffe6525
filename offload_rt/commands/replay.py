"""`offload-rt replay`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config import EvictionOptions, check_choice
from ..errors import ConfigError
from .common import add_command, check_writable, numbers, stderr_console


def run(args: argparse.Namespace) -> int:
    """Replays what `generate --record` wrote: what a working set would save, what a smaller pool would lose. Tables go
    to stdout and --out; --html makes a page that shows which passages each sentence read."""
    from ..engine.recording import Recording
    from ..eval.simulate.attention_page import write_page
    from ..eval.simulate.selection_replay import ReplayConfig, run_replay

    check_writable(args.html)
    config = ReplayConfig(**_settings(args))
    recording = Recording.open(Path(args.recording))
    out = Path(args.out) if args.out is not None else Path(args.recording) / "replay"
    console = stderr_console(args.quiet)
    for report in run_replay(recording, config, out, console.print):
        print(report.markdown(), flush=True)
        console.print(f"wrote {out / report.name}.json, .csv, .md, .png", soft_wrap=True, markup=False)
    if args.html is not None:
        write_page(recording, Path(args.html))
        console.print(f"wrote {args.html}", soft_wrap=True, markup=False)
    return 0


def add(commands: Any) -> None:
    """Enters the subcommand."""
    parser = add_command(commands, "replay", run, model=False)
    parser.add_argument("recording", metavar="RUN", help="folder that 'offload-rt generate --record RUN' wrote")
    parser.add_argument("--working-set", type=numbers, metavar="0.05,0.1", help="rows kept, as shares of the tokens")
    parser.add_argument("--cache", metavar="decay,lru,lfu,counter", help="what leaves a working set first")
    parser.add_argument("--budgets", type=numbers, metavar="0.5,0.8", help="pool limits, as shares of the tokens")
    parser.add_argument("--eviction", metavar="fifo,lru,counter", help="what gives way in a smaller pool")
    parser.add_argument(
        "--protect", metavar="window|none", help="what eviction spares (default: fifo is tried with both)"
    )
    parser.add_argument("--out", metavar="DIR", help="results (default: RUN/replay)")
    parser.add_argument("--html", metavar="FILE", help="page of the text: which passages each sentence read")
    parser.add_argument("--quiet", action="store_true", help="tables only")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for `ReplayConfig`. Raises ConfigError."""
    settings: dict[str, Any] = {}
    if args.working_set is not None:
        settings["working_sets"] = tuple(args.working_set)
    if args.cache is not None:
        settings["caches"] = tuple(args.cache.split(","))
    if args.budgets is not None:
        settings["budgets"] = tuple(args.budgets)
    if args.eviction is not None:
        for name in args.eviction.split(","):
            check_choice("eviction", name, ("fifo", "lru", "counter"))
        settings["evictions"] = tuple(EvictionOptions(n, args.protect or "window") for n in args.eviction.split(","))
    elif args.protect is not None:
        raise ConfigError(f"--protect {args.protect} goes with --eviction: give both")
    return settings
