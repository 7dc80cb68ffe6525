"""`LLM`: a model, a policy and a pool behind three calls: `generate`, `stream`, `score`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .arguments import folder_path, salt, sampling, sampling_of_each, texts_or_ids, whole_or_none
from .config import EngineConfig, StoreOptions
from .config_fields import configured
from .core import ModelGeometry
from .engine.build import build, build_beside
from .engine.checks import check_token_ids, most_tokens
from .engine.engine import Engine
from .engine.prompts import PromptLike, each_prompt, one_prompt
from .engine.recording import RunInfo, RunWriter
from .engine.request import Request, request_output
from .engine.runner import Runner
from .engine.scoring import Score, score
from .engine.swap import Swap
from .errors import InputError, OffloadError
from .forward.trace import Recorder
from .outputs import RequestOutput, Stats, TokenOutput
from .progress import Progress
from .sampling_params import SamplingParams
from .sessions.chat_render import Message, Tool, encode_rendered, render_chat
from .sessions.session import Session
from .sessions.store import SessionStore
from .sessions.turn_queue import TurnQueue
from .units import format_size


class LLM:
    """An offloading runtime for one model on one device.

    model: "reference" (ships with the package), a local folder, a GGUF file, a hub id, or a loaded transformers model.
    config: an `EngineConfig`; without one its defaults.
    fields: any of `EngineConfig`'s fields by name (`policy="infinigen"`, `host_memory="200GiB"`, ...), which go on top
        of `config`.
    tokenizer: for a loaded model, or to replace a checkpoint's own. Without one, prompts are lists of token ids.

    Raises ConfigError, ModelError, ArtifactError, MemoryLimitError, StoreError. Threads take turns, step
    by step: any of them may call, a session or a queue one at a time.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **fields: Any,
    ) -> None:
        chosen = configured(EngineConfig, config, fields)
        self._begin(build(model, chosen, tokenizer), WeakValueDictionary())

    def _begin(self, runner: Runner, family: WeakValueDictionary[int, LLM]) -> None:
        """A runtime of `runner`, which nothing has been asked of. family: those of the same weights, by number: each
        has a folder of its own to swap to."""
        self._progress = Progress(enabled=runner.config.progress)
        self._runner, self._family = runner, family
        number = next(n for n in itertools.count() if n not in family)
        family[number], folder = self, runner.config.swap
        own = folder if folder is None or not number else folder / f"under-{number}"
        self._swap = None if own is None else Swap(runner, own)
        self._last: Request | None = None
        self._stores: dict[Path, SessionStore] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        runner, pool = self._runner, self._runner.pool
        made = f"policy={runner.policy.name!r}, device={str(runner.adapter.device)!r}, dtype={self.config.dtype!r}"
        return f"LLM({self.name!r}, {made}, host_memory={format_size(pool.limit_bytes)!r})"

    def close(self) -> None:
        """Ends what is being answered, and saves and closes all sessions: another process may open them then. Nothing
        may be asked of it afterwards (InputError); its memory is given back when nobody refers to it any more. A second
        call does nothing. Raises StoreError where a session cannot be saved; all others are."""
        self._closed = True
        with ExitStack() as ends:
            if self._swap is not None:
                ends.callback(self._swap.close)
            for store in self._stores.values():
                ends.callback(store.close)

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"{self!r} is closed: make another one")

    def under(self, policy: str, policy_options: Mapping[str, Any] | None = None, *, exact: object = None) -> LLM:
        """The same weights and the same host pool under another policy, everything else as here: a prompt that was
        prefilled under one of them is not prefilled again under the other. For comparing policies, one after another.
        exact: in place of this one's, as `LLM` takes it (False: no drafts). Raises ConfigError, also with
        `device_memory`, and InputError if this runtime is closed."""
        self._check_open()
        other = LLM.__new__(LLM)
        given = {} if policy_options is None else policy_options
        other._begin(build_beside(self._runner, policy, given, exact), self._family)
        return other

    @property
    def config(self) -> EngineConfig:
        """What this runtime was made of, with the policy's options that are in force."""
        return self._runner.config

    @property
    def runner(self) -> Runner:
        """The loaded model with its policy, pool and link. Free every sequence that it makes."""
        return self._runner

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

    def get_default_sampling_params(self, **fields: Any) -> SamplingParams:
        """What is taken where no sampling parameters are given: those of the model's `generation_config.json`
        (temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens), with `fields` of `SamplingParams` on
        top. A `SamplingParams` that is given is taken as it is. Raises ConfigError."""
        return configured(SamplingParams, self._runner.model.sampling, fields)

    @property
    def most_tokens(self) -> int:
        """The most tokens of prompt and answer together that positions, host memory and device memory allow."""
        return most_tokens(self.geometry.max_positions, self._runner.check_fits)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights."""
        return self._runner.model.weight_bytes

    @property
    def last_stats(self) -> Stats | None:
        """What the latest `stream` has cost so far, also after it was interrupted; None before its prompt started, and
        after a `generate` or `score`: what these cost stands in their results."""
        return self._last.stats(self._runner) if self._last is not None else None

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        record: str | Path | None = None,
        *,
        cache_salt: str = "",
    ) -> Iterator[TokenOutput]:
        """Events of one prompt's new tokens as they come. Closing the iterator cancels the rest. What every step
        selects is written to the new folder `record` (see `engine/recording.py`). cache_salt: as `generate` takes it.

        Raises InputError for an empty prompt or wrong ids, for several completions and for a folder that is not empty,
        ModelError for too many positions, PoolFullError.
        """
        self._check_open()
        params = sampling(sampling_params, self._runner.model.sampling)
        if params.n > 1 or params.num_beams > 1:
            raise InputError("a stream is of one completion as it comes: use generate for n or num_beams above 1")
        if record is not None and self.config.exact is not None:
            raise InputError("a recording is of what steps select, and with exact=... all is attended: leave one out")
        ids, cache_salt = self.encode(prompt), salt(cache_salt)
        if record is None:
            return self._stream(ids, params, cache_salt)
        return self._recorded(ids, params, cache_salt, folder_path("record", record))

    def _recorded(
        self, prompt: list[int], params: SamplingParams, cache_salt: str, folder: Path
    ) -> Iterator[TokenOutput]:
        tokens, writer = list(prompt), RunWriter(folder, RunInfo.of(self._runner, prompt))
        try:
            for event in self._stream(prompt, params, cache_salt, writer):
                tokens.append(event.token_id)
                yield event
        finally:
            writer.close(tokens, self.tokenizer)

    def _stream(
        self, prompt: list[int], params: SamplingParams, cache_salt: str, recorder: Recorder | None = None
    ) -> Iterator[TokenOutput]:
        with self._progress.prefill(self.geometry.layers) as on_prefill:
            engine = Engine(self._runner, max_batch=1, on_prefill=lambda _, layers: on_prefill(layers))
            self._last = request = engine.add(prompt, params, recorder, cache_salt)
            try:
                while not engine.idle:
                    self._check_open()
                    yield from engine.step()
            finally:
                engine.cancel(request)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Return the outputs of `prompts`, in order, with `n` completions each. All are decoded in one batch that
        requests join and leave. KV of common prefixes is computed and stored once.

        `sampling_params`: one for all or one per prompt. `cache_salt`: KV is shared only among requests with the same
        salt, so that no client learns from latency or `num_cached_tokens` what another one has asked.

        Raises as `stream`; nothing is returned if one prompt fails.
        """
        given = each_prompt(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._generate([self.encode(prompt) for prompt in given], texts, sampling_params, salt(cache_salt))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answers to a conversation, or to each of several, as `generate` gives them. Each goes through the tokenizer's
        chat template, with `tools` and the variables in `chat_template_kwargs` (`enable_thinking=False`, ...).

        messages: `{"role": "user", "content": "..."}` and so on; a list of them, or a list of lists.

        Raises InputError also where there is no template, or it refuses the conversation.
        """
        listed = messages if isinstance(messages, Sequence) else ()
        several = bool(listed) and all(isinstance(one, Sequence) and not isinstance(one, str) for one in listed)
        prompts = [
            self.chat_prompt(
                one,  # type: ignore[arg-type]
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for one in (messages if several else [messages])
        ]
        texts = [text for text, _ in prompts]
        return self._generate([ids for _, ids in prompts], texts, sampling_params, salt(cache_salt))

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[int]]:
        """The text that `chat` makes of one conversation, and its token ids; the options are `chat`'s. Raises as it."""
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer: give token ids to generate, or pass tokenizer=")
        text = render_chat(self.tokenizer, messages, **options)
        return text, encode_rendered(self.tokenizer, text)

    def _generate(
        self, encoded: list[list[int]], texts: Sequence[str | None], sampling_params: object, cache_salt: str
    ) -> list[RequestOutput]:
        each, self._last = sampling_of_each(sampling_params, len(encoded), self._runner.model.sampling), None
        for prompt, one in zip(encoded, each, strict=True):
            self._runner.room.check(len(prompt), len(prompt) + one.max_tokens)
        engine = self.make_engine()
        requests = [engine.add(prompt, one, cache_salt=cache_salt) for prompt, one in zip(encoded, each, strict=True)]
        try:
            with self._progress.items("generate", sum(one.n for one in each)) as on_done:
                while not engine.idle:
                    for event in engine.step():
                        if event.finish_reason is not None:
                            on_done()
        finally:
            for request in requests:
                engine.cancel(request)
        given = zip(requests, encoded, texts, strict=True)
        return [request_output(request, ids, text) for request, ids, text in given]

    def make_engine(
        self,
        on_failure: Callable[[Request, Exception], None] | None = None,
        on_prefill: Callable[[Request, int], None] = lambda request, layers: None,
        waited_for: Callable[[], bool] = lambda: False,
    ) -> Engine:
        """An engine over this runtime, for front ends that add requests and take steps themselves. The functions are as
        `Engine` says."""
        self._check_open()
        return Engine(
            self._runner,
            max_batch=self.config.max_batch,
            on_prefill=on_prefill,
            swap=self._swap,
            on_failure=on_failure,
            waited_for=waited_for,
        )

    def score(
        self,
        prompts: Sequence[PromptLike],
        continuations: Sequence[PromptLike],
        decode_from: int | None = None,
        *,
        batch: int | None = None,
    ) -> list[Score]:
        """Teacher-forced log-probabilities of `continuations[i]` after `prompts[i]`.

        All but each prompt's last token (or only its first `decode_from` tokens) are prefilled exactly; the rest is
        decoded under the policy. A continuation given as a string is tokenized on its own, without special tokens.

        Raises InputError for empty prompts or continuations and lists of different lengths, PoolFullError.
        """
        self._check_open()
        first, then = texts_or_ids("prompts", prompts), texts_or_ids("continuations", continuations)
        if len(first) != len(then):
            raise InputError(f"{len(first)} prompts but {len(then)} continuations: give one for each")
        decode_from, batch = whole_or_none("decode_from", decode_from, 0), whole_or_none("batch", batch, 1)
        self._last = None
        encoded = [self.encode(prompt) for prompt in first]
        targets = [self.encode(text, special_tokens=False) for text in then]
        with self._progress.items("score", len(encoded)) as on_done, self._runner.pool.lock:
            most = batch or self.config.max_batch
            return score(self._runner, encoded, targets, decode_from=decode_from, batch=most, on_done=on_done)

    def session(
        self,
        name: str,
        store: str | Path,
        options: StoreOptions | None = None,
        *,
        system: str | None = None,
        **fields: Any,
    ) -> Session:
        """The conversation `name`: new, or with all its history where the folder `store` has it. Its KV cache comes
        back from host memory or disk. One process at a time may have sessions of a folder open. `options`, or fields of
        `StoreOptions` by name (`limit="50GiB"`, `ttl="7d"`, ...), are in force until the last session closes. Between
        turns a session's rows stay in host memory until something else, a turn or a prompt, needs the room.

        `system`: what a new session tells the model before all turns (`Session.instruct`).

        Raises InputError, ConfigError (a policy that cannot be restored, eviction, a wrong option), StoreError.
        """
        with self._runner.pool.lock:
            known = self.session_store(store, options, **fields)
            try:
                session = known.open(name)
            except OffloadError:
                known.close_if_idle()
                raise
        if system is not None:
            try:
                session.instruct(system)
            except OffloadError:
                session.close()
                raise
        return session

    def turns(
        self,
        store: str | Path,
        options: StoreOptions | None = None,
        *,
        max_batch: int | None = None,
        **fields: Any,
    ) -> TurnQueue:
        """A queue of turns of many sessions in one folder, at most `max_batch` computed together (None: as many as the
        configuration says); what waiting turns need comes from disk to host memory before they begin, and is not
        evicted. Options and errors as `session`."""
        with self._runner.pool.lock:
            most = whole_or_none("max_batch", max_batch, 1) or self.config.max_batch
            return TurnQueue(self.session_store(store, options, **fields), most)

    def session_store(self, store: str | Path, options: StoreOptions | None = None, **fields: Any) -> SessionStore:
        """What the sessions of one folder have in common, for front ends: it closes with the last that holds it.
        Options and errors as `session`."""
        self._check_open()
        folder = folder_path("store", store).resolve()
        known = self._stores.get(folder)
        if known is None or known.closed:
            chosen = configured(StoreOptions, options, fields)
            known = self._stores[folder] = SessionStore.on_disk(self._runner, folder, chosen)
        return known

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of prompts that no request and no open session uses. Return whether all of it is gone."""
        self._check_open()
        with self._runner.pool.lock:
            return self._runner.pool.drop_prefixes()

    def encode(self, prompt: PromptLike | object, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, or the ids themselves.

        Raises:
            InputError: `prompt` is empty or no prompt, or an id is not in the vocabulary.
        """
        ids = one_prompt(prompt)
        if isinstance(ids, str):
            if self.tokenizer is None:
                raise InputError(f"{self.name} has no tokenizer: give token ids, or pass tokenizer=")
            ids = encode_rendered(self.tokenizer, ids, special_tokens=special_tokens)
        if not ids:
            raise InputError("the prompt is empty: give at least one token")
        check_token_ids(ids, self._runner.model)
        return ids
