"""The script that answers many questions about one document: computed once, in order, continued after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from support.outputs import completed
from support.scripts import load_example
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, InputError, SamplingParams

ROOT = Path(__file__).parents[3]
QUESTIONS = ["Who came?", "When did they arrive at the castle?", "Why?", "What was lost?", "Where is the arrow?"]
PARAMS = SamplingParams(max_tokens=6, temperature=0, stop="\n")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_example("answer_many")


@pytest.fixture(scope="module")
def document() -> str:
    return (ROOT / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8")[:3000]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("reference", policy="full", host_memory="256MiB")


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_those_of_single_runs_and_the_document_is_computed_once(
    script: ModuleType, llm: LLM, document: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    script.answer_file(llm, document, QUESTIONS, out, PARAMS, batch=3)
    assert [line["question"] for line in read(out)] == QUESTIONS
    bare = LLM("reference", policy="full", host_memory="256MiB", enable_prefix_caching=False)
    prompts = [
        llm.encode(document) + llm.encode(script.TEMPLATE.format(question=q), special_tokens=False) for q in QUESTIONS
    ]
    alone = [completed(bare.generate([prompt], PARAMS))[0].text.strip() for prompt in prompts]
    assert [line["answer"] for line in read(out)] == alone
    report = capsys.readouterr().err
    assert "[questions 1-3:" in report and "[questions 4-5:" in report
    again = completed(llm.generate(prompts, PARAMS))
    assert all(c.stats.reused_tokens >= len(llm.encode(document)) // 64 * 64 for c in again)


def test_an_instruct_model_is_asked_through_its_template(script: ModuleType, document: str, tmp_path: Path) -> None:
    model, out = tmp_path / "instruct", tmp_path / "answers.jsonl"
    tiny_checkpoint(model, "llama", num_hidden_layers=2)
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<me>")
    llm = LLM(model, policy="full", host_memory="64MiB")
    script.answer_file(llm, document, QUESTIONS, out, PARAMS, batch=8)
    asked = [[{"role": "user", "content": f"{document}\n\n{question}"}] for question in QUESTIONS]
    outputs = llm.chat(asked, SamplingParams(max_tokens=6, temperature=0))
    assert [line["answer"] for line in read(out)] == [output.outputs[0].text.strip() for output in outputs]
    assert all(output.num_cached_tokens >= 128 for output in outputs), "the document's tokens are the same ones"


def test_a_started_file_is_continued_and_a_foreign_one_refused(
    script: ModuleType, llm: LLM, document: str, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    script.answer_file(llm, document, QUESTIONS, whole, PARAMS, batch=2)
    script.answer_file(llm, document, QUESTIONS[:2], out, PARAMS, batch=2)
    script.answer_file(llm, document, QUESTIONS, out, PARAMS, batch=2)
    assert read(out) == read(whole)
    with pytest.raises(InputError, match="answers other questions"):
        script.answer_file(llm, document, QUESTIONS[::-1], out, PARAMS, batch=2)
    out.write_text("no answers\n", encoding="utf-8")
    with pytest.raises(InputError, match="no file of answers"):
        script.answer_file(llm, document, QUESTIONS, out, PARAMS, batch=2)


def test_a_document_is_cut_to_what_the_model_holds(script: ModuleType, llm: LLM) -> None:
    text = "word " * 5000
    assert len(script.document_tokens(llm, text, 100, None, "tail")) == llm.geometry.max_positions - 100
    with pytest.raises(InputError, match="--truncate tail to drop its end"):
        script.document_tokens(llm, text, 100, None)
    assert len(script.document_tokens(llm, text, 100, 50)) == 50
    with pytest.raises(InputError, match="--document-tokens 2040 must be between 1 and 1948"):
        script.document_tokens(llm, text, 100, 2040)
    with pytest.raises(InputError, match="need 5000 positions"):
        script.document_tokens(llm, text, 5000, None)
