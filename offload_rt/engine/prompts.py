"""Convert prompts, given as texts, lists, tensors, arrays or tokenizer outputs, to texts or lists of token ids."""

from __future__ import annotations

from collections import UserString
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Protocol

from ..errors import InputError
from ..utils.config_fields import check_choice


class Listed(Protocol):
    def tolist(self) -> Any: ...


PromptLike = str | Sequence[int] | Listed | Mapping[str, Any]
"""One prompt: a text, or token ids `[T]` as a list, tensor, array or tokenizer output."""

TRUNCATE = ("head", "tail", "middle")
"""Parts that can be removed from a text if it is too long."""

WANTED = "pass a text, or token ids (a list, tensor or array of integers, or a tokenizer's output)"


def one_prompt(prompt: object) -> str | list[int]:
    """Return a single prompt as a text or as token ids. Raise InputError for several prompts and for other types."""
    found = each_prompt(prompt)
    if len(found) != 1:
        raise InputError(f"{len(found)} prompts instead of one: {WANTED}")
    return found[0]


def each_prompt(prompts: object) -> list[str | list[int]]:
    """Return one or several prompts as a list, each as a text or as token ids. Raises InputError for other types.

    One prompt is a text, token ids `[T]`, or a tokenizer's output for one text. Several prompts are a list of these,
    token ids `[B, T]`, or a tokenizer's output for several texts. Padding is removed from tokenizer outputs.
    """
    if isinstance(prompts, (str, UserString)):
        return [str(prompts)]
    if isinstance(prompts, (bytes, bytearray)):
        raise InputError(f"a prompt is {type(prompts).__name__}: decode it to text, or {WANTED}")
    if _is_encoding(prompts):
        return [list(ids) for ids in _unpadded(prompts)]
    values = _as_list(prompts)
    if not isinstance(values, list):
        raise InputError(f"a prompt is {prompts!r:.80}, of type {type(prompts).__name__}: {WANTED}")
    if not values or _is_integer(values[0]):
        return [_ids(values)]
    try:
        return [one_prompt(value) for value in values]
    except RecursionError:
        raise InputError(f"a prompt is {type(prompts).__name__}, with lists nested too deeply: {WANTED}") from None


def token_ids(ids: object) -> list[int]:
    """Return the token ids of a single prompt as a list. Raise InputError for other types."""
    found = one_prompt(ids)
    if isinstance(found, str):
        raise InputError(f"a text instead of token ids: {found!r:.80}")
    return found


def shortened(ids: Sequence[int], max_tokens: int, truncate: str | None, what: str) -> list[int]:
    """Return at most `max_tokens` token ids. If there are more, remove the part given by `truncate`.

    `truncate` is "head", "tail" or "middle". Raise InputError if the text is too long and `truncate` is None, or if
    `max_tokens` is below 1. Error messages call the text `what`.
    """
    if len(ids) <= max_tokens:
        return list(ids)
    if truncate is None or max_tokens < 1:
        raise InputError(
            f"{what} has {len(ids):,} tokens, and {max(0, max_tokens):,} fit together with the new tokens: use "
            "--truncate tail to drop its end, head to drop its beginning, or middle"
        )
    check_choice("truncate", truncate, TRUNCATE)
    first = {"head": 0, "tail": max_tokens, "middle": max_tokens // 2}[truncate]
    return [*ids[:first], *ids[len(ids) - (max_tokens - first) :]]


def _is_encoding(prompts: Any) -> bool:
    if not isinstance(prompts, Mapping) and not hasattr(prompts, "input_ids"):
        return False
    if "input_ids" not in prompts:
        raise InputError(
            f"a prompt is a mapping with {', '.join(map(str, prompts))}: pass chat messages to chat, "
            "or to a session's send"
        )
    return True


def _unpadded(encoding: Any) -> list[list[int]]:
    rows = _token_rows(encoding["input_ids"])
    if encoding.get("attention_mask") is None:
        return rows
    given = _as_list(encoding["attention_mask"])
    masks = given if given and isinstance(given, list) and isinstance(given[0], list) else [given]
    shapes = [len(mask) if isinstance(mask, list) else None for mask in masks]
    if shapes != [len(row) for row in rows]:
        raise InputError("input_ids and attention_mask have different shapes")
    return [[i for i, m in zip(row, mask, strict=True) if m] for row, mask in zip(rows, masks, strict=True)]


def _token_rows(values: Any) -> list[list[int]]:
    plain = _as_list(values)
    if not isinstance(plain, list):
        raise InputError(f"input_ids are {values!r:.80}, of type {type(values).__name__}: {WANTED}")
    nested = plain and not _is_integer(plain[0])
    return [_ids(_as_list(row)) for row in plain] if nested else [_ids(plain)]


def _as_list(values: Any) -> Any:
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
    for wrong in (value for value in values if not _is_integer(value)):
        raise InputError(f"token ids contain {wrong!r:.80}, of type {type(wrong).__name__}: {WANTED}")
    return [index(value) for value in values]


def _is_integer(value: Any) -> bool:
    return hasattr(type(value), "__index__") and not isinstance(value, bool)
