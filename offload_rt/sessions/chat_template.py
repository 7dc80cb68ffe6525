"""The tokens of a turn: through the tokenizer's chat template where it has one, else the text as it is.

What is computed of a conversation stays: an answer is what the model wrote, token for token, whatever a template would
print of it later (many trim answers, or leave out earlier thinking). Only what a template puts behind an answer is
rendered, with a marker in the answer's place.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..errors import InputError
from .chat_render import encode_rendered, render_chat
from .history import History

_MARKER = "offloadrtanswer"


@dataclass(frozen=True)
class TurnTokens:
    """What a turn does to a session of `held` tokens: its last `dropped` tokens leave, and `added` follow."""

    held: int
    dropped: int
    added: tuple[int, ...]


def turn_tokens(
    tokenizer: PreTrainedTokenizerBase, history: History, text: str, ends: AbstractSet[int] = frozenset()
) -> TurnTokens:
    """Returns the tokens that a user's `text` adds to a session with this history. ends: tokens that end an answer.

    With a template: all that it puts behind the last answer, up to where the next answer begins. A token that ended the
    answer leaves (it has no row yet): the template's own end of a turn stands for it, which may be another one. Where
    the template does not show an answer as it is at all, what it makes of the conversation is compared with the tokens
    that there are: those before the first difference stay, the others are computed again, and a warning says so.

    Raises InputError where nothing is added, or the template refuses the conversation.
    """
    if not text:
        raise InputError("the message is empty: give at least one character")
    tokens, dropped = history.tokens, 0
    if getattr(tokenizer, "chat_template", None) is None:
        added = encode_rendered(tokenizer, text, special_tokens=not tokens)
    elif not tokens:
        added = encode_rendered(tokenizer, _render_turns(tokenizer, [*_system(history), ("user", text)]))
    elif (behind := _behind_answer(tokenizer, history, text)) is not None:
        added = encode_rendered(tokenizer, behind)
        dropped = int(tokens[-1] in ends)
    else:
        turns = [*_system(history), *history.turns, ("user", text)]
        added = encode_rendered(tokenizer, _render_turns(tokenizer, turns))
        same = _common(tokens, added[:-1])
        dropped, added = len(tokens) - same, added[same:]
        warnings.warn(
            f"the chat template rewrites earlier turns: {dropped:,} of the {len(tokens):,} tokens of session "
            f"{history.name!r} are computed again",
            stacklevel=2,
        )
    if not added:
        raise InputError("the message has no tokens")
    return TurnTokens(len(tokens), dropped, tuple(added))


def _behind_answer(tokenizer: PreTrainedTokenizerBase, history: History, text: str) -> str | None:
    """What the template puts behind the last answer where `text` follows it; None where it hides or refuses the answer.
    Earlier turns are there by number alone: what they said may be anything."""
    marker = _MARKER
    while marker in text:
        marker += "x"
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


def _common(one: Seq[int], other: Seq[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
