"""Compare random calls of the public API with transformers' forward pass over the whole text.

After a truncation, a session's KV still depends on the removed tokens, so transformers would give other results. Calls
on truncated sessions are therefore compared with the same calls in a separate runtime.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import PreTrainedModel

from offload_rt import LLM, InputError, OffloadError, PoolFullError, SamplingParams
from offload_rt.sessions.session import Session

from .tiny_models import assert_greedy, tiny_model, tiny_prompt

POSITIONS = 512
NAMES = ("ada", "bob", "cyd")
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, max_position_embeddings=POSITIONS)

prompts = st.builds(lambda length, seed: tiny_prompt(length, seed=seed), st.integers(1, 150), st.integers(0, 5))
counts = st.integers(1, 8)
names = st.sampled_from(NAMES)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0)


def make_llm(model: PreTrainedModel, size: str) -> LLM:
    return LLM(model, dtype="float32", policy="full", host_memory=size)


@dataclass
class PendingAnswer:
    """A stream that is partly read.

    Attributes:
        before: Tokens that the session had before the turn.
        received: Tokens read so far.
    """

    events: Iterator[Any]
    before: list[int]
    prompt: list[int]
    count: int
    received: list[int] = field(default_factory=list)


@dataclass
class SessionRecord:
    """A record of the calls made on a session.

    Attributes:
        log: In call order, (prompt, max_tokens, answer) for each turn and (kept tokens,) for each truncation.
        truncated: Whether the session was truncated.
    """

    session: Session | None
    log: list[tuple[Any, ...]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    truncated: bool = False
    answer: PendingAnswer | None = None


class ApiMachine(RuleBasedStateMachine):
    """State machine that uses three sessions and partly read streams in a runtime with memory for 1,024 tokens."""

    @initialize(overflow=st.sampled_from(["truncate", "error"]))
    def start(self, overflow: str) -> None:
        self.threads, self.files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        self.temporary_folder = tempfile.TemporaryDirectory()
        self.overflow, self.records = overflow, {name: SessionRecord(None) for name in NAMES}
        self.streams: list[PendingAnswer] = []
        self.llm = make_llm(MODEL, "1MiB")

    def folder(self) -> Path:
        return Path(self.temporary_folder.name) / "store"

    def open_session(self, name: str) -> Session:
        record = self.records[name]
        if record.session is None:
            record.session = self.llm.session(name, self.folder(), overflow=self.overflow)
            assert record.session.tokens == record.tokens
        return record.session

    # ------------------------------------------------------------------------------------------------ without a session

    @rule(inputs=st.lists(prompts, min_size=1, max_size=3), count=counts)
    def generate(self, inputs: list[list[int]], count: int) -> None:
        with suppress(PoolFullError):
            for prompt, done in zip(inputs, self.llm.generate(inputs, greedy(count)), strict=True):
                assert_greedy(MODEL, prompt, done.outputs[0].token_ids)

    @rule(inputs=prompts, continuation=st.lists(st.integers(1, 198), min_size=1, max_size=5))
    def score(self, inputs: list[int], continuation: list[int]) -> None:
        with suppress(PoolFullError):
            [found] = self.llm.score([inputs], [continuation])
            logits = MODEL(torch.tensor([inputs + continuation])).logits[0, len(inputs) - 1 : -1].log_softmax(-1)
            expected = [float(logits[i, token]) for i, token in enumerate(continuation)]
            assert torch.allclose(torch.tensor(found.logprobs), torch.tensor(expected), atol=1e-6)

    @precondition(lambda self: len(self.streams) < 2)
    @rule(prompt=prompts, count=counts)
    def stream(self, prompt: list[int], count: int) -> None:
        self.streams.append(PendingAnswer(self.llm.stream(prompt, greedy(count)), [], prompt, count))

    @precondition(lambda self: self.streams)
    @rule(at=st.integers(0, 1), events=st.integers(0, 4), end=st.booleans())
    def read_stream(self, at: int, events: int, end: bool) -> None:
        one = self.streams[at % len(self.streams)]
        ended = self.read(one, events)
        assert_greedy(MODEL, one.prompt, one.received) if one.received else None
        if ended or end:
            one.events.close()  # type: ignore[attr-defined]
            self.streams.remove(one)

    @staticmethod
    def read(one: PendingAnswer, events: int) -> bool:
        """Read up to `events` tokens. Return whether the answer has ended."""
        try:
            for _ in range(events):
                one.received.append(next(one.events).token_id)
        except (StopIteration, PoolFullError):
            return True
        return False

    # ------------------------------------------------------------------------------------------------------- sessions

    @rule(name=names, prompt=prompts, count=counts, events=st.integers(0, 9))
    def send(self, name: str, prompt: list[int], count: int, events: int) -> None:
        session, record = self.open_session(name), self.records[name]
        if record.answer is not None:
            try:
                list(session.send(prompt, greedy(count)))
            except InputError:
                return
            assert not record.answer.received, "a turn began during another turn"
            self.end_turn(name, PendingAnswer(iter(()), record.tokens, prompt, count))
            record.answer.before = record.tokens
            return
        try:
            record.answer = PendingAnswer(session.send(prompt, greedy(count)), record.tokens, prompt, count)
        except OffloadError:
            assert session.tokens == record.tokens
            return
        self.read_answer(name, events, end=False)

    @rule(name=names, events=st.integers(0, 9), end=st.booleans())
    def read_answer(self, name: str, events: int, end: bool) -> None:
        record = self.records[name]
        if (answer := record.answer) is None:
            return
        if self.read(answer, events) or end:
            answer.events.close()  # type: ignore[attr-defined]
            record.answer = None
            self.end_turn(name, answer)

    def end_turn(self, name: str, answer: PendingAnswer) -> None:
        record = self.records[name]
        assert record.session is not None
        now, prompt = record.session.tokens, answer.prompt
        before = answer.before
        if now[: len(before)] != before or (record.session.history.shift and not record.truncated):
            assert self.overflow == "truncate", "only overflow='truncate' removes tokens"
            record.truncated = True
        if now == before:
            assert not answer.received
            return
        if record.truncated:
            start = next(
                i for i in range(len(now), -1, -1) if now[i : i + len(prompt)] == prompt and i + len(prompt) <= len(now)
            )
            answer_tokens = now[start + len(prompt) :]
        else:
            assert now[len(before) : len(before) + len(prompt)] == prompt
            answer_tokens = now[len(before) + len(prompt) :]
            if answer_tokens:
                assert_greedy(MODEL, before + prompt, answer_tokens)
        assert answer_tokens[: len(answer.received)] == answer.received and len(answer_tokens) <= answer.count
        record.log.append((prompt, answer.count, answer_tokens))
        record.tokens = now

    @rule(name=names, keep=st.integers(1, 200))
    def truncate(self, name: str, keep: int) -> None:
        session, record = self.open_session(name), self.records[name]
        try:
            removed = session.truncate(keep_last=keep)
        except OffloadError:
            assert session.tokens == record.tokens or record.answer
            return
        if removed:
            assert session.tokens[-min(keep, len(session.tokens)) :] == record.tokens[-min(keep, len(session.tokens)) :]
            record.log.append((keep,))
            record.tokens, record.truncated = session.tokens, True

    @rule(name=names, other=names, prompt=prompts)
    def fork(self, name: str, other: str, prompt: list[int]) -> None:
        session, record, target = self.open_session(name), self.records[name], self.records[other]
        try:
            forked = session.fork(other)
        except OffloadError:
            return
        assert target.session is None and not target.tokens and not target.log and other != name
        self.records[other] = SessionRecord(forked, list(record.log), list(forked.tokens), record.truncated)
        assert forked.tokens == record.tokens

    @rule(name=names, method=st.sampled_from(["save", "prefetch", "close", "discard"]))
    def other_calls(self, name: str, method: str) -> None:
        session, record = self.open_session(name), self.records[name]
        if method == "discard" and record.answer is not None:
            self.read_answer(name, 0, end=True)
        with suppress(InputError, PoolFullError):
            getattr(session, method)()
        if method == "close":
            self.mark_closed(name)
        elif method == "discard":
            self.records[name] = SessionRecord(None)

    def mark_closed(self, name: str) -> None:
        record = self.records[name]
        if record.answer is not None and record.session is not None:
            answer, record.answer = record.answer, None
            self.end_turn(name, answer)
        record.session = None

    @rule(turns=st.lists(st.tuples(names, prompts, counts), min_size=1, max_size=4), steps=st.integers(0, 30))
    def queue(self, turns: list[tuple[str, list[int], int]], steps: int) -> None:
        for name in NAMES:
            self.read_answer(name, 0, end=True)
            self.open_session(name)
        queue = self.llm.turns(self.folder())
        added = [
            (name, PendingAnswer(iter(()), [], prompt, count), queue.add(name, prompt, greedy(count)))
            for name, prompt, count in turns
        ]
        for _ in range(steps):
            with suppress(OffloadError):
                queue.step()
        sessions = {name: record.session for name, record in self.records.items()}
        queue.cancel()
        for name in dict.fromkeys(name for name, _, _ in added):
            self.end_queued_turns(name, [(answer, queued) for one, answer, queued in added if one == name])
        queue.close()
        for name in dict.fromkeys(name for name, _, _ in added):
            assert sessions[name] is not None
            self.records[name].session = None

    def end_queued_turns(self, name: str, turns: list[tuple[PendingAnswer, Any]]) -> None:
        record, text = self.records[name], list(self.records[name].tokens)
        assert record.session is not None
        for answer, queued in turns:
            if queued.turn is None or not queued.token_ids:
                continue
            answer_tokens = queued.token_ids
            if record.session.history.shift == 0:
                assert_greedy(MODEL, text + answer.prompt, answer_tokens)
                text += answer.prompt + answer_tokens
            record.log.append((answer.prompt, answer.count, answer_tokens))
        now = record.session.tokens
        if record.session.history.shift:
            record.truncated = True
        else:
            assert now[: len(text)] == text
            extra = now[len(text) :]  # prompt of a turn that ended before its first token
            if extra:
                record.log.append((extra, 1, []))
        record.tokens = now

    # ---------------------------------------------------------------------------------------------------- whole runtime

    @rule(inputs=st.lists(prompts, min_size=3, max_size=3), turn=st.tuples(names, prompts), count=counts)
    def from_several_threads(self, inputs: list[list[int]], turn: tuple[str, list[int]], count: int) -> None:
        name, prompt = turn
        self.read_answer(name, 0, end=True)
        session, record = self.open_session(name), self.records[name]

        def attempt(call: Any) -> Any:
            with suppress(PoolFullError):
                return call()

        def send_turn() -> list[int]:
            return [event.token_id for event in session.send(prompt, greedy(count))]

        before = record.tokens
        with ThreadPoolExecutor(3) as threads:
            calls = [
                threads.submit(attempt, lambda: self.llm.generate(inputs[:2], greedy(count))),
                threads.submit(
                    attempt, lambda: [event.token_id for event in self.llm.stream(inputs[2], greedy(count))]
                ),
                threads.submit(send_turn),
            ]
            found = [call.exception() or call.result() for call in calls]
        for one in found[:2]:
            assert not isinstance(one, BaseException), one
        for tokens, one in zip(inputs[:2], found[0] or [], strict=False):
            assert_greedy(MODEL, tokens, one.outputs[0].token_ids)
        if found[1]:
            assert_greedy(MODEL, inputs[2], found[1])
        if isinstance(found[2], BaseException):
            assert isinstance(found[2], OffloadError), found[2]
            found[2] = []
        self.end_turn(name, PendingAnswer(iter(()), before, prompt, count, found[2]))

    @rule()
    def restart(self) -> None:
        self.finish()
        self.llm = make_llm(MODEL, "1MiB")
        for name, record in self.records.items():
            if record.log:
                self.open_session(name)

    def finish(self) -> None:
        for one in self.streams:
            one.events.close()  # type: ignore[attr-defined]
        self.streams = []
        stores = list(self.llm._stores)
        self.llm.close()
        for name in NAMES:
            self.mark_closed(name)
        for store in stores:
            store.context.storage.check_integrity()
        assert self.llm.runner.pool.sequence_bytes == 0
        assert not list(Path(self.temporary_folder.name).rglob("*.tmp"))

    @invariant()
    def check_state(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.llm.runner.check_integrity()
        for record in self.records.values():
            if record.session is not None and record.answer is None:
                assert record.session.tokens == record.tokens
                record.session.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.finish()
        for record in self.records.values():
            if record.truncated:
                self.replay(record)
        self.temporary_folder.cleanup()
        assert threading.active_count() <= self.threads
        assert len(os.listdir("/proc/self/fd")) <= self.files

    def replay(self, record: SessionRecord) -> None:
        with tempfile.TemporaryDirectory() as folder, make_llm(MODEL, "16MiB") as llm, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            session = llm.session("again", folder, overflow=self.overflow)
            for prompt, *turn in record.log:
                if not turn:
                    session.truncate(keep_last=prompt)
                    continue
                count, answer_tokens = turn
                events = session.send(prompt, greedy(count))
                assert [next(events).token_id for _ in answer_tokens] == answer_tokens
                events.close()  # type: ignore[attr-defined]
            assert session.tokens == record.tokens
