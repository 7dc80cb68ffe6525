"""What can be done with one model, one policy and one pool: prefill, decode, fork, free. No queue, no sampling."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from ..config import EngineConfig
from ..errors import InputError, ModelError
from ..models.registry import LoadedModel
from ..pool.pool import HostPool
from ..select.base import Policy
from ..transfer.link import Link
from .decode import DecodeStep
from .metrics import Stats, Trace, fractions, layer_means
from .prefill import Prefill
from .sequence import Sequence, key_reader


class Runner:
    """Owns the pool and the link of one model and runs sequences on them. Every sequence it makes must go through
    `free`; between calls each one's lease, resident rows and policy state agree."""

    def __init__(self, model: LoadedModel, policy: Policy, pool: HostPool, link: Link, config: EngineConfig) -> None:
        self.model, self.policy, self.pool, self.link, self.config = model, policy, pool, link, config
        self.adapter = model.adapter
        self._ids = itertools.count()
        self._open: dict[int, Sequence] = {}

    def new_sequence(self, tokens: Seq[int], capacity: int) -> Sequence:
        """A sequence with nothing computed and room for `capacity` tokens.

        Raises InputError for token ids the model does not have, ModelError for more positions than it has,
        PoolFullError where the pool has no room.
        """
        geometry = self.adapter.geometry
        wrong = next((t for t in tokens if not 0 <= t < geometry.vocab), None)
        if wrong is not None:
            raise InputError(f"token id {wrong} is not in the vocabulary of {self.model.name} (0-{geometry.vocab - 1})")
        self._check_positions(capacity)
        lease = self.pool.new_lease(capacity)
        keys = key_reader(self.pool, lease)
        trace = Trace(geometry.layers, self.config.missed_mass_every)
        return self._register(Sequence(next(self._ids), list(tokens), lease, keys, self.policy.new_state(keys), trace))

    def fork(self, sequence: Sequence, capacity: int) -> Sequence:
        """A sequence with the same computed tokens, sharing their chunks, with room for `capacity` tokens."""
        lease = self.pool.fork(sequence.lease)
        self.pool.reserve(lease, capacity)
        keys = key_reader(self.pool, lease)
        before = sequence.trace
        trace = Trace(before.layers, before.missed_every, before.prefill_seconds, prompt_tokens=before.prompt_tokens)
        return self._register(
            Sequence(next(self._ids), list(sequence.tokens), lease, keys, sequence.state.fork(keys), trace)
        )

    def _register(self, sequence: Sequence) -> Sequence:
        self.link.open(sequence.lease, self.policy.sinks, self.policy.recent)
        self._open[sequence.id] = sequence
        return sequence

    def free(self, sequence: Sequence) -> None:
        """Gives back everything the sequence holds."""
        del self._open[sequence.id]
        self.link.close(sequence.lease)
        self.pool.release(sequence.lease)

    @torch.inference_mode()
    def begin_prefill(self, sequence: Sequence, stop: int, *, want_logits: bool) -> Prefill:
        """The exact prefill of tokens [position, stop), to be advanced with `advance_prefill`."""
        sequence.trace.prompt_tokens = stop
        size = self.config.prefill_slice
        return Prefill(sequence, stop, self.adapter, self.link, slice_tokens=size, want_logits=want_logits)

    @torch.inference_mode()
    def advance_prefill(self, prefill: Prefill) -> None:
        """Runs one layer; commits the tokens after the last."""
        began = time.perf_counter()
        prefill.run_layer()
        if prefill.done:
            self.pool.commit(prefill.sequence.lease, prefill.stop)
        trace = prefill.sequence.trace
        trace.prefill_seconds += time.perf_counter() - began

    def prefill(
        self,
        sequence: Sequence,
        stop: int,
        *,
        want_logits: bool = False,
        on_layer: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor | None:
        """All of it in one call, `on_layer(layers done)` after each layer. Returns logits `[V]` if wanted."""
        prefill = self.begin_prefill(sequence, stop, want_logits=want_logits)
        while not prefill.done:
            self.advance_prefill(prefill)
            on_layer(prefill.layer)
        return prefill.logits

    @torch.inference_mode()
    def decode(self, batch: Seq[Sequence]) -> torch.Tensor:
        """One step of each sequence: computes and commits token `tokens[position]`. float32 logits `[B, V]`."""
        began = time.perf_counter()
        for sequence in batch:
            self.pool.reserve(sequence.lease, sequence.position + 1)
        logits = DecodeStep(batch, self.adapter, self.policy, self.link).run()
        for sequence in batch:
            self.pool.commit(sequence.lease, sequence.position + 1)
        seconds = time.perf_counter() - began
        for sequence in batch:
            sequence.trace.decode_seconds += seconds
        return logits

    def stats(self, sequence: Sequence) -> Stats:
        """What the sequence cost so far; to be taken before `free`."""
        trace, adapter = sequence.trace, self.adapter
        dense = self.policy.dense_layers
        link_fraction, attended_fraction, sparse_fraction = fractions(trace, dense)
        missed, worst = layer_means(trace, dense)
        return Stats(
            model=self.model.name,
            policy=self.policy.name,
            device=str(adapter.device),
            dtype=str(adapter.dtype).removeprefix("torch."),
            prompt_tokens=trace.prompt_tokens,
            reused_tokens=trace.reused_tokens,
            new_tokens=len(sequence.tokens) - trace.prompt_tokens,
            prefill_seconds=trace.prefill_seconds,
            decode_seconds=trace.decode_seconds,
            link_bytes_to_device=trace.bytes_to_device,
            link_bytes_to_host=trace.bytes_to_host,
            kv_bytes_host=len(sequence.lease.chunks) * self.pool.chunk_bytes,
            kv_bytes_device=self.link.device_bytes,
            scoring_bytes_device=sequence.state.device_bytes,
            weight_bytes=self.model.weight_bytes,
            peak_device_bytes=self._peak_device_bytes(),
            link_fraction=link_fraction,
            attended_fraction=attended_fraction,
            sparse_attended_fraction=sparse_fraction,
            dense_layers=tuple(sorted(dense)),
            layers=adapter.geometry.layers,
            missed_mass=missed,
            missed_mass_worst_layer=worst,
            attended_by_step=trace.attended,
            missed_by_step=trace.missed,
        )

    def _peak_device_bytes(self) -> int:
        if self.adapter.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.adapter.device)
        scoring = sum(sequence.state.device_bytes for sequence in self._open.values())
        return self.model.weight_bytes + self.link.device_bytes + scoring

    def _check_positions(self, tokens: int) -> None:
        geometry = self.adapter.geometry
        if tokens <= geometry.max_positions:
            return
        needed = f"{tokens} positions (prompt and new tokens) are needed and {self.model.name} has"
        if geometry.absolute_positions:
            raise ModelError(f"{needed} a table of {geometry.max_positions}; shorten the prompt or max_new_tokens")
        warnings.warn(f"{needed} been made for {geometry.max_positions}; quality beyond is not known", stacklevel=2)

    def check_integrity(self) -> None:
        """Asserts that pool, sequences and states agree."""
        self.pool.check_integrity()
        for sequence in self._open.values():
            sequence.check_integrity()
