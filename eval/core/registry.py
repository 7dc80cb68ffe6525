"""Registry of the evaluations that `offload-rt eval` runs.

`@measure` registers an evaluation, and `run_measure` runs it.

    @measure("tokens", "how many tokens a text has", add_flags)
    def tokens(args: argparse.Namespace) -> int:
        ...

`offload-rt eval ./tokens.py --text book.txt` runs the evaluation that the Python file registers. Large packages are
imported inside functions, so that the evaluations can be listed quickly.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ...errors import ConfigError, InputError
from ...utils.config_fields import check_choice

Run = Callable[[argparse.Namespace], int]
Flags = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Measure:
    help: str
    add_flags: Flags | None  # Adds the flags to a parser. If None, `run` parses `args.arguments` itself.
    run: Run  # Runs the evaluation and returns the exit code. Its docstring is the `--help` description.


MEASURES: dict[str, Measure] = {}


def measure(name: str, help: str, add_flags: Flags | None) -> Callable[[Run], Run]:
    """Register the decorated function as the evaluation `name`. Raise ConfigError if the name is already taken."""

    def register(run: Run) -> Run:
        if name in MEASURES:
            raise ConfigError(f"there is an evaluation {name!r} already: choose another name")
        MEASURES[name] = Measure(help, add_flags, run)
        return run

    return register


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def run_measure(name: str, arguments: Sequence[str], prog: str) -> int:
    """Run an evaluation and return its exit code.

    Args:
        name: The name of a registered evaluation, or the path of a Python file that registers one.

    Raises:
        ConfigError: The evaluation or a flag is unknown.
    """
    found = _from_file(Path(name)) if name.endswith(".py") else None
    if found is None:
        check_choice("evaluation", name, MEASURES)
        found = MEASURES[name]
    if found.add_flags is None:
        return found.run(argparse.Namespace(arguments=list(arguments)))
    description = " ".join((found.run.__doc__ or found.help).split())
    parser = _Parser(prog=prog, description=description)
    found.add_flags(parser)
    return found.run(parser.parse_args(arguments))


def _from_file(path: Path) -> Measure:
    """Return the evaluation that a Python file registers.

    Raises InputError if the file does not exist, and ConfigError if it does not register exactly one evaluation.
    """
    if not path.is_file():
        raise InputError(f"cannot read {str(path)!r}: there is no such file")
    before = set(MEASURES)
    runpy.run_path(str(path))
    added = [name for name in MEASURES if name not in before]
    if len(added) != 1:
        raise ConfigError(f"{str(path)!r} registers {len(added)} evaluations; it must register one with @measure(...)")
    return MEASURES.pop(added[0])
