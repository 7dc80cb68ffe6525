"""Test the server with LangChain, litellm and `llm`, with conformance suites, and with many concurrent requests.

OFFLOAD_RT_STRESS sets how many seconds schemathesis runs. Tests whose packages are not installed are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from support.serving import ScriptedEngine, reference_tokenizer, run_server, wait_until
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, AsyncLLM, SamplingParams

SECONDS = int(os.environ.get("OFFLOAD_RT_STRESS", "0"))
if not SECONDS:
    pytest.skip("clients and suites, for minutes: make stress PART=server", allow_module_level=True)
NOT_INSTALLED = "not installed: pip install '.[serve,clients]'"
pytestmark = pytest.mark.filterwarnings("default")  # for warnings of these packages

HELLO = "Good morning, “friend” and café."
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "Dick"}}\n</tool_call>'
ANSWERS = {"hello": HELLO, "think": f"<think>\nWell…\n</think>\n\n{HELLO}", "call": CALL, "form": '{"name": "Dick"}'}
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOL: Any = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": PARAMETERS}}
FORM: Any = PARAMETERS | {
    "title": "person", "description": "Who it is.", "properties": {"name": {"type": "string"}}, "required": ["name"],
    "additionalProperties": False,
}  # fmt: skip


def say(prompt: str) -> str:
    last = prompt.rpartition("user: ")[2]
    return next((text for word, text in ANSWERS.items() if word in last), "It was a dark night.")


SERVER_OPTIONS = {"api_keys": ("secret",)}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Share one event loop between tests, because LangChain's models share their connections."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


# --------------------------------------------------------------------------------------------------------- LangChain


def chat_model(url: str, **more: Any) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai", reason=NOT_INSTALLED)
    return langchain_openai.ChatOpenAI(
        model="scripted", base_url=f"{url}/v1", max_retries=0, stream_usage=True, **({"api_key": "secret"} | more)
    )


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(url: str, loop: asyncio.AbstractEventLoop, responses: bool) -> None:
    model = chat_model(url, use_responses_api=responses)
    whole = model.invoke([("system", "Be brief."), ("human", "hello")])
    assert whole.text == HELLO and whole.usage_metadata["input_token_details"]["cache_read"] > 0
    chunks = list(model.stream("hello"))
    assert len(chunks) > 3 and "".join(chunk.text for chunk in chunks) == HELLO
    together = chunks[0]
    for chunk in chunks[1:]:
        together += chunk
    assert together.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] > 5
    assert loop.run_until_complete(model.ainvoke("hello")).text == HELLO
    assert [answer.text for answer in model.batch(["hello", "x", "hello"])] == [HELLO, "It was a dark night.", HELLO]

    tools = model.bind_tools([TOOL])
    [call] = tools.invoke("call").tool_calls
    assert (call["name"], call["args"]) == ("find", {"q": "Dick"})
    streamed = None
    for chunk in tools.stream("call"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [("find", {"q": "Dick"})]
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    talk = [HumanMessage("call"), AIMessage("", tool_calls=[call]), ToolMessage("Richard", tool_call_id=call["id"])]
    assert tools.invoke([*talk, HumanMessage("hello")]).text == HELLO


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_of_langchain(url: str, engine: ScriptedEngine, method: str) -> None:
    model = chat_model(url)
    if method == "function_calling":
        engine.say = lambda prompt: '{"name": "person", "arguments": {"name": "Dick"}}'
    try:
        found = model.with_structured_output(FORM, method=method).invoke("form, in JSON")
    finally:
        engine.say = say
    assert found == {"name": "Dick"} and engine.params.structured_outputs is not None


# ----------------------------------------------------------------------------------------------------------- litellm


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it downloads its price table
    return pytest.importorskip("litellm", reason=NOT_INSTALLED)


def litellm_options(url: str) -> dict[str, dict[str, Any]]:
    common = {"api_key": "secret", "num_retries": 0, "max_tokens": 100}
    return {
        "openai": {"model": "openai/scripted", "api_base": f"{url}/v1"} | common,
        "anthropic": {"model": "anthropic/scripted", "api_base": url} | common,
    }


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_litellm(litellm: Any, url: str, protocol: str) -> None:
    options = litellm_options(url)[protocol]

    def ask(word: str, **more: Any) -> Any:
        return litellm.completion(messages=user(word), **options, **more)

    whole = ask("hello")
    assert whole.choices[0].message.content == HELLO and whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 5 and whole.usage.prompt_tokens_details.cached_tokens > 0
    chunks = list(ask("hello", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HELLO
    assert asyncio.run(litellm.acompletion(messages=user("hello"), **options)).choices[0].message.content == HELLO
    thought = ask("think").choices[0].message
    assert (thought.content, thought.reasoning_content) == (HELLO, "Well…")
    called = ask("call", tools=[TOOL]).choices[0]
    [call] = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("find", {"q": "Dick"})
    assert called.finish_reason == "tool_calls"
    built = litellm.stream_chunk_builder(list(ask("call", tools=[TOOL], stream=True)))
    [call] = built.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("find", {"q": "Dick"})
    with pytest.raises(litellm.BadRequestError, match="maximum context length"):
        ask("x" * 20_000)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=user("hello"), **(options | {"api_key": "wrong"}))


# --------------------------------------------------------------------------------------------------------------- llm


def test_llm_command(url: str, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason=NOT_INSTALLED)
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: scripted\n  api_base: {url}/v1\n  api_key_name: ours\n"
        "  supports_schema: true\n  supports_tools: true\n"
    )
    (tmp_path / "keys.json").write_text('{"ours": "secret"}')

    def ask(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "ours", *arguments],
            env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert ask("hello") == HELLO == ask("hello", "--no-stream", "--system", "Be brief.")
    assert ask("-c", "x") == "It was a dark night."
    assert json.loads(ask("form", "--schema", json.dumps(FORM))) == {"name": "Dick"}


KNOWN_FAILURES = {"Image Input", "Error Handling"}
"""Known failures of llm-comply: images are refused, and `model` is optional, as in vLLM."""


class ToolCallingEngine(ScriptedEngine):
    """Engine that calls a prompt's first tool, or returns text if the prompt contains a tool result."""

    def __init__(self) -> None:
        super().__init__(reference_tokenizer(), self.call_first_tool)

    def call_first_tool(self, prompt: str) -> str:
        found = re.match(r"tools: (\[.*\])\n", prompt)
        if found is None or "tool: " in prompt:
            return "It was a dark night."
        tool = json.loads(found[1])[0]["function"]
        parameters = tool.get("parameters", {}).get("properties", {})
        call = json.dumps({"name": tool["name"], "arguments": dict.fromkeys(parameters, "x")})
        return call if self.params.structured_outputs else f"<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def tool_calling_url() -> Iterator[str]:
    with run_server(ToolCallingEngine()) as address:
        yield address


