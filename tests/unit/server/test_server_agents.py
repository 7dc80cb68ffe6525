"""Replay requests of agents: every request finds the longest beginning that an earlier request has.

`make stress PART=agents` replays all agents, restarts the server, replays them again, and prints a table. With
OFFLOAD_RT_AGENTS_MODEL it uses that model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.agents import AGENTS, AgentRequest
from support.serving import TEMPLATE, served
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, AsyncLLM

BLOCK = 64
STRESS = "OFFLOAD_RT_STRESS" in os.environ
NAMES = list(AGENTS) if STRESS else ["opencode"]


@dataclass(frozen=True)
class Row:
    """Measurements of one request.

    Attributes:
        prompt: Prompt tokens.
        known: Tokens of the longest beginning that an earlier request has.
        cached: Tokens that the server found in its cache.
        seconds: Time to the first token.
    """

    agent: str
    kind: str
    prompt: int
    known: int
    cached: int
    seconds: float


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 32}
    return os.environ.get("OFFLOAD_RT_AGENTS_MODEL") or str(tiny_checkpoint(folder, "llama", **sizes))


@contextmanager
def serving(model: str, store: Path) -> Iterator[httpx2.Client]:
    """Serve a new model, as a restarted process would."""
    llm = LLM(model, policy="full", verify="off", host_memory="1GiB")
    if not getattr(llm.tokenizer, "chat_template", None):
        llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    engine = AsyncLLM(llm, store=store)
    with served(engine, documents=store / "server") as url, httpx2.Client(base_url=url, timeout=600) as http:
        yield http


def known_tokens(prompt: list[int], earlier: list[list[int]]) -> int:
    """Return the length of the longest beginning of a prompt that an earlier one has."""
    ends = ((i for i, pair in enumerate(zip(prompt, other, strict=False)) if pair[0] != pair[1]) for other in earlier)
    return max(
        (next(found, min(len(prompt), len(other))) for found, other in zip(ends, earlier, strict=True)), default=0
    )


def replay(http: httpx2.Client, agent: str, request: AgentRequest, earlier: list[list[int]]) -> Row:
    """Send a request, and add its prompt to `earlier`."""
    prompt = http.post("/tokenize", json=request.body).json()["tokens"]
    known = known_tokens(prompt, earlier)
    earlier.append(prompt)
    body = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4, "temperature": 0}
    first, usage, begun = 0.0, {}, time.perf_counter()
    with http.stream("POST", "/v1/chat/completions", json=request.body | body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                first = first or time.perf_counter() - begun
                usage = chunk["usage"] or usage
    assert usage["prompt_tokens"] == len(prompt)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Row(agent, request.kind, len(prompt), known, cached, first)


def table(title: str, rows: list[Row]) -> str:
    lines = [
        f"\n{title}\n\n| agent | request | prompt | known | cached | first token (s) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {r.agent} | {r.kind} | {r.prompt:,} | {r.known:,} | {r.cached:,} | {r.seconds:.3f} |" for r in rows]
    prompt, cached = sum(row.prompt for row in rows), sum(row.cached for row in rows)
    return "\n".join([*lines, f"| all | {len(rows)} | {prompt:,} | | {cached:,} ({cached / prompt:.0%}) | |"])


def test_agents_find_their_prefixes(model: str, tmp_path: Path) -> None:
    requests = [(name, request) for name in NAMES for request in AGENTS[name]()]
    earlier: list[list[int]] = []
    with serving(model, tmp_path) as http:
        rows = [replay(http, name, request, earlier) for name, request in requests]
    print(table("Before the restart", rows))
    for row in rows:
        # Whole blocks are shared. The last token of a prompt is always computed.
        assert row.cached >= min(row.known, row.prompt - 1) // BLOCK * BLOCK, row
    assert sum(row.cached for row in rows) > 1000
    if not STRESS:
        return
    with serving(model, tmp_path) as http:
        after = [replay(http, name, request, earlier) for name, request in requests]
    print(table("After the restart", after))
    within: list[list[int]] = []
    for row, prompt in zip(after, earlier[len(requests) :], strict=True):
        known = known_tokens(prompt, within)
        within.append(prompt)
        assert row.cached >= min(known, row.prompt - 1) // BLOCK * BLOCK, row
