"""Test multi-turn chats with the chat templates of several model families.

Each turn appends the text that the template puts between two answers, so the KV of earlier turns stays valid.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from offload_rt import LLM, InputError, SamplingParams
from offload_rt.sessions.chat_template import TurnTokens, turn_tokens
from offload_rt.sessions.history import History

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"


@dataclass(frozen=True)
class Family:
    special_tokens: tuple[str, ...]
    end_tokens: tuple[str, ...]
    answer: str
    text_between_answers: str  # if the user message is "U"


PLAIN = " Well,\n\nlet me see. \n"
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML_BETWEEN_ANSWERS = "<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
FAMILIES = {
    "llama3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        ("<|eot_id|>", "<|end_of_text|>"),
        PLAIN,
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "qwen25": Family(CHATML, ("<|im_end|>", "<|endoftext|>"), PLAIN, CHATML_BETWEEN_ANSWERS),
    "qwen3": Family(
        (*CHATML, "<think>", "</think>"),
        ("<|im_end|>", "<|endoftext|>"),
        "<think>\nWhat can they mean?\n</think>\n\nYes. ",
        CHATML_BETWEEN_ANSWERS,
    ),
    "gemma3": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
        PLAIN,
        "<end_of_turn>\n<start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\n",
    ),
    "mistral": Family(("<s>", "</s>", "[INST]", "[/INST]"), ("</s>",), PLAIN, " </s>[INST] U [/INST]"),
    "phi3": Family(
        ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        ("<|endoftext|>", "<|end|>"),
        PLAIN,
        "<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n",
    ),
    "smollm2": Family(CHATML, ("<|im_end|>",), PLAIN, CHATML_BETWEEN_ANSWERS),
    "gpt_oss": Family(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|endoftext|>"),
        ("<|return|>", "<|endoftext|>"),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes. ",
        "<|end|><|start|>user<|message|>U<|end|><|start|>assistant",
    ),
}


@cache
def byte_tokenizer(name: str) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(token, normalized=False) for token in FAMILIES[name].special_tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=FAMILIES[name].end_tokens[0])
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def token_ids(name: str, text: str) -> list[int]:
    return list(byte_tokenizer(name)(text, add_special_tokens=False)["input_ids"])


def end_token_ids(name: str) -> frozenset[int]:
    return frozenset(token_ids(name, "".join(FAMILIES[name].end_tokens)))


def history_with_answers(name: str, answers: list[list[int]]) -> History:
    history = History("s", "m")
    for answer in answers:
        turn = turn_tokens(byte_tokenizer(name), history, "U", end_token_ids(name))
        kept = history.tokens[: len(history.tokens) - turn.dropped]
        history.tokens = [*kept, *turn.added, *answer]
        text = byte_tokenizer(name).decode(answer, skip_special_tokens=True)
        history.turns += [("user", "U"), ("assistant", text)]
    return history


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_that_stop_at_any_token_are_kept(name: str) -> None:
    family, tokenizer = FAMILIES[name], byte_tokenizer(name)
    written = token_ids(name, family.answer)
    answers = [written[:size] for size in range(1, len(written) + 1)]
    answers += [[*written, *token_ids(name, end)] for end in family.end_tokens]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for answer in answers:
            history = history_with_answers(name, [token_ids(name, family.answer), answer])
            turn = turn_tokens(tokenizer, history, "U", end_token_ids(name))
            assert turn.tokens_before == len(history.tokens) and turn.dropped == (answer[-1] in end_token_ids(name))
            assert tokenizer.decode(turn.added) == family.text_between_answers
            kept = tokenizer.decode(history.tokens[: turn.tokens_before - turn.dropped])
            assert kept.endswith(family.text_between_answers + tokenizer.decode(answer[: len(answer) - turn.dropped]))
            assert kept.count(family.answer) == 1 + kept.endswith(family.answer), "the first answer is unchanged"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_turn_is_the_whole_template(name: str) -> None:
    tokenizer = byte_tokenizer(name)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "U"}], tokenize=False, add_generation_prompt=True
    )
    turn = turn_tokens(tokenizer, History("s", "m"), "U", end_token_ids(name))
    assert (turn.tokens_before, turn.dropped, tokenizer.decode(turn.added)) == (0, 0, whole)


def test_a_message_may_contain_the_internal_marker() -> None:
    history = history_with_answers("qwen25", [token_ids("qwen25", "Yes.")])
    turn = turn_tokens(byte_tokenizer("qwen25"), history, "offloadrtanswer offloadrtanswerx", end_token_ids("qwen25"))
    assert "user\nofloadrtanswer".replace("ofl", "offl") in byte_tokenizer("qwen25").decode(turn.added)


def tokenizer_with_template(name: str, template: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(name)._tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


UPPERCASE_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}<|im_start|>"


def test_rewritten_turns_are_recomputed_with_a_warning() -> None:
    tokenizer = tokenizer_with_template("qwen25", UPPERCASE_TEMPLATE)
    history = History("s", "m", tokens=token_ids("qwen25", "<|im_start|>A<|im_end|><|im_start|>Yes."))
    history.turns = [("user", "a"), ("assistant", "Yes.")]
    with pytest.warns(UserWarning, match=r"rewrites earlier turns: 3 of the 8 tokens of session 's'"):
        turn = turn_tokens(tokenizer, history, "b", end_token_ids("qwen25"))
    assert turn == TurnTokens(8, 3, tuple(token_ids("qwen25", "ES.<|im_end|><|im_start|>B<|im_end|><|im_start|>")))


def test_errors_of_the_template_are_reported() -> None:
    tokenizer = tokenizer_with_template("qwen25", "{{ raise_exception('no conversation today') }}")
    for tokens in ([], [1, 2, 3]):
        with pytest.raises(InputError, match=r"refuses this conversation .*no conversation today"):
            turn_tokens(tokenizer, History("s", "m", tokens=tokens), "b")


# ------------------------------------------------------------------------------------------------------- whole sessions


def make_llm(name: str, tokenizer: Any = None) -> LLM:
    model = tiny_model("llama", dtype=torch.float32, vocab_size=280)
    return LLM(model, tokenizer=tokenizer or byte_tokenizer(name), dtype="float32", host_memory="16MiB", policy="full")


@pytest.mark.parametrize("how", ["length", "closed"])
def test_sessions_continue_after_answers_of_any_length(how: str, tmp_path: Path) -> None:
    llm = make_llm("llama3")
    session = llm.session("s", tmp_path)
    for size in range(1, 6):
        before = session.tokens
        events = session.send("U", SamplingParams(max_tokens=size if how == "length" else 50, temperature=0))
        answer = [next(events).token_id for _ in range(size)]
        if how == "length":
            assert list(events) == []
        events.close()  # type: ignore[attr-defined]
        behind = token_ids("llama3", FAMILIES["llama3"].text_between_answers)
        assert not before or session.tokens == [*before, *behind, *answer]
        prompt = session.tokens[: len(session.tokens) - size]
        assert completed(llm.generate([prompt], SamplingParams(max_tokens=size, temperature=0)))[0].token_ids == answer
        assert session.last_stats is not None and session.last_stats.reused_tokens == max(0, len(before) - 1)
        session.check_integrity()
    session.close()


def test_the_next_turn_replaces_the_end_token(tmp_path: Path) -> None:
    """An answer's end token has no KV yet, so the next turn can replace it."""
    llm, params = make_llm("llama3"), SamplingParams(max_tokens=5, temperature=0)
    session = llm.session("s", tmp_path)
    end = [event.token_id for event in llm.session("other", tmp_path).send("U", params)][3]
    object.__setattr__(llm.runner.model, "eos_token_ids", frozenset([end]))
    assert [event.finish_reason for event in session.send("U", params)][-1] == "stop"
    before = session.tokens
    assert before[-1] == end
    events = session.send("U", params)
    events.close()  # type: ignore[attr-defined]
    assert session.tokens == before  # closing a turn early restores the end token
    first = next(session.send("U", params)).token_id
    assert session.tokens == [*before[:-1], *token_ids("llama3", FAMILIES["llama3"].text_between_answers), first]
    assert session.last_stats is not None and session.last_stats.reused_tokens == len(before) - 1
    session.check_integrity()


