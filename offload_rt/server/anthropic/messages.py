"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..chat_responses import Step, answer, asked
from ..chat_stream import Usage
from ..connection import event, json_answer, streamed, until_gone
from ..conversation import refuse_prefill
from ..parsers.pieces import Content, Piece, Reasoning, ToolCall, joined
from ..sampling import forced_call
from ..service import EngineArguments, Service
from .requests import CountRequest, MessagesRequest, from_messages

_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def count_tokens(service: Service, body: CountRequest, request: Request) -> Response:
    """Count the tokens of a prompt.

    If the conversation ends with an assistant message, the generation prompt is not counted.
    """
    service.check_model(body.model)
    conversation = from_messages(body)
    answers = conversation.messages[-1]["role"] != "assistant"
    made = service.prompts.of_conversation(conversation, answer=answers)
    _, ids = await until_gone(request, made)
    return json_answer({"input_tokens": len(ids)})


async def messages(service: Service, body: MessagesRequest, request: Request) -> Response:
    """Handle a request. The response is an event stream if `stream` is true."""
    service.check_model(body.model)
    conversation = from_messages(body)
    refuse_prefill(conversation.messages, "messages")
    text, ids = await until_gone(request, service.prompts.of_conversation(conversation))
    given = {name: value for name in ("temperature", "top_k", "top_p") if (value := getattr(body, name)) is not None}
    forced = forced_call(conversation)
    tokens = service.limits.tokens(len(ids), body.max_tokens)
    params = service.params(max_tokens=tokens, stop=body.stop_sequences or (), **given, **forced)
    where = EngineArguments(cache_salt=service.salt(request, body.cache_salt))
    steps = answer(service, request, asked(text, ids, conversation, params, forced=bool(forced), where=where))
    message: dict[str, Any] = {
        "id": f"msg_{request.scope['state']['request_id']}",
        "type": "message",
        "role": "assistant",
        "model": service.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": _usage(Usage(len(ids))),
    }
    if body.stream:
        return await streamed(request, _events(steps, message))
    return json_answer(await until_gone(request, _whole(steps, message)))


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage object. Unsupported fields of the schema are null."""
    absent = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
    return dict.fromkeys(absent) | {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }


def _end(step: Step) -> dict[str, Any]:
    if step.finish_reason == "stop" and isinstance(step.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": step.stop_reason}
    return {"stop_reason": _ENDS[str(step.finish_reason)], "stop_sequence": None}


async def _whole(steps: AsyncGenerator[Step, None], message: dict[str, Any]) -> dict[str, Any]:
    pieces: list[Piece] = []
    async with aclosing(steps):
        async for step in steps:
            pieces += step.pieces
    return message | {"content": [_block(piece) for piece in joined(pieces)], "usage": _usage(step.usage)} | _end(step)


def _block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"type": "text", "text": piece.text, "citations": None}
    if isinstance(piece, Reasoning):
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    return {
        "type": "tool_use",
        "id": f"toolu_{uuid.uuid4().hex[:24]}",
        "name": piece.name,
        "input": json.loads(piece.arguments),
        "caller": {"type": "direct"},
    }


async def _events(steps: AsyncGenerator[Step, None], message: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    index, open_kind = -1, None
    begun = False
    async with aclosing(steps):
        async for step in steps:
            if not begun:
                begun = True
                yield _named("message_start", message=message | {"usage": _usage(step.usage)})
            for piece in step.pieces:
                if isinstance(piece, ToolCall) or open_kind is not type(piece):
                    if open_kind is not None:
                        yield _named("content_block_stop", index=index)
                    index, open_kind = index + 1, type(piece)
                    yield _named("content_block_start", index=index, content_block=_empty(_block(piece)))
                yield _named("content_block_delta", index=index, delta=_delta(piece))
    if open_kind is not None:
        yield _named("content_block_stop", index=index)
    yield _named("message_delta", delta=_end(step), usage=_usage(step.usage))
    yield _named("message_stop")


def _named(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)


def _empty(block: dict[str, Any]) -> dict[str, Any]:
    """Return a content block with empty text or input, for `content_block_start`."""
    return block | {
        name: {"text": "", "thinking": "", "input": {}}[name] for name in ("text", "thinking", "input") if name in block
    }


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"type": "text_delta", "text": piece.text}
    if isinstance(piece, Reasoning):
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.arguments}
