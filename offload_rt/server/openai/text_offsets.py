"""Find the positions of tokens in the text of a completion, in characters.

A token that begins within a character has the position of this character.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ...engine.detokenizer import TextStream, token_bytes, token_text
from ...outputs import Logprobs


class TextOffsets:
    """Positions of the generated tokens of one completion.

    Args:
        prompt: Tokens of the prompt.
        start: Position of the first generated token.
        special: Whether the text contains special tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int], start: int, *, special: bool
    ) -> None:
        self._tokenizer, self._stream = tokenizer, TextStream(tokenizer, (), special=special, prompt=prompt)
        self._length, self._held_back = start, b""

    def add(self, token: int) -> int:
        # A token that ends within a character may begin with whole characters, for example with a space.
        start = self._length + len(self._held_back.decode(errors="ignore"))
        if text := self._stream.push(token):
            self._length, self._held_back = self._length + len(text), b""
        elif "\N{REPLACEMENT CHARACTER}" in (known := token_text(self._tokenizer, token) or ""):
            self._held_back += token_bytes(self._tokenizer, token, known) or b""
        return start


def prompt_offsets(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], logprobs: Sequence[Logprobs | None], text: str
) -> list[int]:
    """Return the positions of the tokens of `prompt` in `text`, which is echoed."""
    data, special, decoder = text.encode(), set(tokenizer.all_special_ids), getincrementaldecoder("utf-8")("replace")
    found, at, length = [], 0, 0
    for token, there in zip(prompt, logprobs, strict=True):
        found.append(min(length, len(text)))
        known = token_text(tokenizer, token) if there is None else there[token].decoded_token
        piece = token_bytes(tokenizer, token, known or "") or b""
        # The text does not contain special tokens that the tokenizer added, nor the first space of SentencePiece. If
        # the tokenizer changed the text, positions are approximate.
        forms = (piece, piece.removeprefix(b" "))
        piece = next((form for form in forms if data.startswith(form, at)), b"" if token in special else piece)
        at, length = at + len(piece), length + len(decoder.decode(piece))
    return found
