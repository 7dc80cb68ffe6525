"""Check token limits, and tokenize texts and conversations in worker threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from ..errors import OffloadError
from ..sessions.chat_render import encode_rendered, render_chat
from ..utils.allocator import give_back
from .conversation import Conversation, describe_tools
from .errors import bad_request
from .options import ServerOptions
from .tokenizing import max_token_bytes

T = TypeVar("T")

LONG = 1 << 18
"""Texts with more characters than this are tokenized one at a time in a separate thread.

If the length shows that such a text cannot fit in the context, it is refused without being tokenized.
"""

TOKEN_SIZE = 4
"""When the thread is chosen, each token id counts as this many characters.

Each message adds 16 token ids.
"""

SHORT_THREADS = 2
"""Number of threads that tokenize short texts."""


class TokenLimits:
    """Limits on the number of prompt tokens and new tokens of a request.

    Args:
        positions: Context length of the model in tokens.
        capacity: Capacity of the KV cache in tokens.
    """

    def __init__(self, positions: int, capacity: int, options: ServerOptions) -> None:
        self.positions, self.capacity, self._limit = positions, capacity, options.max_tokens_limit

    def check_prompt(self, tokens: int) -> None:
        """Raise RefusedError if a prompt is too long. `tokens` is a lower bound on its length."""
        if tokens >= self.positions:
            raise bad_request(
                f"this model's maximum context length is {self.positions:,} tokens, and the prompt has at least "
                f"{tokens:,}: shorten it",
                code="context_length_exceeded",
            )
        if tokens >= self.capacity:
            raise bad_request(
                f"the prompt has at least {tokens:,} tokens, and the capacity of the KV cache is {self.capacity:,}, "
                "including the response: shorten the prompt, or raise --host-memory",
                code="pool_full",
            )

    def max_new_tokens(self, prompt: int, requested: int | None, default: int | None = None) -> int:
        """Return the maximum number of new tokens after a prompt of `prompt` tokens.

        This is `requested` or, if that is not set, `default`. It is limited by the context length, the KV cache and the
        server's options. Raises RefusedError if the prompt is empty or too long.
        """
        if prompt == 0:
            raise bad_request("the prompt is empty: send at least one token")
        self.check_prompt(prompt)
        left = min(self.positions, self.capacity) - prompt
        return min(n for n in (requested or default, left, self._limit) if n is not None)


class Prompts:
    """Renders and tokenizes prompts in worker threads.

    The methods raise RefusedError if a text is invalid or too long. A call that is cancelled before it starts does no
    work.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, limits: TokenLimits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._short = ThreadPoolExecutor(SHORT_THREADS, "offload-rt-prompts")
        self._long = ThreadPoolExecutor(1, "offload-rt-long-prompts")

    @property
    def template(self) -> str:
        found = getattr(self._tokenizer, "chat_template", None)
        if isinstance(found, Mapping):
            found = found.get("default")
        return found if isinstance(found, str) else ""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise bad_request("this model has no tokenizer: send prompts as token ids to /v1/completions")
        return self._tokenizer

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return await self._in_thread(len(text), lambda: self._ids(text, special_tokens))

    async def render(self, conversation: Conversation, *, answer: bool = True) -> tuple[str, list[int]]:
        """Render a conversation with the chat template. Return the text and its token ids.

        If `answer` is True, the text ends with the beginning of an assistant message (generation prompt).
        """

        def make() -> tuple[str, list[int]]:
            text = self._rendered(conversation, answer)
            return text, self._ids(text, False)

        size = sum(len(message["content"]) + 16 * TOKEN_SIZE for message in conversation.messages)
        return await self._in_thread(size, make)

    async def token_spans(self, text: str, tokens: int) -> list[tuple[int, int]]:
        """Return the (start, end) characters of each token of `text`, or [] if they are unknown.

        `tokens` is the expected number of tokens.
        """

        def find() -> list[tuple[int, int]]:
            if not self.tokenizer.is_fast:
                return []
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            return [(int(a), int(b)) for a, b in found] if len(found) == tokens else []

        return await self._in_thread(len(text), find)

    async def decode(self, ids: Sequence[int]) -> str:
        def decode() -> str:
            size = len(self.tokenizer)
            if (wrong := next((i for i in ids if i >= size), None)) is not None:
                raise bad_request(
                    f"{wrong} is not a token id of this model: its vocabulary has {size:,} tokens", "tokens"
                )
            return str(self.tokenizer.decode(list(ids)))

        return await self._in_thread(TOKEN_SIZE * len(ids), decode)

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        convert = self.tokenizer.convert_ids_to_tokens
        return await self._in_thread(TOKEN_SIZE * len(ids), lambda: list(convert(list(ids))))

    def close(self) -> None:
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, size: int, work: Callable[[], T]) -> T:
        def long() -> T:
            try:
                return work()
            finally:
                give_back()  # return freed memory (hundreds of megabytes) to the system

        threads, job = (self._long, long) if size > LONG else (self._short, work)
        return await asyncio.get_running_loop().run_in_executor(threads, job)

    @cached_property
    def _max_token_bytes(self) -> int | None:
        return max_token_bytes(self.tokenizer)

    def _ids(self, text: str, special_tokens: bool) -> list[int]:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise bad_request("the text contains a lone surrogate, which is not a valid character: remove it") from None
        if len(text) > LONG and self._max_token_bytes is not None:
            self._limits.check_prompt(-(-size // self._max_token_bytes))
        return encode_rendered(self.tokenizer, text, special_tokens=special_tokens)

    def _rendered(self, conversation: Conversation, answer: bool) -> str:
        messages = [dict(message) for message in conversation.messages]
        for message in messages:
            if message["role"] == "developer" and "developer" not in self.template:
                message["role"] = "system"
        tools = () if conversation.offered is None else conversation.tools
        continues = conversation.continues
        if continues and not conversation.prefill.strip():  # an empty message cannot be continued, so begin a new one
            messages, continues = messages[:-1], False
        try:
            if "tools" not in self.template:
                system = "System role not supported" not in self.template
                messages, tools = describe_tools(messages, tools, system=system), ()
            return render_chat(
                self.tokenizer,
                messages,
                tools=tools or None,
                chat_template_kwargs=conversation.template,
                add_generation_prompt=answer and not continues,
                continue_final_message=continues,
            )
        except OffloadError:
            raise
        except Exception as error:  # a chat template can raise any error if a client's input is unsuitable
            raise bad_request(f"the chat template cannot render this conversation: {error}", "messages") from error