def test_a_session_recomputes_rewritten_turns(tmp_path: Path) -> None:
    llm = make_llm("qwen25", tokenizer_with_template("qwen25", UPPERCASE_TEMPLATE))
    params = SamplingParams(max_tokens=5, temperature=0)
    session = llm.session("s", tmp_path)
    list(session.send("aaa " * 30, params))
    before = session.tokens
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        events = session.send("b", params)
    events.close()  # type: ignore[attr-defined]
    assert session.tokens == before  # a turn that is closed before its first token changes nothing
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        answer = [event.token_id for event in session.send("b", params)]
    session.check_integrity()
    assert session.tokens[: len(before)] != before
    prompt = session.tokens[:-5]
    assert completed(llm.generate([prompt], params))[0].token_ids == answer
    session.close()
    reopened = make_llm("qwen25", tokenizer_with_template("qwen25", UPPERCASE_TEMPLATE)).session("s", tmp_path)
    assert reopened.tokens == [*prompt, *answer]
    reopened.close()


@pytest.mark.parametrize("model", ["smollm2", pytest.param("qwen", marks=pytest.mark.slow)])
def test_templates_of_downloaded_models(model: str) -> None:
    folder = Path.home() / ".cache" / "offload-rt-models" / model
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"{model} is not on this machine")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    history = History("s", "m")
    first = turn_tokens(tokenizer, history, "Hello")
    answer = tokenizer("  A\n\nB. \n", add_special_tokens=False)["input_ids"]
    history.tokens = [*first.added, *answer, tokenizer.eos_token_id]
    history.turns = [("user", "Hello"), ("assistant", "  A\n\nB. \n")]
    second = turn_tokens(tokenizer, history, "And then?", {tokenizer.eos_token_id})
    text = tokenizer.decode([*history.tokens[: second.tokens_before - second.dropped], *second.added])
    messages = [*history.turns, ("user", "And then?")]
    rendered = [{"role": role, "content": content} for role, content in messages]
    assert text == tokenizer.apply_chat_template(rendered, tokenize=False, add_generation_prompt=True)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def test_chat_adds_special_tokens_once() -> None:
    llm, params, tokenizer = make_llm("llama3"), SamplingParams(max_tokens=4, temperature=0), byte_tokenizer("llama3")
    talks = [
        [{"role": "user", "content": "U"}],
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "UV"]},
        ],
    ]
    outputs = llm.chat(talks, params)
    talks[1][1] = {"role": "user", "content": "UV"}
    for talk, output in zip(talks, outputs, strict=True):
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert (output.prompt, output.prompt_token_ids) == (text, token_ids("llama3", text))
        assert text.count("<|begin_of_text|>") == 1
        [alone] = llm.generate([output.prompt_token_ids], params)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert llm.chat(talk, params)[0].prompt == text
    closed = llm.chat(talks[0], params, add_generation_prompt=False)[0].prompt
    assert closed is not None and outputs[0].prompt == f"{closed}<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_chat_gives_tools_and_variables_to_the_template() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer("llama3")._tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }} {{ tools[0].function.name if tools }} {{ thinking }}"
    llm, talk = make_llm("llama3", tokenizer), [{"role": "user", "content": "U"}]
    options = {"tools": [WEATHER], "chat_template_kwargs": {"thinking": "hard"}}
    [output] = llm.chat(talk, SamplingParams(max_tokens=1), **options)  # type: ignore[arg-type]
    assert output.prompt == "U weather hard" and llm.chat_prompt(talk)[0] == "U  "


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([{"role": "assistant", "content": "A"}], {}, "refuses this conversation"),
        ([], {}, "at least one"),
        ("Hello", {}, "give a list"),
        ([{"content": "U"}], {}, "a message is {'content': 'U'}"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "only text is supported"),
        ([{"role": "user", "content": "U"}], {"chat_template_kwargs": {"tokenize": True}}, "has tokenize: only"),
        ([{"role": "user", "content": "U"}], {"tools": [3]}, "refuses this conversation"),
    ],
)
def test_messages_that_the_template_cannot_render_are_input_errors(messages: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_llm("mistral").chat(messages, **options)


def test_chat_needs_a_template_and_a_tokenizer() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer("llama3")._tokenizer)
    with pytest.raises(InputError, match="no chat template"):
        make_llm("llama3", tokenizer).chat([{"role": "user", "content": "U"}])
    with pytest.raises(InputError, match="no tokenizer"):
        LLM(tiny_model("llama")).chat([{"role": "user", "content": "U"}])
