"""Output items of the Responses API and their stream events."""

from __future__ import annotations

import uuid
from typing import Any

from ..parsers.pieces import Content, Piece, Reasoning, ToolCall

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
