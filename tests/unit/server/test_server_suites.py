"""Run external conformance suites: schemathesis on the server's schema, llm-comply on three protocols.

Needs OFFLOAD_RT_STRESS, which is the duration of schemathesis in seconds, and the installed suites.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import ScriptedEngine, reference_tokenizer, served

SECONDS = int(os.environ.get("OFFLOAD_RT_STRESS", "0"))
if not SECONDS:
    pytest.skip("suites, for minutes: make stress PART=server", allow_module_level=True)
WHY = "not installed: pip install '.[serve,clients]'"

OTHERWISE = {"Image Input", "Error Handling"}
"""Known failures of llm-comply: images are refused, and `model` is optional, as in vLLM."""


class Obeying(ScriptedEngine):
    """Call the first tool in the prompt until a result exists, as structured output or with tool call marks."""

    def __init__(self) -> None:
        super().__init__(reference_tokenizer(), self.obey)

    def obey(self, prompt: str) -> str:
        found = re.match(r"tools: (\[.*\])\n", prompt)
        if found is None or "tool: " in prompt:
            return "It was a dark night."
        tool = json.loads(found[1])[0]["function"]
        wanted = tool.get("parameters", {}).get("properties", {})
        call = json.dumps({"name": tool["name"], "arguments": dict.fromkeys(wanted, "x")})
        return call if self.params.structured_outputs else f"<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(Obeying()) as address:
        yield address


def run(folder: Path, command: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(command)
    if not program.exists():
        pytest.skip(f"{command} is {WHY}")
    return subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout)


def test_schemathesis_finds_no_error_of_the_server(url: str, tmp_path: Path) -> None:
    done = run(
        tmp_path, "schemathesis", "run", f"{url}/openapi.json", "--no-color", "--phases",
        "examples,coverage,fuzzing,stateful", "--checks", "not_a_server_error", "--max-time", str(SECONDS),
        "--generation-database", "none", timeout=SECONDS + 600,
    )  # fmt: skip
    print("\n".join(done.stdout.splitlines()[-25:]))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize(("protocol", "otherwise"), [
    ("openai-chat", OTHERWISE), ("open-responses", OTHERWISE), ("anthropic", {"Image Input"}),
])  # fmt: skip
def test_llm_comply(url: str, tmp_path: Path, protocol: str, otherwise: set[str]) -> None:
    done = run(
        tmp_path, "llm-comply", "-u", f"{url}/v1", "-m", "scripted", "-k", "none", "--format", protocol, "--json"
    )
    results = json.loads(done.stdout)["results"]
    failed = {result["name"]: result for result in results if result["status"] == "failed"}
    passed = sum(result["status"] == "passed" for result in results)
    print(f"{protocol}: {passed} passed, {sorted(failed)} not")
    assert set(failed) == otherwise, failed
