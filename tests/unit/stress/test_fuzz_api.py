"""Test arbitrary arguments, and calls from several threads in any order.

Only OffloadError may be raised, no token may be wrong, and no memory may leak. `OFFLOAD_RT_FUZZ` sets the number of
cases in `make stress PART=api`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.call_machine import ApiMachine
from support.odd_values import ANYTHING
from support.tiny_models import tiny_model, tiny_prompt
from transformers import AutoTokenizer

from offload_rt import LLM, OffloadError, SamplingParams
from offload_rt.config import DraftOptions, EngineConfig, EvictionOptions
from offload_rt.models.source import find_source
from offload_rt.policies.options import BudgetOptions, InfiniGenOptions, QuestOptions
from offload_rt.sampling_params import StructuredOutputs
from offload_rt.sessions.session import Session
from offload_rt.sessions.turn_queue import TurnQueue
from offload_rt.storage.options import StoreOptions

CASES = int(os.environ.get("OFFLOAD_RT_FUZZ", "0"))
"""Number of cases in `make stress`. 0 means small defaults."""

PROMPT, SHORT = tiny_prompt(70, seed=1), SamplingParams(max_tokens=2, temperature=0)
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, max_position_embeddings=512)
CLASSES = (
    SamplingParams, EngineConfig, StoreOptions, EvictionOptions, DraftOptions, InfiniGenOptions, BudgetOptions,
    QuestOptions, StructuredOutputs,
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
FIELDS = [(kind, field.name) for kind in CLASSES for field in fields(kind)]


def make_llm(**config: Any) -> LLM:
    return LLM(MODEL, dtype="float32", **({"policy": "full", "host_memory": "1MiB"} | config))


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no test here simulates a power failure


def allow_offload_error(call: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with suppress(OffloadError):
            call()


# ------------------------------------------------------------------------------------------------------------- values


@settings(max_examples=CASES // 2 or 80, deadline=None, suppress_health_check=list(HealthCheck))
@given(field=st.sampled_from(FIELDS), value=ANYTHING)
def test_any_field_value_raises_only_offload_error(field: tuple[type, str], value: Any) -> None:
    kind, name = field
    allow_offload_error(lambda: kind(**{name: value}))


class ApiObjects:
    """The runtimes and the folder that the API calls use. Sessions and queues are created for each call."""

    def __init__(self, folder: Path) -> None:
        self.llm, self.folder = make_llm(), folder
        tokenizer = AutoTokenizer.from_pretrained(find_source("reference").name_or_path)
        tokenizer.chat_template = TEMPLATE
        model = tiny_model("llama", vocab_size=2048, num_hidden_layers=1)
        self.chat_llm = LLM(model, policy="full", host_memory="4MiB", tokenizer=tokenizer)

    def in_session(self, call: Callable[[Session], Any]) -> None:
        session = self.llm.session("one", self.folder / "sessions")
        try:
            list(session.send(PROMPT[:5], SHORT))
            call(session)
        finally:
            session.discard()

    def in_queue(self, call: Callable[[TurnQueue], Any]) -> None:
        with closing(self.llm.turns(self.folder / "queue")) as queue:
            call(queue)
            list(queue.run())

    def fork(self, name: Any) -> None:
        self.in_session(lambda session: session.fork(name).discard())


ARGUMENTS: dict[str, Callable[[ApiObjects, Any], Any]] = {
    "generate": lambda api, value: api.llm.generate(value, SHORT),
    "generate with": lambda api, value: api.llm.generate([PROMPT], value),
    "stream": lambda api, value: list(api.llm.stream(value, SHORT)),
    "stream with": lambda api, value: list(api.llm.stream(PROMPT[:3], value)),
    "score": lambda api, value: api.llm.score(value, [[1, 2]]),
    "score continuations": lambda api, value: api.llm.score([PROMPT], value),
    "score continuation": lambda api, value: api.llm.score([PROMPT], [value]),
    "score from": lambda api, value: api.llm.score([PROMPT], [[1]], value),
    "score batch": lambda api, value: api.llm.score([PROMPT], [[1]], batch=value),
    "encode": lambda api, value: api.llm.encode(value),
    "under": lambda api, value: api.llm.under(value),
    "under with": lambda api, value: api.llm.under("infinigen", value),
    "session": lambda api, value: api.llm.session(value, api.folder / "named").discard(),
    "session in": lambda api, value: api.llm.session(
        "s", api.folder / value if isinstance(value, str) else value
    ).discard(),
    "session with": lambda api, value: api.llm.session("s", api.folder / "with", value).discard(),
    "turns with": lambda api, value: api.llm.turns(api.folder / "with", value).close(),
    "turns batch": lambda api, value: api.llm.turns(api.folder / "with", max_num_seqs=value).close(),
    "send": lambda api, value: api.in_session(lambda session: list(session.send(value, SHORT))),
    "send with": lambda api, value: api.in_session(lambda session: list(session.send([1, 2], value))),
    "chat": lambda api, value: api.chat_llm.chat(value, SHORT),
    "chat content": lambda api, value: api.chat_llm.chat([{"role": "user", "content": value}], SHORT),
    "chat message": lambda api, value: api.chat_llm.chat([value], SHORT),
    "chat with": lambda api, value: api.chat_llm.chat(MESSAGES, value),
    "chat tools": lambda api, value: api.chat_llm.chat(MESSAGES, SHORT, tools=value),
    "chat variables": lambda api, value: api.chat_llm.chat(MESSAGES, SHORT, chat_template_kwargs=value),
    "chat goes on": lambda api, value: api.chat_llm.chat(MESSAGES, SHORT, continue_final_message=value),
    "text": lambda api, value: api.chat_llm.generate(value, SHORT),
    "fork": lambda api, value: api.fork(value),
    "truncate": lambda api, value: api.in_session(lambda session: session.truncate(keep_last=value)),
    "truncate sinks": lambda api, value: api.in_session(lambda session: session.truncate(keep_last=3, sinks=value)),
    "truncate drop": lambda api, value: api.in_session(lambda session: session.truncate(drop=value)),
    "add to": lambda api, value: api.in_queue(lambda queue: queue.add(value, [1, 2], SHORT)),
    "add": lambda api, value: api.in_queue(lambda queue: queue.add("a", value, SHORT)),
    "add with": lambda api, value: api.in_queue(lambda queue: queue.add("a", [1], value)),
    "LLM": lambda api, value: LLM(value) if not isinstance(value, (str, Path)) else None,
    "LLM with": lambda api, value: LLM(MODEL, value).close(),
    "LLM tokenizer": lambda api, value: (
        LLM(MODEL, policy="full", host_memory="1MiB", tokenizer=value) if not isinstance(value, str) else None
    ),
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiObjects]:
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # a path that is wrongly accepted would be created here
        api = ApiObjects(folder)
        yield api
        api.llm.close()


@settings(max_examples=CASES // 2 or 80, deadline=None, suppress_health_check=list(HealthCheck))
@given(argument=st.sampled_from(sorted(ARGUMENTS)), value=ANYTHING)
@example(argument="LLM tokenizer", value=torch.tensor([1, 2]))
def test_any_argument_value_raises_only_offload_error(api: ApiObjects, argument: str, value: Any) -> None:
    allow_offload_error(lambda: ARGUMENTS[argument](api, value))
    api.llm.runner.check_integrity()
    assert api.llm.runner.pool.sequence_bytes == 0 and not api.llm.runner.reclaimables


# -------------------------------------------------------------------------------------------------------------- calls

TestCalls = pytest.mark.filterwarnings("ignore:session .* would outgrow")(ApiMachine.TestCase)
TestCalls.settings = settings(
    max_examples=CASES // 150 or 10,
    stateful_step_count=30 if CASES else 8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
