"""Decode steps as CUDA graphs, one for each batch size and bucket of context lengths: captured once, then replayed with
other sequences, lengths and tokens, which are data in `together.Lists`.

**This has not yet run on a device.** What runs in the tests is everything but CUDA: a stand-in that keeps the launches
of a step and repeats them on the same memory.

A step stays eager where a launch would depend on more than the lists: policies whose states select for themselves,
columns chosen from each prompt, working sets, chunks that sequences share, eviction, weights that stream; and where the
host has to see into it: a recorder, a step that measures the missed mass. So does the first step of each batch size and
bucket, which compiles the kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from .batch import Step
from .batched import BatchedStrategy, Counted, Lists, StrategyCache
from .decode import DecodeStep

Body = Callable[[], tuple[torch.Tensor, ...]]


class Graph(Protocol):
    """Launches that can be repeated. Memory that they allocated belongs to the graph for as long as it lives."""

    def capture(self, body: Body) -> tuple[torch.Tensor, ...]:
        """Keeps what `body` launches; its results hold nothing before `replay`."""
        ...

    def replay(self) -> None:
        """Launches it all on the compute stream; the results are overwritten."""
        ...


class CudaGraph:
    """`Graph` of a CUDA device. Other streams that the body forks from the compute stream and joins again are in it."""

    def __init__(self, pool: Any) -> None:
        """pool: memory that graphs share which never run at the same time."""
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, body: Body) -> tuple[torch.Tensor, ...]:
        """See `Graph.capture`."""
        # Other threads may use CUDA meanwhile: the saver waits for write-backs.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return body()

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._graph.replay()


class _Captured:
    """A step's graph and its results: logits `[B, V]`, and for each layer that selects its counts `[B]`."""

    def __init__(self, graph: Graph, step: Step, lists: Lists) -> None:
        self._graph, self._layers = graph, [layer for layer in range(step.geometry.layers) if step.selects(layer)]
        # What was written back before cannot be waited for in the graph: the compute stream does, before it.
        lists.rows.join()
        lists.rows.written(behind=False)
        self._logits, *self._counts = graph.capture(lambda: _body(step, lists))

    def replay(self, together: BatchedStrategy, lists: Lists) -> torch.Tensor:
        """float32 logits `[B, V]` of the step that `lists` hold; `together` is told what it counted."""
        lists.rows.join()
        self._graph.replay()
        lists.rows.written(behind=True)
        # The next replay overwrites both; these copies are ordered before it.
        counts = torch.stack(self._counts).unbind()
        together.counted = [
            Counted(layer, own.new_empty(0), own, None) for layer, own in zip(self._layers, counts, strict=True)
        ]
        return self._logits.clone()


def _body(step: Step, lists: Lists) -> tuple[torch.Tensor, ...]:
    """All launches of a step; what runs in other streams has been joined at its end."""
    together = BatchedStrategy(step, lists, dense=True)
    logits = DecodeStep(step, together).compute()
    lists.rows.join()
    return logits, *(one.counts for one in together.counted)


class Steps(Protocol):
    """Runs decode steps."""

    def run(self, step: Step) -> torch.Tensor:
        """float32 logits `[B, V]`, as `DecodeStep.run`."""
        ...


class Eager:
    """Each launch from the host."""

    def __init__(self, ways: StrategyCache) -> None:
        self._ways = ways

    def run(self, step: Step) -> torch.Tensor:
        """See `Steps.run`."""
        return DecodeStep(step, self._ways.of(step)).run()


class Graphs:
    """With graphs where it can."""

    def __init__(self, ways: StrategyCache, make: Callable[[], Graph]) -> None:
        self._ways, self._make = ways, make
        self._captured: weakref.WeakKeyDictionary[Lists, _Captured | None] = weakref.WeakKeyDictionary()

    def run(self, step: Step) -> torch.Tensor:
        """See `Steps.run`."""
        lists = self._ways.holding(step)
        if lists is None or not lists.static or not _unseen(step):
            return DecodeStep(step, self._ways.of(step)).run()
        together = BatchedStrategy(step, lists, dense=True)
        if lists not in self._captured:
            self._captured[lists] = None
            return DecodeStep(step, together).run()
        decode = DecodeStep(step, together)
        decode.begin()
        captured = self._captured[lists] or _Captured(self._make(), step, lists)
        self._captured[lists] = captured
        logits = captured.replay(together, lists)
        together.finish()
        return logits


def _unseen(step: Step) -> bool:
    """Whether nobody looks into the step, moves rows in it or shares them."""
    alone = not step.sharing.overlapping and step.recorder is None
    return alone and not any(s.slots.listens or s.trace.measures for s in step.batch)


def steps_for(config: EngineConfig, device: torch.device, ways: StrategyCache, *, streams: bool) -> Steps:
    """What the configuration wants. Raises ConfigError for graphs on a device that has none.

    streams: whether weights cross the link in every step, by copies that the host starts."""
    if not config.cuda_graphs:
        return Eager(ways)
    if device.type != "cuda":
        raise ConfigError(f"cuda_graphs=True needs a CUDA device, and this is {str(device)!r}: leave it out")
    if streams:
        return Eager(ways)
    pool = torch.cuda.graph_pool_handle()  # graphs that run one after the other share their memory
    return Graphs(ways, lambda: CudaGraph(pool))
