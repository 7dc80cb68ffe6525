"""Captures decode steps as CUDA graphs, one per batch size and bucket of context lengths, and replays them.

Sequences, lengths and tokens are values in `StepInputs`, so one graph serves all batches of its size. Batch sizes are
rounded up with padding. A step of an 8B model has 1,500 launches, which take 5 to 25 µs each. On an H100, a replayed
step takes 10.6 ms instead of 67 ms (`eval/results/gpu`).

In hybrid models, each recurrent layer copies the states of the batch from their slots, whose numbers are in
`StepInputs`, and writes them back. If a new slot moves the states to other addresses, all graphs are dropped. They are
also dropped if the caller has changed the weights, which may then have other addresses.

A step runs eagerly, which means without a graph, in these cases:

* A launch depends on more than the inputs. This is so for columns chosen from the prompt, eviction, streamed weights,
and policies without a `rule`, except `full` with copies of all KV on the device.
* The host must read values during the step, for recorders or to measure the missed attention mass.
* It is the first step with its batch size, in which kernels are compiled.
* A capture has failed. If it failed because memory was exhausted, other graphs are dropped first.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from .batch import DecodeBatch
from .batched import MAX_CACHED, BatchedMode, EagerSteps, LayerSelection
from .decode import DecodeStep
from .step_inputs import StepInputs, StepShape

Body = Callable[[], tuple[torch.Tensor, ...]]

_log = logging.getLogger(__name__)


class Graph(Protocol):
    """A recorded sequence of kernel launches, with the memory that the kernels allocate."""

    def capture(self, body: Body) -> tuple[torch.Tensor, ...]:
        """Record the launches of `body`. Return the results of `body`, which become valid after `replay`.

        If `body` raises an error, the same error is raised.
        """
        ...

    def replay(self) -> None:
        """Run all recorded launches on the compute stream. This overwrites the results of the previous replay."""
        ...


class CudaGraph:
    """A `Graph` on CUDA. It includes the work on streams that fork from the compute stream and join it again.

    `pool` is the memory pool for allocations during the capture, and `stream` is the stream that is captured.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph, self._pool, self._stream = torch.cuda.CUDAGraph(), pool, stream

    def capture(self, body: Body) -> tuple[torch.Tensor, ...]:
        with torch.cuda.device(self._stream.device):
            return self._capture(body, torch.cuda.current_stream())

    def _capture(self, body: Body, before: torch.cuda.Stream) -> tuple[torch.Tensor, ...]:
        interrupted: BaseException | None = None
        try:
            # Do not capture launches of other threads: the saver thread may wait for write-backs during the capture.
            with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    return body()
                except BaseException as error:
                    interrupted = error
                    raise
        except BaseException as error:
            if torch.cuda.current_stream() != before:
                self._give_up(before)
            # Ending an interrupted capture may raise a second error, which does not name the cause.
            raise interrupted or error  # noqa: B904
        finally:
            interrupted = None  # otherwise, a reference cycle would keep the graph and its memory

    def _give_up(self, before: torch.cuda.Stream) -> None:
        """Finish a capture that torch could not end, for example because of a forbidden operation.

        torch leaves the captured stream current. It also leaves the allocator in the state of a capture, in which
        memory that two streams have used is never freed, and no later capture can use the pool.
        """
        torch.cuda.set_stream(before)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            if (finish := getattr(torch._C, name, None)) is not None:
                with suppress(RuntimeError):  # raised if the allocator is not in this state
                    finish(before.device.index, self._pool)

    def replay(self) -> None:
        self._graph.replay()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures on a device. cuBLAS keeps a workspace for each stream that it has used.

    torch's default is a stream on the device of the first capture in the process.
    """
    return torch.cuda.Stream(device)


class SharedPool:
    """Creates graphs that share one memory pool. They are replayed one after the other, and their results are copied.

    torch gives up the pool when its last graph is deleted, and a later capture with this pool fails. A new pool is
    created then.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs = weakref.WeakSet[CudaGraph]()
        self._handle: Any = None
        self._device = device

    def new_graph(self) -> CudaGraph:
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        graph = CudaGraph(self._handle, capture_stream(self._device))
        self._graphs.add(graph)
        return graph


