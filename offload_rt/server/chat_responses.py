"""Generation of chat responses, shared by all protocols with messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ..sampling_params import SamplingParams
from .chat_stream import ChatStream, Step
from .connection import until_gone
from .conversation import Conversation, forced_call
from .parsers import Parser, answer_parser, ends_within_thinking
from .service import EngineArguments, Service


@dataclass(frozen=True)
class ChatJob:
    """A tokenized chat request.

    Attributes:
        text: Rendered prompt.
        ids: Token ids of the prompt.
        params: Sampling parameters.
        offered: Names of the tools that may be called, or None.
        forced: Whether the response must be a tool call, as JSON.
    """

    text: str
    ids: list[int]
    params: SamplingParams
    offered: list[str] | None
    forced: bool


async def prepare(
    service: Service,
    request: Request,
    conversation: Conversation,
    max_tokens: int | None,
    sampling: Mapping[str, Any],
    structured: Mapping[str, Any] | None = None,
) -> ChatJob:
    """Render and tokenize a conversation, and check the limits.

    Args:
        service: The service.
        request: HTTP request.
        conversation: The conversation.
        max_tokens: Requested maximum number of new tokens, or None.
        sampling: Fields of `SamplingParams` that the request sets.
        structured: The field `structured_outputs`, or nothing. It takes precedence over a required tool call.
    """
    text, ids = await until_gone(request, service.prompts.of_conversation(conversation))
    forced = {} if structured else forced_call(conversation)
    tokens = service.limits.tokens(len(ids), max_tokens)
    params = service.params(max_tokens=tokens, **sampling, **(structured or forced))
    return ChatJob(text, ids, params, conversation.offered, bool(forced))


async def respond_to(
    service: Service, request: Request, job: ChatJob, arguments: EngineArguments
) -> AsyncGenerator[Step, None]:
    """Generate and parse `params.n` responses to a conversation."""

    def parser() -> Parser:
        # Guided decoding applies from the first token on, so the response has no reasoning section.
        if job.params.structured_outputs is not None:
            return answer_parser("llama3_json" if job.forced else "none", "none", job.offered)
        thinking = ends_within_thinking(job.text)
        return answer_parser(service.tools, service.reasoning, job.offered, thinking=thinking)

    stream = ChatStream(parser)
    async with aclosing(service.outputs(request, job.ids, job.params, arguments)) as outputs:
        async for output in outputs:
            for step in stream.of(output):
                yield step
