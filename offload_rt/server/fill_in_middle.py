"""Build fill-in-the-middle prompts.

In such a prompt, special tokens mark the text before (prefix) and after (suffix) a gap, which the model fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .errors import refused
from .prompts import Prompts

Part = Literal["prefix", "suffix", ""]

MARKS: Sequence[Sequence[tuple[str, Part]]] = (
    (("<|fim_prefix|>", "prefix"), ("<|fim_suffix|>", "suffix"), ("<|fim_middle|>", "")),  # Qwen2.5-Coder, CodeGemma
    (("<fim_prefix>", "prefix"), ("<fim_suffix>", "suffix"), ("<fim_middle>", "")),  # StarCoder
    (("<｜fim▁begin｜>", "prefix"), ("<｜fim▁hole｜>", "suffix"), ("<｜fim▁end｜>", "")),  # DeepSeek-Coder
    (("▁<PRE>", "prefix"), ("▁<SUF>", "suffix"), ("▁<MID>", "")),  # Code Llama
    (("[SUFFIX]", "suffix"), ("[PREFIX]", "prefix")),  # Codestral
)
"""Special tokens of each model family, in the order of the prompt.

Each comes with the part of the text that follows it.
"""

ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "<file_sep>", "▁<EOT>")
"""Further tokens that end a completion. The tokens in `MARKS` also end it."""


async def fill_in_middle(prompts: Prompts, prefix: str, suffix: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a fill-in-the-middle prompt, and the token ids that end its completion.

    Raises:
        RefusedError: The model has no fill-in-the-middle tokens.
    """
    vocabulary = prompts.tokenizer.get_vocab()
    marks = next((marks for marks in MARKS if all(token in vocabulary for token, _ in marks)), None)
    if marks is None:
        raise refused("suffix needs a model with fill-in-the-middle tokens: remove it, or use such a model", "suffix")
    start = prompts.tokenizer.bos_token_id
    ids = [start] if start in await prompts.of_text("") else []
    for token, part in marks:
        ids.append(vocabulary[token])
        if part:
            ids += await prompts.of_text(prefix if part == "prefix" else suffix, special_tokens=False)
    ends = [vocabulary[token] for token in (*ENDS, *(token for token, _ in marks)) if token in vocabulary]
    return ids, ends
