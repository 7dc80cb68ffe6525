"""When things happen to a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..outputs import RequestMetrics


@dataclass
class Times:
    """Of one prompt, all its completions together; `time.time()` of each."""

    arrival: float = field(default_factory=time.time)
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    def scheduled(self) -> None:
        """A prefill begins."""
        self.first_scheduled = self.first_scheduled or time.time()

    def token(self) -> None:
        """A new token is there."""
        self.last_token = time.time()
        self.first_token = self.first_token or self.last_token

    def ended(self) -> None:
        """A completion has ended."""
        self.finished = time.time()

    def metrics(self, *, finished: bool) -> RequestMetrics:
        """What is known; `finished`: of a prompt whose completions have all ended."""
        return RequestMetrics(
            arrival_time=self.arrival,
            first_scheduled_time=self.first_scheduled,
            first_token_time=self.first_token,
            last_token_time=self.last_token,
            finished_time=self.finished if finished else None,
        )
