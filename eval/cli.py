"""`offload-rt eval MEASURE ...`: one way to everything that measures. Nothing heavy is imported before one runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from .core.registry import MEASURES, run_measure
from .measures import quality, serving, simulate, speed, suites

FOLDERS = {"quality": quality, "speed": speed, "serving": serving, "simulate": simulate, "suites": suites}
"""The modules that register our measures, by the folder of what they run."""


def listing() -> str:
    """What `offload-rt eval --help` says: each measure with one line."""
    width = max(map(len, MEASURES)) + 2
    lines = [f"  {name:{width}}{found.help}" for name, found in MEASURES.items()]
    usage = "usage: offload-rt eval MEASURE ...\n"
    head = "'offload-rt eval MEASURE --help' lists what a measure takes.\n\nmeasures:"
    tail = "\nMEASURE may be a Python file of your own that registers one."
    return "\n".join([usage, head, *lines, tail])


def run_eval(arguments: Sequence[str]) -> int:
    """Runs `arguments`: a measure (or a Python file that registers one) and its own arguments; `--help` lists all.
    Raises ConfigError for an unknown or a missing measure, and what the measure raises."""
    if not arguments:
        raise ConfigError(f"name a measure: {', '.join(MEASURES)} (see offload-rt eval --help)")
    name, *others = arguments
    if name in ("-h", "--help"):
        print(listing())
        return 0
    return run_measure(name, others, f"offload-rt eval {name}")
