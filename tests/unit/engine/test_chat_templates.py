"""Test multi-turn chats with the templates of several model families.

Each turn adds the text that the template puts after an answer. Answers are not changed, and no KV is computed twice.
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
    """Define the chat format of a model family.

    Attributes:
        special: Special tokens of the tokenizer.
        ends: Tokens that may end an answer.
        written: An answer as the model writes it.
        behind: Text between an answer and the next one if the user message is "U".
    """

    special: tuple[str, ...]
    ends: tuple[str, ...]
    written: str
    behind: str


PLAIN = " Well,\n\nlet me see. \n"
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML_BEHIND = "<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
FAMILIES = {
    "llama3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        ("<|eot_id|>", "<|end_of_text|>"),
        PLAIN,
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "qwen25": Family(CHATML, ("<|im_end|>", "<|endoftext|>"), PLAIN, CHATML_BEHIND),
    "qwen3": Family(
        (*CHATML, "<think>", "</think>"),
        ("<|im_end|>", "<|endoftext|>"),
        "<think>\nWhat can they mean?\n</think>\n\nYes. ",
        CHATML_BEHIND,
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
    "smollm2": Family(CHATML, ("<|im_end|>",), PLAIN, CHATML_BEHIND),
    "gpt_oss": Family(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|endoftext|>"),
        ("<|return|>", "<|endoftext|>"),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes. ",
        "<|end|><|start|>user<|message|>U<|end|><|start|>assistant",
    ),
}


@cache
def tokenizer_of(name: str) -> Any:
    """Return a tokenizer with one token per byte and the special tokens of the family."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(token, normalized=False) for token in FAMILIES[name].special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=FAMILIES[name].ends[0])
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def ids(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name)(text, add_special_tokens=False)["input_ids"])


def ends(name: str) -> frozenset[int]:
    return frozenset(ids(name, "".join(FAMILIES[name].ends)))


def conversation(name: str, answers: list[list[int]]) -> History:
    """Return a session with the given answers, built with `turn_tokens` alone."""
    history = History("s", "m")
    for answer in answers:
        turn = turn_tokens(tokenizer_of(name), history, "U", ends(name))
        kept = history.tokens[: len(history.tokens) - turn.dropped]
        history.tokens = [*kept, *turn.added, *answer]
        text = tokenizer_of(name).decode(answer, skip_special_tokens=True)
        history.turns += [("user", "U"), ("assistant", text)]
    return history


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_kept_wherever_it_ends(name: str) -> None:
    """An answer may stop at any token (Ctrl-C, length limit) or at any of the end tokens. Its KV must stay valid."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    written = ids(name, family.written)
    answers = [written[:size] for size in range(1, len(written) + 1)]
    answers += [[*written, *ids(name, end)] for end in family.ends]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for answer in answers:
            history = conversation(name, [ids(name, family.written), answer])
            turn = turn_tokens(tokenizer, history, "U", ends(name))
            assert turn.tokens_before == len(history.tokens) and turn.dropped == (answer[-1] in ends(name))
            assert tokenizer.decode(turn.added) == family.behind
            kept = tokenizer.decode(history.tokens[: turn.tokens_before - turn.dropped])
            assert kept.endswith(family.behind + tokenizer.decode(answer[: len(answer) - turn.dropped]))
            assert kept.count(family.written) == 1 + kept.endswith(family.written), "also the answer before"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_turn_is_the_whole_template(name: str) -> None:
    tokenizer = tokenizer_of(name)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "U"}], tokenize=False, add_generation_prompt=True
    )
    turn = turn_tokens(tokenizer, History("s", "m"), "U", ends(name))
    assert (turn.tokens_before, turn.dropped, tokenizer.decode(turn.added)) == (0, 0, whole)


def test_a_message_that_holds_the_marker_is_found() -> None:
    history = conversation("qwen25", [ids("qwen25", "Yes.")])
    turn = turn_tokens(tokenizer_of("qwen25"), history, "offloadrtanswer offloadrtanswerx", ends("qwen25"))
    assert "user\nofloadrtanswer".replace("ofl", "offl") in tokenizer_of("qwen25").decode(turn.added)


def hiding(name: str, template: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(name)._tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


SHOUTING = "{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}<|im_start|>"


def test_rewritten_turns_are_recomputed_with_a_warning() -> None:
    tokenizer = hiding("qwen25", SHOUTING)
    history = History("s", "m", tokens=ids("qwen25", "<|im_start|>A<|im_end|><|im_start|>Yes."))
    history.turns = [("user", "a"), ("assistant", "Yes.")]
    with pytest.warns(UserWarning, match=r"rewrites earlier turns: 3 of the 8 tokens of session 's'"):
        turn = turn_tokens(tokenizer, history, "b", ends("qwen25"))
    assert turn == TurnTokens(8, 3, tuple(ids("qwen25", "ES.<|im_end|><|im_start|>B<|im_end|><|im_start|>")))


def test_a_template_that_refuses_says_why() -> None:
    tokenizer = hiding("qwen25", "{{ raise_exception('no conversation today') }}")
    for tokens in ([], [1, 2, 3]):
        with pytest.raises(InputError, match=r"refuses this conversation .*no conversation today"):
            turn_tokens(tokenizer, History("s", "m", tokens=tokens), "b")


# ------------------------------------------------------------------------------------------------------- whole sessions


def make_llm(name: str, tokenizer: Any = None) -> LLM:
    model = tiny_model("llama", dtype=torch.float32, vocab_size=280)
    return LLM(model, tokenizer=tokenizer or tokenizer_of(name), dtype="float32", host_memory="16MiB", policy="full")


@pytest.mark.parametrize("how", ["length", "closed"])
def test_a_session_goes_on_from_every_length_of_an_answer(how: str, tmp_path: Path) -> None:
    """The template strips answers. Each answer must equal that of `generate` for `session.tokens`."""
    llm = make_llm("llama3")
    session = llm.session("s", tmp_path)
    for size in range(1, 6):
        before = session.tokens
        events = session.send("U", SamplingParams(max_tokens=size if how == "length" else 50, temperature=0))
        answer = [next(events).token_id for _ in range(size)]
        if how == "length":
            assert list(events) == []
        events.close()  # type: ignore[attr-defined]
        behind = ids("llama3", FAMILIES["llama3"].behind)
        assert not before or session.tokens == [*before, *behind, *answer]
        prompt = session.tokens[: len(session.tokens) - size]
        assert completed(llm.generate([prompt], SamplingParams(max_tokens=size, temperature=0)))[0].token_ids == answer
        assert session.last_stats is not None and session.last_stats.reused_tokens == max(0, len(before) - 1)
        session.check_integrity()
    session.close()


def test_an_end_token_is_replaced_by_the_templates_text(tmp_path: Path) -> None:
    """The template's text replaces the end token, which has no KV yet. Closing the turn early restores the token."""
    llm, params = make_llm("llama3"), SamplingParams(max_tokens=5, temperature=0)
    session = llm.session("s", tmp_path)
    end = [event.token_id for event in llm.session("other", tmp_path).send("U", params)][3]
    object.__setattr__(llm.runner.model, "eos_token_ids", frozenset([end]))
    assert [event.finish_reason for event in session.send("U", params)][-1] == "stop"
    before = session.tokens
    assert before[-1] == end
    events = session.send("U", params)
    events.close()  # type: ignore[attr-defined]
    assert session.tokens == before
    first = next(session.send("U", params)).token_id
    assert session.tokens == [*before[:-1], *ids("llama3", FAMILIES["llama3"].behind), first]
    assert session.last_stats is not None and session.last_stats.reused_tokens == len(before) - 1
    session.check_integrity()


