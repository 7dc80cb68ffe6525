"""Break down the time of a decode step by stage, without a profiler.

The objects that a step calls are wrapped; a clock is read at the start and end of every call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

REST = "bookkeeping"
"""Stage of the time between wrapped calls: the loop, traces, reshapes."""

ADAPTER = {
    "embed": "embedding and head",
    "attention_input": "projections",
    "qkv": "projections",
    "query": "speculated query",
    "after_attention": "projections",
    "mlp": "MLP",
    "logits": "embedding and head",
}
STATE = {
    "select": "selection",
    "on_keys": "scoring keys",
    "on_values": "scoring keys",
    "tail": "tail",
    "on_attended": "selection",
    "repair": "selection",
}
LINK = {"append": "write-back", "fetch": "plan"}
GATHER, ATTENTION = "gather", "attention"

BREAKDOWN = {
    "attention": ("projections", ATTENTION, "tail"),
    "FFN": ("MLP",),
    "transfer": ("plan", GATHER, "write-back"),
    "prediction": ("speculated query", "selection", "scoring keys"),
    "rest": (REST,),
}
"""Parts of the step of a layer and their stages, as in Figure 18 of InfiniGen. Embedding and head are excluded."""


class StageClock:
    """Accumulate seconds per stage. One stage is current at any time. `read` returns the time in seconds."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._stage, self._since = REST, read()
        self.seconds: dict[str, float] = defaultdict(float)

    def enter(self, stage: str) -> str:
        """Make `stage` current and return the previous stage."""
        now, before = self._read(), self._stage
        self.seconds[before] += now - self._since
        self._stage, self._since = stage, now
        return before

    def reset(self) -> None:
        """Clear all times and start in `REST`."""
        self.enter(REST)
        self.seconds.clear()

    def timed(self, function: Callable[..., Any], stage: str, after: str | None = None) -> Callable[..., Any]:
        """Wrap `function` so that its time counts for `stage`. Then `after`, or the previous stage, becomes current."""

        def call(*args: Any, **options: Any) -> Any:
            before = self.enter(stage)
            try:
                return function(*args, **options)
            finally:
                self.enter(before if after is None else after)

        return call


class Staged:
    """Proxy of `inner` that times the methods in `stages` (`after`: see `StageClock.timed`)."""

    def __init__(self, inner: Any, clock: StageClock, stages: Mapping[str, str], after: str | None = None) -> None:
        self._inner = inner
        for method, stage in stages.items():
            setattr(self, method, clock.timed(getattr(inner, method), stage, after))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class StagedLink(Staged):
    """Link that also times its pending fetches. The time after `wait`, up to the next model call, is attention."""

    def __init__(self, inner: Any, clock: StageClock) -> None:
        super().__init__(inner, clock, {})
        self.storage = Staged(inner.storage, clock, {"append": LINK["append"]})
        self.rows = StagedRows(inner.rows, clock)
        # The wrapped calls are those for single sequences; the batched path does not use them.
        self.batched = None


class StagedRows(Staged):
    """Fetches of single sequences, with timed pending fetches."""

    def __init__(self, inner: Any, clock: StageClock) -> None:
        super().__init__(inner, clock, {})
        fetch = clock.timed(inner.fetch, LINK["fetch"])
        self.fetch = lambda *args: TimedFetch(fetch(*args), clock)


class TimedFetch:
    """Pending fetch whose `wait` is the stage `GATHER` and starts the stage `ATTENTION`."""

    def __init__(self, inner: Any, clock: StageClock) -> None:
        self._inner = inner
        self.wait = clock.timed(inner.wait, GATHER, after=ATTENTION)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def breakdown(stages: Mapping[str, float], layers: int) -> dict[str, float]:
    """Return the seconds of each part of `BREAKDOWN` per layer, from the stage times of a step of `layers` layers.

    The clock synchronizes the device, so nothing overlaps. If transfers and compute overlap in a real step, the parts
    add up to more than its time.
    """
    return {part: sum(stages.get(stage, 0.0) for stage in names) / layers for part, names in BREAKDOWN.items()}
