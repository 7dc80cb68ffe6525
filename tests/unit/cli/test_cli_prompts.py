"""Test how the command line reads prompts, applies chat templates and returns several completions."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import Cli
from support.serving import TEMPLATE
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, SamplingParams

FLAGS = ("--max-new-tokens", "6", "--temperature", "0", "--policy", "full", "--host-memory", "4MiB")
GREEDY = SamplingParams(max_tokens=6, temperature=0)
QUESTION = "Who is Dick Shelton?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("instruct")
    tiny_checkpoint(folder, "llama", num_hidden_layers=2, max_position_embeddings=256)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, policy="full", host_memory="4MiB")


def test_a_prompt_is_given_piped_or_in_a_file(
    cli: Cli, model: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text(QUESTION)
    expected = llm.generate(QUESTION, GREEDY)[0].outputs[0].text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(QUESTION.encode())))
    ways = ([QUESTION], ["--prompt-file", str(tmp_path / "prompt.txt")], [])
    assert [cli("generate", model, *way, *FLAGS).out for way in ways] == [expected] * 3
    cli("generate", model, QUESTION, "--prompt-file", "x", *FLAGS).fails_with("not both")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    cli("generate", model, *FLAGS).fails_with("no prompt", "pipe a text to stdin")
    monkeypatch.setattr(sys, "stdin", None)  # closed
    cli("generate", model, *FLAGS).fails_with("empty")


def test_chat_applies_the_chat_template(cli: Cli, model: str, llm: LLM) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = llm.chat(asked, GREEDY)[0].outputs[0].text
    flags = ("--chat", "--system", "Be brief.", *FLAGS)
    for order in ((QUESTION, *flags), (*flags, QUESTION), (*flags[:3], QUESTION, *flags[3:])):
        assert cli("generate", model, *order).out == expected
    cli("generate", model, *flags, QUESTION, "more").fails_with("unrecognized arguments: more")
    assert cli("generate", model, QUESTION, "--chat", *FLAGS).out == llm.chat(asked[1:], GREEDY)[0].outputs[0].text
    assert expected != llm.generate(QUESTION, GREEDY)[0].outputs[0].text
    cli("generate", model, QUESTION, "--system", "Be brief.", *FLAGS).fails_with("--system needs --chat")
    cli("generate", model, QUESTION, "--chat", "--prompt-tokens", "3", *FLAGS).fails_with("--prompt-tokens needs")
    cli("generate", "reference", QUESTION, "--chat", *FLAGS).fails_with("chat template")


def test_truncation_keeps_the_chat_template_and_the_question(cli: Cli, model: str) -> None:
    long = "It was a dark night. " * 90 + QUESTION
    cli("generate", model, long, "--chat", *FLAGS).fails_with("--truncate")
    asked = cli("generate", model, long, "--chat", "--truncate", "head", *FLAGS)
    assert asked.code == 0 and f"{QUESTION}" in asked.err.replace("\n", " ")


def test_several_completions_are_printed(cli: Cli, model: str, llm: LLM) -> None:
    sampled = SamplingParams(max_tokens=6, temperature=0.9, seed=3, n=3)
    texts = [one.text for one in llm.generate(QUESTION, sampled)[0].outputs]
    flags = ("--max-new-tokens", "6", "--temperature", "0.9", "--seed", "3", "-n", "3", *FLAGS[4:])
    found = cli("generate", model, QUESTION, *flags)
    assert found.out == "".join(f"{text}\n" for text in texts) and "3 of 3" in found.err
    beams = llm.generate(QUESTION, SamplingParams(max_tokens=6, temperature=0, num_beams=3))[0].outputs[0].text
    assert cli("generate", model, QUESTION, *FLAGS, "--num-beams", "3").out == f"{beams}\n"
    cli("generate", model, QUESTION, *flags, "--stats-json", "x").fails_with("--stats-json", "remove -n")


def test_the_system_message_of_a_stored_chat_cannot_change(
    cli: Cli, model: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(*flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who is\\\nDick Shelton?\n"))  # one message of two lines
        run = cli("chat", model, "--session", "s", "--store", str(tmp_path), *FLAGS, *flags)
        return run.code, run.out, run.err

    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is\nDick Shelton?"}]
    expected = llm.chat(asked, GREEDY)[0].outputs[0].text
    assert talk("--system", "Be brief.")[:2] == (0, f"{expected}\n")
    assert talk("--system", "Be brief.")[0] == 0 == talk()[0]
    code, _, error = talk("--system", "Be long.")
    assert code == 2 and "the system message 'Be brief.'" in error and "new session" in error


def test_a_chat_reports_truncated_turns(cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(("It was a dark night. " * 5 + "\n") * 6))
    run = cli("chat", model, "--session", "s", "--store", str(tmp_path), *FLAGS)
    assert run.code == 0 and "the conversation exceeded the context length: its oldest" in run.err
