"""The measures of `offload-rt eval`: a decorator enters one, `run_measure` reads its flags and runs it.

    @measure("tokens", "how many tokens a text has", add_flags)
    def tokens(args: argparse.Namespace) -> int:
        ...

A file of one's own that registers a measure is run by its path: `offload-rt eval ./tokens.py --text book.txt`. Modules
that register measures import what is heavy inside the function, so that all measures can be listed at once.
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
    """A measure. help: one line; add_flags: enters its flags in a parser, None where `run` reads the words itself (they
    are `args.arguments`); run: measures, and returns the exit code. Its docstring is what `--help` says."""

    name: str
    help: str
    add_flags: Flags | None
    run: Run


MEASURES: dict[str, Measure] = {}
"""All that were registered, by name."""


def measure(name: str, help: str, add_flags: Flags | None) -> Callable[[Run], Run]:
    """Registers the decorated function as the measure `name`. Raises ConfigError where the name is taken."""

    def register(run: Run) -> Run:
        if name in MEASURES:
            raise ConfigError(f"there is a measure {name!r} already: choose another name")
        MEASURES[name] = Measure(name, help, add_flags, run)
        return run

    return register


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def run_measure(name: str, arguments: Sequence[str], prog: str) -> int:
    """Runs the measure `name`, or the one that the Python file `name` registers, with `arguments`; its exit code.
    `prog` is how the command line calls it. Raises ConfigError for an unknown measure or flag, and what the measure
    raises."""
    found = _from_file(Path(name)) if name.endswith(".py") else None
    if found is None:
        check_choice("measure", name, MEASURES)
        found = MEASURES[name]
    if found.add_flags is None:
        return found.run(argparse.Namespace(arguments=list(arguments)))
    description = " ".join((found.run.__doc__ or found.help).split())
    parser = _Parser(prog=prog, description=description)
    found.add_flags(parser)
    return found.run(parser.parse_args(arguments))


def _from_file(path: Path) -> Measure:
    """The measure that a Python file registers. Raises InputError where it cannot be read, ConfigError where it
    registers none or several."""
    if not path.is_file():
        raise InputError(f"cannot read {str(path)!r}: there is no such file")
    before = set(MEASURES)
    runpy.run_path(str(path))
    added = [name for name in MEASURES if name not in before]
    if len(added) != 1:
        raise ConfigError(f"{str(path)!r} registers {len(added)} measures; it must register one with @measure(...)")
    return MEASURES.pop(added[0])
