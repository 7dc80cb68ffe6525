"""Output items of `/v1/responses`, and the events of its stream."""

from __future__ import annotations

import uuid
from typing import Any

from ..parsers.pieces import Arguments, Content, Piece, Reasoning, ToolCall

Event = dict[str, Any]


class Items:
    """Converts the pieces of a response to output items of `/v1/responses` and to stream events.

    Adjacent pieces of the same kind form one item. `output` contains the items that are complete.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind: type[Piece] | None = None
        self._id = self._text = ""
        self._call: dict[str, Any] = {}

    def push(self, piece: Piece) -> list[Event]:
        found: list[Event] = []
        if isinstance(piece, ToolCall) or (self._kind is not type(piece) and not isinstance(piece, Arguments)):
            found = self.close() + self._open(piece)
        text = piece.arguments if isinstance(piece, ToolCall) else piece.text
        self._text += text
        return [*found, self._event("delta", delta=text)] if text else found

    def close(self) -> list[Event]:
        """Complete the current item, if there is one. Return the events that report its end."""
        if self._kind is None:
            return []
        item = self._item(self._text, "completed")
        if self._kind is ToolCall:
            found = [self._event("done", arguments=self._text, name=self._call["name"])]
        else:
            found = [self._event("done", text=self._text)]
        if self._kind is Content:
            found.append(self._part_event("done", self._text))
        found.append({"type": "response.output_item.done", "output_index": len(self.output), "item": item})
        self.output.append(item)
        self._kind, self._text = None, ""
        return found

    def _open(self, piece: Piece) -> list[Event]:
        self._kind = kind = type(piece)
        self._id = f"{_PREFIXES[kind]}_{uuid.uuid4().hex[:24]}"
        if isinstance(piece, ToolCall):
            self._call = {"call_id": f"call_{uuid.uuid4().hex[:24]}", "name": piece.name}
        item = self._item("", "in_progress") | ({} if kind is ToolCall else {"content": []})
        found: list[Event] = [{"type": "response.output_item.added", "output_index": len(self.output), "item": item}]
        if kind is Content:
            found.append(self._part_event("added", ""))
        return found

    def _event(self, change: str, **fields: Any) -> Event:
        at = {"item_id": self._id, "output_index": len(self.output)}
        if self._kind is ToolCall:
            return {"type": f"response.function_call_arguments.{change}"} | at | fields
        at["content_index"] = 0
        if self._kind is Reasoning:
            return {"type": f"response.reasoning_text.{change}"} | at | fields
        return {"type": f"response.output_text.{change}"} | at | fields | {"logprobs": []}

    def _part_event(self, change: str, text: str) -> Event:
        at = {"item_id": self._id, "output_index": len(self.output), "content_index": 0}
        return {"type": f"response.content_part.{change}", "part": self._part(text)} | at

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "status": status}
        if self._kind is ToolCall:
            return item | {"type": "function_call", "arguments": text} | self._call
        if self._kind is Reasoning:
            return item | {"type": "reasoning", "summary": [], "content": [self._part(text)]}
        return item | {"type": "message", "role": "assistant", "content": [self._part(text)]}


_PREFIXES: dict[type[Piece], str] = {Content: "msg", Reasoning: "rs", ToolCall: "fc"}
