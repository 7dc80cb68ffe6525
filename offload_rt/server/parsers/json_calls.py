"""Tool calls in JSON: Llama 3, and models without a special format."""

from __future__ import annotations

from .scanner import Scan, Scanner

LLAMA_TAG = "<|python_tag|>"


class LlamaJson(Scanner):
    """Parser of a response that begins with `{"name": …, "parameters": {…}}`, or with a list of such calls."""

    marks = (('"parameters"', "python_tag"), ('"parameters"', "ipython"))
    special = True

    def parse(self) -> Scan[None]:
        yield from self.take(LLAMA_TAG)
        if not (yield from self.json_calls()):
            self._at = 0
        while tag := (yield from self.content(LLAMA_TAG)):
            if not (yield from self.json_calls()):
                self.give_up(tag)


class FencedJson(Scanner):
    """Parser of a response that begins with JSON calls, or contains them in a code fence."""

    FENCE = "```"

    def parse(self) -> Scan[None]:
        if not (yield from self.json_calls()):
            self._at = 0
        while tag := (yield from self.content(self.FENCE)):
            yield from self.take("json", "tool_call", "tool_code")
            if (yield from self.json_calls()):
                yield from self.take(self.FENCE)
            else:
                self.give_up(tag)
