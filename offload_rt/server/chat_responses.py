"""Generate chat responses, for all protocols that send messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ..sampling_params import SamplingParams
from .chat_stream import ChatStream, Step
from .connection import until_gone
from .conversation import Conversation, forced_call
from .parsers import answer_parser, needs_special_tokens
from .parsers.pieces import FirstCall, Parser
from .parsers.reasoning import ends_within_thinking
from .service import EngineArguments, Service


@dataclass(frozen=True)
class ChatJob:
    """A chat request, rendered and tokenized.

    Attributes:
        text: Prompt rendered with the chat template.
        ids: Token ids of the prompt.
        params: Sampling parameters.
        make_parser: Creates the parser for one completion's reasoning and tool calls.
    """

    text: str
    ids: list[int]
    params: SamplingParams
    make_parser: Callable[[], Parser]


async def prepare(
    service: Service,
    request: Request,
    conversation: Conversation,
    max_tokens: int | None,
    sampling: Mapping[str, Any],
    structured: Mapping[str, Any] | None = None,
) -> ChatJob:
    """Render and tokenize a conversation, and check the token limits.

    Args:
        max_tokens: Maximum number of new tokens that the client requested, or None.
        sampling: Fields of `SamplingParams` that the request sets.
        structured: Dictionary with the field `structured_outputs`, or None. It takes precedence over a required tool
            call.
    """
    text, ids = await until_gone(request, service.prompts.of_conversation(conversation))
    forced = {} if structured else forced_call(conversation)
    tokens = service.limits.tokens(len(ids), max_tokens)
    guided = structured or forced
    fields = {**sampling, **guided}
    if not guided and needs_special_tokens(service.tools, service.reasoning, offered=conversation.offered is not None):
        fields["skip_special_tokens"] = False
    params = service.params(max_tokens=tokens, **fields)

    def make_parser() -> Parser:
        # Guided decoding starts with the first token, so the response has no reasoning section.
        if guided:
            return answer_parser("llama3_json" if forced else "none", "none", conversation.offered)
        thinking = ends_within_thinking(text, conversation.prefill)
        parser = answer_parser(service.tools, service.reasoning, conversation.offered, thinking=thinking)
        return parser if conversation.parallel else FirstCall(parser)

    return ChatJob(text, ids, params, make_parser)


async def respond_to(
    service: Service, request: Request, job: ChatJob, arguments: EngineArguments
) -> AsyncGenerator[Step, None]:
    """Generate `params.n` responses to a conversation, and yield their parsed increments."""
    stream = ChatStream(job.make_parser)
    async with aclosing(service.outputs(request, job.ids, job.params, arguments)) as outputs:
        async for output in outputs:
            for step in stream.of(output):
                yield step
