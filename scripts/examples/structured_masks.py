"""Measure the cost of structured output per token: masks of `engine/guided_decoding.py` (llguidance) and of xgrammar.

python scripts/examples/structured_masks.py MODEL_FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from offload_rt.engine.guided_decoding import GuidedDecoder
from offload_rt.sampling_params import StructuredOutputs

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "home": ADDRESS,
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
REGEX = r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}[a-z ]{3,60}"
VALUE = {
    "name": "Richard Shelton",
    "age": 17,
    "tags": ["black arrow", "forest"],
    "home": {"street": "x", "zip": "12345"},
}
ANSWERS = {"json": json.dumps(VALUE), "regex": "2024-11-22T10:15:00 and so on and so on until the end"}
REPEATS = 5
"""Number of repeats; the first one includes reading the tokenizer."""


def measure(begin: Callable[[str], tuple[Callable[[], Any], Callable[[int], Any]]], kind: str, ids: list[int]) -> None:
    """Print the time to compile a structure (ms), of masks (us), and of a whole answer (ms)."""
    for repeat in range(REPEATS):
        began = time.perf_counter()
        mask, take = begin(kind)
        understood, masks = time.perf_counter() - began, []
        for token in ids:
            start = time.perf_counter()
            mask()
            masks.append(1e6 * (time.perf_counter() - start))
            take(token)
        whole = time.perf_counter() - began
        print(
            f"  {kind} {'(first)' if not repeat else '':8} structure {1e3 * understood:8.1f} ms, mask mean "
            f"{mean(masks):6.0f} us, median {median(masks):5.0f}, most {max(masks):7.0f}; {len(ids)} tokens: "
            f"{1e3 * whole:7.1f} ms"
        )


def ours(tokenizer: PreTrainedTokenizerBase, vocab: int) -> Callable[[str], Any]:
    """Return a function that begins an answer with llguidance, as used by the runtime."""

    def begin(kind: str) -> tuple[Callable[[], Any], Callable[[int], Any]]:
        asked = StructuredOutputs(json=SCHEMA) if kind == "json" else StructuredOutputs(regex=REGEX)
        structure = GuidedDecoder(asked, tokenizer, vocab, ())
        return structure.allowed, structure.take

    return begin


def xgrammars(tokenizer: PreTrainedTokenizerBase, vocab: int) -> Callable[[str], Any]:
    """Return a function that begins an answer with xgrammar, without its grammar cache."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def begin(kind: str) -> tuple[Callable[[], Any], Callable[[int], Any]]:
        grammar = compiler.compile_json_schema(SCHEMA) if kind == "json" else compiler.compile_regex(REGEX)
        matcher, bits = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, vocab)
        return lambda: matcher.fill_next_token_bitmask(bits), matcher.accept_token

    return begin


def main() -> None:
    """Measure with the tokenizer of the model folder given as the only argument."""
    torch.set_num_threads(1)
    tokenizer, vocab = AutoTokenizer.from_pretrained(sys.argv[1]), AutoConfig.from_pretrained(sys.argv[1]).vocab_size
    for name, make in (("llguidance", ours), ("xgrammar", xgrammars)):
        try:
            begin = make(tokenizer, vocab)
        except ModuleNotFoundError:
            print(f"{name} is not installed")
            continue
        print(f"{name}, {vocab:,} tokens")
        for kind, text in ANSWERS.items():
            measure(begin, kind, tokenizer(text, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    main()
