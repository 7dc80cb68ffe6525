"""`POST /v1/chat/completions`: OpenAI's Chat Completions API."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from ...llm import LLM
from ...outputs import RequestOutput
from ..chat_stream import ChatJob, Step, collect_steps, generate_steps, prepare
from ..connection import event, json_response, run_for_client, stream_response
from ..conversation import from_chat, with_answer
from ..errors import bad_request
from ..metrics import Usage
from ..parsers.pieces import Arguments, Content, Piece, Reasoning, ToolCall, joined, text_of
from ..service import CurrentService, EngineArguments, Service
from .completions import chat_logprobs, response_head, usage_json
from .requests import ChatRequest, sampling_fields, structured_outputs

router = APIRouter()

MAX_BINS = 1024
"""Maximum number of bins in trace events.

A bin is a group of one or more consecutive prompt tokens that are counted together.
"""


class TraceEvents:
    """Creates the trace events of a request. The web page uses them to show which prompt tokens were selected.

    The first event is `head`. `next_event` returns the events after it.
    """

    def __init__(self, llm: LLM, text: str, spans: Sequence[tuple[int, int]], tokens: int) -> None:
        """Create the first event.

        `spans` contains the (start, end) of each prompt token in characters, or is empty if these are unknown.
        """
        self._size = max(1, -(-tokens // MAX_BINS))
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
            "bin_tokens": self._size,
            "bins": self._bins(text, spans),
        }

    def _bins(self, text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
        if not spans:
            return []
        cuts = [0, *(spans[start][0] for start in self._starts[1:]), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def next_event(self, output: RequestOutput) -> dict[str, Any] | None:
        """Return an event with everything that changed since the last call, or None if there are no changes.

        For each bin (see `MAX_BINS`), the field "selected" counts how often its tokens were selected since the last
        event. The counts are sums over decode steps, layers and KV heads.
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


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, service: CurrentService) -> Response:
    """Respond to a conversation. With `stream`, the response is an event stream."""
    service.check_request(body, request)
    if body.trace and not body.stream:
        raise bad_request("trace requires stream: true", "trace")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs requires logprobs: true", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_fields(body) | ({} if top is None else {"logprobs": top})
    structured = structured_outputs(body.response_format, body.structured_outputs)
    max_tokens = body.max_completion_tokens or body.max_tokens
    conversation = from_chat(body)
    job = await prepare(service, request, conversation, max_tokens, sampling, structured)
    arguments = service.arguments(body, request, trace=bool(body.trace))
    steps = generate_steps(service, request, job, arguments)
    if body.session is not None:
        steps = _store_conversation(service, body, request, steps, arguments.session, continues=conversation.continues)

    def logprobs(step: Step) -> dict[str, Any] | None:
        return None if top is None else chat_logprobs(step, top, service.engine.llm.tokenizer)

    head = response_head(service, request, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")
    if body.stream:
        traced = await _make_trace_events(service, job, arguments) if body.trace else None
        return await stream_response(request, _events(steps, head, logprobs, body.include_usage, traced))
    whole = await run_for_client(request, collect_steps(steps))
    choices = [
        {
            "index": step.index,
            "logprobs": logprobs(step),
            "finish_reason": step.finish_reason,
            "stop_reason": step.stop_reason,
            "message": _message(step.pieces),
        }
        for step in whole
    ]
    return json_response(head | {"choices": choices, "usage": usage_json(whole[-1].usage)})


async def _store_conversation(
    service: Service,
    body: ChatRequest,
    request: Request,
    steps: AsyncGenerator[Step, None],
    session: str | None,
    *,
    continues: bool,
) -> AsyncGenerator[Step, None]:
    """Yield `steps`. Store the messages of the request after the first step, and also the answer at the end."""
    begun, pieces = False, list[Piece]()

    def store() -> None:
        assert body.session is not None
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        if pieces:
            answer = {key: value for key, value in _message(joined(pieces)).items() if value is not None}
            messages = with_answer(messages, answer, continues=continues)
        service.delete_in_background(service.conversations.store(request.state.owner, body.session, messages))

    with service.locked(session):  # keep the lock until the response is stored, because storing would undo a deletion
        try:
            async with aclosing(steps):
                async for step in steps:
                    if not begun:
                        begun = True
                        store()
                    pieces += step.pieces if step.index == 0 else ()
                    yield step
        finally:
            if begun:  # store the text even if the client disconnects
                store()


async def _make_trace_events(service: Service, job: ChatJob, arguments: EngineArguments) -> TraceEvents:
    spans = await service.prompts.token_spans(job.text, len(job.ids))
    async with service.engines.engine_for(arguments.policy, arguments.policy_options) as engine:
        return TraceEvents(engine.llm, job.text, spans, len(job.ids))


async def _events(
    steps: AsyncGenerator[Step, None],
    head: dict[str, Any],
    logprobs_of: Callable[[Step], dict[str, Any] | None],
    with_usage: bool,
    trace: TraceEvents | None,
) -> AsyncGenerator[bytes, None]:
    usage, calls, begun = Usage(), Counter[int](), set[int]()
    null = {"usage": None} if with_usage else {}
    traces: list[dict[str, Any] | None] = [] if trace is None else [trace.head]

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return event(head | {"choices": [choice]} | null)

    def chunks(step: Step) -> Iterator[bytes]:
        if step.index not in begun:
            begun.add(step.index)
            yield chunk(step.index, {"role": "assistant", "content": ""})
        logprobs = logprobs_of(step)
        for piece in step.pieces:
            yield chunk(step.index, _delta(piece, calls[step.index]), logprobs=logprobs)
            calls[step.index] += isinstance(piece, ToolCall)
            logprobs = None
        if step.finish_reason is not None:
            ends = {"finish_reason": step.finish_reason, "stop_reason": step.stop_reason}
            yield chunk(step.index, {}, logprobs=logprobs, **ends)
        elif logprobs is not None:
            yield chunk(step.index, {"content": ""}, logprobs=logprobs)

    async with aclosing(steps):
        async for step in steps:
            usage = step.usage
            if trace is not None and step.traced is not None:
                traces.append(trace.next_event(step.traced))
            for new in filter(None, traces):
                yield event(head | {"choices": [], "trace": new})
            traces.clear()
            for one in () if step.traced is not None else chunks(step):
                yield one
    if with_usage:
        yield event(head | {"choices": [], "usage": usage_json(usage)})
    yield event("[DONE]")


def _delta(piece: Piece, number: int) -> dict[str, Any]:
    if isinstance(piece, Arguments):
        return {"tool_calls": [{"index": number - 1, "function": {"arguments": piece.text}}]}
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    return {"tool_calls": [{"index": number} | _call(piece)]}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    content, reasoning = text_of(pieces, Content), text_of(pieces, Reasoning)
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
