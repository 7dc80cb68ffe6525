"""Test arbitrary arguments and orders of calls from several threads.

Only OffloadError is raised, no token is wrong, and no memory leaks. OFFLOAD_RT_FUZZ sets the number of cases in `make
stress PART=api`.
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
from support.call_machine import Calls
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
"""Number of cases in `make stress`; 0 selects small defaults."""

PROMPT, SHORT = tiny_prompt(70, seed=1), SamplingParams(max_tokens=2, temperature=0)
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, max_position_embeddings=512)
CLASSES = (
    SamplingParams, EngineConfig, StoreOptions, EvictionOptions, DraftOptions, InfiniGenOptions, BudgetOptions,
    QuestOptions, StructuredOutputs,
)  # fmt: skip
SAID = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
FIELDS = [(kind, field.name) for kind in CLASSES for field in fields(kind)]


def make_llm(**config: Any) -> LLM:
    return LLM(MODEL, dtype="float32", **({"policy": "full", "host_memory": "1MiB"} | config))


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync, because no test here simulates a power failure."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def only_ours(call: Callable[[], Any]) -> None:
    """Run a call that may raise OffloadError. Any other exception fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with suppress(OffloadError):
            call()


# ------------------------------------------------------------------------------------------------------------- values


@settings(max_examples=CASES // 2 or 80, deadline=None, suppress_health_check=list(HealthCheck))
@given(field=st.sampled_from(FIELDS), value=ANYTHING)
def test_any_value_of_any_field(field: tuple[type, str], value: Any) -> None:
    kind, name = field
    only_ours(lambda: kind(**{name: value}))


class ApiObjects:
    """Runtimes, a folder, and sessions and queues on demand, on which API calls are made."""

    def __init__(self, folder: Path) -> None:
        self.llm, self.folder = make_llm(), folder
        tokenizer = AutoTokenizer.from_pretrained(find_source("reference").name_or_path)
        tokenizer.chat_template = TEMPLATE
        model = tiny_model("llama", vocab_size=2048, num_hidden_layers=1)
        self.talker = LLM(model, policy="full", host_memory="4MiB", tokenizer=tokenizer)

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

    def forked(self, name: Any) -> None:
        self.in_session(lambda session: session.fork(name).discard())


ARGUMENTS: dict[str, Callable[[ApiObjects, Any], Any]] = {
    "generate": lambda place, value: place.llm.generate(value, SHORT),
    "generate with": lambda place, value: place.llm.generate([PROMPT], value),
    "stream": lambda place, value: list(place.llm.stream(value, SHORT)),
    "stream with": lambda place, value: list(place.llm.stream(PROMPT[:3], value)),
    "score": lambda place, value: place.llm.score(value, [[1, 2]]),
    "score continuations": lambda place, value: place.llm.score([PROMPT], value),
    "score continuation": lambda place, value: place.llm.score([PROMPT], [value]),
    "score from": lambda place, value: place.llm.score([PROMPT], [[1]], value),
    "score batch": lambda place, value: place.llm.score([PROMPT], [[1]], batch=value),
    "encode": lambda place, value: place.llm.encode(value),
    "under": lambda place, value: place.llm.under(value),
    "under with": lambda place, value: place.llm.under("infinigen", value),
    "session": lambda place, value: place.llm.session(value, place.folder / "named").discard(),
    "session in": lambda place, value: place.llm.session(
        "s", place.folder / value if isinstance(value, str) else value
    ).discard(),
    "session with": lambda place, value: place.llm.session("s", place.folder / "with", value).discard(),
    "turns with": lambda place, value: place.llm.turns(place.folder / "with", value).close(),
    "turns batch": lambda place, value: place.llm.turns(place.folder / "with", max_num_seqs=value).close(),
    "send": lambda place, value: place.in_session(lambda session: list(session.send(value, SHORT))),
    "send with": lambda place, value: place.in_session(lambda session: list(session.send([1, 2], value))),
    "chat": lambda place, value: place.talker.chat(value, SHORT),
    "chat content": lambda place, value: place.talker.chat([{"role": "user", "content": value}], SHORT),
    "chat message": lambda place, value: place.talker.chat([value], SHORT),
    "chat with": lambda place, value: place.talker.chat(SAID, value),
    "chat tools": lambda place, value: place.talker.chat(SAID, SHORT, tools=value),
    "chat variables": lambda place, value: place.talker.chat(SAID, SHORT, chat_template_kwargs=value),
    "chat goes on": lambda place, value: place.talker.chat(SAID, SHORT, continue_final_message=value),
    "text": lambda place, value: place.talker.generate(value, SHORT),
    "fork": lambda place, value: place.forked(value),
    "truncate": lambda place, value: place.in_session(lambda session: session.truncate(keep_last=value)),
    "truncate sinks": lambda place, value: place.in_session(lambda session: session.truncate(keep_last=3, sinks=value)),
    "truncate drop": lambda place, value: place.in_session(lambda session: session.truncate(drop=value)),
    "add to": lambda place, value: place.in_queue(lambda queue: queue.add(value, [1, 2], SHORT)),
    "add": lambda place, value: place.in_queue(lambda queue: queue.add("a", value, SHORT)),
    "add with": lambda place, value: place.in_queue(lambda queue: queue.add("a", [1], value)),
    "LLM": lambda place, value: LLM(value) if not isinstance(value, (str, Path)) else None,
    "LLM with": lambda place, value: LLM(MODEL, value).close(),
    "LLM tokenizer": lambda place, value: (
        LLM(MODEL, policy="full", host_memory="1MiB", tokenizer=value) if not isinstance(value, str) else None
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiObjects]:
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # a path that is wrongly accepted would be created here
        place = ApiObjects(folder)
        yield place
        place.llm.close()


@settings(max_examples=CASES // 2 or 80, deadline=None, suppress_health_check=list(HealthCheck))
@given(argument=st.sampled_from(sorted(ARGUMENTS)), value=ANYTHING)
@example(argument="LLM tokenizer", value=torch.tensor([1, 2]))
def test_any_value_of_any_argument(place: ApiObjects, argument: str, value: Any) -> None:
    only_ours(lambda: ARGUMENTS[argument](place, value))
    place.llm.runner.check_integrity()
    assert place.llm.runner.pool.sequence_bytes == 0 and not place.llm.runner.reclaimables


# -------------------------------------------------------------------------------------------------------------- calls

TestCalls = pytest.mark.filterwarnings("ignore:session .* would outgrow")(Calls.TestCase)
TestCalls.settings = settings(
    max_examples=CASES // 150 or 10,
    stateful_step_count=30 if CASES else 8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
