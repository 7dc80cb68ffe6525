"""Decode steps as CUDA graphs, one for each batch size and bucket of context lengths: captured once, then replayed with
other sequences, lengths and tokens, which are data in `batched.StepInputs`. Batch sizes are rounded up, so that few are
captured: rows behind the last sequence are nobody's.

A launch takes the host 5 to 25 microseconds and a step of an 8B model makes 1,500 of them: on an H100 a replayed step
of 8,192 tokens takes 10.6 ms where its launches one by one took 67 (`eval/results/gpu`).

A step stays eager where a launch would depend on more than the inputs: policies whose states select for themselves,
columns chosen from each prompt, working sets, chunks that sequences share, eviction, weights that stream; and where the
host has to see into it: a recorder, a step that measures the missed mass. So does the first step of each batch size and
bucket, which compiles the kernels. Where a capture breaks off, as at a module that asks the device something, all steps
are eager from then on, and it is said once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..config import EngineConfig
from ..core import padded_batch
from ..errors import ConfigError
from .batch import DecodeBatch
from .batched import MOST_CACHED, BatchedStrategy, LayerSelection, StepInputs, StrategyCache
from .decode import DecodeStep

Body = Callable[[], tuple[torch.Tensor, ...]]

_log = logging.getLogger(__name__)


class Graph(Protocol):
    """Launches that can be repeated. Memory that they allocated belongs to the graph for as long as it lives."""

    def capture(self, body: Body) -> tuple[torch.Tensor, ...]:
        """Keeps what `body` launches and returns its results, which hold nothing before `replay`."""
        ...

    def replay(self) -> None:
        """Launches it all on the compute stream; the results are overwritten."""
        ...


class CudaGraph:
    """`Graph` of a CUDA device. Other streams that the body forks from the compute stream and joins again are in it."""

    def __init__(self, pool: Any) -> None:
        """pool: its memory; what is allocated while it is captured stays there, and goes when the graph goes."""
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, body: Body) -> tuple[torch.Tensor, ...]:
        """Captures `body`, of this thread only: the saver's thread may wait for write-backs meanwhile."""
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return body()

    def replay(self) -> None:
        """Launches the graph on the current stream."""
        self._graph.replay()


class _Captured:
    """A step's graph and its results: logits `[B, V]`, and for each layer that selects its counts `[B]`."""

    def __init__(self, graph: Graph, batch: DecodeBatch, inputs: StepInputs) -> None:
        self._graph = graph
        self._layers = [layer for layer in range(batch.geometry.layers) if batch.selects(layer)]
        # What was written back before cannot be waited for in the graph: the compute stream does, before it.
        inputs.rows.join()
        inputs.rows.written(behind=False)
        self._logits, *self._counts = graph.capture(lambda: _body(batch, inputs))

    def replay(self, strategy: BatchedStrategy, inputs: StepInputs) -> torch.Tensor:
        """Returns float32 logits `[size, V]` of the step that `inputs` hold; `strategy` is told what it selected."""
        inputs.rows.join()
        self._graph.replay()
        inputs.rows.written(behind=True)
        # The next replay overwrites both; these copies are ordered before it.
        counts = torch.stack(self._counts).unbind()
        strategy.selected = [
            LayerSelection(layer, own.new_empty(0), own, None) for layer, own in zip(self._layers, counts, strict=True)
        ]
        return self._logits.clone()


