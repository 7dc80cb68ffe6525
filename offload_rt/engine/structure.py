"""Answers of a given structure (JSON schema, regular expression, choice, grammar), through llguidance.

Measured beside xgrammar 0.2.8 by `scripts/examples/structured_masks.py`, with SmolLM2's tokenizer (49,152 tokens) on
one thread of a CPU. A mask, mean over a JSON answer of 45 tokens: 25 us here, ready to use, and 3 us there, packed; of
28 tokens by a regular expression: 250 us and 9 us. To understand the structure first: 1.5 ms each here, 9 ms and
644 ms there. A whole answer: 3 and 9 ms here, 9 and 645 ms there. A decode step of a model takes longer than any of
these masks, and nobody waits two thirds of a second for somebody else's regular expression.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ConfigError, InputError
from ..sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MOST_BYTES = 1 << 18
"""Size of a structure at most: what is longer takes seconds to compile."""

DEEPEST_SCHEMA, MOST_RULES = 2000, 400
"""llguidance follows references by recursion, and a stack overflow would end the process. Chains of 1,000 `$ref`s (of
5,000 levels of JSON) and of 3,000 rules do that with a stack of 8 MiB."""

JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n]{0,24}"}
"""White space between the parts of a JSON value, as a model likes to lay it out, but not for ever."""


class Structure:
    """How far one answer has come, and what may follow. `ends` are the tokens that may end it where it is whole."""

    def __init__(
        self, asked: StructuredOutputs, tokenizer: PreTrainedTokenizerBase | None, vocab: int, ends: Collection[int]
    ) -> None:
        """vocab: how many logits there are. Raises InputError where the structure is not understood, or there is no
        fast tokenizer; ConfigError without llguidance."""
        self._vocab, library = vocab, _library()
        try:
            grammar = _grammar(asked, library)
        except ValueError as error:
            raise InputError(f"structured_outputs are not understood: {error}") from error
        self._matcher: LLMatcher = _understood(tokenizer, vocab, tuple(sorted(ends)), grammar).deep_copy()

    def copy(self) -> Structure:
        """Another that is as far, and goes on by itself."""
        twin = object.__new__(Structure)
        twin._vocab, twin._matcher = self._vocab, self._matcher.deep_copy()
        return twin

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and nothing but its end may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> torch.Tensor:
        """Which tokens may follow, `[V]`. Raises InputError where the structure is more than the library takes."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check("structured_outputs cannot be followed")
        found = np.zeros(self._vocab, dtype=bool)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab]
        found[: len(allowed)] = allowed
        return torch.from_numpy(found)

    def take(self, token: int) -> None:
        """Goes on with a token that was allowed."""
        self._matcher.consume_token(token)
        self._check("structured_outputs cannot be followed")

    def _check(self, what: str) -> None:
        _raise_error(self._matcher, what)


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ConfigError("structured_outputs need llguidance: pip install 'offload-rt[structured]'") from error
    return llguidance


def _grammar(asked: StructuredOutputs, library: Any) -> str:
    """What llguidance reads."""
    matcher = library.LLMatcher
    _check_size(asked)
    if asked.json is not None:
        return str(matcher.grammar_from_json_schema(json.dumps(asked.json), overrides=JSON_OPTIONS))
    if asked.regex is not None:
        return str(matcher.grammar_from_regex(asked.regex))
    if asked.choice is not None:
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, asked.choice))))
    return str(matcher.grammar_from_lark(asked.grammar))


def _check_size(asked: StructuredOutputs) -> None:
    """Raises InputError for structures that are too large or too deep to be compiled safely."""
    given = asked.json if asked.json is not None else asked.regex or asked.grammar or list(asked.choice or ())
    size = len(json.dumps(given))
    if size > MOST_BYTES:
        raise InputError(f"they have {size:,} bytes, and at most {MOST_BYTES:,} are possible: simplify them")
    if asked.json is not None:
        depth, references = _nesting(asked.json)
        if depth * (1 + references) > DEEPEST_SCHEMA:
            raise InputError(
                f"a schema that is nested {depth:,} levels deep and refers to {references:,} definitions could be "
                f"{depth * (1 + references):,} levels deep, and at most {DEEPEST_SCHEMA:,} are possible: simplify it"
            )
    if asked.grammar is not None and (rules := asked.grammar.count(":")) > MOST_RULES:
        raise InputError(f"a grammar of {rules:,} rules (colons), and at most {MOST_RULES:,} are possible: simplify it")


def _nesting(schema: Any) -> tuple[int, int]:
    """How deep JSON is nested, and how many different places its references can mean at most: each with each `$id`,
    which the others are relative to."""
    depth, references, bases, level = 0, set[str](), 0, [schema]
    while level:
        depth += 1
        mappings = [value for value in level if isinstance(value, dict)]
        names = ("$ref", "$dynamicRef", "$recursiveRef")
        references |= {str(value[name]) for value in mappings for name in names if name in value}
        bases += sum(isinstance(value.get(name), str) for value in mappings for name in ("$id", "id"))
        inner = [value for value in level if isinstance(value, list)] + [list(value.values()) for value in mappings]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    return depth, len(references) * max(1, bases)


@lru_cache(maxsize=64)
def _understood(
    tokenizer: PreTrainedTokenizerBase | None, vocab: int, ends: tuple[int, ...], grammar: str
) -> LLMatcher:
    """The beginning of every answer by this grammar, which is looked at when a request comes, when it starts and for
    each of its completions: never to be moved, only copied."""
    what, table = "structured_outputs are not understood", _table(tokenizer, vocab, ends)
    try:
        found: LLMatcher = _library().LLMatcher(table, grammar)
    except ValueError as error:
        raise InputError(f"{what}: {error}") from error
    _raise_error(found, what)
    return found


def _raise_error(matcher: LLMatcher, what: str) -> None:
    if matcher.is_error():
        raise InputError(f"{what}: {matcher.get_error()}")


@lru_cache(maxsize=4)
def _table(tokenizer: PreTrainedTokenizerBase | None, vocab: int, ends: tuple[int, ...]) -> LLTokenizer:
    """The bytes of a tokenizer's tokens, which take a second to collect. Raises InputError."""
    from llguidance.hf import from_tokenizer

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError("structured_outputs need a fast tokenizer: pass tokenizer=")
    return from_tokenizer(tokenizer, max(vocab, len(tokenizer)), list(ends) or None)
