"""Command line `offload-rt eval MEASURE ...`. Heavy modules are imported only when a measure runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from .core.registry import MEASURES, run_measure
from .measures import quality, speed, suites  # noqa: F401 - they register the built-in measures


def listing() -> str:
    """Return the text of `offload-rt eval --help`, with one line per measure."""
    width = max(map(len, MEASURES)) + 2
    lines = [f"  {name:{width}}{found.help}" for name, found in MEASURES.items()]
    usage = "usage: offload-rt eval MEASURE ...\n"
    head = "'offload-rt eval MEASURE --help' lists the options of a measure.\n\nmeasures:"
    tail = "\nMEASURE may also be a Python file that registers a measure."
    return "\n".join([usage, head, *lines, tail])


def run_eval(arguments: Sequence[str]) -> int:
    """Run `arguments`: the name of a measure (or a Python file that registers one), followed by its arguments.

    `--help` lists all measures. Returns the exit code. Raises ConfigError if the measure is missing or unknown.
    """
    if not arguments:
        raise ConfigError(f"name a measure: {', '.join(MEASURES)} (see offload-rt eval --help)")
    name, *others = arguments
    if name in ("-h", "--help"):
        print(listing())
        return 0
    return run_measure(name, others, f"offload-rt eval {name}")