def test_a_session_recomputes_rewritten_turns(tmp_path: Path) -> None:
    """If a turn is closed before its first token, the session keeps its earlier tokens."""
    llm = make_llm("qwen25", hiding("qwen25", SHOUTING))
    params = SamplingParams(max_tokens=5, temperature=0)
    session = llm.session("s", tmp_path)
    list(session.send("aaa " * 30, params))
    before = session.tokens
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        events = session.send("b", params)
    events.close()  # type: ignore[attr-defined]
    assert session.tokens == before
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        answer = [event.token_id for event in session.send("b", params)]
    session.check_integrity()
    assert session.tokens[: len(before)] != before
    prompt = session.tokens[:-5]
    assert completed(llm.generate([prompt], params))[0].token_ids == answer
    session.close()
    reopened = make_llm("qwen25", hiding("qwen25", SHOUTING)).session("s", tmp_path)
    assert reopened.tokens == [*prompt, *answer]
    reopened.close()


@pytest.mark.parametrize("model", ["smollm2", pytest.param("qwen", marks=pytest.mark.slow)])
def test_templates_of_models_on_this_machine(model: str) -> None:
    folder = Path.home() / ".cache" / "offload-rt-models" / model
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"{model} is not on this machine")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    history = History("s", "m")
    first = turn_tokens(tokenizer, history, "Hello")
    said = tokenizer("  A\n\nB. \n", add_special_tokens=False)["input_ids"]
    history.tokens = [*first.added, *said, tokenizer.eos_token_id]
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
    """Only the template may add special tokens. Cover one conversation and several."""
    llm, params, tokenizer = make_llm("llama3"), SamplingParams(max_tokens=4, temperature=0), tokenizer_of("llama3")
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
        assert (output.prompt, output.prompt_token_ids) == (text, ids("llama3", text))
        assert text.count("<|begin_of_text|>") == 1
        [alone] = llm.generate([output.prompt_token_ids], params)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert llm.chat(talk, params)[0].prompt == text
    shut = llm.chat(talks[0], params, add_generation_prompt=False)[0].prompt
    assert shut is not None and outputs[0].prompt == f"{shut}<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_chat_gives_tools_and_variables_to_the_template() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("llama3")._tokenizer)
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


def test_without_a_template_there_is_no_chat() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("llama3")._tokenizer)
    with pytest.raises(InputError, match="no chat template"):
        make_llm("llama3", tokenizer).chat([{"role": "user", "content": "U"}])
    with pytest.raises(InputError, match="no tokenizer"):
        LLM(tiny_model("llama")).chat([{"role": "user", "content": "U"}])
