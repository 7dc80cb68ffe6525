"""Run a competitor in its own process, so that memory, threads and caches are not shared with other competitors."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ...errors import InputError
from .competitors import COMPETITORS, SpeedConfig


@dataclass(frozen=True)
class Result:
    """Result of one prompt.

    Attributes:
        prefill: CPU seconds to the first token.
        steps: CPU seconds of each further token.
        tokens: Generated token ids.
        peak_bytes: Peak memory of the process up to now, in bytes.
    """

    prefill: float
    steps: list[float]
    tokens: list[int]
    peak_bytes: int


def _peak_bytes() -> int:
    """Return the peak resident memory of this process, including mapped files."""
    # `getrusage` would include the peak of the parent process.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


class InProcessCompetitor:
    """A competitor that runs in the current process."""

    def __init__(self, name: str, model: str, config: SpeedConfig) -> None:
        """Load the model. Raises ImportError if a package is missing, and the errors of loading."""
        torch.set_num_threads(config.threads)
        self._ask, self._tokens = COMPETITORS[name](model, config), config.tokens

    def ask(self, prompt: Sequence[int]) -> Result:
        """Generate the continuation of one prompt. Return its tokens and times."""
        began = time.process_time()
        times, tokens = [], []
        for token in islice(self._ask(prompt), self._tokens + 1):
            now = time.process_time()
            times.append(now - began)
            tokens.append(token)
            began = now
        return Result(times[0], times[1:], tokens, _peak_bytes())

    def close(self) -> None:
        """Do nothing."""


class SubprocessCompetitor:
    """A competitor that runs in its own process, until `close` is called."""

    def __init__(self, name: str, model: str, config: SpeedConfig) -> None:
        """Start the process. If loading fails in it, raise InputError with the error message."""
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, name, model, config), daemon=True)
        self._process.start()
        other.close()
        self._take(name)

    def ask(self, prompt: Sequence[int]) -> Result:
        """Generate the continuation of one prompt in the process. Return its tokens and times.

        Raises InputError with the error message of the process if it fails.
        """
        self._end.send(list(prompt))
        result = self._take("a competitor")
        assert isinstance(result, Result)
        return result

    def _take(self, name: str) -> object:
        try:
            found: object = self._end.recv()
        except EOFError:
            found = "its process ended"
        if isinstance(found, str):
            raise InputError(f"{name}: {found}")
        return found

    def close(self) -> None:
        """End the process."""
        self._end.close()
        self._process.join()


def _serve(end: Connection, name: str, model: str, config: SpeedConfig) -> None:
    """Generate from prompts that arrive on `end`, until the other end is closed. Errors are sent back as strings."""
    try:
        competitor = InProcessCompetitor(name, model, config)
        end.send(None)
        while True:
            end.send(competitor.ask(end.recv()))
    except EOFError:
        return
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")
