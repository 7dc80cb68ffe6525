"""Guided decoding with llguidance: JSON schemas, regular expressions, choices and grammars."""

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
from ..utils.extras import install_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_BYTES = 1 << 18  # larger grammars take seconds to compile

# llguidance follows references recursively, and a stack overflow would end the process. With a stack of 8 MiB, this
# happens at a chain of 1,000 `$ref`s (5,000 levels of JSON) or of 3,000 grammar rules.
DEEPEST_SCHEMA, MAX_RULES = 2000, 400

# Allow only one space after a separator: otherwise a model may write whitespace until its tokens run out.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GuidedDecoder:
    """Tracks the state of one output that must match a grammar (structured output)."""

    def __init__(
        self,
        spec: StructuredOutputs,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab: int,
        ends: Collection[int],
    ) -> None:
        """Compile the grammar.

        Args:
            vocab: Number of logits per position.
            ends: Tokens that may end a complete output.

        Raises:
            InputError: The grammar is invalid, or the model has no fast tokenizer.
            ConfigError: llguidance is not installed.
        """
        self._vocab, library = vocab, _library()
        try:
            grammar = _grammar(spec, library)
        except ValueError as error:
            raise InputError(f"structured_outputs are invalid: {error}") from error
        self._matcher: LLMatcher = _grammar_of(tokenizer, vocab, tuple(sorted(ends)), grammar).deep_copy()

    def copy(self) -> GuidedDecoder:
        twin = object.__new__(GuidedDecoder)
        twin._vocab, twin._matcher = self._vocab, self._matcher.deep_copy()
        return twin

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> torch.Tensor:
        """Return which tokens may come next, as bool `[V]`. Raise InputError if the grammar is too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _raise_error(self._matcher, "structured_outputs cannot be followed")
        found = np.zeros(self._vocab, dtype=bool)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab]
        found[: len(allowed)] = allowed
        return torch.from_numpy(found)

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        _raise_error(self._matcher, "structured_outputs cannot be followed")


def _library() -> Any:
    # llguidance compiles a grammar in milliseconds, while xgrammar needs up to 0.6 s for a regular expression. Its
    # token masks take longer (25 to 250 µs per token), but less than a decode step.
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ConfigError(f"structured_outputs need llguidance: {install_command('structured')}") from error
    return llguidance


def _grammar(spec: StructuredOutputs, library: Any) -> str:
    matcher = library.LLMatcher
    _check_size(spec)
    if spec.json is not None:
        return str(matcher.grammar_from_json_schema(json.dumps(spec.json), overrides=JSON_OPTIONS))
    if spec.regex is not None:
        return str(matcher.grammar_from_regex(spec.regex))
    if spec.choice is not None:
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, spec.choice))))
    return str(matcher.grammar_from_lark(spec.grammar))


def _check_size(spec: StructuredOutputs) -> None:
    given = spec.json if spec.json is not None else spec.regex or spec.grammar or list(spec.choice or ())
    size = len(json.dumps(given))
    if size > MAX_BYTES:
        raise InputError(
            f"structured_outputs have {size:,} bytes, and at most {MAX_BYTES:,} are allowed: simplify them"
        )
    if spec.json is not None:
        depth, references = _nesting(spec.json)
        if depth * (1 + references) > DEEPEST_SCHEMA:
            raise InputError(
                f"a schema that is nested {depth:,} levels deep and refers to {references:,} definitions could be "
                f"{depth * (1 + references):,} levels deep, and at most {DEEPEST_SCHEMA:,} are allowed: simplify it"
            )
    if spec.grammar is not None and (rules := spec.grammar.count(":")) > MAX_RULES:
        raise InputError(
            f"the grammar has {rules:,} rules (colons), and at most {MAX_RULES:,} are allowed: simplify it"
        )


def _nesting(schema: Any) -> tuple[int, int]:
    """Return the depth of a JSON schema, and an upper bound on the number of schemas that it refers to."""
    depth, references, bases, level = 0, set[str](), 0, [schema]
    while level:
        depth += 1
        mappings = [value for value in level if isinstance(value, dict)]
        names = ("$ref", "$dynamicRef", "$recursiveRef")
        references |= {str(value[name]) for value in mappings for name in names if name in value}
        bases += sum(isinstance(value.get(name), str) for value in mappings for name in ("$id", "id"))
        inner = [value for value in level if isinstance(value, list)] + [list(value.values()) for value in mappings]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    # The same reference has different targets below different `$id`s.
    return depth, len(references) * max(1, bases)


@lru_cache(maxsize=64)
def _grammar_of(
    tokenizer: PreTrainedTokenizerBase | None, vocab: int, ends: tuple[int, ...], grammar: str
) -> LLMatcher:
    """Return a compiled grammar from the cache. Callers must copy it before they advance it."""
    what, table = "structured_outputs are invalid", _tokenizer_table(tokenizer, vocab, ends)
    try:
        found: LLMatcher = _library().LLMatcher(table, grammar)
    except ValueError as error:
        raise InputError(f"{what}: {error}") from error
    _raise_error(found, what)
    return found


def _raise_error(matcher: LLMatcher, what: str) -> None:
    if matcher.is_error():
        raise InputError(f"{what}: {matcher.get_error()}")


@lru_cache(maxsize=4)  # building a table takes a second
def _tokenizer_table(tokenizer: PreTrainedTokenizerBase | None, vocab: int, ends: tuple[int, ...]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError("structured_outputs need a fast tokenizer: set tokenizer=")
    return from_tokenizer(tokenizer, max(vocab, len(tokenizer)), list(ends) or None)
