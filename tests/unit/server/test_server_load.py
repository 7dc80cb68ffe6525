"""Test ten thousand requests on 32 connections: every text is correct, none is lost, and memory stays bounded.

Run with `make stress PART=server`. OFFLOAD_RT_STRESS=4 sends 200 requests.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import httpx2
import psutil
import pytest
from support.serving import served, wait_until
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, AsyncLLM, SamplingParams

STRESS = int(os.environ.get("OFFLOAD_RT_STRESS", "0"))
REQUESTS, CONNECTIONS, TEXTS = 50 * STRESS, 32, 16
MOST_GROWTH = 64 << 20
"""Allowed growth of the process in bytes after the first tenth of the requests."""

pytestmark = pytest.mark.skipif(not STRESS, reason="10,000 requests: make stress PART=server")


def test_nothing_is_lost(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2)
    engine = AsyncLLM(LLM(folder, policy="full", verify="off", host_memory="32MiB"), max_waiting=2 * CONNECTIONS)
    prompts = [f"It was a dark night, said number {i}. " * (1 + i % 4) for i in range(TEXTS)]
    params = SamplingParams(max_tokens=6, temperature=0)
    expected = [output.outputs[0].text for output in engine.llm.generate(prompts, params)]
    assert len(set(expected)) > TEXTS // 2
    process, outcomes, sizes = psutil.Process(), Counter[str](), list[int]()

    async def ask(http: httpx2.AsyncClient, numbers: asyncio.Queue[int]) -> None:
        while not numbers.empty():
            i = numbers.get_nowait()
            body = {"prompt": prompts[i % TEXTS], "max_tokens": 6, "temperature": 0}
            answer = await http.post("/v1/completions", json=body)
            right = answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected[i % TEXTS]
            outcomes["right" if right else str(answer.status_code)] += 1
            if i % max(1, REQUESTS // 10) == 0:
                sizes.append(process.memory_info().rss)

    async def all_of_them(url: str) -> None:
        numbers: asyncio.Queue[int] = asyncio.Queue()
        for i in range(REQUESTS):
            numbers.put_nowait(i)
        limits = httpx2.Limits(max_connections=CONNECTIONS)
        async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            await asyncio.gather(*(ask(http, numbers) for _ in range(CONNECTIONS)))

    with served(engine) as url:
        asyncio.run(all_of_them(url))
        wait_until(lambda: engine.load().running == 0)
        assert engine.load().pool_used_bytes == 0
    print(f"{dict(outcomes)}, MiB {[size >> 20 for size in sizes]}")
    assert outcomes == {"right": REQUESTS}
    assert max(sizes) - sizes[min(1, len(sizes) - 1)] < MOST_GROWTH
