"""`/v1/responses`: OpenAI's Responses API. A request continues a conversation with `previous_response_id`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ..chat_stream import ChatJob, Step, generate_steps, prepare
from ..connection import event, json_response, run_for_client, stream_response
from ..conversation import (
    Conversation,
    call_message,
    content_text,
    continues_last,
    parsed_arguments,
    tool_options,
    with_answer,
)
from ..documents import StoredResponse, response_of
from ..errors import RefusedError, bad_request
from ..metrics import Usage
from ..service import CurrentService, EngineArguments, Service
from .requests import FlatNamed, ResponsesRequest, sampling_fields, structured_outputs
from .response_items import Event, Items

router = APIRouter()


@router.post("/v1/responses")
async def respond(body: ResponsesRequest, request: Request, service: CurrentService) -> Response:
    """Respond to input. The response is stored unless `store` is false. With `stream`, it is an event stream."""
    service.check_request(body, request)
    if body.background:
        raise bad_request("background is not supported: remove it, and wait for the response", "background")
    head = _initial_response(service, body, request)
    try:
        json.dumps(head, allow_nan=False)
    except (ValueError, RecursionError):
        raise bad_request(
            "tools and metadata must be valid JSON: remove NaN, Infinity and deep nesting", "tools"
        ) from None
    owner, name = request.state.owner, body.previous_response_id
    before = service.responses.get(name, owner) if name else None
    messages = [*(before.messages if before else ()), *_new_messages(body)]
    structured = structured_outputs(body.text.format if body.text else None)
    conversation = _conversation(body, messages)
    job = await prepare(service, request, conversation, body.max_output_tokens, sampling_fields(body), structured)
    session, continues = None if before is None else before.session, conversation.continues
    generation = _Generation(service, request, body, job, messages, session, continues)
    events = generation.events(head)
    if body.stream:
        return await stream_response(request, _encoded(events))
    return json_response(await run_for_client(request, _last_response(events)))


@router.post("/v1/responses/compact")
async def compact() -> Response:
    message = "compaction is not supported: use previous_response_id, which keeps the KV cache"
    raise RefusedError(404, message, code="not_found")


@router.get("/v1/responses/{name}")
async def retrieve(name: str, request: Request, service: CurrentService) -> Response:
    return json_response(service.responses.get(name, request.state.owner).response)


@router.get("/v1/responses/{name}/input_items")
async def input_items(
    name: str,
    request: Request,
    service: CurrentService,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Return the messages, tool calls and tool results before the response `name`."""
    items = _input_items(name, service.responses.get(name, request.state.owner).input_messages)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"after: {after!r:.80} is not an item of this response", "after")
    first = 0 if after is None else ids.index(after) + 1
    data = items[first : first + limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return json_response({"object": "list", "data": data, "has_more": first + limit < len(items)} | ends)


def _input_items(name: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to items. The ids of items never change, so that clients can request the next page."""
    found: list[dict[str, Any]] = []

    def add(prefix: str, **item: Any) -> None:
        found.append({"id": f"{prefix}_{name.removeprefix('resp_')}_{len(found)}", "status": "completed"} | item)

    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            add("fco", type="function_call_output", call_id=message["tool_call_id"], output=content)
        elif content or not message.get("tool_calls"):
            part = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
            add("msg", type="message", role=role, content=[part | {"text": content}])
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            add("fc", type="function_call", call_id=call["id"], name=function["name"], arguments=arguments)
    return found


@router.delete("/v1/responses/{name}")
async def delete(name: str, request: Request, service: CurrentService) -> dict[str, Any]:
    await service.delete_response(request.state.owner, name)
    return {"id": name, "object": "response", "deleted": True}


@dataclass(frozen=True)
class _Generation:
    service: Service
    request: Request
    body: ResponsesRequest
    job: ChatJob
    messages: Sequence[Mapping[str, Any]]
    before: str | None
    continues: bool

    @property
    def _stored(self) -> bool:
        return self.body.store is not False

    @contextmanager
    def _session(self, name: str) -> Iterator[str]:
        """Lock the engine session for the response `name`, and yield the session's id.

        This is the session of the conversation. If another request has locked it, a new session is used instead.
        """
        service, own, before = self.service, response_of(self.request.state.owner, name), self.before
        session = own if before is None or service.is_locked(before) else before
        try:
            with service.locked(*{own, session}):
                yield session
        except BaseException:
            if session == own:  # no stored response uses this session
                service.delete_in_background([session])
            raise

    def _steps(self, session: str) -> AsyncGenerator[Step, None]:
        service = self.service
        arguments = EngineArguments(
            session=session if service.stores_sessions and self._stored else None,
            cache_salt=service.salt(self.request, self.body.cache_salt),
        )
        return generate_steps(service, self.request, self.job, arguments)

    def _finish(self, head: dict[str, Any], session: str, step: Step, items: Items) -> dict[str, Any]:
        response = _completed_response(head, step, items.output)
        if self._stored:
            messages = with_answer(self.messages, _message(items.output), continues=self.continues)
            prefill = content_text(self.messages[-1].get("content"), "input") if self.continues else ""
            stored = StoredResponse(self.request.state.owner, response, messages, session, prefill)
            self.service.delete_in_background(self.service.responses.add(head["id"], stored))
        return response

    async def events(self, head: dict[str, Any]) -> AsyncGenerator[Event, None]:
        items, begun = Items(), False
        with self._session(head["id"]) as session:
            async with aclosing(self._steps(session)) as steps:
                async for step in steps:
                    if not begun:
                        begun = True
                        for name in ("created", "in_progress"):
                            yield {"type": f"response.{name}", "response": head}
                    for piece in step.pieces:
                        for each in items.push(piece):
                            yield each
            for each in items.close():
                yield each
            response = self._finish(head, session, step, items)
        yield {"type": f"response.{response['status']}", "response": response}


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    number = 0
    async with aclosing(events):
        async for each in events:
            yield event(each | {"sequence_number": number}, each["type"])
            number += 1


async def _last_response(events: AsyncGenerator[Event, None]) -> dict[str, Any]:
    async with aclosing(events):
        async for each in events:
            last = each
    response: dict[str, Any] = last["response"]
    return response


def _initial_response(service: Service, body: ResponsesRequest, request: Request) -> dict[str, Any]:
    return {
        "id": f"resp_{request.state.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": request.state.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "presence_penalty": body.presence_penalty or 0.0,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else "auto",
        "tools": [tool.model_dump() | {"strict": False} for tool in body.tools or ()],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        # Fields of the Open Responses schema with fixed values.
        "background": False,
        "top_logprobs": 0,
        "reasoning": None,
        "max_tool_calls": None,
        "service_tier": "default",
        "safety_identifier": None,
        "prompt_cache_key": None,
    }


def _completed_response(head: dict[str, Any], step: Step, output: list[dict[str, Any]]) -> dict[str, Any]:
    cut = step.finish_reason == "length"
    return head | {
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": _usage(step.usage),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.generated,
    }


def _message(output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    calls = [
        call_message(item["name"], item["arguments"], item["call_id"], "answer")
        for item in output
        if item["type"] == "function_call" and parsed_arguments(item["arguments"]) is not None
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def _conversation(body: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> Conversation:
    if not messages:
        raise bad_request("input is empty: send a string or at least one item", "input")
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    functions = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function" or not tool.name:
            raise bad_request(f"tools.{i}: only tools of type 'function' with a name are supported", f"tools.{i}")
        functions.append(tool.model_dump(exclude_none=True, exclude={"type"}))
    named = body.tool_choice.name if isinstance(body.tool_choice, FlatNamed) else None
    return Conversation(
        [*head, *messages],
        **tool_options(functions, body.tool_choice, named),
        parallel=body.parallel_tool_calls is not False,
        continues=continues_last(messages, "input"),
    )


def _new_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    found: list[dict[str, Any]] = []
    for i, item in enumerate(body.input):
        _add_item(found, item, f"input.{i}")
    return found


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("content") is None:
            raise bad_request(f"{where}.content must be a string or a list of content parts", f"{where}.content")
        content = content_text(item["content"], where)
        messages.append({"role": _string(item, "role", where), "content": content})
    elif kind == "function_call":
        call = call_message(
            _string(item, "name", where), _string(item, "arguments", where), _string(item, "call_id", where), where
        )
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        last = messages[-1]
        messages[-1] = last | {"tool_calls": [*last.get("tool_calls", ()), call]}
    elif kind == "function_call_output":
        content = content_text(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content})
    elif kind != "reasoning":  # earlier reasoning is not part of the prompt
        raise bad_request(f"{where}: items of type {kind!r} are not supported", where)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{where}.{name} must be a non-empty string", f"{where}.{name}")
    return value
