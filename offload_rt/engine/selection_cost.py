"""Measure up to which context length full attention is as fast as token selection on this processor.

The engine decodes synthetic KV of two lengths with both methods. Full attention reads more bytes per token, and
selection has a higher fixed cost, so the difference between their times is linear in the length. The result is cached,
so that the generated text does not depend on the load of the machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from ..config import EngineConfig
from ..core import BLOCK_SIZE, ModelGeometry
from ..kernels import team
from ..kv_cache.pool import HostPool
from ..models.adapter import ModelAdapter
from ..models.loading import LoadedModel
from ..policies.auto import Auto
from ..policies.options import AutoOptions
from ..skewing.artifact import SkewArtifact
from ..skewing.prediction import Correction
from ..transfer.cpu import CpuTransfer
from ..utils.atomic_files import write_atomic
from ..utils.native_code import cache_folder, processor_name
from ..utils.native_libraries import build_id
from ..utils.private_files import make_private_folder
from ..utils.small_files import parse_json, read_small
from .runner import Runner
from .thread_choice import ThreadChoice

SHORT = 4 * BLOCK_SIZE
"""Length of the short context in tokens. Its times show the fixed costs."""

LAYER_BYTES = 4 << 20
"""Approximate size of the KV in one layer of the long context."""

KV_BYTES = 16 << 20
"""Total size of the KV of the long context over all layers.

