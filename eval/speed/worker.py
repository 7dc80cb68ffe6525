"""Run a competitor in its own process, so that it shares no memory, threads or caches with other competitors."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from ...errors import InputError
from .competitors import COMPETITORS, Ask, SpeedConfig

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """Result for one prompt."""

    prefill: float  # CPU time to the first token in seconds
    steps: list[float]  # CPU time of each further token in seconds
    tokens: list[int]
    peak_bytes: int  # peak memory of the process so far, in bytes


class SubprocessCompetitor:
    """A competitor that runs in its own process, until `close` is called."""

    def __init__(self, name: str, model: str, config: SpeedConfig) -> None:
        """Start the process. If it fails to load the model, raise InputError with its error message."""
        self._name, self._tokens = name, config.tokens
        self._process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            self._run(_load, name, model, config)
        except InputError:
            self.close()
            raise

    def ask(self, prompt: Sequence[int]) -> Result:
        """Have the process generate the continuation of one prompt. Return the tokens and the times.

        If the process fails, raise InputError with its error message.
        """
        return self._run(_ask, list(prompt), self._tokens)

    def close(self) -> None:
        self._process.shutdown()

    def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return self._process.submit(call, *args, **kwargs).result()
        except Exception as error:
            raise InputError(f"{self._name}: {type(error).__name__}: {error}") from error


_loaded: list[Ask] = []
"""The competitor that this process runs, once it is loaded."""


def _load(name: str, model: str, config: SpeedConfig) -> None:
    torch.set_num_threads(config.threads)
    _loaded[:] = [COMPETITORS[name](model, config)]


def _ask(prompt: Sequence[int], tokens: int) -> Result:
    return timed(_loaded[0], prompt, tokens)


def timed(ask: Ask, prompt: Sequence[int], tokens: int) -> Result:
    """Generate the first token after `prompt` and `tokens` more. Return the tokens and the times."""
    began = time.process_time()
    times, found = [], []
    for token in islice(ask(prompt), tokens + 1):
        now = time.process_time()
        times.append(now - began)
        found.append(token)
        began = now
    return Result(times[0], times[1:], found, _peak_bytes())


def _peak_bytes() -> int:
    # `getrusage` would include the peak of the parent process.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])
