"""Test structured outputs with sampled tokens from a random model."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import cache
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import tiny_model

from offload_rt import LLM, AsyncLLM, ConfigError, InputError, SamplingParams
from offload_rt.engine import guided_decoding
from offload_rt.models.loading import load_model
from offload_rt.outputs import CompletionOutput
from offload_rt.sampling_params import StructuredOutputs

pytest.importorskip("llguidance", reason="llguidance is not installed (extra structured)")

SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"enum": ["Dick", "“Madam”", "Sir Daniel"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "arrows": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["who", "age", "arrows"],
    "additionalProperties": False,
}
CHOICE = ["the black arrow", "the black", 'a "forest"\n', "yes"]
LARK = 'start: sum "="\nsum: NUMBER ("+" NUMBER)~2\nNUMBER: /[1-9][0-9]?/'


@cache
def make_llm(exact: str | None = None) -> LLM:
    tokenizer = load_model("reference").tokenizer
    assert tokenizer is not None
    model = tiny_model("llama", num_hidden_layers=2, vocab_size=len(tokenizer), dtype=torch.float32)
    drafts = {} if exact is None else {"policy": "infinigen", "policy_options": {"budget": 0.3}, "exact": exact}
    return LLM(model, tokenizer=tokenizer, dtype="float32", host_memory="8MiB", **({"policy": "full"} | drafts))


def generate(exact: str | None = None, seed: int = 0, **structure: Any) -> CompletionOutput:
    params = SamplingParams(max_tokens=300, seed=seed, structured_outputs=StructuredOutputs(**structure))
    [found] = completed(make_llm(exact).generate("It was", params))
    return found


def has_structure(text: str, structure: dict[str, Any]) -> bool:
    if "json" in structure:
        found = json.loads(text)
        whole = found.keys() == {"who", "age", "arrows"} and found["who"] in SCHEMA["properties"]["who"]["enum"]  # type: ignore[index]
        return whole and 1 <= found["age"] <= 99 and 1 <= len(found["arrows"]) <= 3
    if "choice" in structure:
        return text in CHOICE
    pattern = structure.get("regex", r"[1-9][0-9]?(\+[1-9][0-9]?){2}=")
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize(
    "structure",
    [{"json": SCHEMA}, {"regex": r"\d{4}-\d{2}: [a-c]{3,5}"}, {"choice": CHOICE}, {"grammar": LARK}],
    ids=["json", "regex", "choice", "grammar"],
)
def test_every_answer_has_the_structure_and_ends(structure: dict[str, Any]) -> None:
    found = [generate(seed=seed, **structure) for seed in range(3)]
    assert all(one.finish_reason == "stop" and has_structure(one.text, structure) for one in found), found
    assert len({one.text for one in found}) > 1, "the model chooses among several texts"
    drafted = [generate("sparse", seed=seed, **structure) for seed in range(3)]
    assert [one.token_ids for one in drafted] == [one.token_ids for one in found]


def test_concurrent_answers_follow_their_own_structures() -> None:
    async def run() -> list[Any]:
        async with AsyncLLM(make_llm().under("full")) as engine:
            kinds = [{"regex": "[a-z]{6}"}, None, {"choice": CHOICE}, {"regex": "(("}]
            return await asyncio.gather(*(answer(engine, kind) for kind in kinds), return_exceptions=True)

    async def answer(engine: AsyncLLM, kind: Any) -> list[str]:
        structure = None if kind is None else StructuredOutputs(**kind)
        params = SamplingParams(max_tokens=12, seed=1, n=3, structured_outputs=structure)
        async for output in engine.generate("It was", params):
            last = output
        return [one.text for one in last.outputs]

    letters, free, chosen, wrong = asyncio.run(run())
    assert all(re.fullmatch("[a-z]{6}", text) for text in letters) and len(set(letters)) > 1
    assert all(text in CHOICE for text in chosen)
    [plain] = make_llm().generate("It was", SamplingParams(max_tokens=12, seed=1, n=3))
    assert free == [one.text for one in plain.outputs]
    assert isinstance(wrong, InputError) and "are invalid" in str(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "have nothing: set one of json"),
        ({"json": SCHEMA, "regex": "a"}, "have json and regex: set one of json"),
        ({"choice": []}, r"choice=\[\] allows no output"),
        ({"choice": [3]}, r"choice=\[3\] must be a string or a list"),
        ({"json": "{"}, "not a JSON schema: Expecting property name"),
        ({"json": [1]}, "not a JSON schema: it must be an object"),
        ({"regex": 3}, "regex=3 is int; it must be a string"),
    ],
    ids=str,
)
def test_invalid_structures_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StructuredOutputs(**wrong)


def schema_with_reference_chain(length: int, **base: str) -> dict[str, Any]:
    ref = "x/" if base else ""
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": ref or f"#/$defs/d{i + 1}"}}} | base
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "string"}}}


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": schema_with_reference_chain(1000)}, "levels deep"),
        ({"json": schema_with_reference_chain(1000, **{"$id": "x/"})}, "levels deep"),
        ({"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "z"'}, "rules"),
        ({"regex": "a" * 300_000}, "bytes"),
        ({"choice": ["a" * 1000 + str(i) for i in range(300)]}, "bytes"),
    ],
)
def test_structures_that_could_overflow_the_stack_are_refused(structure: dict[str, Any], message: str) -> None:
    """Without the refusal, some of these structures would crash the process."""
    with pytest.raises(InputError, match=message):
        generate(**structure)


def test_large_structures_within_the_limits_are_followed() -> None:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(350))
    assert generate(grammar=f'start: r0\n{rules}r350: "z"').text == "z"
    llm = make_llm()
    found = guided_decoding.GuidedDecoder(
        StructuredOutputs(json=schema_with_reference_chain(300)), llm.tokenizer, llm.geometry.vocab, [0]
    )
    assert found.allowed().any()


def test_unsupported_structures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="are invalid"):
        generate(json={"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}})
    with pytest.raises(InputError, match="are invalid"):
        generate(grammar="start: nothing")
    asked = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    with pytest.raises(InputError, match="fast tokenizer"):
        LLM(tiny_model("llama"), policy="full", host_memory="1MiB").generate([3], asked)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="need llguidance: pip install 'llguidance"):
        generate(regex="b")


@pytest.mark.parametrize("exact", [None, "sparse"])
def test_an_answer_without_allowed_tokens_is_an_error(exact: str | None) -> None:
    llm = make_llm(exact)
    [a] = llm.encode("a", special_tokens=False)
    asked = SamplingParams(temperature=0, allowed_token_ids=[a], structured_outputs=StructuredOutputs(regex="aaaab"))
    # With `exact`, the error already occurs in drafting.
    with pytest.raises(InputError, match="no token is allowed"):
        llm.generate("It was", asked)
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


def test_a_schema_may_be_a_string() -> None:
    assert StructuredOutputs(json=json.dumps(SCHEMA)) == StructuredOutputs(json=SCHEMA)


def test_the_token_table_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[str] = []
    table = guided_decoding._tokenizer_table

    def count_builds(tokenizer: Any, vocab: int, ends: tuple[int, ...]) -> Any:
        builds.append("once")
        return table(tokenizer, vocab, ends)

    monkeypatch.setattr(guided_decoding, "_tokenizer_table", count_builds)
    llm, asked = (
        make_llm(),
        SamplingParams(max_tokens=8, seed=1, n=2, structured_outputs=StructuredOutputs(regex="[ab]{9}c")),
    )
    first, second = (llm.generate(["It was"], asked)[0].outputs for _ in range(2))
    assert [one.text for one in first] == [one.text for one in second]
    assert builds == ["once"]
