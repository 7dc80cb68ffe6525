"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from ...llm import LLM
from ...outputs import RequestOutput
from ..chat_responses import ChatJob, Step, answer, asked
from ..chat_stream import Usage
from ..connection import event, json_answer, streamed, until_gone
from ..conversation import from_chat
from ..errors import refused
from ..parsers.pieces import Content, Piece, Reasoning, ToolCall
from ..sampling import forced_call, sampling_fields, structured_outputs
from ..service import Service
from .completions import chat_logprobs, usage_json
from .requests import ChatRequest

MOST_SEGMENTS = 1024
"""Maximum number of prompt segments for which selections are counted. A segment has one or more tokens."""


class TraceEvents:
    """Create the trace events of one request: first `head`, then the results of `of`."""

    def __init__(self, llm: LLM, text: str, spans: Sequence[tuple[int, int]], tokens: int) -> None:
        """Create `head`.

        Args:
            llm: Engine of the request.
            text: Rendered prompt.
            spans: Character span of each prompt token, or empty if unknown.
            tokens: Number of prompt tokens.
        """
        self._size = max(1, -(-tokens // MOST_SEGMENTS))
        self._starts = list(range(0, tokens, self._size))
        self._selected: NDArray[np.int64] = np.zeros(len(self._starts), np.int64)
        self._steps, self._prefilled = 0, -1
        policy, geometry = llm.runner.policy, llm.geometry
        self.head: dict[str, Any] = {
            "policy": policy.name,
            "layers": geometry.layers,
            "kv_heads": geometry.kv_heads,
            "dense_layers": sorted(policy.dense_layers),
            "sinks": policy.sinks,
            "recent": policy.recent,
            "prompt_tokens": tokens,
            "segment_tokens": self._size,
            "segments": self._segments(text, spans),
        }

    def _segments(self, text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Split the prompt text into segments. Empty if the token spans are unknown."""
        if not spans:
            return []
        cuts = [0, *(spans[start][0] for start in self._starts[1:]), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def of(self, output: RequestOutput) -> dict[str, Any] | None:
        """Return the changes since the last output, or None.

        `selected` counts, for each segment, how often a layer and KV head selected a token of it in the new steps.
        """
        trace = output.trace
        if trace is None:
            return None
        new = trace.attended_by_step[self._steps :]
        if not new and trace.layers_prefilled == self._prefilled:
            return None
        counts = np.add.reduceat(trace.selected, self._starts) if len(trace.selected) else self._selected
        gained = counts - self._selected
        self._steps, self._prefilled, self._selected = len(trace.attended_by_step), trace.layers_prefilled, counts
        return {
            "prefill": [trace.layers_prefilled, trace.layers],
            "step": self._steps,
            "attended": [[round(share, 4) for share in step] for step in new],
            "h2d_bytes": trace.h2d_bytes,
            "selected": gained.tolist() if new else None,
        }


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Handle a chat request. The response is an event stream if `stream` is true."""
    service.check_model(body.model)
    if body.trace and not body.stream:
        raise refused("trace requires stream: true", "trace")
    text, job = await _asked(service, body, request)
    top = (body.top_logprobs or 0) if body.logprobs else None
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {
        "id": f"chatcmpl-{request.scope['state']['request_id']}",
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
    }
    keep = _keeper(service, body, request)
    steps, hold = answer(service, request, job), service.answering(job.where.session)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        traced = await _traced(service, text, job) if body.trace else None
        return await streamed(request, _events(steps, head, top, usage, keep, traced, hold))
    return json_answer(await until_gone(request, _whole(steps, head, top, job.params.n, keep, hold)))


Keep = Callable[[Sequence[Piece]], None]
"""Stores the conversation with the pieces of the response so far."""


def _keeper(service: Service, body: ChatRequest, request: Request) -> Keep:
    """Return a function that stores the conversation if the request has a session."""
    owner, name = request.scope["state"]["owner"], body.session

    def keep(pieces: Sequence[Piece]) -> None:
        if name is None:
            return
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        if pieces:
            messages.append({key: value for key, value in _message(list(pieces)).items() if value is not None})
        service.forget(service.conversations.keep(owner, name, messages))

    return keep


async def _traced(service: Service, text: str, job: ChatJob) -> TraceEvents:
    spans = await service.prompts.spans_of(text, len(job.ids))
    async with service.engines.under(job.where.policy, job.where.policy_options) as engine:
        return TraceEvents(engine.llm, text, spans, len(job.ids))


async def _asked(service: Service, body: ChatRequest, request: Request) -> tuple[str, ChatJob]:
    """Render and tokenize the prompt. Return its text and the request."""
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs requires logprobs: true", "top_logprobs")
    conversation = from_chat(body)
    text, ids = await until_gone(request, service.prompts.of_conversation(conversation))
    more: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    structured = structured_outputs(body.response_format, body.structured_outputs)
    forced = {} if structured else forced_call(conversation)
    tokens = service.limits.tokens(len(ids), body.max_completion_tokens or body.max_tokens)
    params = service.params(max_tokens=tokens, **sampling_fields(body), **more, **structured, **forced)
    where = service.where(body, request, trace=bool(body.trace))
    return text, asked(text, ids, conversation, params, forced=bool(forced), where=where)


async def _events(
    steps: AsyncGenerator[Step, None],
    head: dict[str, Any],
    top: int | None,
    with_usage: bool,
    keep: Keep,
    traced: TraceEvents | None,
    hold: AbstractContextManager[None],
) -> AsyncGenerator[bytes, None]:
    usage, calls, pieces = Usage(), dict[int, int](), list[Piece]()
    null = {"usage": None} if with_usage else {}
    begun = False

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return event(head | {"choices": [choice]} | null)

    def gained(step: Step) -> Iterator[bytes]:
        if step.index not in calls:
            calls[step.index] = 0
            yield chunk(step.index, {"role": "assistant", "content": ""})
        logprobs = _logprobs(step, top)
        for piece in step.pieces:
            delta = _delta(piece, calls[step.index])
            calls[step.index] += isinstance(piece, ToolCall)
            yield chunk(step.index, delta, logprobs=logprobs)
            logprobs = None
        if step.finish_reason is not None:
            ends = {"finish_reason": step.finish_reason, "stop_reason": step.stop_reason}
            yield chunk(step.index, {}, logprobs=logprobs, **ends)
        elif logprobs is not None:
            yield chunk(step.index, {"content": ""}, logprobs=logprobs)

    with hold:  # until the response is stored, because `keep` would undo a deletion in between
        try:
            async with aclosing(steps):
                async for step in steps:
                    if not begun:
                        begun = True
                        keep(pieces)
                        if traced is not None:
                            yield event(head | {"choices": [], "trace": traced.head})
                    usage = step.usage
                    pieces += step.pieces if step.index == 0 else ()
                    if step.watched is None:
                        for one in gained(step):
                            yield one
                    elif traced is not None and (new := traced.of(step.watched)) is not None:
                        yield event(head | {"choices": [], "trace": new})
        finally:
            if begun:  # also if the client disconnects
                keep(pieces)
    if with_usage:
        yield event(head | {"choices": [], "usage": usage_json(usage)})
    yield event("[DONE]")


def _delta(piece: Piece, number: int) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    return {"tool_calls": [{"index": number} | _call(piece)]}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _logprobs(step: Step, top: int | None) -> dict[str, Any] | None:
    if top is None or step.logprobs is None or not step.token_ids:
        return None
    return chat_logprobs(step.token_ids, step.logprobs, top)


async def _whole(
    steps: AsyncGenerator[Step, None],
    head: dict[str, Any],
    top: int | None,
    count: int,
    keep: Keep,
    hold: AbstractContextManager[None],
) -> dict[str, Any]:
    usage, pieces = Usage(), [list[Piece]() for _ in range(count)]
    choices: list[dict[str, Any]] = [{"index": i, "logprobs": None} for i in range(count)]
    with hold:
        async with aclosing(steps):
            async for step in steps:
                usage = step.usage
                pieces[step.index] += step.pieces
                choice = choices[step.index]
                if (found := _logprobs(step, top)) is not None:
                    before = choice["logprobs"] or {"content": []}
                    choice["logprobs"] = found | {"content": before["content"] + found["content"]}
                choice |= {"finish_reason": step.finish_reason, "stop_reason": step.stop_reason}
        keep(pieces[0])
    for choice, own in zip(choices, pieces, strict=True):
        choice["message"] = _message(own)
    return head | {"choices": choices, "usage": usage_json(usage)}


def _message(pieces: list[Piece]) -> dict[str, Any]:
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls = [_call(piece) for piece in pieces if isinstance(piece, ToolCall)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
        "annotations": [],
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
