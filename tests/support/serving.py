"""Run a server in a thread, on a free port, with an engine that returns scripted answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvicorn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from offload_rt.engine.async_clients import EngineLoad
from offload_rt.errors import InputError
from offload_rt.models.source import find_source
from offload_rt.outputs import CompletionOutput, Logprob, RequestOutput, RequestTrace
from offload_rt.sampling_params import SamplingParams
from offload_rt.server.app import make_app
from offload_rt.server.options import ServerOptions
from offload_rt.server.protocol import make_server
from offload_rt.server.run import bind_socket

if TYPE_CHECKING:
    import anthropic

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.q }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{# <think> </think> #}"
)
"""A chat template that supports tools and reasoning."""


def reference_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(find_source("reference").name_or_path)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def claude_client(url: str, key: str = "none") -> anthropic.Anthropic:
    # The import takes two seconds, so it is not at the top of the file.
    module = pytest.importorskip("anthropic", reason="anthropic is not installed")
    client: anthropic.Anthropic = module.Anthropic(base_url=url, api_key=key, max_retries=0)
    return client


class ScriptedEngine:
    """Replacement for `AsyncLLM` in server tests.

    Attributes:
        say: Returns the answer to a prompt.
        pause: Time per token in seconds.
        begun: Number of requests that began. `aborted` is the number of those that were aborted.
        fails: Error that is raised after `fails_after` tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], str], pause: float = 0.0) -> None:
        self.say, self.pause = say, pause
        self.begun = self.aborted = 0
        self.fails: Exception | None = None
        self.fails_after = 0
        self.params = SamplingParams()
        self.closed = False
        self.session: str | None = None
        self.cache_salt = ""
        self.deleted: list[str] = []
        geometry = SimpleNamespace(max_positions=4096, layers=2, kv_heads=1)
        policy = SimpleNamespace(name="scripted", dense_layers=frozenset(), sinks=0, recent=0)
        self.llm: Any = SimpleNamespace(
            tokenizer=tokenizer,
            name="scripted",
            geometry=geometry,
            max_model_len=4096,
            runner=SimpleNamespace(policy=policy, max_positions=4096),
            get_default_sampling_params=lambda **fields: SamplingParams(**({"top_k": 11} | fields)),
        )

    async def generate(
        self,
        prompt: list[int],
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        session: str | None = None,
        trace: bool = False,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        if self.fails is not None and not self.fails_after:
            raise self.fails
        self.begun, self.params, self.session = self.begun + 1, sampling_params, session
        self.cache_salt = cache_salt
        tokenizer = self.llm.tokenizer
        if wrong := [token for token in prompt if not 0 <= token < len(tokenizer)]:
            raise InputError(f"token id {wrong[0]} is not in the vocabulary")
        text = self.say(tokenizer.decode(prompt))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        length, reason = len(ids), "stop"
        if length > sampling_params.max_tokens:
            length, reason = sampling_params.max_tokens, "length"
        last = False
        try:
            for end in range(1, length + 1):
                await asyncio.sleep(self.pause)
                if self.fails is not None and end > self.fails_after:
                    raise self.fails
                last = end == length
                each = [
                    self._output(i, tokenizer, ids[:end], reason if last else None) for i in range(sampling_params.n)
                ]
                selected = 2 * end * np.arange(len(prompt)) // len(prompt)
                seen = RequestTrace(2, 2, [[0.5, 0.5]] * end, 100 * end, selected) if trace else None
                yield RequestOutput("0", None, prompt, None, each, last, len(prompt) // 2, trace=seen)
        finally:
            self.aborted += not last

    def _output(self, index: int, tokenizer: Any, ids: list[int], reason: Any) -> CompletionOutput:
        text = str(tokenizer.decode(ids)).rstrip("\N{REPLACEMENT CHARACTER}")
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [{i: Logprob(-0.5, 1, tokenizer.decode([i])), 0: Logprob(-float("inf"), 2, "no")} for i in ids]
        return CompletionOutput(index, text, ids, logprobs, None, reason, None, None)

    async def delete_session(self, name: str) -> bool:
        self.deleted.append(name)
        return False

    def load(self) -> EngineLoad:
        return EngineLoad(**dict.fromkeys((field.name for field in fields(EngineLoad)), 7))

    async def close(self) -> None:
        self.closed = True


@contextmanager
def run_server(engine: Any, **options: Any) -> Iterator[str]:
    chosen = ServerOptions(**({"port": 0, "grace": 5} | options))
    with run_asgi_app(make_app(engine, chosen), chosen) as (url, _):
        yield url


@contextmanager
def run_asgi_app(app: Any, options: ServerOptions | None = None) -> Iterator[tuple[str, uvicorn.Server]]:
    """Run a server in a thread during the block. Yield its address and the server."""
    options = options or ServerOptions(port=0, grace=5)
    listener = bind_socket(options)
    server = make_server(app, options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