def run(folder: Path, command: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(command)
    if not program.exists():
        pytest.skip(f"{command} is {NOT_INSTALLED}")
    return subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout)


def test_schemathesis_finds_no_error_of_the_server(tool_calling_url: str, tmp_path: Path) -> None:
    done = run(
        tmp_path, "schemathesis", "run", f"{tool_calling_url}/openapi.json", "--no-color", "--phases",
        "examples,coverage,fuzzing,stateful", "--checks", "not_a_server_error", "--max-time", str(SECONDS),
        "--generation-database", "none", timeout=SECONDS + 600,
    )  # fmt: skip
    print("\n".join(done.stdout.splitlines()[-25:]))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize(("protocol", "known_failures"), [
    ("openai-chat", KNOWN_FAILURES), ("open-responses", KNOWN_FAILURES), ("anthropic", {"Image Input"}),
])  # fmt: skip
def test_llm_comply(tool_calling_url: str, tmp_path: Path, protocol: str, known_failures: set[str]) -> None:
    done = run(
        tmp_path,
        "llm-comply",
        "-u",
        f"{tool_calling_url}/v1",
        "-m",
        "scripted",
        "-k",
        "none",
        "--format",
        protocol,
        "--json",
    )
    results = json.loads(done.stdout)["results"]
    failed = {result["name"]: result for result in results if result["status"] == "failed"}
    passed = sum(result["status"] == "passed" for result in results)
    print(f"{protocol}: {passed} passed, {sorted(failed)} not")
    assert set(failed) == known_failures, failed


REQUESTS, CONNECTIONS, TEXTS = 50 * SECONDS, 32, 16
MOST_GROWTH = 64 << 20
"""How many bytes the process may grow after the first tenth of the requests."""


def test_no_request_is_lost(tmp_path: Path) -> None:
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
            correct = answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected[i % TEXTS]
            outcomes["right" if correct else str(answer.status_code)] += 1
            if i % max(1, REQUESTS // 10) == 0:
                sizes.append(process.memory_info().rss)

    async def send_all(url: str) -> None:
        numbers: asyncio.Queue[int] = asyncio.Queue()
        for i in range(REQUESTS):
            numbers.put_nowait(i)
        limits = httpx2.Limits(max_connections=CONNECTIONS)
        async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            await asyncio.gather(*(ask(http, numbers) for _ in range(CONNECTIONS)))

    with run_server(engine) as url:
        asyncio.run(send_all(url))
        wait_until(lambda: engine.load().running == 0)
        assert engine.load().pool_used_bytes == 0
    print(f"{dict(outcomes)}, MiB {[size >> 20 for size in sizes]}")
    assert outcomes == {"right": REQUESTS}
    assert max(sizes) - sizes[min(1, len(sizes) - 1)] < MOST_GROWTH
