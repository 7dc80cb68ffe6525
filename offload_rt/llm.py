"""`LLM`: a model, a policy and a pool behind three calls: `generate`, `stream`, `score`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .config import (
    DType,
    EngineConfig,
    KVFormatName,
    SamplingParams,
    SkewMethod,
    StoreOptions,
    eviction_options,
    from_mapping,
    parse_duration,
    parse_size,
)
from .core import CHUNK, ModelGeometry
from .engine.engine import Engine
from .engine.recording import RunInfo, RunWriter
from .engine.request import Completion, Request, TokenOutput
from .engine.runner import Runner
from .engine.scoring import Score, score
from .engine.stats import Stats
from .engine.swap import Swap
from .errors import InputError
from .forward.batch import Recorder
from .models.registry import LoadedModel, load_model, load_shape
from .planning.device_plan import DevicePlan, plan_for
from .pool.pool import HostPool
from .progress import Progress
from .select.base import Policy
from .select.registry import make_policy
from .sessions.session import Session
from .sessions.store import SessionStore
from .sessions.turn_queue import TurnQueue
from .skewing.artifact import SkewArtifact
from .skewing.calibrate import cached_artifact
from .skewing.tuned import default_options, load_artifact
from .transfer.cpu import CpuLink
from .transfer.cuda import CudaLink
from .transfer.link import Link
from .transfer.streams import CudaStream, InlineStream
from .transfer.weights import StreamedAdapter, WeightStream

PromptLike = str | Sequence[int]

MAX_BATCH = 32
"""Sequences decoded together."""


class LLM:
    """An offloading runtime for one model on one device.

    model: "reference" (ships with the package), a local folder, a hub id, or a loaded transformers model.
    policy, policy_options: "full", "infinigen", ... and its options; for infinigen `preset="paper"` is one of them.
    device, dtype: "auto" takes CUDA where there is one, and the checkpoint's dtype there (float32 on a CPU).
    device_memory: hard limit on bytes of the device, an int or "22GiB": weights, scoring keys, resident and fetched
        rows, activations. Decoder layers that do not fit stay in host memory and cross the link for every step; scoring
        keys that still do not fit are scored on the host. The tokens are the same.
    max_context: tokens of one sequence that `device_memory` is planned for; None takes all positions of the model, as
        far as the host pool holds them.
    host_memory: hard limit on KV bytes in host memory, an int or "200GiB"; None takes half of what is free.
    eviction: "fifo", "lru" or "counter", or `EvictionOptions` as a mapping: what gives way when a sequence outgrows the
        pool. None makes it an error.
    skew: path of a skew artifact, or of a folder that `offload-rt skew` or `tune` wrote: what `tune` chose are then the
        policy's default options. None calibrates once on the packaged text and caches by model fingerprint.
    tokenizer: for a loaded model, or to replace a checkpoint's own. Without one, prompts are lists of token ids.
    kv_format: "auto" keeps rows of K and V in host memory as they are, "int8", "int4" and "int2" round them there:
        fewer bytes in the pool and on the link. Prefill is exact in any case; rounded prefixes are not shared.
    prefix_sharing: prompts that begin alike are computed and stored once, also those of earlier calls.
    swap: folder on a fast disk where `generate` keeps the rows of requests that give way in a full pool, if that is
        estimated cheaper than computing them again; nothing of it outlives the object. None always computes again.
    missed_mass_every: decode steps between two measurements of the missed attention mass; 0 never measures.
    working_set: rows of each KV head, in each layer that selects and for each sequence, that stay on the device after
        they were fetched, so that they need not cross the link again; 0 is none. The tokens are the same. On a CPU,
        where rows are otherwise attended to where they lie, this copies them as a device would: it shows what a device
        saves and makes the run slower.
    cuda_graphs: capture decode steps as CUDA graphs and replay them (`forward/cuda_graphs.py` says which). It has not
        yet run on a device.
    progress: show progress bars on stderr for long work.

    Raises ConfigError, ModelError, ArtifactError, MemoryLimitError, StoreError. Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        policy: str = "infinigen",
        policy_options: Mapping[str, Any] | None = None,
        device: str = "auto",
        dtype: DType | torch.dtype = "auto",
        device_memory: int | str | None = None,
        max_context: int | None = None,
        host_memory: int | str | None = None,
        eviction: str | Mapping[str, Any] | None = None,
        skew: str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        kv_format: KVFormatName = "auto",
        prefix_sharing: bool = True,
        swap: str | Path | None = None,
        missed_mass_every: int = 16,
        working_set: int = 0,
        cuda_graphs: bool = False,
        progress: bool = False,
    ) -> None:
        limit = None if host_memory is None else parse_size(host_memory, "host_memory")
        config = EngineConfig(
            host_memory=limit,
            eviction=eviction_options(eviction),
            prefix_sharing=prefix_sharing,
            missed_mass_every=missed_mass_every,
            working_set=working_set,
            cuda_graphs=cuda_graphs,
            device_memory=None if device_memory is None else parse_size(device_memory, "device_memory"),
            max_context=max_context,
        )
        place, given = None if skew is None else Path(skew), policy_options or {}
        plan = None
        if config.device_memory is not None:
            shape = load_shape(model, device=device, dtype=dtype)
            options = default_options(place, policy, given, fingerprint=None)
            plan = plan_for(config, shape, policy, options, rounded=kv_format != "auto")
        loaded = load_model(
            model, tokenizer=tokenizer, device=device, dtype=dtype, on_host=() if plan is None else plan.streamed
        )
        self._progress = Progress(enabled=progress)
        self._options = default_options(place, policy, given, loaded.fingerprint)
        streamed, stream = _stream_weights(loaded, plan)
        chosen = _policy(streamed, policy, self._options, place, keys_on_host=plan is not None and plan.keys_on_host)
        pin = loaded.adapter.device.type == "cuda"
        pool = HostPool(loaded.adapter.geometry, loaded.adapter.dtype, limit, kv_format=kv_format, pin=pin)
        self._runner = Runner(streamed, chosen, pool, _link(loaded, pool, working_set), config, plan, stream)
        self._swap = None if swap is None else Swap(self._runner, Path(swap).expanduser())
        self._last: Request | None = None
        self._stores: dict[Path, SessionStore] = {}

    @property
    def name(self) -> str:
        """What the model was loaded as."""
        return self._runner.model.name

    @property
    def geometry(self) -> ModelGeometry:
        """Shapes of the model."""
        return self._runner.adapter.geometry

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, if it has one."""
        return self._runner.model.tokenizer

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights."""
        return self._runner.model.weight_bytes

    @property
    def last_stats(self) -> Stats | None:
        """What the latest `stream` has cost so far, also after it was interrupted; None before its prompt started."""
        return self._last.stats(self._runner) if self._last is not None else None

    def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, record: str | Path | None = None
    ) -> Iterator[TokenOutput]:
        """Events of one prompt's new tokens as they come. Closing the iterator cancels the rest. What every step
        selects is written to the new folder `record` (see `engine/recording.py`).

        Raises InputError for an empty prompt or wrong ids, for several completions and for a folder that is not empty,
        ModelError for too many positions, PoolFullError.
        """
        params = params or SamplingParams()
        if params.n > 1 or params.num_beams > 1:
            raise InputError("a stream is of one completion as it comes: use generate for n or num_beams above 1")
        ids = self.encode(prompt)
        return self._stream(ids, params) if record is None else self._recorded(ids, params, Path(record))

    def _recorded(self, prompt: list[int], params: SamplingParams, folder: Path) -> Iterator[TokenOutput]:
        tokens, writer = list(prompt), RunWriter(folder, self._run_info(prompt))
        try:
            for event in self._stream(prompt, params, writer):
                tokens.append(event.token_id)
                yield event
        finally:
            writer.close(tokens, self.tokenizer)

    def _run_info(self, prompt: list[int]) -> RunInfo:
        runner, geometry = self._runner, self.geometry
        dense = runner.policy.dense_layers
        return RunInfo(
            model=self.name,
            fingerprint=runner.model.fingerprint,
            policy=runner.policy.name,
            options=dict(self._options),
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            row_bytes=runner.pool.chunk_bytes // (CHUNK * geometry.layers * geometry.kv_heads),
            selecting=tuple(layer for layer in range(geometry.layers) if layer not in dense),
            sinks=runner.policy.sinks,
            recent=runner.policy.recent,
            prompt_tokens=len(prompt),
            tokens=tuple(prompt),
        )

    def _stream(
        self, prompt: list[int], params: SamplingParams, recorder: Recorder | None = None
    ) -> Iterator[TokenOutput]:
        with self._progress.prefill(self.geometry.layers) as on_prefill:
            engine = Engine(
                self._runner, max_batch=1, on_prefill=lambda _, layers: on_prefill(layers), recorder=recorder
            )
            self._last = request = engine.add(prompt, params)
            try:
                while not engine.idle:
                    yield from engine.step()
            finally:
                engine.cancel(request)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completions of `prompts`, in order, `params.n` of each, decoded in one batch that requests join and leave.

        What prompts have in common is found, computed and stored once, and attended to together. `params` is one for
        all or one per prompt. Raises as `stream`; no completion is returned if one prompt fails.
        """
        encoded = [self.encode(prompt) for prompt in _as_list(prompts)]
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(encoded)
        if len(each) != len(encoded):
            raise InputError(f"{len(each)} SamplingParams for {len(encoded)} prompts: give one, or one per prompt")
        engine = Engine(self._runner, max_batch=MAX_BATCH, swap=self._swap)
        requests = [engine.add(prompt, one) for prompt, one in zip(encoded, each, strict=True)]
        try:
            with self._progress.items("generate", sum(one.n for one in each)) as on_done:
                while not engine.idle:
                    for event in engine.step():
                        if event.finish_reason is not None:
                            on_done()
        finally:
            for request in requests:
                engine.cancel(request)
        return [completion for request in requests for completion in request.completions()]

    def score(
        self,
        prompts: Sequence[PromptLike],
        continuations: Sequence[PromptLike],
        decode_from: int | None = None,
        *,
        batch: int = MAX_BATCH,
    ) -> list[Score]:
        """Teacher-forced log-probabilities of `continuations[i]` after `prompts[i]`.

        All but each prompt's last token (or only its first `decode_from` tokens) are prefilled exactly; the rest goes
        through the decode path and so through the policy. Equal prompts are prefilled once. A continuation given as a
        string is tokenized on its own, without special tokens.

        Raises InputError for empty prompts or continuations and lists of different lengths, PoolFullError.
        """
        if len(prompts) != len(continuations):
            raise InputError(f"{len(prompts)} prompts but {len(continuations)} continuations: give one for each")
        if decode_from is not None and decode_from < 0:
            raise InputError(f"decode_from={decode_from} must not be negative")
        encoded = [self.encode(prompt) for prompt in prompts]
        targets = [self.encode(text, special_tokens=False) for text in continuations]
        with self._progress.items("score", len(encoded)) as on_done:
            return score(self._runner, encoded, targets, decode_from=decode_from, batch=batch, on_done=on_done)

    def session(self, name: str, store: str | Path, *, limit: int | str | None = None, **options: Any) -> Session:
        """The conversation `name`: new, or with all its history where the folder `store` has it. Its KV cache comes
        back from host memory or disk. One process at a time may have sessions of a folder open; `limit` is the most
        bytes of all of the folder's files; it and the other `StoreOptions` (policy; ttl, in seconds or as "7d";
        free_host; overflow) are in force until the last session closes. Between turns a session's rows stay in host
        memory until something else, a turn or a prompt, needs the room.

        Raises InputError, ConfigError (a policy that cannot be restored, eviction, a wrong option), StoreError.
        """
        known = self._store(store, limit, options)
        try:
            return known.open(name)
        except InputError:
            known.close_if_idle()
            raise

    def turns(
        self, store: str | Path, *, max_batch: int = MAX_BATCH, limit: int | str | None = None, **options: Any
    ) -> TurnQueue:
        """A queue of turns of many sessions in one folder, computed together; what waiting turns need comes from disk
        to host memory before they begin, and is not evicted. Options and errors as `session`."""
        return TurnQueue(self._store(store, limit, options), max_batch)

    def _store(self, store: str | Path, limit: int | str | None, options: Mapping[str, Any]) -> SessionStore:
        folder = Path(store).expanduser().resolve()
        known = self._stores.get(folder)
        if known is None or known.closed:
            size = None if limit is None else parse_size(limit, "limit")
            if options.get("ttl") is not None:
                options = {**options, "ttl": parse_duration(options["ttl"], "ttl")}
            chosen = from_mapping(StoreOptions, {"limit": size, **options})
            known = self._stores[folder] = SessionStore.on_disk(self._runner, folder, chosen)
        return known

    def encode(self, prompt: PromptLike, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text, or the ids themselves. Raises InputError where there are none."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(f"{self.name} has no tokenizer: give token ids, or pass tokenizer=")
            ids = [int(i) for i in self.tokenizer(prompt, add_special_tokens=special_tokens)["input_ids"]]
        else:
            ids = [int(i) for i in prompt]
        if not ids:
            raise InputError("the prompt is empty: give at least one token")
        return ids


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or several: a string or a list of ints is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _stream_weights(loaded: LoadedModel, plan: DevicePlan | None) -> tuple[LoadedModel, WeightStream | None]:
    """The model as it runs with the layers of `plan` streaming, and what streams them; as it is, where none do."""
    if plan is None or not plan.streamed:
        return loaded, None
    device = loaded.adapter.device
    copies = CudaStream(device) if device.type == "cuda" else InlineStream()
    weights = WeightStream(loaded.layers, plan.streamed, device, copies)
    return replace(loaded, adapter=StreamedAdapter(loaded.adapter, weights)), weights


def _policy(
    loaded: LoadedModel, name: str, options: Mapping[str, Any], skew: Path | None, *, keys_on_host: bool
) -> Policy:
    def artifact(method: SkewMethod) -> SkewArtifact:
        if skew is not None:
            return load_artifact(skew, loaded.fingerprint)
        return cached_artifact(loaded, method)

    adapter = loaded.adapter
    return make_policy(
        name,
        options,
        geometry=adapter.geometry,
        device=adapter.device,
        dtype=adapter.dtype,
        artifact=artifact,
        keys_on_host=keys_on_host,
    )


def _link(loaded: LoadedModel, pool: HostPool, working_set: int) -> Link:
    """In place where host memory is the device's, rows are stored as numbers and none are to be kept; else rows are
    staged."""
    device, geometry = loaded.adapter.device, loaded.adapter.geometry
    if device.type == "cuda":
        return CudaLink(pool, geometry, device, working_set=working_set)
    if pool.format.exact and not working_set:
        return CpuLink(pool)
    return CudaLink(pool, geometry, device, streams=(InlineStream(), InlineStream()), working_set=working_set)
