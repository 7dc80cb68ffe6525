"""Render conversations with the tokenizer's chat template, for `LLM.chat`, sessions and servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..errors import InputError

Message = Mapping[str, Any]
"""A message: `role`, `content` (a text or a list of `{"type": "text", "text": ...}`), and other template fields."""

Tool = Mapping[str, Any] | Callable[..., Any]
"""A function that the model may call: a JSON schema, or a Python function with annotations and a docstring."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Render a conversation as text that includes the special tokens.

    Args:
        tools: Functions that the model may call.
        chat_template_kwargs: Additional variables for the template.
        add_generation_prompt: End the text with the header of a new assistant message.
        continue_final_message: Omit the end of the last message, so that the model continues this message.

    Raises:
        InputError: The tokenizer has no chat template, an argument is invalid, or the template rejects the messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("the tokenizer has no chat template: give it one, or send a plain prompt")
    for name, value, kind in (
        ("tools", tools, Sequence), ("chat_template_kwargs", chat_template_kwargs, Mapping),
        ("add_generation_prompt", add_generation_prompt, bool),
        ("continue_final_message", continue_final_message, bool),
    ):  # fmt: skip
        if not isinstance(value, kind) and (value is not None or kind is bool):
            raise InputError(f"{name}={value!r:.80} is {type(value).__name__}; it must be a {kind.__name__}")
    more = _template_options(tokenizer, chat_template_kwargs or {})
    plain = [_plain_message(message) for message in _check_messages(messages)]
    try:
        rendered = tokenizer.apply_chat_template(
            plain,
            tools=list(tools) if tools else None,  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **more,
        )
    except (TemplateError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"the tokenizer's chat template refuses this conversation ({error}): use another template, or send token "
            "ids"
        ) from error
    return str(rendered)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool = False) -> list[int]:
    """Tokenize a text. If `special_tokens` is False, none are added, so the text must already contain them.

    Raises InputError if the text has a lone surrogate (half of a UTF-16 pair).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text has an unpaired surrogate at character {error.start:,} ({text[error.start]!r})"
        ) from None
    return [int(token) for token in tokenizer(text, add_special_tokens=special_tokens)["input_ids"]]


def _check_messages(messages: object) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InputError(f'messages={messages!r:.80}: give a list of {{"role": ..., "content": ...}}, at least one')
    return messages


def _plain_message(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f'a message is {message!r:.80}: it must be a mapping with "role" and "content"')
    found, content = dict(message), message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        found["content"] = "".join(_part_text(part) for part in content)
    return found


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise InputError(f"a part of a message is {part!r:.80}: only text is supported")
    return text


def _template_options(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`. Raise InputError if any of its names is also a parameter of `apply_chat_template`."""
    wrong = next((name for name in given if not isinstance(name, str)), None)
    if wrong is not None:
        raise InputError(f"chat_template_kwargs has the name {wrong!r:.80}: names of variables must be strings")
    taken = sorted(given.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys())
    if taken:
        raise InputError(f"chat_template_kwargs has {', '.join(taken)}: only variables of the template are allowed")
    return dict(given)
