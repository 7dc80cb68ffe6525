"""A lock that only one process may use."""

from __future__ import annotations

import os
import threading

from ..errors import InputError


class ProcessLock:
    """A re-entrant lock that raises InputError in a forked child process.

    The child must not use the runtime, because it lacks the parent's threads but shares its file locks on stores.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"this runtime was loaded in process {self._process} and cannot be used in a forked process: load it "
                "after the fork, or start workers with multiprocessing's start method 'spawn'"
            )
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
