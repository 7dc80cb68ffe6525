"""The command line `offload-rt`: its subcommands and exit codes.

A user error is reported as one line on stderr, and the exit code is 2. After Ctrl-C, the exit code is 130. torch and
transformers are imported only when a command runs, so `--help` and usage errors are fast.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO, TextIOWrapper, UnsupportedOperation
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ..errors import OffloadError
from ..utils.extras import install_command
from ..utils.quiet import quiet_transformers
from . import batch, cache, chat, evaluate, generate, info, serve, sessions, skew, write
from .common import INTERRUPTED
from .flags import in_flags

USER_ERROR = 2

EXTRAS = {
    "lm_eval": "eval", "datasets": "eval", "matplotlib": "plot", "optimum": "bench", "ray": "ray",
    "llguidance": "structured",
}  # fmt: skip
"""Maps optional packages to the extras of this package that install them."""

COMMANDS = (generate, write, chat, batch, serve, sessions, skew, info, cache, evaluate)


def main(argv: Sequence[str] | None = None) -> int:
    if sys.stdin is None:  # closed, as with `<&-`
        sys.stdin = TextIOWrapper(BytesIO())
    _accept_all_characters(sys.stdin, "surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        _accept_all_characters(stream, "backslashreplace")
    args = _parser().parse_args(argv)
    try:
        with _quiet_libraries():
            return int(args.run(args))
    except OffloadError as error:
        print(f"offload-rt: {in_flags(' '.join(str(error).split()), args)}", file=sys.stderr)
        return USER_ERROR
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"offload-rt: {package} is not installed: {install_command(EXTRAS[package])}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("offload-rt: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed stdout, as `head` does; prevent a second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _accept_all_characters(stream: TextIO | None, errors: str) -> None:
    """Prevent a UnicodeError if a text contains characters that are not valid in the user's character set."""
    # Tests replace streams by others, and a closed stream is None.
    if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
        with suppress(UnsupportedOperation):  # a program that calls `main` may have read from stdin
            stream.reconfigure(errors=errors)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Suppress warnings from libraries. Print each warning from this package only once, as one line on stderr."""
    quiet_transformers()
    package = str(Path(__file__).parents[1])
    shown = set[str]()  # one request may create several sequences that issue the same warning

    def show(message: Warning | str, category: type[Warning], filename: str, *where: object, **line: object) -> None:
        if Path(filename).is_relative_to(package) and str(message) not in shown:
            shown.add(str(message))
            print(f"offload-rt: note: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *parsed: object) -> None:
        from .. import __version__

        print(f"offload-rt {__version__}")
        parser.exit()


def _positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return f"[{name}]" if action.nargs == "?" else f"{name} ..." if action.nargs in ("*", argparse.PARSER) else name


class _Parser(argparse.ArgumentParser):
    """Parser that does not accept abbreviated options, so that a new option never changes the meaning of a command."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **arguments})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            left_out = not action.option_strings and action.nargs == "?" and getattr(found, action.dest) is None
            if left_out and rest and not rest[0].startswith("-"):
                setattr(found, action.dest, rest.pop(0))
        if rest:  # reported here because the main parser does not know the options of this command
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def format_help(self) -> str:
        # The usage line omits the options, because they are listed below.
        words = [f"{action.option_strings[-1]} {action.metavar}" if action.option_strings else _positional(action)
                 for action in self._actions if action.required or not action.option_strings]  # fmt: skip
        self.usage = " ".join(["%(prog)s [OPTIONS]", *words])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        message += self._suggestion(message)
        self.exit(USER_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _suggestion(self, message: str) -> str:
        if not (wrong := re.search(r"unrecognized arguments: (--[^\s=]+)|invalid choice: '([^']+)'", message)):
            return "; put a text with spaces in quotes" if message.startswith("unrecognized arguments: ") else ""
        actions = self._actions
        choices = [name for action in actions for name in (action.choices if wrong[2] else action.option_strings) or ()]
        near = difflib.get_close_matches(wrong[1] or wrong[2], choices, n=1)
        return f"; did you mean {near[0]}?" if near else ""


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
