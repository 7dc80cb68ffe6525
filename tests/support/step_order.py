"""Drive several engines, each in its own thread, one step at a time and in a seeded order.

The interleaving is reproducible, and the number of rounds reveals an engine that makes no progress.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from offload_rt.engine.engine import Engine


def run_in_rounds(engines: Seq[Engine], seed: int, rounds: int, after_step: Callable[[], None] = lambda: None) -> int:
    """Step all engines once per round, in random order, until all are idle. Return the number of rounds.

    Raises AssertionError if an engine is still busy after `rounds` rounds.
    """
    order = random.Random(seed)
    with ExitStack() as ends:
        threads = [ends.enter_context(ThreadPoolExecutor(1)) for _ in engines]
        for done in range(rounds):
            busy = [i for i, engine in enumerate(engines) if not engine.idle]
            if not busy:
                return done
            for i in order.sample(busy, len(busy)):
                threads[i].submit(engines[i].step).result()
                after_step()
    raise AssertionError(f"not idle after {rounds} rounds: a livelock")
