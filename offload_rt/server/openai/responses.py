"""`/v1/responses`. Conversations are continued with `previous_response_id`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..chat_responses import Step, answer, asked
from ..chat_stream import Usage
from ..connection import event, json_answer, streamed, until_gone
from ..conversation import call_message
from ..documents import Kept, response_of
from ..errors import refused
from ..parsers.pieces import Content, Piece, Reasoning, ToolCall, joined
from ..sampling import forced_call, structured_outputs
from ..service import EngineArguments, Service
from .responses_requests import ResponsesRequest, format_of, from_responses, new_messages

Event = dict[str, Any]


class Items:
    """Build output items and events from pieces. Adjacent pieces of one kind form one item.

    `output` contains the completed items.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind: type[Piece] | None = None
        self._id = self._text = ""

    def push(self, piece: Piece) -> list[Event]:
        if isinstance(piece, ToolCall):
            return self.close() + self._call(piece)
        found: list[Event] = []
        if self._kind is not type(piece):
            found = self.close() + self._open(type(piece))
        self._text += piece.text
        return [*found, self._event(f"{self._part_event}.delta", delta=piece.text)]

    def close(self) -> list[Event]:
        """Complete the open item, if any, and return its events."""
        if self._kind is None:
            return []
        part, item = self._part(self._text), self._item(self._text, "completed")
        found = [self._event(f"{self._part_event}.done", text=self._text)]
        if self._kind is Content:
            found.append(self._event("response.content_part.done", part=part))
        found.append({"type": "response.output_item.done", "output_index": len(self.output), "item": item})
        self.output.append(item)
        self._kind, self._text = None, ""
        return found

    def _open(self, kind: type[Piece]) -> list[Event]:
        self._kind = kind
        self._id = f"{'msg' if kind is Content else 'rs'}_{uuid.uuid4().hex[:24]}"
        item = self._item("", "in_progress") | {"content": []}
        found: list[Event] = [{"type": "response.output_item.added", "output_index": len(self.output), "item": item}]
        if kind is Content:
            found.append(self._event("response.content_part.added", part=self._part("")))
        return found

    def _call(self, call: ToolCall) -> list[Event]:
        index = len(self.output)
        item = {
            "id": f"fc_{uuid.uuid4().hex[:24]}",
            "type": "function_call",
            "call_id": f"call_{uuid.uuid4().hex[:24]}",
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        at = {"item_id": item["id"], "output_index": index}
        self.output.append(item)
        return [
            {
                "type": "response.output_item.added",
                "output_index": index,
                "item": item | {"arguments": "", "status": "in_progress"},
            },
            {"type": "response.function_call_arguments.delta", "delta": call.arguments} | at,
            {"type": "response.function_call_arguments.done", "arguments": call.arguments, "name": call.name} | at,
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]

    @property
    def _part_event(self) -> str:
        return "response.output_text" if self._kind is Content else "response.reasoning_text"

    def _event(self, kind: str, **fields: Any) -> Event:
        logprobs: Event = {"logprobs": []} if kind.startswith("response.output_text") else {}
        return (
            {"type": kind, "item_id": self._id, "output_index": len(self.output), "content_index": 0}
            | fields
            | logprobs
        )

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        if self._kind is Reasoning:
            return {"id": self._id, "type": "reasoning", "summary": [], "content": [self._part(text)], "status": status}
        return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": [self._part(text)]}


async def respond(service: Service, body: ResponsesRequest, request: Request) -> Response:
    """Handle a request and store the response unless `store` is false.

    The response is an event stream if `stream` is true.
    """
    service.check_model(body.model)
    if body.background:
        raise refused("background is not supported: remove it, and wait for the response", "background")
    head = _head(service, body, request)
    try:
        json.dumps(head, allow_nan=False)
    except (ValueError, RecursionError):
        raise refused("tools and metadata must be valid JSON: remove NaN, Infinity and deep nesting", "tools") from None
    owner = request.scope["state"]["owner"]
    before = service.responses.get(body.previous_response_id, owner) if body.previous_response_id else None
    messages = [*(before.messages if before else ()), *new_messages(body)]
    conversation = from_responses(body, messages)
    text, ids = await until_gone(request, service.prompts.of_conversation(conversation))
    given: dict[str, Any] = {
        name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None
    }
    given |= (structured := structured_outputs(format_of(body)))
    given |= (forced := {} if structured else forced_call(conversation))
    params = service.params(max_tokens=service.limits.tokens(len(ids), body.max_output_tokens), **given)
    salt = service.salt(request, body.cache_salt)

    def answers(session: str) -> AsyncGenerator[Step, None]:
        where = EngineArguments(
            session=session if service.remembers and body.store is not False else None, cache_salt=salt
        )
        return answer(service, request, asked(text, ids, conversation, params, forced=bool(forced), where=where))

    def keep(session: str, response: dict[str, Any], pieces: Sequence[Piece]) -> None:
        if body.store is not False:
            kept = Kept(owner, response, [*messages, _message(pieces)], session)
            service.forget(service.responses.add(head["id"], kept))

    turn = _Turn(service, response_of(owner, head["id"]), None if before is None else before.session, answers, keep)
    if body.stream:
        return await streamed(request, _events(turn, head))
    return json_answer(await until_gone(request, _whole(turn, head)))


@dataclass(frozen=True)
class _Turn:
    """The generation of one response.

    Attributes:
        service: The service.
        response: Session id derived from the id of the response.
        before: Session of the conversation that the response continues, or None.
        answers: Generates the response in the given session.
        keep: Stores the response and its session.
    """

    service: Service
    response: str
    before: str | None
    answers: Callable[[str], AsyncGenerator[Step, None]]
    keep: Callable[[str, dict[str, Any], Sequence[Piece]], None]

    @contextmanager
    def begin(self) -> Iterator[tuple[str, AsyncGenerator[Step, None]]]:
        """Lock the session of the response, and yield its id and the generation steps.

        If another request is continuing the same conversation, the response gets a new session.
        """
        busy = self.before is None or self.service.is_answering(self.before)
        session = self.response if busy or self.before is None else self.before
        try:
            with self.service.answering(*{self.response, session}):
                yield session, self.answers(session)
        except BaseException:
            if session == self.response:  # no stored response refers to it
                self.service.forget([session])
            raise


def _head(service: Service, body: ResponsesRequest, request: Request) -> dict[str, Any]:
    """Return the initial response object."""
    return {
        "id": f"resp_{request.scope['state']['request_id']}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.name,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else "auto",
        "tools": [tool.model_dump() | {"strict": False} for tool in body.tools or ()],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        # Fields of the Open Responses schema with fixed values.
        "background": False,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "top_logprobs": 0,
        "reasoning": None,
        "max_tool_calls": None,
        "service_tier": "default",
        "safety_identifier": None,
        "prompt_cache_key": None,
    }


def _done(head: dict[str, Any], step: Step, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the completed response object."""
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


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the response as an assistant message, without reasoning."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls = [
        call_message(piece.name, piece.arguments, f"call_{uuid.uuid4().hex[:24]}", "answer")
        for piece in pieces
        if isinstance(piece, ToolCall)
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


async def _whole(turn: _Turn, head: dict[str, Any]) -> dict[str, Any]:
    items, pieces = Items(), list[Piece]()
    with turn.begin() as (session, steps):
        async with aclosing(steps):
            async for step in steps:
                pieces += step.pieces
        for piece in joined(pieces):
            items.push(piece)
        items.close()
        response = _done(head, step, items.output)
        turn.keep(session, response, pieces)
    return response


async def _events(turn: _Turn, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    items, pieces, number = Items(), list[Piece](), 0

    def numbered(events: Sequence[dict[str, Any]]) -> bytes:
        nonlocal number
        found = b""
        for each in events:
            found += event(each | {"sequence_number": number}, each["type"])
            number += 1
        return found

    begun = False
    with turn.begin() as (session, steps):
        async with aclosing(steps):
            async for step in steps:
                if not begun:
                    begun = True
                    yield numbered([{"type": f"response.{n}", "response": head} for n in ("created", "in_progress")])
                for piece in step.pieces:
                    pieces.append(piece)
                    yield numbered(items.push(piece))
        yield numbered(items.close())
        response = _done(head, step, items.output)
        turn.keep(session, response, pieces)
    yield numbered([{"type": f"response.{response['status']}", "response": response}])