class _Captured:
    """A captured step.

    Its results are the logits `[B, V]` and, if layers select tokens, how many they have selected.
    """

    def __init__(self, graph: Graph, batch: DecodeBatch, inputs: StepInputs) -> None:
        self._graph = graph
        self._layers: list[int] = []
        self._recurrent_layers: list[int] = []
        with inputs.rows.capturing():
            self._logits, *self._selected = graph.capture(lambda: self._launch(batch, inputs))

    def _launch(self, batch: DecodeBatch, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        mode = BatchedMode(batch, inputs, dense=True)
        try:
            logits = DecodeStep(batch, mode).compute()
        finally:
            inputs.rows.join()  # All streams must join before the capture ends. Otherwise, torch cannot end it.
        self._layers = [selection.layer for selection in mode.selections]
        self._recurrent_layers = mode.recurrent_layers
        counts = [selection.counts for selection in mode.selections]
        tallies = [selection.tally for selection in mode.selections if selection.tally is not None]
        return logits, *(torch.stack(each) for each in (counts, tallies) if each)

    def replay(self, mode: BatchedMode, inputs: StepInputs) -> torch.Tensor:
        """Replay the step with the values in `inputs`, and set the attributes of `mode`.

        Return float32 logits `[size, V]`.
        """
        self._graph.replay()
        inputs.rows.replayed()
        # Copy the results, because the next replay overwrites them.
        per_layer = zip(self._layers, *(stacked.clone().unbind() for stacked in self._selected), strict=True)
        mode.recurrent_layers = self._recurrent_layers
        mode.selections = [LayerSelection(layer, counts[:0], counts, *tally) for layer, counts, *tally in per_layer]
        return self._logits.clone()


class GraphSteps:
    """Runs decode steps, if possible by replaying CUDA graphs. At most `max_graphs` graphs are kept.

    `weight_changes` returns how often the caller has changed the weights of the model.
    """

    def __init__(
        self,
        eager: EagerSteps,
        new_graph: Callable[[], Graph],
        max_graphs: int = MAX_CACHED,
        weight_changes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._eager, self._new_graph, self._max_graphs, self._disabled = eager, new_graph, max_graphs, False
        self._weight_changes = weight_changes
        self._captured: weakref.WeakKeyDictionary[StepInputs, _Captured] = weakref.WeakKeyDictionary()
        self._too_large: weakref.WeakSet[StepInputs] = weakref.WeakSet()
        # Shapes (with capacity 0) for which all kernels have been compiled, and inputs that have run eagerly.
        self._compiled: set[StepShape] = set()
        self._ran_eagerly: weakref.WeakSet[StepInputs] = weakref.WeakSet()
        # Number of slots of recurrent state, and of weight changes, for which graphs are captured.
        self._captured_for = 0, weight_changes()

    def run(self, batch: DecodeBatch) -> torch.Tensor:
        sequences = len(batch.sequences)
        capturable = not self._disabled and _capturable(batch)
        inputs = self._eager.load(batch, batch.padded_size) if capturable else None
        if inputs is None or not inputs.capturable:
            return self._eager.run(batch)
        mode = BatchedMode(batch, inputs, dense=True)
        step = DecodeStep(batch, mode)
        step.begin()
        self._drop_outdated(batch)
        inputs.rows.join()  # A graph cannot wait for earlier transfers, and the compute stream may read copies.
        captured = self._find(batch, inputs)
        logits = step.compute() if captured is None else captured.replay(mode, inputs)
        mode.finish()
        return logits[:sequences]

    def _find(self, batch: DecodeBatch, inputs: StepInputs) -> _Captured | None:
        """Return the captured step, or None if the step must run eagerly."""
        shape = inputs.shape._replace(capacity=0)  # Shapes that differ only in their capacity use the same kernels.
        if shape not in self._compiled or inputs in self._too_large:
            self._compiled.add(shape)
            self._ran_eagerly.add(inputs)
            return None
        return self._captured.get(inputs) or self._try_capture(batch, inputs)

    def _drop_outdated(self, batch: DecodeBatch) -> None:
        """Drop all graphs if recurrent states or weights may have moved to other addresses."""
        current = 0 if batch.states is None else batch.states.size, self._weight_changes()
        if current != self._captured_for:
            self._captured.clear()
            self._captured_for = current

    def _try_capture(self, batch: DecodeBatch, inputs: StepInputs) -> _Captured | None:
        """Capture a step. If this fails, return None, so that the step runs eagerly.

        If memory is exhausted, `_free_memory` is called. After any other error, captures are disabled if these inputs
        have already run eagerly.
        """
        try:
            return self._capture(batch, inputs)
        except RuntimeError as error:
            inputs.rows.forget()
            if isinstance(error, torch.OutOfMemoryError):
                self._free_memory(inputs)
                return None
            if inputs not in self._ran_eagerly:
                self._ran_eagerly.add(inputs)
                return None
            self._disabled = True
            _log.warning(
                "decode steps of this model cannot be captured as CUDA graphs and may be several times slower (set "
                "cuda_graphs=False to hide this warning): %s", (str(error).splitlines() or [type(error).__name__])[0],
            )  # fmt: skip
            return None

    def _capture(self, batch: DecodeBatch, inputs: StepInputs) -> _Captured:
        for oldest in list(self._captured)[: max(0, len(self._captured) + 1 - self._max_graphs)]:
            del self._captured[oldest]
        self._captured[inputs] = captured = _Captured(self._new_graph(), batch, inputs)
        return captured

    def _free_memory(self, inputs: StepInputs) -> None:
        """Drop all graphs, and keep fewer graphs from now on. If there are none, never capture `inputs` again."""
        if self._captured:
            self._max_graphs = len(self._captured)
            self._captured.clear()
            return
        self._too_large.add(inputs)
        _log.warning(
            "no device memory is left for a CUDA graph of %d sequences of up to %d tokens: their decode steps may be "
            "several times slower; lower max_num_seqs or max_model_len, or set cuda_graphs=False to hide this warning",
            inputs.size, inputs.capacity,
        )  # fmt: skip


def _capturable(batch: DecodeBatch) -> bool:
    # Launches must depend only on the inputs, and the host must not read any values during the step.
    per_sequence_bases = batch.policy.rule is not None and batch.policy.rule.per_sequence_bases
    measures_missed = bool(batch.selecting) and any(s.trace.measures_missed_next for s in batch.sequences)
    read_by_host = any(s.slots.records_selected or s.trace.recorder for s in batch.sequences)
    return not (per_sequence_bases or measures_missed or read_by_host)


def steps_for(
    config: EngineConfig, device: torch.device, eager: EagerSteps, weight_changes: Callable[[], int], *, streams: bool
) -> EagerSteps | GraphSteps:
    """Return the object that runs decode steps. Raises ConfigError if graphs are requested but not supported.

    `streams` is True if weights are copied to the device in every step, which a graph cannot do. For `weight_changes`,
    see `GraphSteps`.
    """
    limit = max_graphs(config, device, streams=streams)
    if not limit:
        return eager
    return GraphSteps(eager, SharedPool(device).new_graph, limit, weight_changes)


def max_graphs(config: EngineConfig, device: torch.device, *, streams: bool) -> int:
    """Return the maximum number of CUDA graphs, or 0 if all steps run eagerly. For arguments, see `steps_for`.

    Raises ConfigError like `steps_for`.
    """
    if config.cuda_graphs and device.type != "cuda":
        raise ConfigError(f"cuda_graphs=True needs a CUDA device, and this is {str(device)!r}: remove the option")
    if streams or not config.replays(device.type):
        return 0
    return MAX_CACHED if config.device_memory is None else 1
