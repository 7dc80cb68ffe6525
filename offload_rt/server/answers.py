"""Answers to conversations, as all chat protocols show them: pieces of content, thinking and calls, step by step."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ..outputs import Logprobs, RequestOutput, StopReason
from ..sampling_params import SamplingParams
from .conversation import Conversation
from .deltas import Deltas, Usage, usage_of
from .parsers.choose import answer_parser, ends_within_thinking
from .parsers.pieces import Parser, Piece, ToolCall
from .service import Service, Where


@dataclass(frozen=True)
class Step:
    """What the answer `index` gained. `finish_reason`, with the last step, is "stop", "length" or "tool_calls"; `usage`
    is the whole request's so far."""

    index: int
    pieces: list[Piece]
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: StopReason
    usage: Usage
    watched: RequestOutput | None = None
    """Of a request that is watched, now and then, in a step of its own: the whole state."""


@dataclass(frozen=True)
class Asked:
    """A conversation whose prompt has been made, and how it is answered. thinking: the prompt ends within thinking.
    offered: tools that may be called; forced: the answer is a call, as JSON."""

    ids: list[int]
    params: SamplingParams
    thinking: bool
    offered: list[str] | None
    forced: bool
    where: Where


def asked(
    text: str,
    ids: list[int],
    conversation: Conversation,
    params: SamplingParams,
    *,
    forced: bool,
    where: Where | None = None,
) -> Asked:
    """Puts together what a conversation, rendered as `text`, asks for."""
    return Asked(ids, params, ends_within_thinking(text), conversation.offered, forced, where or Where())


async def answer(service: Service, request: Request, what: Asked) -> AsyncGenerator[Step, None]:
    """The answers of one conversation, `params.n` of them, step by step."""
    deltas, parsers, called = Deltas(), dict[int, Parser](), set[int]()
    async with aclosing(service.outputs(request, what.ids, what.params, what.where)) as outputs:
        async for output in outputs:
            for delta in deltas.of(output):
                parser = parsers.setdefault(delta.index, _parser(service, what))
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


def _parser(service: Service, what: Asked) -> Parser:
    """What follows a grammar does so from its first token on, so that there is no thinking to take out."""
    if what.params.structured_outputs is not None:
        return answer_parser("llama3_json" if what.forced else "none", "none", what.offered)
    return answer_parser(service.tools, service.reasoning, what.offered, thinking=what.thinking)
