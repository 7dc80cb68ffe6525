"""Helpers shared by the subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

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


def add_passing(commands: Any, name: str, run: Callable[[argparse.Namespace], int]) -> None:
    """Add a subcommand that passes all arguments, including `--help`, to `run`."""
    summary = " ".join((run.__doc__ or "").split())
    parser = commands.add_parser(name, help=summary.split(". ")[0].rstrip("."), add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the options that are set. Defaults are defined only in the Python API."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def stderr_console(quiet: bool) -> Console:
    from rich.console import Console

    return Console(stderr=True, quiet=quiet, highlight=False)
