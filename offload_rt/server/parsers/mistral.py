"""Tool calls of Mistral.

Older models write `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, newer ones `[TOOL_CALLS]NAME[ARGS]{…}` per call.
"""

from __future__ import annotations

from .scanner import Scan, Scanner

CALLS = "[TOOL_CALLS]"


class Mistral(Scanner):
    marks = ((CALLS,),)
    special = True

    def parse(self) -> Scan[None]:
        while tag := (yield from self.content(CALLS)):
            if not (yield from self.json_calls()) and not (yield from self._named()):
                self.give_up(tag)

    def _named(self) -> Scan[bool]:
        name = yield from self.word()
        if (yield from self.take("[CALL_ID]")):
            yield from self.word()
        yield from self.take("[ARGS]")
        if name not in self.tools or (yield from self.peek()) != "{":
            return False
        yield from self.call(name)
        return True
