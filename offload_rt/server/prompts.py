"""Prompts as token ids: texts, and conversations through the model's chat template. They are made in threads beside the
event loop: long texts in one of their own, so that they delay neither streams nor short prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from ..errors import OffloadError
from ..sessions.chat_render import render_chat
from ..utils.allocator import give_back
from .conversation import Conversation
from .errors import refused
from .sampling import Room
from .tokenizing import TextTokenizer

T = TypeVar("T")

LONG = 1 << 18
"""Characters from which on a text counts as long: a second or less of tokenizing. Long texts go one by one."""

TOKEN_SIZE = 4
"""Characters that a token id counts for when a thread is chosen; a message counts for 16 times that, and its text."""

SHORT_THREADS = 2
"""Threads for other texts."""


class Prompts:
    """What the model's tokenizer makes of texts. Raises RefusedError for texts that it cannot read, and for long ones
    of more tokens than there is room for. Cancelling a call ends its work."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, room: Room) -> None:
        self._tokenizer, self._room = tokenizer, room
        self._texts = None if tokenizer is None else TextTokenizer(tokenizer)
        self._short = ThreadPoolExecutor(SHORT_THREADS, "offload-rt-prompts")
        self._long = ThreadPoolExecutor(1, "offload-rt-long-prompts")

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
        return await self._in_thread(len(text), lambda cancelled: self._ids(text, special_tokens, cancelled))

    async def of_conversation(self, conversation: Conversation, *, answer: bool = True) -> tuple[str, list[int]]:
        """The conversation as the template prints it, and its token ids. answer: with what begins the answer."""

        def make(cancelled: Event) -> tuple[str, list[int]]:
            text = self._rendered(conversation, answer)
            return text, self._ids(text, False, cancelled)

        size = sum(len(message["content"]) + 16 * TOKEN_SIZE for message in conversation.messages)
        return await self._in_thread(size, make)

    async def spans_of(self, text: str, tokens: int) -> list[tuple[int, int]]:
        """Where in a rendered text each of its `tokens` tokens stands; empty where the tokenizer does not say."""

        def find(cancelled: Event) -> list[tuple[int, int]]:
            if not self.tokenizer.is_fast:
                return []
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            return [(int(a), int(b)) for a, b in found] if len(found) == tokens else []

        return await self._in_thread(len(text), find)

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""

        def decode(cancelled: Event) -> str:
            size = len(self.tokenizer)
            if (wrong := next((i for i in ids if i >= size), None)) is not None:
                raise refused(f"{wrong} is no token of this model, which has {size:,}", "tokens")
            return str(self.tokenizer.decode(list(ids)))

        return await self._in_thread(TOKEN_SIZE * len(ids), decode)

    async def tokens_of(self, ids: Sequence[int]) -> list[str]:
        """The tokens of token ids, as the vocabulary writes them."""
        convert = self.tokenizer.convert_ids_to_tokens
        return await self._in_thread(TOKEN_SIZE * len(ids), lambda cancelled: list(convert(list(ids))))

    def close(self) -> None:
        """Ends the threads."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, size: int, work: Callable[[Event], T]) -> T:
        """Return what `work` returns, for a text of `size` characters. Its event is set when nobody waits any more."""
        cancelled, loop = Event(), asyncio.get_running_loop()

        def long() -> T:
            try:
                return work(cancelled)
            finally:
                give_back()  # the allocator would keep hundreds of megabytes

        try:
            if size > LONG:
                return await loop.run_in_executor(self._long, long)
            return await loop.run_in_executor(self._short, work, cancelled)
        finally:
            cancelled.set()

    def _ids(self, text: str, special_tokens: bool, cancelled: Event) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise refused("a text holds half a surrogate pair, which is no character") from None
        assert self.tokenizer is not None and self._texts is not None
        return self._texts.encode(text, special_tokens, cancelled, self._room.check_prompt)

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
