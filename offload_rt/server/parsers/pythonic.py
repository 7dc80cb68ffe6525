"""Tool calls of Llama 4 and similar models, written as a list of Python calls: `[find(q="Dick", most=3), stop()]`."""

from __future__ import annotations

import ast
import json
from typing import Any

from .scanner import Brackets, Scan, Scanner


class Pythonic(Scanner):
    """Parser for a list of Python calls, at the beginning of the response or after a tag.

    Each call is returned once it is complete.
    """

    tags = ("<|python_start|>",)
    untagged = True
    marks = (("func_name1(",), tags)
    special = True

    def read_calls(self, tag: str) -> Scan[bool]:
        listed = yield from self.accept("[")
        if not (yield from self._call()):
            return False
        more = True
        while more:
            yield from self.accept(",")
            more = yield from self._call()
        if listed:
            yield from self.accept("]")
        yield from self.accept("<|python_end|>")
        return True

    def _call(self) -> Scan[bool]:
        """Read one call. If the text is not a call of an offered tool, return False and do not move the position."""
        yield from self.peek()
        start = self._at
        name = yield from self.read_word()
        parts = [name]
        if name in self.tools and self._text[self._at : self._at + 1] == "(":
            complete = yield from self.stream_brackets(parts.append, Brackets("\"'"))
            arguments = _arguments("".join(parts)) if complete else None
            if arguments is not None:
                self.emit_call(name, json.dumps(arguments, ensure_ascii=False))
                return True
        self._at = start
        return False


def _arguments(text: str) -> dict[str, Any] | None:
    """Parse the keyword arguments of a Python call.

    Return None if any argument is not a literal that JSON can represent.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            return None
        found = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(found, allow_nan=False)
        return found
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