def _body(batch: DecodeBatch, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
    """All launches of a step; what runs in other streams has been joined at its end."""
    strategy = BatchedStrategy(batch, inputs, dense=True)
    logits = DecodeStep(batch, strategy).compute()
    inputs.rows.join()
    return logits, *(selection.counts for selection in strategy.selected)


class Steps(Protocol):
    """Runs decode steps."""

    def run(self, batch: DecodeBatch) -> torch.Tensor:
        """Returns float32 logits `[B, V]`, as `DecodeStep.run`."""
        ...


class EagerSteps:
    """Steps whose launches all come from the host."""

    def __init__(self, strategies: StrategyCache) -> None:
        self._strategies = strategies

    def run(self, batch: DecodeBatch) -> torch.Tensor:
        """Returns float32 logits `[B, V]` of a step by the strategy that suits the batch."""
        return DecodeStep(batch, self._strategies.strategy(batch)).run()


class GraphSteps:
    """Steps that replay a graph where one can be captured. There are at most so many graphs at a time: each keeps the
    memory of its step."""

    def __init__(self, strategies: StrategyCache, make: Callable[[], Graph], most: int = MOST_CACHED) -> None:
        self._strategies, self._make, self._most, self._refused = strategies, make, most, False
        self._captured: weakref.WeakKeyDictionary[StepInputs, _Captured | None] = weakref.WeakKeyDictionary()

    def run(self, batch: DecodeBatch) -> torch.Tensor:
        """Returns float32 logits `[B, V]`: of an eager step the first time, else of a replay."""
        sequences = len(batch.sequences)
        capturable = not self._refused and _capturable(batch)
        inputs = self._strategies.load(batch, padded_batch(sequences)) if capturable else None
        if inputs is None or not inputs.static:
            return DecodeStep(batch, self._strategies.strategy(batch)).run()
        strategy = BatchedStrategy(batch, inputs, dense=True)
        if inputs not in self._captured:
            self._captured[inputs] = None
            return DecodeStep(batch, strategy).run()[:sequences]
        step = DecodeStep(batch, strategy)
        step.begin()
        captured = self._captured[inputs] or self._try_capture(batch, inputs)
        logits = step.compute() if captured is None else captured.replay(strategy, inputs)
        strategy.finish()
        return logits[:sequences]

    def _try_capture(self, batch: DecodeBatch, inputs: StepInputs) -> _Captured | None:
        """As `_capture`; None where it broke off, as it would every time."""
        try:
            return self._capture(batch, inputs)
        except RuntimeError as error:
            self._refused = True
            inputs.rows.forget()
            _log.warning(
                "decode steps of this model cannot be captured and are launched one by one, which may be several times "
                "slower (cuda_graphs=False says nothing of it): %s", str(error).splitlines()[0],
            )  # fmt: skip
            return None

    def _capture(self, batch: DecodeBatch, inputs: StepInputs) -> _Captured:
        """A graph of a step of `inputs`, in place of the oldest one where there are enough."""
        held = [each for each, graph in self._captured.items() if graph is not None]
        for oldest in held[: len(held) + 1 - self._most]:
            self._captured[oldest] = None
        # It comes last from now on.
        del self._captured[inputs]
        self._captured[inputs] = captured = _Captured(self._make(), batch, inputs)
        return captured


def _capturable(batch: DecodeBatch) -> bool:
    """Whether nobody looks into the step, moves rows in it or shares them, no address in it is a sequence's own (as of
    columns chosen from its prompt, or of rows in sliding layers), and the host need not know which experts run."""
    own = batch.policy.wants_queries or batch.geometry.sliding
    alone = not (batch.sharing.overlapping or batch.geometry.experts or own)
    watched = any(s.slots.listens or s.trace.measures_missed_next or s.trace.recorder for s in batch.sequences)
    return alone and not watched


def steps_for(config: EngineConfig, device: torch.device, strategies: StrategyCache, *, streams: bool) -> Steps:
    """What the configuration wants. Raises ConfigError for graphs on a device that has none.

    streams: whether weights cross the link in every step, by copies that the host starts. Under a limit of the device's
    memory there is one graph at a time, which is planned for (`DeviceCosts.graphs`)."""
    most = most_graphs(config, device, streams=streams)
    if not most:
        return EagerSteps(strategies)
    return GraphSteps(strategies, lambda: CudaGraph(torch.cuda.graph_pool_handle()), most)


def most_graphs(config: EngineConfig, device: torch.device, *, streams: bool) -> int:
    """How many graphs there are at most at a time, each of which keeps the memory of its step; 0: steps are eager.
    Raises ConfigError as `steps_for`."""
    if config.cuda_graphs and device.type != "cuda":
        raise ConfigError(f"cuda_graphs=True needs a CUDA device, and this is {str(device)!r}: leave it out")
    if streams or not config.replays(device.type):
        return 0
    return MOST_CACHED if config.device_memory is None else 1
