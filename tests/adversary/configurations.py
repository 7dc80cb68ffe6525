"""Test random models and options against transformers.

Each case builds a random tiny model and a runtime with random options. It generates batches of prompts with shared
prefixes, several samples of one prompt, and turns of sessions that are edited, forked, truncated and restarted. Half of
the cases run the GPU's copy path on the CPU. Each case checks:

* if the options are exact, every token is the greedy token of transformers' forward pass over the whole text;
* only subclasses of OffloadError other than EngineError are raised, each with a message;
* `check_integrity` passes, and at the end, the pool is empty and no thread is left.
"""

from __future__ import annotations

import gc
import random
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support.architectures import VOCAB
from support.outputs import completed
from support.random_models import random_model
from support.staged_transfer import staged

from offload_rt import LLM, SamplingParams
from offload_rt.errors import EngineError, OffloadError, PoolFullError
from offload_rt.sessions.request_factory import StoredRequestFactory

LENGTHS = (1, 2, 30, 63, 64, 65, 100, 127, 128, 129, 192, 200, 300, 600)
STEPS = 6
TIE_TOLERANCE = 1e-4
"""Tolerance for near ties, relative to the largest logit. It is needed because norms and routers compute in float32."""


def random_policy(rng: random.Random) -> tuple[dict[str, Any], bool]:
    """Return random policy options, and whether the tokens must equal those of full attention."""
    window = {"sinks": rng.choice((0, 1, 4)), "recent": rng.choice((1, 8, 64, 65))}
    everything = window | {"budget": 1.0, "dense_layers": ()}
    select_all = window | {"preset": "rows", "alpha": float("inf"), "max_fraction": 1.0}
    exact: list[tuple[str, dict[str, Any]]] = [
        ("full", {}), ("full", {}), ("infinigen", everything), ("infinigen", select_all), ("h2o", everything),
        ("quest", everything | {"page": rng.choice((1, 7, 16))}), ("oracle", everything), ("streaming", everything),
        ("infinigen", everything | {"approximate_kv": "off"}), ("auto", {"dense_until": 4096}),
    ]  # fmt: skip
    sparse: list[tuple[str, dict[str, Any]]] = [
        ("infinigen", {}), ("infinigen", {"approximate_kv": "int2"}), ("infinigen", {"preset": "paper"}), ("auto", {}),
        ("auto", {"dense_until": 0}), ("infinigen", window | {"max_missed_mass": 0.1}),
        ("quest", window | {"budget": 0.3}), ("h2o", window | {"budget": 0.3}),
    ]  # fmt: skip
    is_exact = rng.random() < 0.7
    name, options = rng.choice(exact if is_exact else sparse)
    chosen: dict[str, Any] = {"policy": name, "policy_options": options}
    if not is_exact and rng.random() < 0.4:  # full attention verifies every token
        return chosen | {"exact": rng.choice((True, "lookup", "sparse"))}, True
    return chosen, is_exact


def random_options(rng: random.Random, folder: Path) -> tuple[dict[str, Any], bool]:
    """Return random runtime options, and whether the tokens must equal those of full attention."""
    options, exact = random_policy(rng)
    options |= {
        "kv_cache_dtype": rng.choices(("auto", "int8", "int4", "int2"), (7, 1, 1, 1))[0],
        "enable_prefix_caching": rng.random() < 0.8,
        "prefill_chunk_size": rng.choice((None, None, 1, 17, 64, 100, 128)),
        "max_num_batched_tokens": rng.choice((1, 64, 512)),
        "max_num_seqs": rng.choice((1, 2, 32)),
        "working_set": rng.choice((0, 0, 0, 1, 40)),
    }
    if rng.random() < 0.15:
        options |= {"disk": folder / "rows", "disk_limit": "8MiB"}
    if rng.random() < 0.1:
        options["eviction"] = rng.choice(("fifo", "lru", "counter"))
    if rng.random() < 0.2:
        options["swap"] = folder / "swap"
    return options, exact and options["kv_cache_dtype"] == "auto" and "eviction" not in options


