"""Test random interleavings of requests on engines that share a small pool: each gives the same tokens as alone.

Even seeds drive engines step by step, so that a case repeats exactly. Odd seeds use `AsyncLLM` with sessions, clients
that disconnect, and a second policy in another thread; their timing varies.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support.architectures import architecture
from support.faults import ERRORS, PLACES, fault
from support.outputs import completed
from support.step_order import run_in_rounds
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, AsyncLLM, EngineError, InputError, PoolFullError, SamplingParams, SessionBusyError
from offload_rt.engine import pool_order
from offload_rt.engine.engine import Engine
from offload_rt.engine.request import Request
from offload_rt.engine.swap import Swap

Asked = tuple[tuple[int, ...], SamplingParams]

POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "infinigen": {"recent": 16, "sinks": 2},
    "quest": {"budget": 0.4, "recent": 16},
}
LONGEST_PROMPT, MOST_TOKENS, WIDEST = 200, 24, 3


@functools.cache
def model(name: str) -> Any:
    """Return a tiny model that C kernels support."""
    if name == "gemma3":
        return architecture("gemma3", dtype=torch.float32)
    return tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, vocab_size=97)


def make(name: str, policy: str, **options: Any) -> LLM:
    return LLM(
        model(name), policy=policy, policy_options=POLICIES[policy], dtype="float32", verify="off",
        **({"host_memory": "64MiB"} | options),
    )  # fmt: skip


@functools.cache
def roomy(name: str, policy: str) -> LLM:
    return make(name, policy, enable_prefix_caching=False)


def alone(name: str, policy: str, asked: Asked) -> list[list[int]]:
    """Return the tokens of each completion of a request on a separate engine. Not for use while a fault is injected."""
    return [one.token_ids for one in completed(roomy(name, policy).generate([list(asked[0])], asked[1]))]


def tight_memory(name: str, rng: random.Random) -> int:
    """Return a pool size in bytes that holds most requests, but not two of the larger ones."""
    pool = roomy(name, "full").runner.pool
    blocks = pool.groups.blocks(LONGEST_PROMPT + MOST_TOKENS) + rng.randint(0, 8) * pool.groups.blocks_at_once
    return int(blocks * pool.block_bytes)


def fits_alone(name: str, policy: str, asked: Asked, memory: int) -> bool:
    try:
        make(name, policy, host_memory=memory).generate([list(asked[0])], asked[1])
    except PoolFullError:
        return False
    return True


def random_prompt(rng: random.Random, longest: int = LONGEST_PROMPT) -> tuple[int, ...]:
    whole = tiny_prompt(LONGEST_PROMPT, seed=rng.randrange(3))
    tail = tiny_prompt(20, seed=rng.randrange(50))
    count = rng.randint(1, longest)
    return tuple(token % 96 + 1 for token in [*whole[: max(0, count - len(tail))], *tail][:count])


def random_params(rng: random.Random, kinds: str = "greedy sampled several beams") -> SamplingParams:
    count, kind = rng.randint(1, MOST_TOKENS), rng.choice(kinds.split())
    if kind == "greedy":
        return SamplingParams(max_tokens=count, temperature=0)
    if kind == "beams":
        width = rng.randint(2, WIDEST)
        return SamplingParams(max_tokens=count, temperature=0, num_beams=width, n=rng.randint(1, width))
    return SamplingParams(max_tokens=count, seed=rng.randrange(9), n=rng.randint(2, WIDEST) if kind == "several" else 1)


@contextmanager
def random_fault(llm: LLM, rng: random.Random) -> Iterator[Exception | None]:
    """Inject an exception into one engine call, with a probability of one half. Yield the exception or None."""
    if rng.random() < 0.5:
        yield None
        return
    error = rng.choice(ERRORS)()
    with fault(llm, rng.choice(list(PLACES)), rng.randrange(40), error):
        yield error


@contextmanager
def swapping(rng: random.Random, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield options that enable swapping at random. With swapping, preempted requests always go to disk."""
    if rng.random() < 0.5:
        yield {}
        return
    with patch.object(Swap, "_recompute_seconds", lambda *_: math.inf):
        yield {"swap": folder / "swap"}


# ---------------------------------------------------------------------------------------------------- engines by steps


