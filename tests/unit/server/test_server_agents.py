"""Test, with recorded requests of agents, that the server reuses the longest known prefix of each prompt.

`make stress PART=agents` replays the requests of all agents and prints tables. The environment variable
OFFLOAD_RT_AGENTS_MODEL selects another model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.agents import AGENTS, AgentRequest
from support.serving import TEMPLATE, run_server
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, AsyncLLM, StoreOptions

BLOCK = 64
SCRIPT = Path(__file__).parents[3] / "scripts" / "stateless_client.py"
STRESS = "OFFLOAD_RT_STRESS" in os.environ
NAMES = list(AGENTS) if STRESS else ["opencode"]


@dataclass(frozen=True)
class Measurement:
    agent: str
    kind: str
    prompt_tokens: int
    known_tokens: int  # longest prefix that the prompt shares with earlier ones
    cached_tokens: int
    first_token_seconds: float


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 32}
    return os.environ.get("OFFLOAD_RT_AGENTS_MODEL") or str(tiny_checkpoint(folder, "llama", **sizes))


@dataclass(frozen=True)
class Service:
    http: httpx2.Client
    engine: AsyncLLM
    store: Path

    @property
    def disk_bytes(self) -> int:
        storage: Any = self.engine._sessions.store.context.storage  # type: ignore[union-attr]
        with storage._index.mutex:  # otherwise files could be deleted and written between two calls to stat
            return store_bytes(self.store)


def store_bytes(store: Path) -> int:
    """Return the total size of the files with KV and sessions, including temporary files."""
    spaces = (folder for folder in store.iterdir() if folder.is_dir() and folder.name != "server")
    return sum(path.stat().st_size for space in spaces for path in space.rglob("*") if path.is_file())


@contextmanager
def serving(model: str, store: Path, limit: int | None = None) -> Iterator[Service]:
    """Load and serve the model, as a new process would."""
    llm = LLM(model, policy="full", verify="off", host_memory="1GiB")
    if not getattr(llm.tokenizer, "chat_template", None):
        llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    engine = AsyncLLM(llm, store=store, store_options=StoreOptions(limit=limit))
    with run_server(engine, documents=store / "server") as url, httpx2.Client(base_url=url, timeout=600) as http:
        yield Service(http, engine, store)


def longest_shared_prefix(prompt: list[int], earlier: list[list[int]]) -> int:
    ends = ((i for i, pair in enumerate(zip(prompt, other, strict=False)) if pair[0] != pair[1]) for other in earlier)
    return max(
        (next(found, min(len(prompt), len(other))) for found, other in zip(ends, earlier, strict=True)), default=0
    )


def replay(http: httpx2.Client, agent: str, request: AgentRequest, earlier: list[list[int]]) -> Measurement:
    """Send a request, return its measurements, and append its prompt to `earlier`."""
    prompt = http.post("/tokenize", json=request.body).json()["tokens"]
    known = longest_shared_prefix(prompt, earlier)
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
    return Measurement(agent, request.kind, len(prompt), known, cached, first)


def requests() -> Iterator[tuple[str, AgentRequest]]:
    return ((name, request) for name in NAMES for request in AGENTS[name]())


def table(title: str, rows: list[Measurement]) -> str:
    lines = [
        f"\n{title}\n\n| agent | request | prompt | known | cached | first token (s) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.agent} | {r.kind} | {r.prompt_tokens:,} | {r.known_tokens:,} | {r.cached_tokens:,} "
        f"| {r.first_token_seconds:.3f} |"
        for r in rows
    ]
    prompt, cached = sum(row.prompt_tokens for row in rows), sum(row.cached_tokens for row in rows)
    return "\n".join([*lines, f"| all | {len(rows)} | {prompt:,} | | {cached:,} ({cached / prompt:.0%}) | |"])


def test_prompts_of_agents_reuse_their_known_prefix(model: str, tmp_path: Path) -> None:
    earlier: list[list[int]] = []
    for title in ("Before the restart", "After the restart"):
        with serving(model, tmp_path) as service:
            rows = [replay(service.http, name, request, earlier) for name, request in requests()]
        print(table(title, rows))
        for row in rows:
            # Whole blocks are shared. The last token of a prompt is always computed.
            assert row.cached_tokens >= min(row.known_tokens, row.prompt_tokens - 1) // BLOCK * BLOCK, row
    # The restarted server finds all prompts on disk.
    assert all(row.known_tokens == row.prompt_tokens for row in rows)


def test_the_store_stays_within_its_limit(model: str, tmp_path: Path) -> None:
    earlier: list[list[int]] = []
    with serving(model, tmp_path / "whole") as service:
        for name, request in requests():
            replay(service.http, name, request, earlier)
    limit = store_bytes(tmp_path / "whole") // 3  # a third of the space that all prompts need
    sizes: list[int] = []
    for title in ("Limited store, before the restart", "Limited store, after the restart"):
        rows = []
        with serving(model, tmp_path / "limited", limit) as service:
            for name, request in requests():
                rows.append(replay(service.http, name, request, earlier))
                sizes.append(service.disk_bytes)
        sizes.append(store_bytes(tmp_path / "limited"))
        print(table(title, rows))
    print(f"\nlimit {limit:,} bytes, largest size on disk {max(sizes):,} bytes")
    assert limit / 2 < max(sizes) <= limit
    assert any(row.cached_tokens for row in rows)


@pytest.mark.skipif(not STRESS, reason="starts five servers: make stress PART=agents")
def test_the_script_prints_a_table_of_first_tokens(tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2, head_dim=32))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, str(SCRIPT), str(folder), "--characters", "1500", "--host-memory", "16MiB"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == 14
    for line in lines:
        name, prompt, cached, _ = (cell.strip().replace(",", "") for cell in line.strip("|").split("|"))
        if not prompt:
            assert name.startswith("another text")
        elif name.startswith(("first turn again", "second", "third", "fourth", "document")) or name.endswith("again"):
            assert int(prompt) - 2 * BLOCK < int(cached) < int(prompt), line
        else:
            assert int(cached) == 0, line
