"""Choose the number of threads for decode steps on a CPU by measuring step times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, median

import torch

from ..kernels import team

KEPT = 8  # number of step times to keep per mode
SHORTEST_INTERVAL, LONGEST_INTERVAL = 16, 256  # steps between two trials of the slower mode
TRIED = 4  # steps per trial
GAIN = 1.05  # several threads must be this much faster, because they use more processor time and vary more
CHANGED = 1.3  # a change of step times by this factor means that the machine's load has changed


class ThreadChoice:
    """Runs decode steps with either all threads or one thread, whichever has been faster recently.

    If other processes are busy, several threads can make a step slower, and only the time of whole steps shows this.
    The slower mode is tried again from time to time, but less and less often while it stays slower.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed, self._batch = fixed, 0
        self._begin()

    def _begin(self) -> None:
        self._times: dict[bool, deque[float]] = {several: deque(maxlen=KEPT) for several in (True, False)}
        self._several, self._interval, self._steps, self._trying = True, SHORTEST_INTERVAL // 4, 0, 0
        self._cold = True  # the first step is slower, because its memory and caches are new

    @contextmanager
    def step(self, device: torch.device, batch: int) -> Iterator[None]:
        if device.type != "cpu":
            yield
            return
        if batch != self._batch:  # times at other batch sizes cannot be compared
            self._begin()
            self._batch = batch
        several = self._several ^ (self._trying > 0)
        began = time.perf_counter()
        with team.torch_on_one_thread(helpers=several):
            yield
        if team.threads() > 1 and not self._fixed:
            self.record(several, time.perf_counter() - began)

    def record(self, several: bool, seconds: float) -> None:
        """Record how long a step took, with several threads if `several` and with one otherwise.

        Choose the mode of the next step.
        """
        if self._cold:
            self._cold = False
            return
        times = self._times[several]
        if several == self._several and len(times) == KEPT and seconds > CHANGED * median(times):
            self._interval = SHORTEST_INTERVAL
        times.append(seconds)
        self._steps += 1
        if self._trying:
            self._trying -= 1
            if not self._trying:
                self._compare()
        elif self._steps >= self._interval:
            self._trying, self._steps = TRIED, 0
            self._times[not self._several].clear()

    def _compare(self) -> None:
        # Use means rather than minima, so that a few slow steps, which had lost their processor, also count.
        several, one = (fmean(self._times[mode]) for mode in (True, False))
        if (GAIN * several < one) != self._several:
            self._several, self._interval = not self._several, SHORTEST_INTERVAL
        else:
            self._interval = min(LONGEST_INTERVAL, 2 * self._interval)
