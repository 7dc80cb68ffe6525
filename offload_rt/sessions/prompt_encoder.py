"""Convert prompts and conversations to the token ids of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.checks import check_token_ids
from ..engine.prompts import one_prompt
from ..errors import InputError
from ..models.loading import LoadedModel
from .chat_render import Message, encode_rendered, render_chat


class PromptEncoder:
    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def encode(self, prompt: object, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. For errors, see `LLM.encode`."""
        ids = one_prompt(prompt)
        if isinstance(ids, str):
            if self._model.tokenizer is None:
                raise InputError(f"{self._model.name} has no tokenizer: pass token ids, or set tokenizer=")
            ids = encode_rendered(self._model.tokenizer, ids, special_tokens=special_tokens)
        if not ids:
            raise InputError("the prompt is empty: it needs at least one token")
        check_token_ids(ids, self._model)
        return ids

    def chat(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[int]]:
        if self._model.tokenizer is None:
            raise InputError(f"{self._model.name} has no tokenizer: pass token ids to generate, or set tokenizer=")
        text = render_chat(self._model.tokenizer, messages, **options)
        return text, encode_rendered(self._model.tokenizer, text)

    def each_chat(self, messages: Sequence[Any], **options: Any) -> list[tuple[str, list[int]]]:
        """Apply `chat` to one conversation (a list of messages), or to every conversation in a list."""
        listed = messages if isinstance(messages, Sequence) else ()
        several = bool(listed) and all(isinstance(one, Sequence) and not isinstance(one, str) for one in listed)
        return [self.chat(one, **options) for one in (messages if several else [messages])]
