"""Test `offload-rt batch`: every request gets exactly one result or error message, even after an interruption."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_checkpoint, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.cli import batch, main
from offload_rt.cli.batch import BatchRequest, Results, process, process_group, read_requests
from offload_rt.cli.flags import SAMPLING, add_sampling_flags
from offload_rt.cli.openai_batch import ServerRequest
from offload_rt.errors import InputError
from offload_rt.server.openai.requests import ChatRequest, CompletionRequest, RequestBody, ResponsesRequest

DEFAULTS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
PROMPTS = [tiny_prompt(20 + i, seed=i % 3) for i in range(7)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_checkpoint(tmp_path_factory.mktemp("batch"), "llama"), dtype="float32", policy="full")


def answer_all(
    llm: Any, requests: list[Any], results: Results, at_once: int = 8, show: Any = lambda done, of: None
) -> int:
    return results.add_all(process(llm, requests, DEFAULTS, at_once), len(requests), show)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests), encoding="utf-8")
    return path


def test_an_interrupted_batch_continues(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = read_requests(
        write_lines(tmp_path / "in", [{"id": f"q{i}", "prompt": p} for i, p in enumerate(PROMPTS)]), {}
    )
    out, real = tmp_path / "out", Results.add

    def add_and_interrupt(self: Results, answers: Any) -> None:
        real(self, answers)
        if len(read_lines(out)) >= 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Results, "add", add_and_interrupt)
        first = Results(out)
        with pytest.raises(KeyboardInterrupt):
            answer_all(llm, requests, first, at_once=2)
        with pytest.raises(InputError, match="another process"):
            Results(out)
        first.close()
    # The interrupted command has written only part of a line.
    out.write_bytes(out.read_bytes() + b'{"id": "q5", "outp')
    again = Results(out)
    left = [request for request in requests if request.id not in again.done]
    assert len(again.done) == 4 and len(left) == 3
    shown: list[tuple[int, int]] = []
    assert answer_all(llm, left, again, 2, lambda *done: shown.append(done)) == 0
    assert shown == [(2, 3), (3, 3)]
    again.close()
    found = {each["id"]: each["outputs"][0]["text"] for each in read_lines(out)}
    assert len(read_lines(out)) == len(found) == 7
    assert len(set(found.values())) > 3, "the texts differ"
    expected = llm.generate(PROMPTS, SamplingParams(**DEFAULTS))
    assert found == {f"q{i}": each.outputs[0].text for i, each in enumerate(expected)}


def test_only_invalid_requests_get_an_error(llm: LLM, tmp_path: Path) -> None:
    wrong = [{"prompt": PROMPTS[0]}, {"prompt": [10**6]}, {"prompt": PROMPTS[1], "max_tokens": 2}]
    answers = Results(tmp_path / "out")
    assert answer_all(llm, read_requests(write_lines(tmp_path / "in", wrong), DEFAULTS), answers) == 1
    answers.close()
    found = {each["id"]: each for each in read_lines(tmp_path / "out")}
    assert "vocabulary" in found["2"]["error"] and (found["1"]["new_tokens"], found["3"]["new_tokens"]) == (4, 2)


def test_line_separators_and_surrogates_are_valid_in_requests(llm: LLM, tmp_path: Path) -> None:
    asked = [{"id": "a", "prompt": "one\u2028two\u0085three"}, {"id": "\ud800", "prompt": PROMPTS[0], "num_beams": 2}]
    (tmp_path / "in").write_text(
        f"{json.dumps(asked[0], ensure_ascii=False)}\r\n{json.dumps(asked[1])}\n", encoding="utf-8", newline=""
    )
    answers = Results(tmp_path / "out")
    assert answer_all(llm, read_requests(tmp_path / "in", DEFAULTS), answers) == 0
    answers.close()
    assert {each["id"] for each in read_lines(tmp_path / "out")} == {"a", "\ud800"}


def test_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2))
    config = {"do_sample": True, "top_k": 1, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    requests = [BatchRequest(str(i), PROMPTS[0], None, {"max_tokens": 2} if i else {}) for i in range(2)]
    with LLM(folder, policy="full", verify="off", host_memory="8MiB") as llm:
        first, second = process_group(llm, requests, {"ignore_eos": True})
        [greedy] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert (first["new_tokens"], second["new_tokens"]) == (3, 2)
    assert first["outputs"][0]["text"] == greedy.outputs[0].text


def test_a_checkpoint_without_defaults_samples_as_in_other_commands(llm: LLM) -> None:
    given = {"seed": 1, "max_tokens": 8, "ignore_eos": True}
    [request] = process_group(llm, [BatchRequest("1", PROMPTS[0], None, {})], given)
    [expected] = llm.generate([PROMPTS[0]], SamplingParams(temperature=0.8, top_p=0.95, **given))
    assert request["outputs"][0]["text"] == expected.outputs[0].text


def test_prompts_with_a_common_prefix_are_grouped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        batch, "_generate_group", lambda llm, group, defaults: [order.append(one.id) or {"id": one.id} for one in group]
    )
    requests = [BatchRequest(str(i), f"{'AB'[i % 2]} {i}", None, {}) for i in range(6)]
    answers = Results(tmp_path / "out")
    answer_all(None, requests, answers, at_once=3)
    answers.close()
    assert order == ["0", "2", "4", "1", "3", "5"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a valid request"),
        ("[]", "a JSON object"),
        ('{"id": 1}', "'prompt' or 'messages'"),
        ('{"prompt": 5}', "a string or a list of token ids"),
        ('{"prompt": "a", "temprature": 1}', "'temprature' is not a sampling option; did you mean 'temperature'?"),
        ('{"prompt": "a", "guess": 1}', "'guess' is not a sampling option"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', "twice"),
    ],
)
def test_a_wrong_line_is_reported_before_the_model_is_loaded(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text(line, encoding="utf-8")
    assert main(["batch", "no-such-model", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_command_continues_its_output_and_refuses_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama")
    source = write_lines(tmp_path / "in", [{"prompt": each, "max_tokens": 2} for each in PROMPTS[:2]])
    arguments = ["batch", model, str(source), str(tmp_path / "out"), "--policy", "full"]
    assert main(arguments) == 0 and sorted(each["id"] for each in read_lines(tmp_path / "out")) == ["1", "2"]
    assert main(arguments) == 0 and "0 of 2 requests" in capsys.readouterr().err
    assert main([*arguments, "--ray", "0"]) == 2 and "at least 1" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert main([*arguments[:3], str(tmp_path / "new"), "--ray", "2"]) == 2
        assert "pip install 'ray[" in capsys.readouterr().err
    (tmp_path / "other").write_text("text\n", encoding="utf-8")
    assert main([*arguments[:3], str(tmp_path / "other")]) == 2 and "choose another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "notes without a line feed",
        '{"id": "a", "prompt": "x"}',
        '{"id": "a", "prompt": "x"}\n{"id": "b"',
        '{"id": "a", "prompt": "a long prom',
        '{"id": 1, "mess',
        "[1]\n",
    ],
)
def test_a_file_without_results_is_not_changed(tmp_path: Path, content: str) -> None:
    other = tmp_path / "other"
    other.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="choose another file"):
        Results(other)
    assert other.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ('{"id": "b\\"", "outputs": [], "new_tokens": 0}', ["a", 'b"']),
        ('{"id": "b\\"", "outputs": [], "new_tok', ["a"]),
        ('{"id": "b\\"", "err', ["a"]),
        ('{"id": "batch_req_1", "custom_id": "b", "resp', ["a"]),
        ('{"id": "b\\', ["a"]),
        ("{", ["a"]),
    ],
)
def test_only_an_incomplete_result_is_removed(tmp_path: Path, end: str, kept: list[str]) -> None:
    out = tmp_path / "out"
    out.write_text('{"id": "a", "error": "x"}\n' + end, encoding="utf-8")
    results = Results(out)
    results.add([{"id": "c", "error": "y"}])
    results.close()
    assert results.done == set(kept) and [line["id"] for line in read_lines(out)] == [*kept, "c"]


def openai_line(id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {"model": "gpt"} | body}


def test_results_in_openai_format_equal_generate(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "llama", head_dim=32)
    requests = [openai_line(f"q{i}", prompt=prompt, n=1 + i) for i, prompt in enumerate(PROMPTS[:3])]
    wrong = openai_line("wrong", prompt="x", temperature="hot")
    chat = {"custom_id": "chat", "url": "/v1/responses", "body": {"input": "Who?"}}  # the model has no chat template
    several = openai_line("several", prompt=PROMPTS[:4])  # more prompts than requests in a group
    source, out = write_lines(tmp_path / "in", [*requests, several, wrong, chat]), tmp_path / "out"
    arguments = ["batch", folder, str(source), str(out), "--policy", "full", "--at-once", "2", "--quiet"]
    arguments += ["--temperature", "0", "--max-new-tokens", "4", "--ignore-eos"]
    assert main(arguments) == 1, "one request failed"
    found = {line["custom_id"]: line for line in read_lines(out)}
    assert found.keys() == {"q0", "q1", "q2", "several", "wrong", "chat"}
    assert all(line["error"] is None for line in found.values())
    response = found["several"]["response"]
    assert response["status_code"] == 200 and len(response["body"]["choices"]) == 4
    [single] = LLM(folder, policy="full").generate([PROMPTS[1]], SamplingParams(**DEFAULTS))
    for i in range(3):
        response = found[f"q{i}"]["response"]
        texts = [choice["text"] for choice in response["body"]["choices"]]
        assert response["status_code"] == 200 and len(texts) == 1 + i and len(set(texts)) == 1
        assert response["body"]["usage"]["completion_tokens"] == 4 * (1 + i) and response["body"]["model"] == "gpt"
        assert i != 1 or texts[0] == single.outputs[0].text
    for id in ("wrong", "chat"):
        assert found[id]["response"]["status_code"] == 400 and found[id]["response"]["body"]["error"]["message"]
    before = out.read_bytes()
    assert main(arguments) == 0 and out.read_bytes() == before


def test_sampling_flags_are_fields_of_every_endpoint() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser, several=False)
    flags = [action.dest.removeprefix(SAMPLING) for action in parser._actions if action.dest.startswith(SAMPLING)]
    bodies: dict[str, type[RequestBody]] = {
        "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/v1/responses": ResponsesRequest
    }  # fmt: skip
    for path, body in bodies.items():
        request = ServerRequest("a", path, {"seed": 2})
        given = request.with_defaults(dict.fromkeys(flags, 1))
        assert len(given) == len(flags) and given["seed"] == 2 and given.keys() <= body.model_fields.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": 5}, "custom_id"),
        ({"url": "/v1/embeddings"}, "url must be"),
        ({"method": "GET"}, "method"),
        ({"body": []}, "body"),
        ({"body": {"stream": True}}, "stream"),
    ],
)
def test_invalid_lines_in_openai_format_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_requests(write_lines(tmp_path / "in", [openai_line("a", prompt="x") | change]), {})
