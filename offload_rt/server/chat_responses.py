"""Parsed chat responses for all protocols, as a stream of content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ..outputs import Logprobs, RequestOutput, StopReason
from ..sampling_params import SamplingParams
from .chat_stream import ChatStream, Usage, usage_of
from .conversation import Conversation
from .parsers import answer_parser, ends_within_thinking
from .parsers.pieces import Parser, Piece, ToolCall
from .service import EngineArguments, Service


@dataclass(frozen=True)
class Step:
    """New output of the completion `index`.

    Attributes:
        index: Position of the completion in the response.
        pieces: New content, reasoning and tool calls.
        token_ids: New tokens `[t]`.
        logprobs: Log-probabilities of the new tokens, if requested.
        finish_reason: "stop", "length" or "tool_calls" in the last step, else None.
        stop_reason: Stop string or token that ended the completion.
        usage: Token counts of the whole request so far.
        watched: Output with the trace data of a traced request, in a separate step.
    """

    index: int
    pieces: list[Piece]
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: StopReason
    usage: Usage
    watched: RequestOutput | None = None


@dataclass(frozen=True)
class ChatJob:
    """A tokenized chat request.

    Attributes:
        ids: Token ids of the prompt.
        params: Sampling parameters.
        thinking: Whether the prompt ends inside a reasoning section.
        offered: Names of the tools that may be called, or None.
        forced: Whether the response must be a tool call, as JSON.
        where: Engine options.
    """

    ids: list[int]
    params: SamplingParams
    thinking: bool
    offered: list[str] | None
    forced: bool
    where: EngineArguments


def asked(
    text: str,
    ids: list[int],
    conversation: Conversation,
    params: SamplingParams,
    *,
    forced: bool,
    where: EngineArguments | None = None,
) -> ChatJob:
    """Return the request for a conversation with the rendered prompt `text`."""
    return ChatJob(ids, params, ends_within_thinking(text), conversation.offered, forced, where or EngineArguments())


async def answer(service: Service, request: Request, job: ChatJob) -> AsyncGenerator[Step, None]:
    """Generate and parse `params.n` responses to a conversation."""
    deltas, parsers, called = ChatStream(), dict[int, Parser](), set[int]()
    async with aclosing(service.outputs(request, job.ids, job.params, job.where)) as outputs:
        async for output in outputs:
            for delta in deltas.of(output):
                parser = parsers.setdefault(delta.index, _parser(service, job))
                pieces = parser.push(delta.text)
                if delta.finish_reason is not None:
                    pieces += parser.finish()
                if any(isinstance(piece, ToolCall) for piece in pieces):
                    called.add(delta.index)
                reason: Any = delta.finish_reason
                if reason == "stop" and delta.index in called:
                    reason = "tool_calls"
                yield Step(
                    delta.index, pieces, delta.token_ids, delta.logprobs, reason, delta.stop_reason, usage_of(output)
                )
            if output.trace is not None:
                yield Step(0, [], [], None, None, None, usage_of(output), output)


def _parser(service: Service, job: ChatJob) -> Parser:
    # Guided decoding applies from the first token on, so the response has no reasoning section.
    if job.params.structured_outputs is not None:
        return answer_parser("llama3_json" if job.forced else "none", "none", job.offered)
    return answer_parser(service.tools, service.reasoning, job.offered, thinking=job.thinking)
