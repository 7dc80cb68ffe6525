"""Run one part of the adversary tests for a given time, or repeat a single case.

    python tests/adversary/run.py files --seconds 600 --seed 1
    python tests/adversary/run.py files --case 1000042

A part is a module in this folder. Its function `run_case(seed)` raises an exception if the case fails, and otherwise
returns counts of the work that was done. The run continues after a failure. The traceback and the command that repeats
the failed case are printed and added to `out/adversary-failures.txt`, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PARTS = ("configurations", "interleavings", "names", "files", "clients")
CASES_PER_SEED = 1_000_000
CASE_SECONDS = 180
"""Time limit for one case. A case that takes longer counts as failed, because it may be in a deadlock."""

FAILURES = Path(__file__).parents[2] / "out" / "adversary-failures.txt"

Case = Callable[[int], Counter[str]]


def load(part: str) -> Case:
    case: Case = importlib.import_module(f"adversary.{part}").run_case
    return case


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """After `seconds`, print the stacks of all threads and raise TimeoutError in the main thread."""

    def expired(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(all_threads=True)
        raise TimeoutError(f"the case took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command(part: str, seed: int) -> str:
    return f"python tests/adversary/run.py {part} --case {seed}"


def record_failure(part: str, seed: int) -> None:
    report = f"FAILED: {command(part, seed)}\n{traceback.format_exc()}"
    print(report, end="", flush=True)
    FAILURES.parent.mkdir(exist_ok=True)
    with FAILURES.open("a") as file:
        file.write(report)


def run_part(part: str, seeds: Iterator[int], seconds: float) -> tuple[Counter[str], list[int]]:
    """Run cases until `seconds` have passed or `seeds` is exhausted. Return the summed counts and the failed seeds."""
    case, done, failed = load(part), Counter[str](), list[int]()
    end, reported = time.monotonic() + seconds, time.monotonic()
    for seed in seeds:
        try:
            with time_limit(CASE_SECONDS):
                done.update(case(seed))
        except KeyboardInterrupt:
            break
        except BaseException:
            failed.append(seed)
            record_failure(part, seed)
        done["cases"] += 1
        if time.monotonic() - reported > 30:
            reported = time.monotonic()
            print(f"{part}: {dict(done)}, {len(failed)} failed", flush=True)
        if time.monotonic() > end:
            break
    return done, failed


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help=f"first case: SEED * {CASES_PER_SEED:,}")
    parser.add_argument("--case", type=int, help="run this case alone")
    options = parser.parse_args()
    warnings.simplefilter("error")
    first = options.seed * CASES_PER_SEED if options.case is None else options.case
    seeds = iter(range(first, first + CASES_PER_SEED) if options.case is None else [first])
    done, failed = run_part(options.part, seeds, options.seconds)
    print(f"{options.part}: {dict(done)}, {len(failed)} failed")
    for seed in failed:
        print(f"  {command(options.part, seed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
