"""Tokenize the turns of a session, using the tokenizer's chat template if it has one.

The tokens of earlier turns must not change, because their KV would be lost. Many templates trim responses or omit
earlier reasoning, so the whole conversation is not rendered again. Instead, a marker replaces the last response, and
only the text after the marker is tokenized.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..errors import InputError
from ..utils.prefixes import common_prefix
from .chat_render import encode_rendered, render_chat
from .history import History

_MARKER = "offloadrtanswer"


@dataclass(frozen=True)
class TurnTokens:
    """How a session's tokens change when a turn starts.

    Attributes:
        dropped: Number of tokens to remove from the end.
        added: Tokens to append after the removal.
    """

    tokens_before: int
    dropped: int
    added: tuple[int, ...]


def turn_tokens(
    tokenizer: PreTrainedTokenizerBase, history: History, text: str, ends: AbstractSet[int] = frozenset()
) -> TurnTokens:
    """Return how a user message changes the tokens of a session. `ends` contains the tokens that end a response.

    With a chat template, the text between the last response and the next one is added. If the template would change the
    last response, a warning is issued and the whole conversation is tokenized again. All tokens after the first
    difference are then replaced.

    Raises:
        InputError: The message is empty or has no tokens, or the template rejects the conversation.
    """
    if not text:
        raise InputError("the message is empty: give at least one character")
    tokens, dropped = history.tokens, 0
    if getattr(tokenizer, "chat_template", None) is None:
        added = encode_rendered(tokenizer, text, special_tokens=not tokens)
    elif not tokens:
        added = encode_rendered(tokenizer, _render_turns(tokenizer, [*_system(history), ("user", text)]))
    elif (text_after := _text_after_response(tokenizer, history, text)) is not None:
        added = encode_rendered(tokenizer, text_after)
        # `added` begins with the template's own end-of-turn token, so the token that ended the response is removed.
        # Both tokens may differ, and the removed one has no KV yet.
        dropped = int(tokens[-1] in ends)
    else:
        turns = [*_system(history), *history.turns, ("user", text)]
        added = encode_rendered(tokenizer, _render_turns(tokenizer, turns))
        change = tokens_of_prompt(tokens, added)
        warnings.warn(
            f"the chat template rewrites earlier turns: {change.dropped:,} of the {len(tokens):,} tokens of session "
            f"{history.name!r} are computed again",
            stacklevel=2,
        )
        return change
    if not added:
        raise InputError("the message has no tokens")
    return TurnTokens(len(tokens), dropped, tuple(added))


def tokens_of_prompt(tokens: Seq[int], prompt: Seq[int]) -> TurnTokens:
    """Return the change that turns the `tokens` of a session into `prompt`.

    It keeps the common prefix. The last token of the prompt is always added, because a prefill needs at least one
    token.
    """
    same = common_prefix(tokens, prompt[:-1])
    return TurnTokens(len(tokens), len(tokens) - same, tuple(prompt[same:]))


def _text_after_response(tokenizer: PreTrainedTokenizerBase, history: History, text: str) -> str | None:
    """Render the user message `text`, and return the rendered text between the last response and the next one.

    Return None if the template changes or rejects the last response.
    """
    marker = _MARKER
    while marker in text:
        marker += "x"
    # Templates may depend on the number of earlier turns, so short placeholders replace them.
    earlier = [("user", "x"), ("assistant", "x")] * (len(history.turns) // 2 - 1)
    try:
        whole = _render_turns(tokenizer, [*earlier, ("user", "x"), ("assistant", marker), ("user", text)])
    except InputError:
        return None
    parts = whole.split(marker)
    return parts[1] if len(parts) == 2 else None


def _system(history: History) -> list[tuple[str, str]]:
    return [("system", history.system)] if history.system else []


def _render_turns(tokenizer: PreTrainedTokenizerBase, turns: Seq[tuple[str, str]]) -> str:
    return render_chat(tokenizer, [{"role": role, "content": content} for role, content in turns])
