"""Tool calls of Llama 4 and similar models, as a list of Python calls: `[find(q="Dick", most=3), stop()]`."""

from __future__ import annotations

import ast
import json
from typing import Any

from .scanner import Brackets, Scan, Scanner

START, END = "<|python_start|>", "<|python_end|>"


class Pythonic(Scanner):
    """Parser of a response that begins with a list of Python calls. Each call is returned when it is complete."""

    marks = (("func_name1(",), (START,))
    special = True

    def parse(self) -> Scan[None]:
        if not (yield from self._calls()):
            self._at = 0
        while tag := (yield from self.content(START)):
            if not (yield from self._calls()):
                self.give_up(tag)

    def _calls(self) -> Scan[bool]:
        yield from self.take(START)
        listed = yield from self.take("[")
        if not (yield from self._call()):
            return False
        more = True
        while more:
            yield from self.take(",")
            more = yield from self._call()
        if listed:
            yield from self.take("]")
        yield from self.take(END)
        return True

    def _call(self) -> Scan[bool]:
        """Read one call. If the text is not a call of an offered tool, keep the position in the text."""
        yield from self.peek()
        start = self._at
        name = yield from self.word()
        parts = [name]
        if name in self.tools and self._text[self._at : self._at + 1] == "(":
            complete = yield from self.brackets(parts.append, Brackets("\"'"))
            arguments = _arguments("".join(parts)) if complete else None
            if arguments is not None:
                self.emit_call(name, json.dumps(arguments, ensure_ascii=False))
                return True
        self._at = start
        return False


def _arguments(text: str) -> dict[str, Any] | None:
    """Return the keyword arguments of a call, or None if they are not literals with JSON types."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            return None
        found = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(found, allow_nan=False)
        return found
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
