"""Test random calls of the public API against transformers' forward pass over the whole text.

The KV of a truncated session was computed with tokens that were removed later. Its calls are therefore compared with
the same calls in a separate runtime.
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
class Answer:
    """An answer that is being read.

    Attributes:
        before: Tokens of the session before the turn.
        taken: Tokens read so far.
    """

    events: Iterator[Any]
    before: list[int]
    prompt: list[int]
    count: int
    taken: list[int] = field(default_factory=list)


@dataclass
class Talk:
    """The calls on a session.

    Attributes:
        log: (prompt, max_tokens, answer) of turns and (kept tokens,) of truncations, in order.
        cut: Whether the session was truncated.
    """

    session: Session | None
    log: list[tuple[Any, ...]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cut: bool = False
    answer: Answer | None = None


class Calls(RuleBasedStateMachine):
    """Make random calls on a runtime with room for 1,024 tokens, three sessions, and partly read streams."""

    @initialize(overflow=st.sampled_from(["truncate", "error"]))
    def start(self, overflow: str) -> None:
        self.threads, self.files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        self.home = tempfile.TemporaryDirectory()
        self.overflow, self.talks = overflow, {name: Talk(None) for name in NAMES}
        self.streams: list[Answer] = []
        self.llm = make_llm(MODEL, "1MiB")

    def folder(self) -> Path:
        return Path(self.home.name) / "store"

    def opened(self, name: str) -> Session:
        talk = self.talks[name]
        if talk.session is None:
            talk.session = self.llm.session(name, self.folder(), overflow=self.overflow)
            assert talk.session.tokens == talk.tokens
        return talk.session

    # ------------------------------------------------------------------------------------------------ without a session

    @rule(asked=st.lists(prompts, min_size=1, max_size=3), count=counts)
    def generate(self, asked: list[list[int]], count: int) -> None:
        with suppress(PoolFullError):
            for prompt, done in zip(asked, self.llm.generate(asked, greedy(count)), strict=True):
                assert_greedy(MODEL, prompt, done.outputs[0].token_ids)

    @rule(asked=prompts, then=st.lists(st.integers(1, 198), min_size=1, max_size=5))
    def score(self, asked: list[int], then: list[int]) -> None:
        with suppress(PoolFullError):
            [found] = self.llm.score([asked], [then])
            logits = MODEL(torch.tensor([asked + then])).logits[0, len(asked) - 1 : -1].log_softmax(-1)
            expected = [float(logits[i, token]) for i, token in enumerate(then)]
            assert torch.allclose(torch.tensor(found.logprobs), torch.tensor(expected), atol=1e-6)

    @precondition(lambda self: len(self.streams) < 2)
    @rule(prompt=prompts, count=counts)
    def stream(self, prompt: list[int], count: int) -> None:
        self.streams.append(Answer(self.llm.stream(prompt, greedy(count)), [], prompt, count))

    @precondition(lambda self: self.streams)
    @rule(at=st.integers(0, 1), events=st.integers(0, 4), end=st.booleans())
    def read_stream(self, at: int, events: int, end: bool) -> None:
        one = self.streams[at % len(self.streams)]
        ended = self.read(one, events)
        assert_greedy(MODEL, one.prompt, one.taken) if one.taken else None
        if ended or end:
            one.events.close()  # type: ignore[attr-defined]
            self.streams.remove(one)

    @staticmethod
    def read(one: Answer, events: int) -> bool:
        """Read up to `events` tokens. Return whether the answer has ended."""
        try:
            for _ in range(events):
                one.taken.append(next(one.events).token_id)
        except (StopIteration, PoolFullError):
            return True
        return False

    # ------------------------------------------------------------------------------------------------------- sessions

    @rule(name=names, prompt=prompts, count=counts, events=st.integers(0, 9))
    def send(self, name: str, prompt: list[int], count: int, events: int) -> None:
        session, talk = self.opened(name), self.talks[name]
        if talk.answer is not None:
            try:
                list(session.send(prompt, greedy(count)))
            except InputError:
                return
            assert not talk.answer.taken, "a turn was begun while another one was answered"
            self.end(name, Answer(iter(()), talk.tokens, prompt, count))
            talk.answer.before = talk.tokens
            return
        try:
            talk.answer = Answer(session.send(prompt, greedy(count)), talk.tokens, prompt, count)
        except OffloadError:
            assert session.tokens == talk.tokens
            return
        self.read_answer(name, events, end=False)

    @rule(name=names, events=st.integers(0, 9), end=st.booleans())
    def read_answer(self, name: str, events: int, end: bool) -> None:
        talk = self.talks[name]
        if (answer := talk.answer) is None:
            return
        if self.read(answer, events) or end:
            answer.events.close()  # type: ignore[attr-defined]
            talk.answer = None
            self.end(name, answer)

    def end(self, name: str, answer: Answer) -> None:
        talk = self.talks[name]
        assert talk.session is not None
        now, prompt = talk.session.tokens, answer.prompt
        before = answer.before
        if now[: len(before)] != before or (talk.session.history.shift and not talk.cut):
            assert self.overflow == "truncate", "nothing is forgotten unasked"
            talk.cut = True
        if now == before:
            assert not answer.taken
            return
        if talk.cut:
            start = next(
                i for i in range(len(now), -1, -1) if now[i : i + len(prompt)] == prompt and i + len(prompt) <= len(now)
            )
            said = now[start + len(prompt) :]
        else:
            assert now[len(before) : len(before) + len(prompt)] == prompt
            said = now[len(before) + len(prompt) :]
            if said:
                assert_greedy(MODEL, before + prompt, said)
        assert said[: len(answer.taken)] == answer.taken and len(said) <= answer.count
        talk.log.append((prompt, answer.count, said))
        talk.tokens = now

    @rule(name=names, keep=st.integers(1, 200))
    def truncate(self, name: str, keep: int) -> None:
        session, talk = self.opened(name), self.talks[name]
        try:
            gone = session.truncate(keep_last=keep)
        except OffloadError:
            assert session.tokens == talk.tokens or talk.answer
            return
        if gone:
            assert session.tokens[-min(keep, len(session.tokens)) :] == talk.tokens[-min(keep, len(session.tokens)) :]
            talk.log.append((keep,))
            talk.tokens, talk.cut = session.tokens, True

    @rule(name=names, other=names, prompt=prompts)
    def fork(self, name: str, other: str, prompt: list[int]) -> None:
        session, talk, target = self.opened(name), self.talks[name], self.talks[other]
        try:
            twin = session.fork(other)
        except OffloadError:
            return
        assert target.session is None and not target.tokens and not target.log and other != name
        self.talks[other] = Talk(twin, list(talk.log), list(twin.tokens), talk.cut)
        assert twin.tokens == talk.tokens

    @rule(name=names, what=st.sampled_from(["save", "prefetch", "close", "discard"]))
    def other_calls(self, name: str, what: str) -> None:
        session, talk = self.opened(name), self.talks[name]
        if what == "discard" and talk.answer is not None:
            self.read_answer(name, 0, end=True)
        with suppress(InputError, PoolFullError):
            getattr(session, what)()
        if what == "close":
            self.closed(name)
        elif what == "discard":
            self.talks[name] = Talk(None)

    def closed(self, name: str) -> None:
        talk = self.talks[name]
        if talk.answer is not None and talk.session is not None:
            answer, talk.answer = talk.answer, None
            self.end(name, answer)
        talk.session = None

    @rule(turns=st.lists(st.tuples(names, prompts, counts), min_size=1, max_size=4), steps=st.integers(0, 30))
    def queue(self, turns: list[tuple[str, list[int], int]], steps: int) -> None:
        for name in NAMES:
            self.read_answer(name, 0, end=True)
            self.opened(name)
        queue = self.llm.turns(self.folder())
        added = [
            (name, Answer(iter(()), [], prompt, count), queue.add(name, prompt, greedy(count)))
            for name, prompt, count in turns
        ]
        for _ in range(steps):
            with suppress(OffloadError):
                queue.step()
        sessions = {name: talk.session for name, talk in self.talks.items()}
        queue.cancel()
        for name in dict.fromkeys(name for name, _, _ in added):
            self.end_queued(name, [(answer, queued) for one, answer, queued in added if one == name])
        queue.close()
        for name in dict.fromkeys(name for name, _, _ in added):
            assert sessions[name] is not None
            self.talks[name].session = None

    def end_queued(self, name: str, turns: list[tuple[Answer, Any]]) -> None:
        talk, text = self.talks[name], list(self.talks[name].tokens)
        assert talk.session is not None
        for answer, queued in turns:
            if queued.turn is None or not queued.token_ids:
                continue
            said = queued.token_ids
            if talk.session.history.shift == 0:
                assert_greedy(MODEL, text + answer.prompt, said)
                text += answer.prompt + said
            talk.log.append((answer.prompt, answer.count, said))
        now = talk.session.tokens
        if talk.session.history.shift:
            talk.cut = True
        else:
            assert now[: len(text)] == text
            extra = now[len(text) :]  # prompt of a turn that ended before its first token
            if extra:
                talk.log.append((extra, 1, []))
        talk.tokens = now

    # ---------------------------------------------------------------------------------------------------- whole runtime

    @rule(asked=st.lists(prompts, min_size=3, max_size=3), turn=st.tuples(names, prompts), count=counts)
    def from_several_threads(self, asked: list[list[int]], turn: tuple[str, list[int]], count: int) -> None:
        name, prompt = turn
        self.read_answer(name, 0, end=True)
        session, talk = self.opened(name), self.talks[name]

        def attempt(call: Any) -> Any:
            with suppress(PoolFullError):
                return call()

        def said() -> list[int]:
            return [event.token_id for event in session.send(prompt, greedy(count))]

        before = talk.tokens
        with ThreadPoolExecutor(3) as threads:
            calls = [
                threads.submit(attempt, lambda: self.llm.generate(asked[:2], greedy(count))),
                threads.submit(attempt, lambda: [event.token_id for event in self.llm.stream(asked[2], greedy(count))]),
                threads.submit(said),
            ]
            found = [call.exception() or call.result() for call in calls]
        for one in found[:2]:
            assert not isinstance(one, BaseException), one
        for tokens, one in zip(asked[:2], found[0] or [], strict=False):
            assert_greedy(MODEL, tokens, one.outputs[0].token_ids)
        if found[1]:
            assert_greedy(MODEL, asked[2], found[1])
        if isinstance(found[2], BaseException):
            assert isinstance(found[2], OffloadError), found[2]
            found[2] = []
        self.end(name, Answer(iter(()), before, prompt, count, found[2]))

    @rule()
    def restart(self) -> None:
        self.finish()
        self.llm = make_llm(MODEL, "1MiB")
        for name, talk in self.talks.items():
            if talk.log:
                self.opened(name)

    def finish(self) -> None:
        for one in self.streams:
            one.events.close()  # type: ignore[attr-defined]
        self.streams = []
        stores = list(self.llm._stores)
        self.llm.close()
        for name in NAMES:
            self.closed(name)
        for store in stores:
            store.context.storage.check_integrity()
        assert self.llm.runner.pool.sequence_bytes == 0
        assert not list(Path(self.home.name).rglob("*.tmp"))

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.llm.runner.check_integrity()
        for talk in self.talks.values():
            if talk.session is not None and talk.answer is None:
                assert talk.session.tokens == talk.tokens
                talk.session.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.finish()
        for talk in self.talks.values():
            if talk.cut:
                self.play_again(talk)
        self.home.cleanup()
        assert threading.active_count() <= self.threads
        assert len(os.listdir("/proc/self/fd")) <= self.files

    def play_again(self, talk: Talk) -> None:
        with tempfile.TemporaryDirectory() as folder, make_llm(MODEL, "16MiB") as llm, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            session = llm.session("again", folder, overflow=self.overflow)
            for prompt, *turn in talk.log:
                if not turn:
                    session.truncate(keep_last=prompt)
                    continue
                count, said = turn
                events = session.send(prompt, greedy(count))
                assert [next(events).token_id for _ in said] == said
                events.close()  # type: ignore[attr-defined]
            assert session.tokens == talk.tokens
