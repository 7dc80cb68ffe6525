"""Times of a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..outputs import RequestMetrics


@dataclass
class Times:
    """Times of one prompt and all its completions, as returned by `time.time()`."""

    arrival: float = field(default_factory=time.time)
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    def scheduled(self) -> None:
        """Record the start of a prefill."""
        self.first_scheduled = self.first_scheduled or time.time()

    def token(self) -> None:
        """Record a new token."""
        self.last_token = time.time()
        self.first_token = self.first_token or self.last_token

    def ended(self) -> None:
        """Record the end of a completion."""
        self.finished = time.time()

    def metrics(self, *, finished: bool) -> RequestMetrics:
        """Return the times so far. `finished`: all completions have ended."""
        return RequestMetrics(
            arrival_time=self.arrival,
            first_scheduled_time=self.first_scheduled,
            first_token_time=self.first_token,
            last_token_time=self.last_token,
            finished_time=self.finished if finished else None,
        )
