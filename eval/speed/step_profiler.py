"""Where a decode step's time goes, without a profiler: the objects a step calls are wrapped, and a clock is read at
every call's start and end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

REST = "bookkeeping"
"""What runs between the wrapped calls: the loop, traces, reshapes."""

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
"""InfiniGen's Figure 18: the parts of a layer's step, and the stages they are made of. The embedding and the head are
no part of a layer."""


class StageClock:
    """Adds up seconds per stage; one stage is current at any time. `read` gives the time in seconds."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._stage, self._since = REST, read()
        self.seconds: dict[str, float] = defaultdict(float)

    def enter(self, stage: str) -> str:
        """`stage` becomes current; returns the one that ends."""
        now, before = self._read(), self._stage
        self.seconds[before] += now - self._since
        self._stage, self._since = stage, now
        return before

    def reset(self) -> None:
        """Forgets everything and starts in REST."""
        self.enter(REST)
        self.seconds.clear()

    def timed(self, function: Callable[..., Any], stage: str, after: str | None = None) -> Callable[..., Any]:
        """`function`, its time given to `stage`; what follows belongs to `after`, or to what was current before."""

        def call(*args: Any, **options: Any) -> Any:
            before = self.enter(stage)
            try:
                return function(*args, **options)
            finally:
                self.enter(before if after is None else after)

        return call


class Staged:
    """`inner` with the methods named in `stages` timed (`after`: see `StageClock.timed`); all else is passed on."""

    def __init__(self, inner: Any, clock: StageClock, stages: Mapping[str, str], after: str | None = None) -> None:
        self._inner = inner
        for method, stage in stages.items():
            setattr(self, method, clock.timed(getattr(inner, method), stage, after))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class StagedLink(Staged):
    """A link whose tickets are timed too. Attention is what follows `wait`, up to the model's next call."""

    def __init__(self, inner: Any, clock: StageClock) -> None:
        super().__init__(inner, clock, {})
        self.storage = Staged(inner.storage, clock, {"append": LINK["append"]})
        self.rows = StagedRows(inner.rows, clock)
        # What stages are timed of are the calls for one sequence, which a batch of lists would not make.
        self.batched = None


class StagedRows(Staged):
    """Fetches of single sequences whose tickets are timed too."""

    def __init__(self, inner: Any, clock: StageClock) -> None:
        super().__init__(inner, clock, {})
        fetch = clock.timed(inner.fetch, LINK["fetch"])
        self.fetch = lambda *args: StagedTicket(fetch(*args), clock)


class StagedTicket:
    """A ticket whose `wait` is the stage GATHER and starts the stage ATTENTION."""

    def __init__(self, inner: Any, clock: StageClock) -> None:
        self._inner = inner
        self.wait = clock.timed(inner.wait, GATHER, after=ATTENTION)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def breakdown(stages: Mapping[str, float], layers: int) -> dict[str, float]:
    """Seconds of each part of BREAKDOWN in one layer's step, from seconds of the stages of a step of `layers` layers.
    Between two readings of the clock everything has ended, so nothing overlaps: the parts add up to more than a step
    takes where a device works beside the link."""
    return {part: sum(stages.get(stage, 0.0) for stage in names) / layers for part, names in BREAKDOWN.items()}
