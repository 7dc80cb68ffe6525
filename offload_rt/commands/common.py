"""What subcommands share: files in and out, the console, the flags every command with a model has."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, model: bool = True
) -> argparse.ArgumentParser:
    """A parser for the subcommand `name`, described by the docstring of `run`; with `model` also MODEL and --dtype."""
    summary = " ".join((run.__doc__ or "").split())
    head = summary.split(". ")[0].split(";")[0].rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(name, help=head, description=summary)
    if model:
        parser.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
        parser.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
    parser.set_defaults(run=run)
    return parser


def add_passing(commands: Any, name: str, run: Callable[[argparse.Namespace], int]) -> None:
    """A subcommand whose arguments, `--help` included, all go to `run` as they are."""
    summary = " ".join((run.__doc__ or "").split())
    parser = commands.add_parser(name, help=summary.split(". ")[0].rstrip("."), add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def read_text(path: str) -> str:
    """The text of a UTF-8 file, "-" for stdin. Raises InputError where it is missing, unreadable, binary or empty."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path!r}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path!r} is not text: byte {error.start} is not UTF-8; give a plain text file in UTF-8"
        ) from error
    if "\0" in text:
        raise InputError(f"{path!r} is a binary file: it holds NUL bytes; give a plain text file in UTF-8")
    if not text.strip():
        raise InputError(f"{path!r} is empty: there is nothing to continue")
    return text


def check_writable(path: str | None) -> None:
    """Raises InputError now rather than after the run."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path!r}: there is no folder {str(folder)!r}")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise InputError(f"cannot write {path!r}: it is a folder, or writing is not permitted")


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options that were given, so that defaults stay where they are defined."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def stderr_console(quiet: bool) -> Console:
    """A console that leaves stdout alone."""
    from rich.console import Console

    return Console(stderr=True, quiet=quiet, highlight=False)


def numbers(text: str) -> list[float]:
    """Numbers from "0.5,0.8"."""
    try:
        return [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; write 0.05,0.1") from None
