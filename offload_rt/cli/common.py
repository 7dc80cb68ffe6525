"""Helpers shared by the subcommands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def default_store() -> Path:
    """Return the folder of the default store: `$XDG_DATA_HOME/offload-rt/store`, or below `~/.local/share`."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "offload-rt" / "store"


INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, model: bool = True
) -> argparse.ArgumentParser:
    """Add a subcommand described by the docstring of `run`, with MODEL and --dtype if `model` is true."""
    summary = " ".join((run.__doc__ or "").split())
    head = summary.split(". ")[0].split(";")[0].rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(name, help=head, description=summary)
    if model:
        parser.add_argument("model", metavar="MODEL", help="'reference', a local folder, a GGUF file or a hub id")
        parser.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
    parser.set_defaults(run=run)
    return parser


def stderr_console(quiet: bool) -> Console:
    from rich.console import Console

    return Console(stderr=True, quiet=quiet, highlight=False)