class Case:
    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.folder, self.counts = rng, folder, Counter[str]()
        self.description, self.model = random_model(rng)
        self.options, self.exact = random_options(rng, folder)
        self.seen: list[list[int]] = []
        """Earlier texts. New prompts may share a prefix with them."""
        self.use_copies, self.use_small_pool = rng.random() < 0.5, rng.random() < 0.3

    def make_runtime(self, ends: ExitStack) -> LLM:
        llm = self._runtime(ends, "64MiB")
        pool = llm.runner.pool
        if self.use_small_pool and pool.file is None:
            llm = self._runtime(ends, pool.bytes_for(self.rng.choice((128, 256, 640))) + pool.block_bytes)
        return llm

    def _runtime(self, ends: ExitStack, memory: int | str) -> LLM:
        llm = LLM(self.model, dtype=self.model.dtype, verify="off", host_memory=memory, **self.options)
        ends.callback(llm.close)
        if self.use_copies and llm.runner.pool.file is None and self.options["working_set"] == 0:
            llm = staged(llm)
            ends.callback(llm.close)
        return llm

    # ----------------------------------------------------------------------------------------------------- requests

    def prompt(self) -> list[int]:
        rng, new = self.rng, [self.rng.randrange(1, VOCAB) for _ in range(self.rng.choice(LENGTHS))]
        if self.seen and rng.random() < 0.6:
            text = rng.choice(self.seen)
            new = [*text[: rng.choice((len(text), rng.randint(0, len(text)), len(text) // 64 * 64))], *new][:900]
        return new

    def params(self, **fields: Any) -> SamplingParams:
        return SamplingParams(max_tokens=self.rng.choice((1, 3, 8)), temperature=0, **fields)

    def check_tokens(self, prompt: list[int], tokens: list[int]) -> None:
        self.seen.append([*prompt, *tokens])
        assert all(0 <= token < self.model.get_output_embeddings().weight.shape[0] for token in tokens)
        if not self.exact:
            return
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        below = (logits.amax(-1) - chosen) / logits.abs().amax()
        wrong = [i for i, share in enumerate(below.tolist()) if share > TIE_TOLERANCE]
        assert not wrong, f"{len(prompt)} tokens: new tokens {wrong} are {below.max():.2g} below the model's"
        self.counts["tokens compared"] += len(tokens)

    def batch(self, llm: LLM) -> None:
        prompts = [self.prompt() for _ in range(self.rng.randint(1, 4))]
        params = [self.params() for _ in prompts]
        self.counts["prompts"] += len(prompts)
        found = llm.generate(prompts, params)
        for prompt, one in zip(prompts, completed(found), strict=True):
            self.check_tokens(prompt, one.token_ids)

    def samples(self, llm: LLM) -> None:
        prompt, beams = self.prompt(), self.rng.random() < 0.3
        self.counts["prompts"] += 1
        if beams:
            llm.generate([prompt], self.params(num_beams=2))
            return
        for one in completed(llm.generate([prompt], self.params(n=3))):
            self.check_tokens(prompt, one.token_ids)

    def stop_early(self, llm: LLM) -> None:
        stream = llm.stream(self.prompt(), self.params())
        next(stream)
        stream.close()

    # ----------------------------------------------------------------------------------------------------- sessions

    def turns(self, llm: LLM) -> None:
        rng, store = self.rng, self.folder / "store"
        name = rng.choice(("a", "b"))
        session = llm.session(name, store)
        exact = self.exact
        try:
            for _ in range(rng.randint(1, 4)):
                event = rng.choice(("send", "send", "send", "reopen", "fork", "truncate"))
                self.counts[event] += 1
                if event == "send":
                    before = [*session.tokens, *self.prompt()[:600]]
                    added = before[len(session.tokens) :]
                    self.exact = exact and not session.history.truncation_id
                    answer = [one.token_id for one in session.send(added, self.params())]
                    self.check_tokens(before, answer)
                elif event == "reopen":
                    session.close()
                    session = llm.session(name, store)
                elif event == "fork":
                    fork = session.fork(f"{name}{len(self.seen)}{self.counts['fork']}")
                    fork.close()
                elif len(session.tokens) > 20:
                    session.truncate(keep_last=rng.randint(1, len(session.tokens)))
                session.check_integrity()
        finally:
            self.exact = exact
            session.close()

    def edits(self, llm: LLM) -> None:
        """Send whole prompts to a session. Each prompt changes, repeats or continues the previous text."""
        rng, store = self.rng, llm.session_store(self.folder / "edits")
        factory, engine, prompt = StoredRequestFactory(store, [].append), llm.make_engine(), self.prompt()
        try:
            for number in range(rng.randint(2, 4)):
                self.counts["edits"] += 1
                turn = factory.turn("s", number, prompt, self.params())
                try:
                    engine.submit(turn)
                    while not engine.idle:
                        engine.step()
                finally:
                    engine.cancel(turn)
                    factory.ended("s")
                self.check_tokens(prompt, turn.new_tokens)
                engine.check_integrity()
                text = [*prompt, *turn.new_tokens]
                next_prompt = rng.choice(
                    (prompt, [*text, *self.prompt()[:200]], [*text[: rng.randint(0, len(text))], 1, 2])
                )
                prompt = next_prompt[:1200]
        finally:
            factory.close()

    # ---------------------------------------------------------------------------------------------------------- case

    def attempt(self, action: Callable[[LLM], None], llm: LLM) -> None:
        """Run `action` and count an OffloadError as a refusal, unless it is an EngineError (an unexpected error)."""
        try:
            action(llm)
        except EngineError:
            raise
        except OffloadError as error:
            check_message(error)
            self.counts["full" if isinstance(error, PoolFullError) else "refusals"] += 1

    def transformers_supports_model(self) -> bool:
        """Return whether transformers can run the model. It does not support all expert sizes."""
        try:
            self.model(torch.tensor([[1, 2, 3]]))
        except RuntimeError:
            return False
        return True

    def run(self) -> None:
        if not self.transformers_supports_model():
            self.counts["models that transformers does not run"] += 1
            return
        with ExitStack() as ends:
            try:
                llm = self.make_runtime(ends)
            except OffloadError as error:
                check_message(error)
                self.counts["refused configurations"] += 1
                return
            self.counts["configurations"] += 1
            runner = llm.runner
            for _ in range(STEPS):
                action = self.rng.choice(
                    (self.batch, self.batch, self.samples, self.stop_early, self.turns, self.edits)
                )
                self.attempt(action, llm)
                runner.check_integrity()
                assert runner.pool.sequence_bytes == 0, (
                    f"{action.__name__} left {runner.pool.sequence_bytes} bytes of the pool"
                )
            assert llm.reset_prefix_cache(), "published blocks are left"
            assert runner.pool.bytes_used == 0, f"{runner.pool.bytes_used} bytes of the pool are left"


def run_case(seed: int) -> Counter[str]:
    rng, threads = random.Random(seed), set(threading.enumerate())
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as place, patch.dict("os.environ", OFFLOAD_RT_CACHE=f"{place}/cache"):
        case = Case(rng, Path(place))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # for truncated sessions, and stores that could not save
                case.run()
        except BaseException as error:
            flags = f"copies={case.use_copies} small={case.use_small_pool} counts={dict(case.counts)}"
            error.add_note(f"{case.description}\n{case.options} {flags}")
            raise
    check_threads(threads)
    return case.counts


def check_threads(before: set[threading.Thread]) -> None:
    end = time.monotonic() + 5
    gc.collect()
    while left := [one for one in threading.enumerate() if one not in before and one.is_alive()]:
        assert time.monotonic() < end, f"threads are left: {left}"
        time.sleep(0.01)


def check_message(error: OffloadError) -> None:
    assert len(str(error)) > 10, f"{type(error).__name__} without a message"
