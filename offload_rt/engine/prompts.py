"""What callers give as prompts: texts, token ids, and what tokenizers return."""

from __future__ import annotations

from collections import UserString
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Protocol

from ..errors import InputError
from ..utils.config_fields import check_choice


class Listed(Protocol):
    """A tensor or an array."""

    def tolist(self) -> Any:
        """Nested lists of its numbers."""
        ...


PromptLike = str | Sequence[int] | Listed | Mapping[str, Any]
"""A text, or token ids `[T]`: a list, a tensor, an array, or what a tokenizer returned."""

TRUNCATE = ("head", "tail", "middle")
"""Which part of a text that is too long may be left out."""

WANTED = "give a text, or its token ids (a list, tensor or array of whole numbers, or what a tokenizer returned)"


def one_prompt(prompt: object) -> str | list[int]:
    """The text, or the token ids. Raises InputError, with what it got, for anything else and for several prompts."""
    found = each_prompt(prompt)
    if len(found) != 1:
        raise InputError(f"{len(found)} prompts where one is wanted: {WANTED}")
    return found[0]


def each_prompt(prompts: object) -> list[str | list[int]]:
    """One prompt or several: a text, ids `[T]` and a tokenizer's output of one text are one; a list of these, ids
    `[B, T]` and a tokenizer's output of several are several. Of a tokenizer's output what its mask leaves out
    (padding) is no part of a prompt. Raises InputError, with what it got."""
    if isinstance(prompts, (str, UserString)):
        return [str(prompts)]
    if isinstance(prompts, (bytes, bytearray)):
        raise InputError(f"a prompt is {type(prompts).__name__}: decode it to text, or {WANTED}")
    if _encoding(prompts):
        return [list(ids) for ids in _unpadded(prompts)]
    values = _plain(prompts)
    if not isinstance(values, list):
        raise InputError(f"a prompt is {prompts!r:.80}, of type {type(prompts).__name__}: {WANTED}")
    if not values or _whole(values[0]):
        return [_ids(values)]
    try:
        return [one_prompt(value) for value in values]
    except RecursionError:
        raise InputError(f"a prompt is {type(prompts).__name__}, in which lists have no end: {WANTED}") from None


def token_ids(ids: object) -> list[int]:
    """Token ids alone, as `one_prompt` takes them."""
    found = one_prompt(ids)
    if isinstance(found, str):
        raise InputError(f"a text where token ids are wanted: {found!r:.80}")
    return found


def shortened(ids: Sequence[int], room: int, truncate: str | None, what: str) -> list[int]:
    """At most `room` of a text's token ids: all of them, or with its "head", "tail" or "middle" left out (then half of
    what stays is the beginning, half the end). Raises InputError, with the numbers, where the text, called `what`, is
    too long and nothing was said (None), or nothing of it would stay."""
    if len(ids) <= room:
        return list(ids)
    if truncate is None or room < 1:
        raise InputError(
            f"{what} has {len(ids):,} tokens, and there is room for {max(0, room):,} beside what is to be written: "
            "--truncate tail leaves its end out, head its beginning, middle what lies between"
        )
    check_choice("truncate", truncate, TRUNCATE)
    first = {"head": 0, "tail": room, "middle": room // 2}[truncate]
    return [*ids[:first], *ids[len(ids) - (room - first) :]]


def _encoding(prompts: Any) -> bool:
    """Whether a tokenizer returned this. Raises InputError for a chat message, which is a mapping too."""
    if not isinstance(prompts, Mapping) and not hasattr(prompts, "input_ids"):
        return False
    if "input_ids" not in prompts:
        raise InputError(
            f"a prompt is a mapping with {', '.join(map(str, prompts))}: messages of a chat go to chat, "
            "or to a session's send"
        )
    return True


def _unpadded(encoding: Any) -> list[list[int]]:
    """Ids of each text of a tokenizer's output."""
    rows = _rows(encoding["input_ids"])
    if encoding.get("attention_mask") is None:
        return rows
    given = _plain(encoding["attention_mask"])
    masks = given if given and isinstance(given, list) and isinstance(given[0], list) else [given]
    shapes = [len(mask) if isinstance(mask, list) else None for mask in masks]
    if shapes != [len(row) for row in rows]:
        raise InputError("input_ids and attention_mask are not of the same shape")
    return [[i for i, m in zip(row, mask, strict=True) if m] for row, mask in zip(rows, masks, strict=True)]


def _rows(values: Any) -> list[list[int]]:
    """Whole numbers `[T]` or `[B][T]` as `[B][T]`."""
    plain = _plain(values)
    if not isinstance(plain, list):
        raise InputError(f"input_ids are {values!r:.80}, of type {type(values).__name__}: {WANTED}")
    nested = plain and not _whole(plain[0])
    return [_ids(_plain(row)) for row in plain] if nested else [_ids(plain)]


def _plain(values: Any) -> Any:
    """Lists of what has a length and an order; tensors and arrays as their nested lists."""
    if hasattr(values, "tolist"):
        try:
            return values.tolist()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"a prompt is {type(values).__name__} whose numbers cannot be read: {error!s:.80}"
            ) from error
    return list(values) if isinstance(values, (Sequence, range)) and not isinstance(values, (str, bytes)) else values


def _ids(values: Any) -> list[int]:
    if not isinstance(values, list):
        raise InputError(f"token ids are {values!r:.80}, of type {type(values).__name__}: {WANTED}")
    for wrong in (value for value in values if not _whole(value)):
        raise InputError(f"token ids have {wrong!r:.80}, of type {type(wrong).__name__}, among them: {WANTED}")
    return [index(value) for value in values]


def _whole(value: Any) -> bool:
    """Whether it counts as a token id: any whole number but True and False."""
    return hasattr(type(value), "__index__") and not isinstance(value, bool)
