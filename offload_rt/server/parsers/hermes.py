"""Tool calls of Hermes, Qwen and similar models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json

from .argument_check import fits
from .pieces import ToolCall
from .scanner import Scan, Scanner

CALL, CALL_END = "<tool_call>", "</tool_call>"
FENCE, FENCE_END = "```json", "```"


class Hermes(Scanner):
    """Parser of tagged calls. Before the first tag, calls in JSON code fences are found as well.

    Small models such as Qwen 2.5 1.5B often write fences instead of tags. JSON in a fence may also be an example in the
    text. It is a call only if the fence contains nothing else and the arguments fit the parameters of an offered tool.
    """

    marks = ((CALL,),)

    def parse(self) -> Scan[None]:
        tags: tuple[str, ...] = (CALL, FENCE)
        while tag := (yield from self.content(*tags)):
            if tag == FENCE:
                found = yield from self._fenced_calls()
            else:
                tags = (CALL,)
                found = yield from self.json_calls()
                if found:
                    yield from self.take(CALL_END)
            if not found:
                self.give_up(tag)

    def _fenced_calls(self) -> Scan[bool]:
        """Read the JSON calls up to the end of a fence and emit them. Emit none if anything else is in the fence."""
        calls: list[ToolCall] = []
        while (yield from self.peek()) == "{":
            start = self._at
            yield from self.take("{")
            # Other JSON is shown as it arrives: it need not be complete to see that it is not a call.
            if (yield from self.string()) not in ("name", "arguments", "parameters"):
                return False
            self._at = start
            call = yield from self.described_call()
            if call is None or not fits(json.loads(call.arguments), self.tools[call.name]):
                return False
            calls.append(call)
        if not calls or ((yield from self.peek()) and not (yield from self.take(FENCE_END))):
            return False
        for call in calls:
            self.emit_call(call.name, call.arguments)
        return True
