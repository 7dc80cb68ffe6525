"""The command line: assembles the subcommands of `commands/` and turns errors into exit codes. A user's mistake is one
line on stderr and exit code 2; Ctrl-C is exit code 130.

Neither torch nor transformers is imported before a command runs, so that `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ..errors import OffloadError
from ..utils.quiet import quiet_transformers
from . import batch, chat, generate, info, measure, serve, sessions, skew
from .common import INTERRUPTED

USER_ERROR = 2

COMMANDS = (generate, chat, batch, serve, sessions, skew, info, measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        with _quiet_libraries():
            return int(args.run(args))
    except OffloadError as error:
        print(f"offload-rt: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("offload-rt: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our stdout has left, as `head` does; flushing at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silences what libraries say; our own warnings become one line each on stderr."""
    quiet_transformers()
    package = str(Path(__file__).parents[1])

    def show(message: Warning | str, category: type[Warning], filename: str, *where: object, **line: object) -> None:
        if Path(filename).is_relative_to(package):
            print(f"offload-rt: note: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


class _Version(argparse.Action):
    """Prints the version, which is looked up only then, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *parsed: object) -> None:
        from .. import __version__

        print(f"offload-rt {__version__}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints fit one line, and in which an argument that may be left out may also stand
    behind flags: argparse takes it for left out as soon as one comes."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, which gives back what it has no place for."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            left_out = not action.option_strings and action.nargs == "?" and getattr(found, action.dest) is None
            if left_out and rest and not rest[0].startswith("-"):
                setattr(found, action.dest, rest.pop(0))
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        self.exit(USER_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="offload-rt",
        description="Long-context generation with the KV cache in host memory.",
        epilog="MODEL is 'reference' (ships with the package), a local folder, a GGUF file or a hub id.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add(commands)
    return parser
