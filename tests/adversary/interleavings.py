"""Test random interleavings of requests on engines that share a small pool. Tokens are as if each request ran alone.

With even seeds, engines are driven step by step, so a case can be repeated exactly. With odd seeds, `AsyncLLM` runs
sessions, clients that disconnect, and a second policy in another thread, so timing varies between runs.
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

RequestSpec = tuple[tuple[int, ...], SamplingParams]

POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "infinigen": {"recent": 16, "sinks": 2},
    "quest": {"budget": 0.4, "recent": 16},
}
LONGEST_PROMPT, MOST_TOKENS, WIDEST = 200, 24, 3


@functools.cache
def make_model(name: str) -> Any:
    """Create a model whose shape the C kernels support."""
    if name == "gemma3":
        return architecture("gemma3", dtype=torch.float32)
    return tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, vocab_size=97)


def make_llm(name: str, policy: str, **options: Any) -> LLM:
    return LLM(
        make_model(name), policy=policy, policy_options=POLICIES[policy], dtype="float32", verify="off",
        **({"host_memory": "64MiB"} | options),
    )  # fmt: skip


@functools.cache
def large_pool_llm(name: str, policy: str) -> LLM:
    return make_llm(name, policy, enable_prefix_caching=False)


def expected_tokens(name: str, policy: str, spec: RequestSpec) -> list[list[int]]:
    """Generate on a separate engine. Do not call this while a fault is injected."""
    return [one.token_ids for one in completed(large_pool_llm(name, policy).generate([list(spec[0])], spec[1]))]


def tight_memory(name: str, rng: random.Random) -> int:
    """Return a pool size in bytes that holds most requests, but not two large ones."""
    pool = large_pool_llm(name, "full").runner.pool
    blocks = pool.groups.blocks(LONGEST_PROMPT + MOST_TOKENS) + rng.randint(0, 8) * pool.groups.blocks_at_once
    return int(blocks * pool.block_bytes)


def fits_pool(name: str, policy: str, spec: RequestSpec, memory: int) -> bool:
    try:
        make_llm(name, policy, host_memory=memory).generate([list(spec[0])], spec[1])
    except PoolFullError:
        return False
    return True


def random_prompt(rng: random.Random, longest: int = LONGEST_PROMPT) -> tuple[int, ...]:
    whole = tiny_prompt(LONGEST_PROMPT, seed=rng.randrange(3))
    suffix = tiny_prompt(20, seed=rng.randrange(50))
    count = rng.randint(1, longest)
    return tuple(token % 96 + 1 for token in [*whole[: max(0, count - len(suffix))], *suffix][:count])


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
    """With probability 1/2, make one engine call raise an exception. Yield this exception, or None."""
    if rng.random() < 0.5:
        yield None
        return
    error = rng.choice(ERRORS)()
    with fault(llm, rng.choice(list(PLACES)), rng.randrange(40), error):
        yield error


@contextmanager
def random_swap(rng: random.Random, folder: Path) -> Iterator[dict[str, Any]]:
    """With probability 1/2, yield options that enable swapping."""
    if rng.random() < 0.5:
        yield {}
        return
    # Preempted requests always go to disk.
    with patch.object(Swap, "_recompute_seconds", lambda *_: math.inf):
        yield {"swap": folder / "swap"}


# ---------------------------------------------------------------------------------------------------- engines by steps


@dataclass
class Engines:
    name: str
    rng: random.Random
    engines: list[Engine] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    requests: dict[Request, tuple[Engine, str, RequestSpec]] = field(default_factory=dict)
    failed: dict[Request, Exception] = field(default_factory=dict)
    aborted: set[Request] = field(default_factory=set)
    full: set[Request] = field(default_factory=set)

    def add_engine(self, llm: LLM, policy: str) -> None:
        self.engines.append(llm.make_engine(on_failure=self._record_failure))
        self.policies.append(policy)

    def _record_failure(self, request: Request, error: Exception) -> None:
        self.failed[request] = error
        for engine in self.engines:
            if any(request in known.samples for known, (own, _, _) in self.requests.items() if own is engine):
                [first] = [known for known in self.requests if request in known.samples]
                self.failed[first] = error
                engine.cancel(first)

    def add_or_cancel_request(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.3:
            at = rng.randrange(len(self.engines))
            spec = random_prompt(rng), random_params(rng)
            request = self.engines[at].add(list(spec[0]), spec[1])
            self.requests[request] = self.engines[at], self.policies[at], spec
        elif kind < 0.33 and self.requests:
            request = rng.choice(list(self.requests))
            if any(sample.finish_reason is None for sample in request.samples):
                self.aborted.add(request)
                try:
                    self.requests[request][0].cancel(request)
                except EngineError as error:
                    self.failed[request] = error

    def check(self) -> None:
        for engine in self.engines:
            engine.check_integrity()

    def verify(self, injected: Exception | None) -> Counter[str]:
        counts = Counter(requests=len(self.requests), aborted=len(self.aborted), failed=len(self.failed))
        for request in [request for request, error in self.failed.items() if isinstance(error, PoolFullError)]:
            if request in self.requests:
                assert not fits_pool(self.name, *self.requests[request][1:], self.engines[0].runner.pool.limit_bytes)
            del self.failed[request]
            self.full.add(request)
        counts["full"] = len(self.full)
        for request, (_, policy, spec) in self.requests.items():
            expected = expected_tokens(self.name, policy, spec)
            found = [one.token_ids for one in request.completions()]
            if request in self.failed or request in self.aborted or request in self.full:
                if spec[1].num_beams == 1:
                    assert all(
                        expected_ids[: len(one)] == one for one, expected_ids in zip(found, expected, strict=True)
                    )
            else:
                assert found == expected, (policy, spec, found, expected)
                counts["tokens"] += sum(map(len, found))
        causes = {id(error.__cause__) for error in self.failed.values()}
        assert all(isinstance(error, EngineError) for error in self.failed.values()), self.failed
        assert causes <= {id(injected)}, self.failed
        assert sum(request in self.requests for request in self.failed) <= 1, "one exception, several failed requests"
        counts["preemptions"] = sum(engine.scheduler.preemptions for engine in self.engines)
        counts["restored"] = sum(engine.scheduler.restored for engine in self.engines)
        return counts


def run_engines(seed: int, folder: Path) -> Counter[str]:
    rng = random.Random(seed)
    name = rng.choice(("llama", "gemma3"))
    state = Engines(name, rng)
    with ExitStack() as ends:
        ends.enter_context(patch.object(pool_order, "RECHECK_SECONDS", 0.0))
        options = ends.enter_context(random_swap(rng, folder))
        batch = {"max_num_seqs": rng.randint(3, 6), "max_num_batched_tokens": rng.choice((32, 512))}
        policy = rng.choice(list(POLICIES))
        llm = make_llm(name, policy, host_memory=tight_memory(name, rng), **options, **batch)
        ends.callback(llm.close)
        state.add_engine(llm, policy)
        others = [rng.choice(list(POLICIES)) for _ in range(rng.randint(0, 2))]
        for other in others:
            second_policy = llm.under(other, POLICIES[other])
            ends.callback(second_policy.close)
            state.add_engine(second_policy, other)
        with random_fault(llm, rng) as injected:
            while not state.requests:
                state.add_or_cancel_request()

            def after_step() -> None:
                state.check()
                if len(state.requests) < 10:
                    state.add_or_cancel_request()

            steps = run_in_rounds(state.engines, seed, 3000, after_step)
        counts = state.verify(injected)
        assert llm.runner.pool.sequence_bytes == 0
        assert not any(engine.runner._open for engine in state.engines)
        following: RequestSpec = random_prompt(rng), random_params(rng, "greedy sampled")
        [output] = llm.generate([list(following[0])], following[1])
        assert [one.token_ids for one in output.outputs] == expected_tokens(name, policy, following)
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
    full: list[tuple[str, RequestSpec]] = field(default_factory=list)
    answers: list[tuple[str, RequestSpec, list[list[int]], bool]] = field(default_factory=list)

    async def run(self, number: int, rng: random.Random) -> None:
        for turn in range(rng.randint(2, 5)):
            await self.run_random_action(f"{number}-{turn}", rng)

    async def run_random_action(self, request_id: str, rng: random.Random) -> None:
        kind = rng.random()
        try:
            if kind < 0.1:
                await self.engine.delete_session(rng.choice("ab"))
                self.counts["deleted"] += 1
            elif kind < 0.5:
                await self.turn(request_id, rng)
            else:
                spec = random_prompt(rng), random_params(rng)
                await self.generate(request_id, spec, rng)
        except SessionBusyError:
            self.counts["busy"] += 1
        except EngineError as error:
            self.errors.append(error)
        except InputError:
            if not self.closing:
                raise
            self.counts["refused"] += 1
        except (AssertionError, RuntimeError) as error:
            if error is not self.injected:  # an injected fault may also be raised while no request is being processed
                raise

    async def turn(self, request_id: str, rng: random.Random) -> None:
        name = rng.choice("ab")
        before = self.histories.get(name, ())
        prefix = before if rng.random() < 0.6 else before[: rng.randint(0, len(before))]
        prompt = (*prefix, *random_prompt(rng, 60))[:LONGEST_PROMPT]
        params = random_params(rng, "greedy sampled")
        completions = await self.generate(request_id, (prompt, params), rng, session=name)
        self.histories[name] = (*prompt, *completions[0])[: LONGEST_PROMPT - 20]

    async def generate(self, request_id: str, spec: RequestSpec, rng: random.Random, **more: Any) -> list[list[int]]:
        leaves = rng.randint(1, 6) if rng.random() < 0.2 else 1000
        aborts = rng.randint(1, 6) if rng.random() < 0.1 else 1000
        pause = rng.choice((0, 0, 0.004))
        found: list[list[int]] = []
        outputs, reasons = 0, list[Any]()
        try:
            async with aclosing(self.engine.generate(list(spec[0]), spec[1], request_id, **more)) as answer:
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
            self.full.append(("full", spec))
            return [[]]
        whole = all(reason in ("stop", "length") for reason in reasons)
        self.answers.append(("full", spec, found, whole))
        return found

    def run_second_policy(self, llm: LLM, policy: str, rng: random.Random) -> None:
        for _ in range(rng.randint(0, 3)):
            spec: RequestSpec = random_prompt(rng), random_params(rng)
            try:
                [output] = llm.generate([list(spec[0])], spec[1])
                self.answers.append((policy, spec, [one.token_ids for one in output.outputs], True))
            except EngineError as error:
                self.errors.append(error)
            except PoolFullError:
                self.full.append((policy, spec))

    def verify(self) -> Counter[str]:
        for policy, spec, found, whole in self.answers:
            expected = expected_tokens(self.name, policy, spec)
            if whole:
                assert found == expected, (policy, spec, found, expected)
                self.counts["tokens"] += sum(map(len, found))
            elif spec[1].num_beams == 1:
                assert all(expected_ids[: len(one)] == one for one, expected_ids in zip(found, expected, strict=False))
            self.counts["whole" if whole else "left"] += 1
        memory = self.engine.llm.runner.pool.limit_bytes
        for policy, spec in self.full:
            assert not fits_pool(self.name, policy, spec, memory), spec
        causes = {id(error.__cause__) for error in self.errors}
        assert causes <= {id(self.injected)} and len(self.errors) <= 1, self.errors
        return self.counts + Counter(failed=len(self.errors), full=len(self.full))


async def run_clients(seed: int, folder: Path) -> Counter[str]:
    """Run clients and a second policy on one `AsyncLLM`. Inject a fault, and possibly close the engine early."""
    rng = random.Random(seed)
    name = rng.choice(("llama", "gemma3"))
    with random_swap(rng, folder) as options:
        llm = make_llm(name, "full", host_memory=tight_memory(name, rng), max_num_seqs=rng.randint(3, 6), **options)
        policy = rng.choice(list(POLICIES))
        other = llm.under(policy, POLICIES[policy])
        engine = AsyncLLM(llm, store=folder / "store")
        clients = Clients(name, engine)
        with random_fault(llm, rng) as clients.injected:
            tasks = [
                asyncio.create_task(clients.run(i, random.Random(seed * 100 + i))) for i in range(rng.randint(2, 5))
            ]
            second_policy = asyncio.create_task(
                asyncio.to_thread(clients.run_second_policy, other, policy, random.Random(seed + 7))
            )
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.2)
                rng.choice(tasks).cancel()
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.2)
                clients.closing = True
            else:
                await asyncio.wait([*tasks, second_policy])
                last: RequestSpec = random_prompt(rng), random_params(rng, "greedy sampled")
        if not clients.closing:
            await clients.generate("last", last, random.Random(1))
        await engine.close()
        found = await asyncio.gather(*tasks, second_policy, return_exceptions=True)
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
