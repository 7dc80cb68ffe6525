"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from .chat_stream import Step, collect_steps, generate_steps, prepare
from .connection import event, json_response, run_for_client, stream_response
from .conversation import Conversation, call_message, content_text, continues_last, parsed_arguments, tool_options
from .errors import bad_request
from .metrics import Usage
from .openai.requests import Body, CacheSalt, Count, RequestBody, Texts, sampling_fields
from .parsers.pieces import Arguments, Content, Piece, Reasoning, ToolCall
from .service import CurrentService, EngineArguments

router = APIRouter()

_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class InputMessage(Body):
    """A message of a request. Its content is a string or a list of content blocks."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class ClientTool(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(RequestBody):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Count
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    cache_salt: CacheSalt | None = None


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, service: CurrentService) -> Response:
    """Return the number of prompt tokens."""
    service.check_request(body, request)
    made = service.prompts.render(_conversation(body))
    _, ids = await run_for_client(request, made)
    return json_response({"input_tokens": len(ids)})


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request, service: CurrentService) -> Response:
    """Respond to a conversation. With `stream`, the response is an event stream."""
    service.check_request(body, request)
    conversation = _conversation(body)
    sampling = sampling_fields(body) | {"stop": body.stop_sequences or ()}
    job = await prepare(service, request, conversation, body.max_tokens, sampling)
    steps = generate_steps(service, request, job, EngineArguments(cache_salt=service.salt(request, body.cache_salt)))
    message: dict[str, Any] = {
        "id": f"msg_{request.state.request_id}",
        "type": "message",
        "role": "assistant",
        "model": request.state.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": _usage(Usage(len(job.ids))),
    }
    if body.stream:
        return await stream_response(request, _events(steps, message))
    [step] = await run_for_client(request, collect_steps(steps))
    content = [_block(piece) for piece in step.pieces]
    return json_response(message | {"content": content, "usage": _usage(step.usage)} | _end_fields(step))


def _usage(usage: Usage) -> dict[str, Any]:
    absent = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
    return dict.fromkeys(absent) | {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }


def _end_fields(step: Step) -> dict[str, Any]:
    if step.finish_reason == "stop" and isinstance(step.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": step.stop_reason}
    return {"stop_reason": _ENDS[str(step.finish_reason)], "stop_sequence": None}


def _block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"type": "text", "text": piece.text, "citations": None}
    if isinstance(piece, Reasoning):
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    assert isinstance(piece, ToolCall)
    return {
        "type": "tool_use",
        "id": f"toolu_{uuid.uuid4().hex[:24]}",
        "name": piece.name,
        "input": parsed_arguments(piece.arguments) or {},
        "caller": {"type": "direct"},
    }


async def _events(steps: AsyncGenerator[Step, None], message: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    index, open_kind = -1, None
    begun = False
    async with aclosing(steps):
        async for step in steps:
            if not begun:
                begun = True
                yield _event("message_start", message=message | {"usage": _usage(step.usage)})
            for piece in step.pieces:
                new = not isinstance(piece, Arguments) and open_kind is not type(piece)
                if new or isinstance(piece, ToolCall):
                    if open_kind is not None:
                        yield _event("content_block_stop", index=index)
                    index, open_kind = index + 1, type(piece)
                    yield _event("content_block_start", index=index, content_block=_with_empty_content(_block(piece)))
                yield _event("content_block_delta", index=index, delta=_delta(piece))
    if open_kind is not None:
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end_fields(step), usage=_usage(step.usage))
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)


def _with_empty_content(block: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"text": "", "thinking": "", "input": {}}
    return block | {name: value for name, value in empty.items() if name in block}


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"type": "text_delta", "text": piece.text}
    if isinstance(piece, Reasoning):
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text if isinstance(piece, Arguments) else piece.arguments}


def _conversation(body: CountRequest) -> Conversation:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": content_text(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _template_messages(message, f"messages.{i}")
    functions = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            where = f"tools.{i}.type"
            raise bad_request(f"{where}: {tool.type!r} is not supported: send client tools only", where)
        parameters = tool.input_schema or {}
        functions.append({"name": tool.name, "description": tool.description or "", "parameters": parameters})
    choice = body.tool_choice or ToolChoice(type="auto")
    named = choice.name or "" if choice.type == "tool" else None
    return Conversation(
        messages,
        **tool_options(functions, _CHOICES[choice.type], named),
        parallel=not choice.disable_parallel_tool_use,
        continues=continues_last(messages, "messages"),
    )


def _template_messages(message: InputMessage, where: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        kind, at = block.get("type"), f"{where}.content.{i}"
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use" and message.role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and message.role == "user":
            content = content_text(block.get("content"), at)
            found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": content})
        elif kind not in ("thinking", "redacted_thinking"):  # earlier reasoning is not part of the prompt
            raise bad_request(f"{at}: {kind!r} is not supported in a message of role {message.role!r}: send text", at)
    if texts or calls or not found:
        converted: dict[str, Any] = {"role": message.role, "content": content_text(texts, where)}
        found.append(converted | ({"tool_calls": calls} if calls else {}))
    return found


def _call(block: dict[str, Any], at: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, dict):
        raise bad_request(f"{at}: a tool_use block needs a name and an input object", at)
    return call_message(name, given, str(block.get("id", "")), at)
