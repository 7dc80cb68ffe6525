"""What sharing a prefix saves end to end, on the reference model: questions about one document, and requests that
arrive at random. The clock is CPU time of this process on one thread: arrivals are measured against it, so that other
work on the machine changes nothing."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from ...engine.engine import Engine
from ...engine.request import Request
from ...errors import InputError
from ...llm import LLM
from ...model_runner.shared_prefix import NEVER_PAYS, SharedPrefixes
from ...sampling_params import SamplingParams
from ..core.needles import FACTS, NAMES
from ..core.report import Column, Report, Row

MAX_BATCH = 32
ANSWER = 8
"""Tokens of an answer."""


@dataclass(frozen=True)
class Scale:
    """How large the measurements are. repeats: of each baseline, at the least. batches, prefixes, suffixes: sequences
    and tokens of the attention table. requests, shared: those of the workload, and the tokens they have in common.
    questions: about one document. arrivals, rates: requests of the open loop, and how many a second. slots: tokens that
    the memory of the waste table holds."""

    repeats: int = 7
    batches: tuple[int, ...] = (1, 4, 16, 32)
    prefixes: tuple[int, ...] = (0, 1024, 4096)
    suffixes: tuple[int, ...] = (64, 256, 1024, 2048)
    requests: int = 32
    shared: int = 2048
    questions: tuple[int, ...] = (64, 128, 256, 512)
    arrivals: int = 24
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    slots: int = 1 << 16


SMALL = Scale(1, (1, 4), (0, 256), (64,), 4, 256, (4, 8), 3, (4.0,), 1 << 13)
"""To see in seconds that everything runs; the numbers say nothing."""


def greedy(count: int) -> SamplingParams:
    """Exactly `count` tokens."""
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def make(*, sharing: bool, policy: str = "full", host_memory: str = "2GiB", **fields: Any) -> LLM:
    """The reference model, float32, with other fields of `EngineConfig`. Without sharing every sequence reads all of
    its rows."""
    llm = LLM(
        "reference", policy=policy, dtype="float32", host_memory=host_memory, enable_prefix_caching=sharing, **fields
    )
    if not sharing:
        geometry = llm.geometry
        llm.runner.prefixes = SharedPrefixes(geometry.kv_bytes(1, torch.float32) // geometry.layers, NEVER_PAYS)
    return llm


def token_lists(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    """Random tokens: what they say does not change what they cost."""
    rng = random.Random(seed)
    return [[rng.randrange(1, llm.geometry.vocab) for _ in range(length)] for _ in range(count)]


# ---------------------------------------------------------------------------------------------- questions, one document


@dataclass(frozen=True)
class ToldDocument:
    """A passage of a book with made-up facts spread through it, and for each fact a question and its answer."""

    document: list[int]
    questions: list[tuple[list[int], str]]


def tell(llm: LLM, book: str, length: int, facts: int, seed: int = 0) -> ToldDocument:
    """`facts` facts of as many people (numbers, birthplaces, things), told at even distances in `length` tokens of
    `book`. Raises InputError for a text that is too short."""
    rng = np.random.default_rng(seed)
    people = [NAMES[int(i)] for i in rng.choice(len(NAMES), size=facts, replace=False)]
    pairs = [FACTS[i % len(FACTS)](rng, who) for i, who in enumerate(people)]
    told = [llm.encode(f"{question}{answer}.", special_tokens=False) for question, answer in pairs]
    room = (length - sum(map(len, told))) // facts
    text = llm.encode(book[: 16 * length], special_tokens=False)
    if room < 1 or len(text) < facts * room:
        raise InputError(f"{facts} facts and their text do not fit {length} tokens of a text of {len(text)}")
    document = [t for i, fact in enumerate(told) for t in (*text[i * room : (i + 1) * room], *fact)]
    asked = [(llm.encode(question, special_tokens=False), answer) for question, answer in pairs]
    return ToldDocument(document, asked)


@dataclass
class Answered:
    """CPU seconds of a run of questions: all of it, and of its decode steps alone; what was spent; and the answers."""

    answers: list[str]
    seconds: float
    decode_seconds: float
    prefilled: int
    peak: int
    bytes_to_device: int


def ask(llm: LLM, prompts: Sequence[list[int]]) -> Answered:
    """Answers all prompts in batches."""
    engine = Engine(llm.runner, max_num_seqs=MAX_BATCH)
    requests = [engine.add(prompt, greedy(ANSWER)) for prompt in prompts]
    llm.runner.pool.bytes_peak = llm.runner.pool.bytes_used
    began, decode = time.process_time(), 0.0
    while not engine.idle:
        prefilling = bool(engine.scheduler.waiting or engine.scheduler.prefilling)
        step = time.process_time()
        engine.step()
        decode += 0.0 if prefilling else time.process_time() - step
    seconds = time.process_time() - began
    done = [one.completions()[0] for one in requests]
    stats = [one.stats for one in done if one.stats is not None]
    prefilled = sum(s.prompt_tokens - s.reused_tokens for s in stats)
    link = sum(s.h2d_bytes for s in stats)
    return Answered([c.text for c in done], seconds, decode, prefilled, llm.runner.pool.bytes_peak, link)


TOLD = 16
"""Facts in the document; more questions than that ask again."""


def _answered(llm: LLM, told_document: ToldDocument, count: int) -> tuple[Answered, float]:
    """`count` questions, and the share of right answers."""
    asked = [told_document.questions[i % TOLD] for i in range(count)]
    run = ask(llm, [told_document.document + question for question, _ in asked])
    right = [text.startswith(f"{answer}.") for text, (_, answer) in zip(run.answers, asked, strict=True)]
    return run, sum(right) / count


def questions_report(scale: Scale) -> Report:
    """Questions about made-up facts in a book's passage of nearly the reference model's whole context."""
    shared_llm, apart_llm = make(sharing=True), make(sharing=False)
    length = (shared_llm.geometry.max_positions - 128) // 64 * 64
    book = files("offload_rt").joinpath("data", "black_arrow.txt").read_text("utf-8")
    told_document = tell(shared_llm, book, length, TOLD)
    document = told_document.document
    rows: list[Row] = []
    for count, sharing in ((scale.questions[0], False), *((count, True) for count in scale.questions)):
        run, right = _answered(make(sharing=sharing) if sharing else apart_llm, told_document, count)
        rows.append({"questions": count, "sharing": "yes" if sharing else "no", "right": right, **_run_row(run, count)})
    about = {
        "model": "reference, float32, policy full (all layers dense)",
        "document": f"{len(document)} tokens of The Black Arrow (never trained on), {TOLD} made-up facts in it",
        "answers": f"{ANSWER} tokens",
        "batch": MAX_BATCH,
        "clock": "CPU time, one thread",
    }
    columns = (
        Column("questions", "questions", ",d"),
        Column("sharing", "sharing"),
        Column("right", "right", ".1%"),
        Column("seconds", "seconds", ".1f"),
        Column("seconds a question", "each", ".3f"),
        Column("tokens prefilled", "prefilled", ",d"),
        Column("peak KV MiB", "peak_mib", ".1f"),
        Column("link MiB", "link_mib", ",.0f"),
    )
    notes = ("Without sharing every question prefills the document; its time grows with their number.",)
    return Report("sharing_questions", "Many questions about one document", about, columns, rows, notes)


def _run_row(run: Answered, count: int) -> Row:
    return {
        "seconds": run.seconds,
        "each": run.seconds / count,
        "prefilled": run.prefilled,
        "peak_mib": run.peak / 2**20,
        "link_mib": run.bytes_to_device / 2**20,
    }


# -------------------------------------------------------------------------------------------------------- open loop


@dataclass
class OpenLoopLog:
    """Requests that arrive at times of their own; all times in CPU seconds."""

    arrived: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    widest: int = 0
    peak_bytes: int = 0


def open_loop(llm: LLM, prompts: Sequence[list[int]], rate: float, seed: int) -> OpenLoopLog:
    """Serves prompts that arrive as a Poisson process of `rate` a second. When nothing is to be done, the clock jumps
    to the next arrival."""
    rng, at, log = random.Random(seed), 0.0, OpenLoopLog()
    arrivals = []
    for prompt in prompts:
        at += rng.expovariate(rate)
        arrivals.append((at, prompt))
    engine, now = Engine(llm.runner, max_num_seqs=MAX_BATCH), 0.0
    requests: list[Request] = []
    while arrivals or not engine.idle:
        if engine.idle:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            when, prompt = arrivals.pop(0)
            requests.append(engine.add(prompt, greedy(32)))
            log.arrived[requests[-1].prompt.id] = when
        began = time.process_time()
        events = engine.step()
        now += time.process_time() - began
        log.widest = max(log.widest, len(engine.scheduler.running))
        log.peak_bytes = max(log.peak_bytes, llm.runner.pool.bytes_held)
        for event in events:
            log.first.setdefault(event.request_id, now)
            log.done[event.request_id] = now
    return log


def poisson_load_report(scale: Scale) -> Report:
    """Normalised latency and time to first token over the arrival rate (ChunkAttention's Figure 5 and Table 4)."""
    rows: list[Row] = []
    for shared_tokens in (0, 1024):
        for rate in scale.rates:
            for sharing in (True, False):
                llm = make(sharing=sharing)
                stem, warm = token_lists(llm, 1, shared_tokens, 0)[0], token_lists(llm, 1, 1088, 2)
                own = 64 if shared_tokens else 1088
                prompts = [stem + rest for rest in token_lists(llm, scale.arrivals, own, 1)]
                llm.generate(warm, greedy(ANSWER))  # the first of all requests pays for more than itself
                log = open_loop(llm, prompts, rate, seed=0)
                latency = [(log.done[i] - log.arrived[i]) / 32 for i in log.arrived]
                rows.append(
                    {
                        "shared": shared_tokens,
                        "rate": rate,
                        "sharing": "yes" if sharing else "no",
                        "latency_ms": 1e3 * statistics.mean(latency),
                        "first_s": statistics.mean(log.first[i] - log.arrived[i] for i in log.arrived),
                        "peak_mib": log.peak_bytes / 2**20,
                        "widest": log.widest,
                    }
                )
    columns = (
        Column("shared tokens", "shared", ",d"),
        Column("requests a second", "rate"),
        Column("sharing", "sharing"),
        Column("latency, ms a token", "latency_ms", ".0f"),
        Column("time to first token, s", "first_s", ".2f"),
        Column("peak KV MiB", "peak_mib", ".1f"),
        Column("peak batch", "widest"),
    )
    about = {
        "model": "reference, float32, policy full",
        "requests": f"{scale.arrivals} of 1,088 prompt tokens and 32 new ones, random; Poisson arrivals, one seed",
        "clock": "CPU time, one thread; latency is the time from arrival to the last token over 32",
    }
    notes = ("Peak KV is what requests hold between steps; what the prefix tree keeps of ended ones is not counted.",)
    return Report("sharing_arrivals", "Open loop: requests that arrive at random", about, columns, rows, notes)
