"""Compare the time of each C kernel with lower bounds, for each instruction set level of this processor.

The bounds are derived from memory traffic and arithmetic, as explained in the C sources in `kernels/`. All kernels run
on one thread.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import nn

from ...core import KVPart
from ...kernels import causal_cpu, decode_attention, low_bit_sequence, native
from ...kernels.low_bit import Layout
from ...kernels.low_bit_sequence import NativeQuery
from ...kernels.pages import PAGE_BLOCKS, PAGE_TOKENS, Pages
from ...models.linear import use_backends
from ...models.linear.dense import DenseLinear
from ...utils.native_code import LEVEL_VARIABLE, available_levels, cpuinfo
from ..core.report import Column, Report, Row

HEADS, GROUP, D, VALUE_BITS, SHARE = 3, 3, 64, 4, 0.05
"""Shape of one layer of SmolLM2 135M, and the fraction of tokens that is selected."""

LANES = {"scalar": 4, "neon": 4, "avx2": 8, "avx512": 16, "avx512_bf16": 16}
CODE_PRODUCTS = {"scalar": 4, "neon": 8, "avx2": 16, "avx512": 32, "avx512_bf16": 64}
"""Number of products of a code and a weight that one vector instruction computes, including their addition."""
VALUE_PRODUCTS = {"scalar": 4, "neon": 4, "avx2": 8, "avx512": 16, "avx512_bf16": 32}
EXPONENTIAL, RANKING = 14, 4
"""Minimum number of vector instructions per vector, for exponentials and for top-k selection."""

COLD = 96 << 20
"""Number of other bytes to read between two reads of the same data, so that the data is no longer in processor
caches.
"""
QUERIES = 256
"""Number of queries per head in a prefill."""
WEIGHT = (1536, 576)
"""Weight shape of a linear layer in SmolLM2's MLP. A decode step multiplies the weight by one row."""

PER_CYCLE = 2
"""Assumed number of vector instructions per cycle. Some processors execute only one 512-bit instruction per cycle."""

COLUMNS = (
    Column("level", "level"),
    Column("tokens", "tokens", ","),
    Column("kernel", "kernel"),
    Column("µs", "us", ".0f"),
    Column("memory floor", "memory_us", ".0f"),
    Column("arithmetic floor", "arithmetic_us", ".0f"),
    Column("times the larger floor", "times_floor", ".1f"),
)


@dataclass(frozen=True)
class Case:
    """A kernel to measure.

    `moved` is its minimum memory traffic in bytes, and `instructions` is its minimum number of vector instructions.
    """

    name: str
    moved: int
    instructions: int
    call: Callable[[], object]


def kernel_report(tokens: Sequence[int], repeats: int) -> Report:
    threads, before = torch.get_num_threads(), os.environ.get(LEVEL_VARIABLE)
    torch.set_num_threads(1)
    rate, clock, rows = _read_rate(repeats), _clock(), list[Row]()
    try:
        for level in available_levels() if before is None else (before,):
            os.environ[LEVEL_VARIABLE] = level
            native.unload()
            for count in tokens:
                for case in (*low_bit_cases(level, count), *attention_cases(level, count)):
                    rows.append({"level": level, "tokens": count} | _measure(case, rate, clock, repeats))
            for case in linear_cases(level):
                rows.append({"level": level, "tokens": 1} | _measure(case, rate, clock, repeats))
    finally:
        torch.set_num_threads(threads)
        os.environ.pop(LEVEL_VARIABLE, None)
        if before is not None:
            os.environ[LEVEL_VARIABLE] = before
        native.unload()
    about = {"layer": f"{HEADS} KV heads of {GROUP} queries, d {D}, values of {VALUE_BITS} bits", "repeats": repeats}
    about |= {"memory": f"{rate / 1e9:.1f} GB/s read by one thread", "clock": f"{clock / 1e9:.2f} GHz"}
    return Report("cpu_kernels", "C kernels of a decode step, one layer, one thread", about, COLUMNS, rows)


