"""Shows that the tests catch faults: applies each mutant of `mutants.toml`, a line that is wrong, to a copy of the tree
and runs the tests that should fail. `make mutants`; `MUTANT=name` runs one; `--jobs N` runs several at once.

Exit code 1 if a mutant survives, or if its tests end otherwise than by failing (an error in collection kills nothing).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
LEFT_OUT = shutil.ignore_patterns(".*", "out", "docs", "reference", "__pycache__", "*.egg-info")
WEIGHTS = Path("offload_rt", "reference")
"""Shipped models: linked into a copy, not copied."""

ENDED = 100
"""Added to pytest's exit codes, so that a process that fails by itself is not taken for a failed test."""

KILLED, SURVIVED = ENDED + 1, ENDED
"""Of tests that failed, and of tests that passed."""

PRELOADED = "ignore::pytest.PytestAssertRewriteWarning"
"""Plugins of modules that were imported before the processes were forked need no rewriting."""


@dataclass(frozen=True)
class Mutant:
    """`old`, a line of `file` without its indentation, is replaced by `new`; one of `tests` must fail then."""

    name: str
    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Returns the text of the file with the fault. Raises ValueError where the line is not there exactly once."""
        lines = text.splitlines(keepends=True)
        found = [i for i, line in enumerate(lines) if line.strip() == self.old]
        if len(found) != 1:
            raise ValueError(f"mutant {self.name}: {self.file} has the line {self.old!r} {len(found)} times, not once")
        lines[found[0]] = lines[found[0]].replace(self.old, self.new)
        return "".join(lines)


def load(path: Path = LIST) -> list[Mutant]:
    """Returns the mutants of a list."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def copy_tree(folder: Path) -> Path:
    """Copies what tests need, with the package reachable as in an installation; returns the folder to import from."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    (tree / WEIGHTS).symlink_to(ROOT / WEIGHTS)
    (folder / "path").mkdir()
    (folder / "path" / "offload_rt").symlink_to(tree / "offload_rt")
    return folder / "path"


def attempt(mutant: Mutant, log: Path) -> None:
    """In a process of its own: ends with pytest's exit code and ENDED."""
    with tempfile.TemporaryDirectory() as place:
        path = copy_tree(Path(place))
        file = Path(place, "tree", mutant.file)
        file.write_text(mutant.applied(file.read_text(encoding="utf-8")), encoding="utf-8")
        os.chdir(file.parents[len(Path(mutant.file).parts) - 1])
        sys.path.insert(0, str(path))
        os.environ["PYTHONPATH"] = str(path)
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            import pytest

            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", PRELOADED, *mutant.tests])
        sys.stdout.flush()
        shutil.rmtree(place, ignore_errors=True)
        os._exit(ENDED + code)


def attempts(mutants: Sequence[Mutant], jobs: int, logs: Path) -> Iterator[tuple[Mutant, int | None, float]]:
    """Yields each mutant with its exit code and the seconds it took."""
    import torch  # noqa: F401  read once, for all processes that are forked
    import transformers  # noqa: F401

    context, waiting = multiprocessing.get_context("fork"), list(reversed(mutants))
    running: list[tuple[Mutant, multiprocessing.process.BaseProcess, float]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            process = context.Process(target=attempt, args=(mutant, logs / f"{mutant.name}.log"))
            process.start()
            running.append((mutant, process, time.monotonic()))
        for entry in [entry for entry in running if not entry[1].is_alive()]:
            running.remove(entry)
            yield entry[0], entry[1].exitcode, time.monotonic() - entry[2]
        time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the mutants that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants to run (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "mutants", help="where pytest's output goes")
    given = parser.parse_args(argv)
    mutants = [mutant for mutant in load() if not given.names or mutant.name in given.names]
    if unknown := set(given.names) - {mutant.name for mutant in mutants}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    given.logs.mkdir(parents=True, exist_ok=True)
    left = 0
    for mutant, code, seconds in attempts(mutants, given.jobs, given.logs):
        told = {KILLED: "killed", SURVIVED: "SURVIVED"}.get(code if code is not None else -1, f"BROKEN ({code})")
        left += code != KILLED
        print(f"{told:10} {mutant.room:10} {mutant.name} ({seconds:.0f} s)", flush=True)
    print(f"{len(mutants) - left} of {len(mutants)} mutants killed; pytest's output is in {given.logs}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
