"""Tool calls of DeepSeek V3, R1 and V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.

V3 and R1 write `function<｜tool▁sep｜>NAME`, and the arguments in a code fence.
"""

from __future__ import annotations

from .scanner import Scan, Scanner

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeek(Scanner):
    marks = ((CALLS,),)
    special = True

    def parse(self) -> Scan[None]:
        while tag := (yield from self.content(CALLS, CALL)):
            if tag == CALLS and not (yield from self.take(CALL)):
                self.give_up(tag)
                continue
            if not (yield from self._call()):
                self.give_up(tag)
                continue
            while (yield from self.take(CALL)) and (yield from self._call()):
                pass
            yield from self.take(CALLS_END)

    def _call(self) -> Scan[bool]:
        name = yield from self.word()
        if not (yield from self.take(SEPARATOR)):
            return False
        if name == "function" and (yield from self.peek()) != "{":
            name = yield from self.word()
        fenced = yield from self.take("```json")
        if name not in self.tools or (yield from self.peek()) != "{":
            return False
        yield from self.call(name)
        if fenced:
            yield from self.take("```")
        yield from self.take(CALL_END)
        return True
