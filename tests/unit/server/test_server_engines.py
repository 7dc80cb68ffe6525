"""Test engines of several policies in one server when a client leaves while an engine is created or closed."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, AsyncLLM, SamplingParams
from offload_rt.server.engines import Engines
from offload_rt.server.options import ServerOptions

GREEDY = SamplingParams(max_tokens=3, temperature=0)


async def ask(engines: Engines, policy: str) -> None:
    async with engines.under(policy, None) as engine:
        async for _ in engine.generate(tiny_prompt(9), GREEDY):
            pass


def test_who_leaves_leaves_no_engine_half_made_or_half_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is created once and serves the next client. The counts of closed engines are included in the load."""
    llm = LLM(tiny_model("llama", num_hidden_layers=2), policy="full", verify="off", host_memory="8MiB")
    go, made = threading.Event(), list[LLM]()
    under, end = LLM.under, AsyncLLM._end

    def slowly(*given: object) -> LLM:
        go.wait(10)
        made.append(under(*given))  # type: ignore[arg-type]
        return made[-1]

    async def leave(engines: Engines, policy: str) -> None:
        go.clear()
        leaving = asyncio.create_task(ask(engines, policy))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        go.set()

    async def run() -> list[int]:
        engines = Engines(AsyncLLM(llm), ServerOptions(max_engines=2))
        monkeypatch.setattr(LLM, "under", slowly)
        await leave(engines, "full")
        await ask(engines, "full")
        monkeypatch.setattr(LLM, "under", under)
        monkeypatch.setattr(AsyncLLM, "_end", lambda self: (go.wait(10), end(self))[1])
        await leave(engines, "streaming")
        counted = [engines.load().generated_tokens]
        await ask(engines, "streaming")
        await engines.close()
        return [*counted, engines.load().generated_tokens]

    assert asyncio.run(run()) == [3, 6] and len(made) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "offload-rt engine"]
