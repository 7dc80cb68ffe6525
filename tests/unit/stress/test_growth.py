"""Test that ten thousand requests leak neither memory nor files (`make stress PART=growth`)."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import random
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, OffloadError, SamplingParams

REQUESTS, MEASUREMENTS = 10_000, 20
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, max_position_embeddings=512)


NAMES = tracemalloc.Filter(False, pathlib.__file__)
"""Excludes allocations by pathlib, which interns every name. The table of names sometimes doubles (7.7 MB at once)."""


def measure_resources() -> dict[str, int]:
    gc.collect()
    traced = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([NAMES]).traces)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    usage = {"resident": resident, "python": traced}
    return usage | {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def random_request(llm: LLM, folder: Path, rng: random.Random) -> Callable[[], Any]:
    def prompt() -> list[int]:
        return tiny_prompt(rng.randrange(1, 90), seed=rng.randrange(50))

    def batch() -> None:
        params = SamplingParams(max_tokens=rng.randrange(1, 6), seed=rng.randrange(9), logprobs=rng.choice([None, 2]))
        llm.generate([prompt() for _ in range(rng.randrange(1, 4))], params)

    def samples() -> None:
        llm.generate(prompt(), SamplingParams(max_tokens=3, n=3, temperature=1.0))

    def abandoned_stream() -> None:
        with closing(llm.stream(prompt(), SamplingParams(max_tokens=9))) as stream:
            next(stream)

    def refused() -> None:
        with suppress(OffloadError):
            llm.generate(tiny_prompt(600, seed=1), SamplingParams(max_tokens=9))

    def turn() -> None:
        with llm.session(f"s{rng.randrange(30)}", folder, limit=1 << 20) as session, suppress(OffloadError):
            list(session.send(tiny_prompt(rng.randrange(1, 20), seed=2), SamplingParams(max_tokens=2)))

    def scored() -> None:
        llm.score([prompt()], [tiny_prompt(5, seed=3)])

    kinds = (batch, samples, abandoned_stream, refused, scored, turn)
    return lambda: rng.choices(kinds, weights=(8, 2, 2, 1, 2, 3))[0]()


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="takes minutes: make stress PART=growth")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_requests_leak_no_memory_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    measurements = []
    with LLM(MODEL, dtype="float32", host_memory="2MiB", policy="infinigen") as llm:
        request = random_request(llm, tmp_path / "store", random.Random(0))
        tracemalloc.start()
        try:
            for _ in range(MEASUREMENTS):
                for _ in range(REQUESTS // MEASUREMENTS):
                    request()
                assert llm.runner.pool.sequence_bytes == 0
                measurements.append(measure_resources())
        finally:
            tracemalloc.stop()
        llm.runner.check_integrity()
    print(json.dumps({"requests": REQUESTS, "first": measurements[0], "last": measurements[-1]}))
    half = MEASUREMENTS // 2
    for name, slack in (("resident", 8 << 20), ("python", 1 << 20), ("files", 2), ("threads", 2)):
        early, late = (max(one[name] for one in part) for part in (measurements[:half], measurements[half:]))
        assert late <= early + slack, f"{name} grows: {early} in the first half, {late} in the second"
