"""Tool calls of Hermes, Qwen and similar models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from .scanner import Scan, Scanner

CALL, CALL_END = "<tool_call>", "</tool_call>"


class Hermes(Scanner):
    marks = ((CALL,),)

    def parse(self) -> Scan[None]:
        while tag := (yield from self.content(CALL)):
            if (yield from self.json_calls()):
                yield from self.take(CALL_END)
            else:
                self.give_up(tag)
