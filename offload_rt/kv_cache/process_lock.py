"""The lock that threads take turns by, in one process."""

from __future__ import annotations

import os
import threading

from ..errors import InputError


class ProcessLock:
    """A re-entrant lock of the process that made it. After `os.fork` the child has the memory and none of the threads
    (savers, loaders), and shares its parent's hold on stores: entering there raises InputError, before anything is
    touched."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"this runtime was loaded in process {self._process}, and a fork of it cannot use it: load it after "
                "the fork, or start workers with multiprocessing's method 'spawn'"
            )
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
