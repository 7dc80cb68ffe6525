"""Command line `offload-rt eval NAME ...`. Heavy modules are imported only when an evaluation runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from .core.registry import MEASURES, run_measure
from .measures import quality, speed, suites  # noqa: F401 - these modules register the built-in evaluations


def listing() -> str:
    width = max(map(len, MEASURES)) + 2
    lines = [f"  {name:{width}}{found.help}" for name, found in MEASURES.items()]
    usage = "usage: offload-rt eval NAME ...\n"
    head = "'offload-rt eval NAME --help' lists the options of an evaluation.\n\nevaluations and benchmarks:"
    tail = "\nNAME may also be a Python file that registers an evaluation."
    return "\n".join([usage, head, *lines, tail])


def run_eval(arguments: Sequence[str]) -> int:
    """Run an evaluation and return its exit code. `--help` lists all evaluations.

    Args:
        arguments: The name of an evaluation, or the path of a Python file that registers one, followed by flags.

    Raises:
        ConfigError: No evaluation is given, or it is unknown.
    """
    if not arguments:
        raise ConfigError(f"name an evaluation: {', '.join(MEASURES)} (see offload-rt eval --help)")
    name, *others = arguments
    if name in ("-h", "--help"):
        print(listing())
        return 0
    return run_measure(name, others, f"offload-rt eval {name}")