@dataclass
class Engines:
    name: str
    rng: random.Random
    engines: list[Engine] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    asked: dict[Request, tuple[Engine, str, Asked]] = field(default_factory=dict)
    failed: dict[Request, Exception] = field(default_factory=dict)
    aborted: set[Request] = field(default_factory=set)
    full: set[Request] = field(default_factory=set)

    def join(self, llm: LLM, policy: str) -> None:
        self.engines.append(llm.make_engine(on_failure=self._fail))
        self.policies.append(policy)

    def _fail(self, request: Request, error: Exception) -> None:
        self.failed[request] = error
        for engine in self.engines:
            if any(request in known.samples for known, (own, _, _) in self.asked.items() if own is engine):
                [first] = [known for known in self.asked if request in known.samples]
                self.failed[first] = error
                engine.cancel(first)

    def act(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.3:
            at = rng.randrange(len(self.engines))
            asked = random_prompt(rng), random_params(rng)
            request = self.engines[at].add(list(asked[0]), asked[1])
            self.asked[request] = self.engines[at], self.policies[at], asked
        elif kind < 0.33 and self.asked:
            request = rng.choice(list(self.asked))
            if any(sample.finish_reason is None for sample in request.samples):
                self.aborted.add(request)
                try:
                    self.asked[request][0].cancel(request)
                except EngineError as error:
                    self.failed[request] = error

    def check(self) -> None:
        for engine in self.engines:
            engine.check_integrity()

    def verify(self, injected: Exception | None) -> Counter[str]:
        counts = Counter(requests=len(self.asked), aborted=len(self.aborted), failed=len(self.failed))
        for request in [request for request, error in self.failed.items() if isinstance(error, PoolFullError)]:
            if request in self.asked:
                assert not fits_alone(self.name, *self.asked[request][1:], self.engines[0].runner.pool.limit_bytes)
            del self.failed[request]
            self.full.add(request)
        counts["full"] = len(self.full)
        for request, (_, policy, asked) in self.asked.items():
            expected = alone(self.name, policy, asked)
            found = [one.token_ids for one in request.completions()]
            if request in self.failed or request in self.aborted or request in self.full:
                if asked[1].num_beams == 1:
                    assert all(right[: len(one)] == one for one, right in zip(found, expected, strict=True))
            else:
                assert found == expected, (policy, asked, found, expected)
                counts["tokens"] += sum(map(len, found))
        causes = {id(error.__cause__) for error in self.failed.values()}
        assert all(isinstance(error, EngineError) for error in self.failed.values()), self.failed
        assert causes <= {id(injected)}, self.failed
        assert sum(request in self.asked for request in self.failed) <= 1, "one exception, several failed requests"
        counts["preemptions"] = sum(engine.scheduler.preemptions for engine in self.engines)
        counts["restored"] = sum(engine.scheduler.restored for engine in self.engines)
        return counts


def run_engines(seed: int, folder: Path) -> Counter[str]:
    rng = random.Random(seed)
    name = rng.choice(("llama", "gemma3"))
    state = Engines(name, rng)
    with ExitStack() as ends:
        ends.enter_context(patch.object(pool_order, "RECHECK_SECONDS", 0.0))
        options = ends.enter_context(swapping(rng, folder))
        batch = {"max_num_seqs": rng.randint(3, 6), "max_num_batched_tokens": rng.choice((32, 512))}
        policy = rng.choice(list(POLICIES))
        llm = make(name, policy, host_memory=tight_memory(name, rng), **options, **batch)
        ends.callback(llm.close)
        state.join(llm, policy)
        others = [rng.choice(list(POLICIES)) for _ in range(rng.randint(0, 2))]
        for other in others:
            beside = llm.under(other, POLICIES[other])
            ends.callback(beside.close)
            state.join(beside, other)
        with random_fault(llm, rng) as injected:
            while not state.asked:
                state.act()

            def after_step() -> None:
                state.check()
                if len(state.asked) < 10:
                    state.act()

            steps = run_in_rounds(state.engines, seed, 3000, after_step)
        counts = state.verify(injected)
        assert llm.runner.pool.sequence_bytes == 0
        assert not any(engine.runner._open for engine in state.engines)
        following: Asked = random_prompt(rng), random_params(rng, "greedy sampled")
        [output] = llm.generate([list(following[0])], following[1])
        assert [one.token_ids for one in output.outputs] == alone(name, policy, following)
    return counts + Counter(rounds=steps)


# ------------------------------------------------------------------------------------------------ clients of AsyncLLM


@dataclass
class Clients:
    name: str
    engine: AsyncLLM
    injected: Exception | None = None
    closing: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    histories: dict[str, tuple[int, ...]] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    full: list[tuple[str, Asked]] = field(default_factory=list)
    answers: list[tuple[str, Asked, list[list[int]], bool]] = field(default_factory=list)

    async def run(self, number: int, rng: random.Random) -> None:
        for turn in range(rng.randint(2, 5)):
            await self.once(f"{number}-{turn}", rng)

    async def once(self, request_id: str, rng: random.Random) -> None:
        kind = rng.random()
        try:
            if kind < 0.1:
                await self.engine.delete_session(rng.choice("ab"))
                self.counts["deleted"] += 1
            elif kind < 0.5:
                await self.turn(request_id, rng)
            else:
                asked = random_prompt(rng), random_params(rng)
                await self.ask(request_id, asked, rng)
        except SessionBusyError:
            self.counts["busy"] += 1
        except EngineError as error:
            self.errors.append(error)
        except InputError:
            if not self.closing:
                raise
            self.counts["refused"] += 1
        except (AssertionError, RuntimeError) as error:
            if error is not self.injected:  # an injected fault may also be raised outside a request
                raise

    async def turn(self, request_id: str, rng: random.Random) -> None:
        name = rng.choice("ab")
        before = self.histories.get(name, ())
        kept = before if rng.random() < 0.6 else before[: rng.randint(0, len(before))]
        prompt = (*kept, *random_prompt(rng, 60))[:LONGEST_PROMPT]
        params = random_params(rng, "greedy sampled")
        said = await self.ask(request_id, (prompt, params), rng, session=name)
        self.histories[name] = (*prompt, *said[0])[: LONGEST_PROMPT - 20]

    async def ask(self, request_id: str, asked: Asked, rng: random.Random, **more: Any) -> list[list[int]]:
        leaves = rng.randint(1, 6) if rng.random() < 0.2 else 1000
        aborts = rng.randint(1, 6) if rng.random() < 0.1 else 1000
        pause = rng.choice((0, 0, 0.004))
        found: list[list[int]] = []
        outputs, reasons = 0, list[Any]()
        try:
            async with aclosing(self.engine.generate(list(asked[0]), asked[1], request_id, **more)) as answer:
                async for output in answer:
                    found = [one.token_ids for one in output.outputs]
                    reasons = [one.finish_reason for one in output.outputs]
                    outputs += 1
                    if outputs == leaves:
                        break
                    if outputs == aborts:
                        await self.engine.abort(request_id)
                    await asyncio.sleep(pause)
        except PoolFullError:
            self.full.append(("full", asked))
            return [[]]
        whole = all(reason in ("stop", "length") for reason in reasons)
        self.answers.append(("full", asked, found, whole))
        return found

    def beside(self, llm: LLM, policy: str, rng: random.Random) -> None:
        for _ in range(rng.randint(0, 3)):
            asked: Asked = random_prompt(rng), random_params(rng)
            try:
                [output] = llm.generate([list(asked[0])], asked[1])
                self.answers.append((policy, asked, [one.token_ids for one in output.outputs], True))
            except EngineError as error:
                self.errors.append(error)
            except PoolFullError:
                self.full.append((policy, asked))

    def verify(self) -> Counter[str]:
        for policy, asked, found, whole in self.answers:
            expected = alone(self.name, policy, asked)
            if whole:
                assert found == expected, (policy, asked, found, expected)
                self.counts["tokens"] += sum(map(len, found))
            elif asked[1].num_beams == 1:
                assert all(right[: len(one)] == one for one, right in zip(found, expected, strict=False))
            self.counts["whole" if whole else "left"] += 1
        memory = self.engine.llm.runner.pool.limit_bytes
        for policy, asked in self.full:
            assert not fits_alone(self.name, policy, asked, memory), asked
        causes = {id(error.__cause__) for error in self.errors}
        assert causes <= {id(self.injected)} and len(self.errors) <= 1, self.errors
        return self.counts + Counter(failed=len(self.errors), full=len(self.full))


async def run_clients(seed: int, folder: Path) -> Counter[str]:
    """Run several clients, a second policy and a fault on one `AsyncLLM`, which may be closed early."""
    rng = random.Random(seed)
    name = rng.choice(("llama", "gemma3"))
    with swapping(rng, folder) as options:
        llm = make(name, "full", host_memory=tight_memory(name, rng), max_num_seqs=rng.randint(3, 6), **options)
        policy = rng.choice(list(POLICIES))
        other = llm.under(policy, POLICIES[policy])
        engine = AsyncLLM(llm, store=folder / "store")
        clients = Clients(name, engine)
        with random_fault(llm, rng) as clients.injected:
            tasks = [
                asyncio.create_task(clients.run(i, random.Random(seed * 100 + i))) for i in range(rng.randint(2, 5))
            ]
            beside = asyncio.create_task(asyncio.to_thread(clients.beside, other, policy, random.Random(seed + 7)))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.2)
                rng.choice(tasks).cancel()
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.2)
                clients.closing = True
            else:
                await asyncio.wait([*tasks, beside])
                last: Asked = random_prompt(rng), random_params(rng, "greedy sampled")
        if not clients.closing:
            await clients.ask("last", last, random.Random(1))
        await engine.close()
        found = await asyncio.gather(*tasks, beside, return_exceptions=True)
        other.close()
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError):
                raise one
    assert engine._engine.idle and not engine._clients and not engine._by_number
    for runner in (llm.runner, other.runner):
        runner.check_integrity()
        assert not runner._open
    assert llm.runner.pool.sequence_bytes == 0
    return clients.verify()


def run_case(seed: int) -> Counter[str]:
    asyncio.run(asyncio.sleep(0))
    before = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder:
        counts = run_engines(seed, Path(folder)) if seed % 2 == 0 else asyncio.run(run_clients(seed, Path(folder)))
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not left, left
    return counts
