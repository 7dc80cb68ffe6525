"""The tokens of a turn: through the tokenizer's chat template where it has one, else the text as it is."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from transformers import PreTrainedTokenizerBase

from ..errors import InputError


def turn_tokens(
    tokenizer: PreTrainedTokenizerBase, turns: Seq[tuple[str, str]], tokens: Seq[int], text: str
) -> list[int]:
    """Returns the token ids that a user's `text` adds to a session that holds `tokens` after `turns` (role, text).

    With a template: all that it puts behind the last answer, up to where the next answer begins. Answers are never
    rendered again, their tokens are those that were generated; where generation has ended with the end-of-text token,
    the template's own is left out. Raises InputError where nothing is added, or the template rewrites earlier turns.
    """
    if not text:
        raise InputError("the message is empty: give at least one character")
    if getattr(tokenizer, "chat_template", None) is None:
        added = tokenizer(text, add_special_tokens=not tokens)["input_ids"]
    else:
        added = tokenizer(_templated(tokenizer, turns, tokens, text), add_special_tokens=False)["input_ids"]
    if not added:
        raise InputError("the message has no tokens")
    return [int(token) for token in added]


def _templated(tokenizer: PreTrainedTokenizerBase, turns: Seq[tuple[str, str]], tokens: Seq[int], text: str) -> str:
    whole = _render(tokenizer, [*turns, ("user", text)])
    if not turns:
        return whole
    role, answer = turns[-1]
    before = _render(tokenizer, turns[:-1]) + answer if role == "assistant" else _render(tokenizer, turns)
    if not whole.startswith(before):
        raise InputError(
            "the tokenizer's chat template rewrites earlier turns, so what is computed of them cannot be kept: use "
            "another template, or send token ids"
        )
    added = whole[len(before) :]
    end = tokenizer.eos_token
    if end and tokens and tokens[-1] == tokenizer.eos_token_id and added.startswith(end):
        added = added[len(end) :]
    return added


def _render(tokenizer: PreTrainedTokenizerBase, turns: Seq[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
