"""`LLM`: generate, stream, chat and score with the KV cache in host memory."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .config import EngineConfig
from .engine.build import build, build_with_policy
from .engine.checks import (
    check_int_or_none,
    check_prompt_list,
    check_salt,
    check_sampling_params,
    max_length,
    sampling_params_per_prompt,
)
from .engine.engine import Engine
from .engine.prompts import PromptLike, each_prompt
from .engine.request import Request, request_output
from .engine.runner import Runner
from .engine.scoring import Score, score
from .engine.swap import Swap
from .errors import InputError
from .outputs import RequestOutput, Stats, TokenOutput
from .sampling_params import SamplingParams
from .sessions.chat_render import Message, Tool
from .sessions.prompt_encoder import PromptEncoder
from .sessions.session import Session
from .sessions.store import OpenStores, SessionStore
from .sessions.turn_queue import TurnQueue
from .storage.options import StoreOptions
from .utils.config_fields import configured
from .utils.progress import Progress
from .utils.units import format_size


class LLM:
    """An offloading inference runtime for one model on one device.

    Several threads may use one `LLM`. The steps of their requests are then interleaved. A session or a queue may be
    used by only one thread at a time.

    Args:
        model: "reference" (a model that ships with the package), a local folder, a GGUF file, a hub id, or a loaded
            transformers model.
        config: Engine options. If None, the defaults are used.
        tokenizer: A tokenizer that replaces the checkpoint's, or the tokenizer of a loaded model. Can be an object, a
            folder or a hub id. Without a tokenizer, prompts are lists of token ids.
        **fields: Fields of `EngineConfig` that override `config`, such as `host_memory="200GiB"`.

    Attributes:
        runner: The loaded model with its policy and KV cache. If you create sequences with it, you must free them.
        config: The configuration, with all options of the policy filled in.
        name: The model's name, folder or hub id.
        geometry: The model's dimensions.
        tokenizer: The model's tokenizer, if it has one.

    Raises:
        ConfigError: An option is unknown or invalid.
        ModelError: The model is unsupported, incomplete, or fails load-time verification.
        ArtifactError: The skew artifact is damaged or belongs to another model.
        MemoryLimitError: The model or its KV cache does not fit.
        StoreError: The swap folder cannot be used.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        **fields: Any,
    ) -> None:
        chosen = configured(EngineConfig, config, fields)
        self._begin(build(model, chosen, tokenizer), WeakValueDictionary())

    def _begin(self, runner: Runner, family: WeakValueDictionary[int, LLM]) -> None:
        # `family` maps numbers to the `LLM` objects that share the weights. Each has a separate swap folder.
        self._progress = Progress(enabled=runner.config.progress)
        self.runner, self._family, self.config, self.name = runner, family, runner.config, runner.model.name
        self.geometry, self.tokenizer = runner.adapter.geometry, runner.model.tokenizer
        number = next(n for n in itertools.count() if n not in family)
        family[number], folder = self, runner.config.swap
        own = folder if folder is None or not number else folder / f"under-{number}"
        self._swap = None if own is None else Swap(runner, own)
        self._last: Request | None = None
        self._stores, self._encoder = OpenStores(runner), PromptEncoder(runner.model)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        runner, pool = self.runner, self.runner.pool
        made = f"policy={runner.policy.name!r}, device={str(runner.adapter.device)!r}, dtype={self.config.dtype!r}"
        return f"LLM({self.name!r}, {made}, host_memory={format_size(pool.limit_bytes)!r})"

    def close(self) -> None:
        """Cancel running requests, and save and close all sessions, so that another process can open them.

        Later calls of other methods raise InputError. A second `close` has no effect. Memory is freed when the last
        reference to this object is gone.

        Raises:
            StoreError: A session could not be saved. All other sessions were saved.
        """
        self._closed = True
        with ExitStack() as ends:
            if self._swap is not None:
                ends.callback(self._swap.close)
            ends.callback(self._stores.close)

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"{self!r} is closed: create another one")

    def under(self, policy: str, policy_options: Mapping[str, Any] | None = None, *, exact: object = None) -> LLM:
        """Return an `LLM` with another policy that shares the weights and the KV cache of this one.

        Prompts that were prefilled with one policy need no second prefill with the other. All other options stay the
        same.

        Args:
            policy: Name of the policy.
            policy_options: Options of the policy.
            exact: New value of the option `exact`. None keeps the current value, and False disables lossless mode.

        Raises:
            ConfigError: An option is invalid, or `device_memory` is set.
            InputError: This `LLM` is closed.
        """
        self._check_open()
        other = LLM.__new__(LLM)
        given = {} if policy_options is None else policy_options
        other._begin(build_with_policy(self.runner, policy, given, exact), self._family)
        return other

    def get_default_sampling_params(self, **fields: Any) -> SamplingParams:
        """Return the sampling parameters that are used if none are given.

        They come from the model's `generation_config.json` (temperature, top_k, top_p, min_p, repetition_penalty,
        max_new_tokens) and are overridden by `fields`, which are fields of `SamplingParams`. Raises ConfigError for
        invalid values.
        """
        return configured(SamplingParams, self.runner.model.sampling, fields)

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt and output in tokens, limited by the model, by memory and by the configuration."""
        return max_length(self.runner.max_positions, self.runner.check_fits)

    @property
    def last_stats(self) -> Stats | None:
        """Statistics of the latest `stream`, even while it is running or after it was interrupted.

        None before the first `stream`, and after `generate` or `score`, because their results contain statistics.
        """
        return self._last.stats(self.runner) if self._last is not None else None

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
    ) -> Iterator[TokenOutput]:
        """Yield new tokens of one prompt as they are decoded. Closing the iterator cancels the request.

        Args:
            prompt: Text or token ids.
            sampling_params: If None, the model's defaults are used.
            cache_salt: See `generate`.

        Raises:
            InputError: The prompt is empty or has invalid ids, or more than one completion is requested.
            ModelError: Prompt and output together exceed `max_model_len`, or the absolute positions of the model. Other
                models may exceed the length that they were trained for, with a warning.
            PoolFullError: The KV cache is too small.
        """
        self._check_open()
        params = check_sampling_params(sampling_params, self.runner.model.sampling)
        if params.n > 1 or params.num_beams > 1:
            raise InputError("stream returns one completion: use generate for n or num_beams above 1")
        return self._stream(self.encode(prompt), params, check_salt(cache_salt))

    def _stream(self, prompt: list[int], params: SamplingParams, cache_salt: str) -> Iterator[TokenOutput]:
        with self._progress.bar("prefill", self.geometry.layers) as on_prefill:
            engine = Engine(self.runner, max_num_seqs=1, on_prefill=lambda _, layers: on_prefill(layers))
            self._last = request = engine.add(prompt, params, cache_salt=cache_salt)
            try:
                while not engine.idle:
                    self._check_open()
                    yield from engine.step()
            finally:
                if not sys.is_finalizing():  # at interpreter exit, modules that are needed to free memory are gone
                    engine.cancel(request)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Return the outputs of `prompts`, in order, with `n` completions each.

        Requests are decoded with continuous batching. The KV of common prefixes is computed and stored only once.

        Args:
            prompts: One prompt or several. Each is a text or token ids.
            sampling_params: Parameters for all prompts, or a list with one item per prompt. If None, the model's
                defaults are used.
            cache_salt: Text that separates users of the cache: KV is shared only among requests with the same salt.
                Latency and `num_cached_tokens` then reveal no information about requests with other salts.

        Raises:
            InputError, ModelError, PoolFullError: See `stream`. If one prompt fails, no output is returned.
        """
        given = each_prompt(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._generate([self.encode(prompt) for prompt in given], texts, sampling_params, check_salt(cache_salt))

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
        """Return responses to one or several conversations, which are rendered with the tokenizer's chat template.

        Args:
            messages: A list of messages such as `{"role": "user", "content": "..."}`, or a list of such lists.
            sampling_params: See `generate`.
            tools: Tool definitions for the template.
            chat_template_kwargs: Variables for the template, such as `{"enable_thinking": False}`.
            add_generation_prompt: Append the beginning of an assistant message, which the model then continues.
            continue_final_message: Continue the last message instead of starting a new one.
            cache_salt: See `generate`.

        Raises:
            InputError: There is no chat template, or it rejects the conversation. See also `generate`.
        """
        prompts = self._encoder.each_chat(
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        texts = [text for text, _ in prompts]
        return self._generate([ids for _, ids in prompts], texts, sampling_params, check_salt(cache_salt))

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[int]]:
        """Render one conversation. Return the text and its token ids. For options and errors, see `chat`."""
        return self._encoder.chat(messages, **options)

    def _generate(
        self, encoded: list[list[int]], texts: Sequence[str | None], sampling_params: object, cache_salt: str
    ) -> list[RequestOutput]:
        each, self._last = sampling_params_per_prompt(sampling_params, len(encoded), self.runner.model.sampling), None
        requests = self.make_engine().run_all(encoded, each, cache_salt, self._progress)
        given = zip(requests, encoded, texts, strict=True)
        return [request_output(request, ids, text) for request, ids, text in given]

    def make_engine(self, **callbacks: Any) -> Engine:
        """Return an engine, for programs that add requests and run steps themselves. For `callbacks`, see `Engine`."""
        self._check_open()
        return Engine(self.runner, max_num_seqs=self.config.max_num_seqs, swap=self._swap, **callbacks)

    def score(
        self,
        prompts: Sequence[PromptLike],
        continuations: Sequence[PromptLike],
        decode_from: int | None = None,
        *,
        batch: int | None = None,
    ) -> list[Score]:
        """Return teacher-forced log-probabilities of each `continuations[i]` after `prompts[i]`.

        Args:
            prompts: Texts or token ids.
            continuations: Texts or token ids. Texts are tokenized separately from the prompt, without special tokens.
            decode_from: Number of prompt tokens that are prefilled with full attention. All later tokens are decoded
                with the policy. If None, all prompt tokens except the last one are prefilled.
            batch: Maximum number of sequences per batch. If None, `max_num_seqs` is used.

        Raises:
            InputError: A prompt or continuation is empty, or the lists differ in length.
            PoolFullError: The KV cache is too small.
        """
        self._check_open()
        first, then = check_prompt_list("prompts", prompts), check_prompt_list("continuations", continuations)
        if len(first) != len(then):
            raise InputError(f"{len(first)} prompts but {len(then)} continuations: pass one for each prompt")
        decode_from, batch = check_int_or_none("decode_from", decode_from, 0), check_int_or_none("batch", batch, 1)
        self._last = None
        encoded = [self.encode(prompt) for prompt in first]
        targets = [self.encode(text, special_tokens=False) for text in then]
        with self._progress.items("score", len(encoded)) as on_done, self.runner.pool.lock:
            most = batch or self.config.max_num_seqs
            return score(self.runner, encoded, targets, decode_from=decode_from, batch=most, on_done=on_done)

    def session(
        self,
        name: str,
        store: str | Path,
        options: StoreOptions | None = None,
        *,
        system: str | None = None,
        **fields: Any,
    ) -> Session:
        """Open the conversation `name`, or create it if it does not exist. Its KV is restored from host memory or disk.

        Between turns, the KV of a session stays in host memory until other requests need the space.

        Args:
            name: Name of the session. Any text is allowed.
            store: Folder of the sessions. Only one process at a time can open it.
            options: Options of the store. They stay in effect until the last session of the store is closed.
            system: System message for a new session.
            **fields: Fields of `StoreOptions` that override `options`, such as `limit="50GiB"`.

        Raises:
            InputError: `name` or `system` is invalid.
            ConfigError: An option is invalid, the policy's KV cannot be restored, or `eviction` is set.
            StoreError: The store cannot be opened or is in use by another process.
        """
        self._check_open()
        return self._stores.open_session(name, store, options, fields, system)

    def turns(
        self,
        store: str | Path,
        options: StoreOptions | None = None,
        *,
        max_num_seqs: int | None = None,
        **fields: Any,
    ) -> TurnQueue:
        """Return a queue that computes turns of many sessions in one folder.

        The KV of sessions with queued turns is loaded from disk in advance. At most `max_num_seqs` turns are decoded
        together. If it is None, the configured value is used. For other arguments and errors, see `session`.
        """
        with self.runner.pool.lock:
            most = check_int_or_none("max_num_seqs", max_num_seqs, 1) or self.config.max_num_seqs
            return TurnQueue(self.session_store(store, options, **fields), most)

    def session_store(
        self, store: str | Path, options: StoreOptions | None = None, *, read_only: bool = False, **fields: Any
    ) -> SessionStore:
        """Return the session store of a folder, for programs that manage sessions themselves.

        The store is closed when its last session is closed. For the arguments, see `session` and `SessionStore`.
        """
        self._check_open()
        return self._stores.open(store, options, fields, read_only=read_only)

    def reset_prefix_cache(self) -> bool:
        """Free the KV of all prefixes that are not in use by a request or an open session.

        Return whether no prefix is left.
        """
        self._check_open()
        with self.runner.pool.lock:
            return self.runner.pool.drop_prefixes()

    def encode(self, prompt: PromptLike | object, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. A list of token ids is returned unchanged.

        Raises InputError if `prompt` is empty, is neither text nor token ids, or has an id that is not in the
        vocabulary.
        """
        return self._encoder.encode(prompt, special_tokens=special_tokens)