def low_bit_cases(level: str, tokens: int) -> Iterator[Case]:
    """Yield three cases with `tokens` tokens: scores of low-bit keys, selection, and attention over low-bit values.

    If there is no C compiler, yield no cases. Each case states the minimum number of instructions of its compiled code,
    which depends on the instruction set `level`.
    """
    torch.manual_seed(0)
    layout, scores = Layout(D, VALUE_BITS), HEADS * GROUP * tokens
    if low_bit_sequence.library(D, VALUE_BITS) is None:
        return
    shape = (1, HEADS, PAGE_BLOCKS, layout.block_bytes)
    pages = Pages.of(
        [
            torch.randint(0, 256, shape, dtype=torch.uint8).clamp_(100, 140)  # as codes of steps: 2^-7 to 2^-3
            for _ in range(-(-tokens // PAGE_TOKENS))
        ]
    )
    q, mean = torch.randn(HEADS, GROUP, D) / 4, torch.randn(HEADS, D)

    def score() -> NativeQuery:
        asked = low_bit_sequence.low_bit_query(q, mean, pages, layout, range(tokens))
        assert isinstance(asked, NativeQuery)
        return asked

    asked, n = score(), max(1, int(SHARE * tokens))
    skip, products, exponentials = asked.select(math.inf, n), scores * D, scores * EXPONENTIAL // LANES[level]
    keys, values = (HEADS * tokens * (width + 1) for width in (layout.key_bytes, layout.value_bytes))
    yield Case("score", keys + 4 * scores, products // CODE_PRODUCTS[level] + exponentials, score)
    ranked = 4 * scores + 8 * HEADS * tokens
    yield Case("select", ranked, scores * RANKING // LANES[level], lambda: asked.select(math.inf, n))
    mixed = products // VALUE_PRODUCTS[level] + exponentials
    exact, rotations = (torch.zeros_like(q), torch.zeros(HEADS, GROUP)), (torch.eye(D), torch.eye(D))
    yield Case("mix", values + 4 * scores, mixed, lambda: asked.merge(exact, skip, rotations))


def attention_cases(level: str, tokens: int) -> Iterator[Case]:
    """For each dtype, yield two cases of attention to `tokens` tokens: decoding and prefill.

    In decoding, there is one query per head. In prefill, the last QUERIES tokens are the queries. The lower bound
    depends on the instruction set `level`.
    """
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.randn(HEADS * GROUP, min(QUERIES, tokens), D).to(dtype)
        k, v = torch.randn(2, HEADS, tokens, D).to(dtype)
        decode, prefill = decode_attention.library(D, dtype), causal_cpu.library_for(q)
        if decode is not None:
            copies = torch.stack((k, v)).unsqueeze(0).repeat(-(-COLD // (2 * k.nbytes)), 1, 1, 1, 1)
            call = partial(_next_step, decode, q[:, 0], cycle(copies))
            pairs = HEADS * GROUP * tokens
            yield Case(
                f"decode attention, {_name(dtype)}", 2 * k.nbytes, pairs * (2 * D + EXPONENTIAL) // LANES[level], call
            )
        if prefill is not None:
            causal = partial(causal_cpu.attend_causal, prefill, q, k, v, 0.125, None, None, None)
            pairs = HEADS * GROUP * sum(range(tokens - q.shape[1] + 1, tokens + 1))
            products = 2 * D // _products_at_once(level, dtype)
            yield Case(
                f"prefill attention, {_name(dtype)}",
                2 * k.nbytes,
                pairs * (products + EXPONENTIAL) // LANES[level],
                causal,
            )


def linear_cases(level: str) -> Iterator[Case]:
    """For each dtype, yield one case: a linear layer with one input row.

    The minimum number of instructions depends on the instruction set `level`.
    """
    for dtype in (torch.bfloat16, torch.float32):
        outs, ins = WEIGHT
        size = outs * ins * dtype.itemsize
        layers = nn.ModuleList(nn.Linear(ins, outs, bias=False, dtype=dtype) for _ in range(-(-COLD // size)))
        use_backends(layers, torch.device("cpu"))
        if isinstance(layers[0], DenseLinear):
            products = outs * ins // (LANES[level] * _products_at_once(level, dtype))
            call = partial(_next_product, torch.randn(1, ins).to(dtype), cycle(layers))
            yield Case(f"linear, {_name(dtype)}", size, products, call)


def _next_step(code: ctypes.CDLL, q: torch.Tensor, copies: Iterator[torch.Tensor]) -> None:
    k, v = next(copies)
    decode_attention.attend_in_c(code, q, KVPart(k, v), 0.125, None)


def _next_product(x: torch.Tensor, layers: Iterator[nn.Module]) -> torch.Tensor:
    with torch.inference_mode():
        product: torch.Tensor = next(layers)(x)
    return product


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products_at_once(level: str, dtype: torch.dtype) -> int:
    """Return how many products one instruction of `level` adds to each element of a vector."""
    return 2 if level == "avx512_bf16" and dtype == torch.bfloat16 else 1


def _measure(case: Case, rate: float, clock: float, repeats: int) -> Row:
    spent = _least(case.call, repeats)
    memory, arithmetic = case.moved / rate, case.instructions / (PER_CYCLE * clock)
    return {
        "kernel": case.name,
        "us": 1e6 * spent,
        "memory_us": 1e6 * memory,
        "arithmetic_us": 1e6 * arithmetic,
        "times_floor": spent / max(memory, arithmetic),
    }


def _least(call: Callable[[], object], repeats: int) -> float:
    spent = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return min(spent[1:])


def _read_rate(repeats: int) -> float:
    data = torch.ones(1 << 26)
    return data.nbytes / _least(data.sum, min(repeats, 10))


def _clock() -> float:
    return 1e6 * float(cpuinfo("cpu MHz") or 3000)