It is large enough that no layer finds its KV in the processor's caches.
"""

FLUSHED_BYTES = 4 << 20
"""Number of bytes that are read between two layers. They stand for the weights that a real decode step reads there."""

REPEATS = 4
"""Number of steps with each method. The first step does not count."""

ROUNDED_TO = 512
"""The result is rounded to a multiple of this number of tokens."""

_log = logging.getLogger(__name__)


def measured_dense_until(
    options: AutoOptions,
    geometry: ModelGeometry,
    dtype: torch.dtype,
    idle: AbstractContextManager[object] | None = None,
) -> int | None:
    """Return the longest context, in tokens, for which full attention is as fast as selection with `options`.

    The value is read from the user's cache, or measured and stored there. Return None if it cannot be stored. The
    measurement runs in the context `idle`, while no engine of the process computes.
    """
    entry = cache_folder() / "selection" / _key(options, geometry, dtype)
    if (stored := _read(entry)) is not None:
        return stored
    with idle or nullcontext(), team.torch_on_one_thread():
        measured = _measure(options, geometry, dtype)
    try:
        if _read(entry) is None:
            entry.unlink(missing_ok=True)  # the entry is damaged
        make_private_folder(entry.parent)
        write_atomic(entry, json.dumps({"dense_until": measured}).encode(), keep=True)
    except OSError as error:
        # A value that differs between processes would change the text.
        _log.warning("the speed of selection could not be stored, so `auto` uses a fixed length: %s", error)
        return None
    return _read(entry)  # if several processes measure at once, all use the first value


def _key(options: AutoOptions, geometry: ModelGeometry, dtype: torch.dtype) -> str:
    inputs = {
        "versions": [version("offload-rt"), torch.__version__],
        "processor": processor_name(),
        "kernels": build_id(),
        "threads": team.threads(),
        "dtype": str(dtype),
        "rows": repr(geometry.full_rows),
        "shape": [geometry.group, geometry.softcap, geometry.default_alpha],
        "options": repr(options),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]


def _read(entry: Path) -> int | None:
    try:
        found = parse_json(read_small(entry, 1000))["dense_until"]
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return found if type(found) is int and found >= 0 else None


def _measure(options: AutoOptions, geometry: ModelGeometry, dtype: torch.dtype) -> int:
    per_token = geometry.full_rows.bytes(dtype)
    long = max(4 * SHORT, LAYER_BYTES // per_token // BLOCK_SIZE * BLOCK_SIZE)
    layers = max(2, KV_BYTES // (long * per_token))
    return crossing([(n, *layer_seconds(options, _synthetic(geometry, layers), dtype, n)) for n in (SHORT, long)])


def crossing(measured: Sequence[tuple[int, float, float]]) -> int:
    """Return the context length at which full attention and selection take equal time, rounded to `ROUNDED_TO`.

    `measured` has two tuples (context length, time of full attention, time of selection), with times in seconds. If
    selection never becomes faster, the result is very large.
    """
    (short, *short_times), (long, *long_times) = measured
    behind, ahead = short_times[1] - short_times[0], long_times[0] - long_times[1]
    slope = (behind + ahead) / (long - short)  # seconds that selection gains per additional token
    if slope <= 0:
        return 0 if ahead > 0 else 1 << 40
    return max(0, round((short + behind / slope) / ROUNDED_TO)) * ROUNDED_TO


@torch.inference_mode()
def layer_seconds(
    options: AutoOptions, geometry: ModelGeometry, dtype: torch.dtype, length: int
) -> tuple[float, float]:
    """Return the times of one layer, in seconds, with full attention and with selection.

    The context has `length` tokens. For each layer, only the fastest repeat counts. The results are medians over
    layers.
    """
    steps = 2 * REPEATS
    adapter = _TimedAdapter(geometry, dtype, length)
    policy = Auto(
        replace(options, dense_until=0, dense_layers=()), geometry, _identity(geometry), adapter.device, dtype
    )
    pool = HostPool(geometry, dtype, geometry.kv_bytes(length + 2 * BLOCK_SIZE, dtype))
    config = EngineConfig(missed_mass_every=0, enable_prefix_caching=False)
    runner = Runner(
        LoadedModel(adapter, None, "", "", frozenset(), 0), policy, pool, CpuTransfer(pool, geometry), config
    )
    runner.thread_choice = ThreadChoice(fixed=True)
    sequence = runner.new_sequence([0] * (length + steps), length + steps)
    for layer in range(geometry.layers):
        pool.write(sequence.blocks, layer, 0, adapter.k, adapter.v)
        if policy.wants_queries:
            sequence.state.on_queries(layer, adapter.q.expand(-1, BLOCK_SIZE, -1), adapter.k, length - BLOCK_SIZE)
        sequence.state.on_kv(layer, adapter.k, adapter.v, 0)
    pool.commit(sequence.blocks, length)
    sequence.position, sequence.unobserved = length, 0
    for _ in range(REPEATS):
        for policy.dense_until in (length + steps, 0):
            adapter.steps.append([])
            runner.decode([sequence])
    runner.free(sequence)
    full, selecting = adapter.steps[2::2], adapter.steps[3::2]
    return _median_over_layers(full), _median_over_layers(selecting)


def _median_over_layers(steps: Sequence[Sequence[float]]) -> float:
    # `steps` has one time per step and layer. Use the fastest step of each layer.
    return float(median(map(min, zip(*steps, strict=True))))


class _TimedAdapter(ModelAdapter):
    """A model that consists of attention layers with random KV and no weights.

    It records the time of each layer in `steps`.
    """

    def __init__(self, geometry: ModelGeometry, dtype: torch.dtype, length: int) -> None:
        super().__init__(geometry, dtype, torch.device("cpu"))
        random = torch.Generator().manual_seed(0)
        kv_heads, d = geometry.kv_heads, geometry.head_dim
        self.q, self.k, self.v = (
            torch.randn(heads, n, d, generator=random).to(dtype)
            for heads, n in ((geometry.heads, 1), (kv_heads, length), (kv_heads, length))
        )
        self.steps: list[list[float]] = []
        self._began = 0.0
        self._flushed = torch.zeros(FLUSHED_BYTES // 4)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens), 1, dtype=self.dtype)

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._began = perf_counter()
        return super().qkv(layer, attention_input, positions)

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.q

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[:, :1], self.v[:, :1]

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return hidden

    def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        # A policy may select for the next layer after this layer's attention, so the time ends here.
        self.steps[-1].append(perf_counter() - self._began)
        self._flushed.sum()
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()


def _synthetic(geometry: ModelGeometry, layers: int) -> ModelGeometry:
    scales, windows = (geometry.head_dim**-0.5,) * layers, (None,) * layers
    return replace(
        geometry, layers=layers, hidden=1, vocab=1, scales=scales, windows=windows, max_positions=1 << 40, sinks=False,
        absolute_positions=False, chunked=False, experts=False, states=(), attention_at=(), depth=0, window_rows=None,
        kv_from=(),
    )  # fmt: skip


def _identity(geometry: ModelGeometry) -> SkewArtifact:
    shape = geometry.layers, geometry.kv_heads, geometry.head_dim
    basis, mean, right = torch.eye(shape[2]).expand(*shape, -1), torch.zeros(shape), Correction.none(shape[0])
    return SkewArtifact("balanced", basis, basis, mean, mean + 1, right.slope, right.offset, "synthetic", "none")
