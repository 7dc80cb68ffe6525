"""Prompts as token ids: texts, and conversations through the model's chat template. Made in a thread of their own, so
that a long document holds up nobody's stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from ..errors import OffloadError
from ..sessions.chat_render import encode_rendered, render_chat
from .conversation import Conversation
from .errors import refused

T = TypeVar("T")


class Prompts:
    """What the model's tokenizer makes of texts. Raises RefusedError for what it cannot read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "offload-rt-prompts")

    @property
    def template(self) -> str:
        """The text of the chat template; empty where there is none."""
        found = getattr(self._tokenizer, "chat_template", None)
        if isinstance(found, Mapping):
            found = found.get("default")
        return found if isinstance(found, str) else ""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        if self._tokenizer is None:
            raise refused("this model has no tokenizer: send prompts as token ids to /v1/completions")
        return self._tokenizer

    async def of_text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return await self._in_thread(lambda: self._ids(text, special_tokens))

    async def of_conversation(self, conversation: Conversation, *, answer: bool = True) -> tuple[str, list[int]]:
        """The conversation as the template prints it, and its token ids. answer: with what begins the answer."""

        def make() -> tuple[str, list[int]]:
            text = self._rendered(conversation, answer)
            return text, self._ids(text, special_tokens=False)

        return await self._in_thread(make)

    async def spans_of(self, text: str, tokens: int) -> list[tuple[int, int]]:
        """Where in a rendered text each of its `tokens` tokens stands; empty where the tokenizer does not say."""

        def find() -> list[tuple[int, int]]:
            if not self.tokenizer.is_fast:
                return []
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            return [(int(a), int(b)) for a, b in found] if len(found) == tokens else []

        return await self._in_thread(find)

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        size = len(self.tokenizer)
        if wrong := [i for i in ids if i >= size]:
            raise refused(f"{wrong[0]} is no token of this model, which has {size:,}", "tokens")
        return await self._in_thread(lambda: str(self.tokenizer.decode(list(ids))))

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _ids(self, text: str, special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise refused("a text holds half a surrogate pair, which is no character") from None
        return encode_rendered(self.tokenizer, text, special_tokens=special_tokens)

    def _rendered(self, conversation: Conversation, answer: bool) -> str:
        if conversation.offered is not None and "tools" not in self.template:
            raise refused("the chat template of this model knows no tools: send the request without them", "tools")
        messages = [dict(message) for message in conversation.messages]
        for message in messages:
            if message["role"] == "developer" and "developer" not in self.template:
                message["role"] = "system"
        try:
            return render_chat(
                self.tokenizer,
                messages,
                tools=None if conversation.offered is None else conversation.tools,
                chat_template_kwargs=conversation.template,
                add_generation_prompt=answer,
            )
        except OffloadError:
            raise
        except Exception as error:  # a template is a program, and its input is what a client sent
            raise refused(f"the chat template refuses this conversation: {error}", "messages") from error
