"""How new tokens are chosen: `SamplingParams`, with vLLM's and transformers' names, checked when they are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .config_fields import check, check_types

EarlyStopping = bool | Literal["never"]

LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-5, 1e30
"""Logits divided by a temperature outside leave the range of float32."""

REPETITION_PENALTIES = 1e-30, 1e30
"""Logits multiplied or divided by a penalty outside leave the range of float32."""

MOST_LENGTH_PENALTY = 1e25
"""Largest `max_tokens ** abs(length_penalty)`: scores beyond leave the range of float32."""

ALL = -1
"""As `top_k` none is left out; as `logprobs` all of the vocabulary."""


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer must look like: one of these.

    json: a JSON schema, as a mapping or as text; the answer is a value that it allows.
    regex: a regular expression that the whole answer matches.
    choice: texts, one of which is the answer.
    grammar: a context-free grammar (Lark's notation, as llguidance reads it).
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        check(len(given) == 1, f"structured outputs have {' and '.join(given) or 'nothing'}: give one of json, regex, "
              "choice, grammar")  # fmt: skip
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts("choice", self.choice))
            check(bool(self.choice), "choice=[] leaves no answer: give at least one")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))


@dataclass(frozen=True)
class SamplingParams:
    """How new tokens are chosen and when they end. `temperature=0` is greedy. Filters apply in transformers' order:
    `logit_bias`, penalties, `bad_words`, `min_tokens`, `allowed_token_ids`, `structured_outputs`, `logits_processors`,
    temperature, top-k, top-p, min-p. The same seed gives the same text.

    max_tokens, min_tokens: new tokens at most, and before which neither the end of the text nor a stop ends it.
    top_k, top_p, min_p: filters of what is drawn from; -1 (or 0), 1 and 0 leave everything.
    presence_penalty, frequency_penalty: taken from the logits of tokens that were written, once or for each time;
        `repetition_penalty` divides those of the prompt's tokens too (multiplies negative ones).
    stop: a text or several that end an answer, which is left out of it unless `include_stop_str_in_output`;
        stop_token_ids: tokens that do. `ignore_eos` goes on after the end of the text.
    logprobs: log-probabilities of each new token and of so many of the most probable ones, of what the model says
        before any filter; 0 for the new tokens' alone, -1 for all of the vocabulary. prompt_logprobs: the same of the
        prompt's tokens, all of which are computed for it.
    bad_words: texts that are never written. logit_bias: what is added to logits, by token id. allowed_token_ids: the
        only ones that may be chosen.
    logits_processors: transformers' `LogitsProcessor` objects, called with all tokens `[1, T]` and logits `[1, V]` of
        one completion at a time, in no order of completions.
    structured_outputs: a JSON schema, regular expression, choice or grammar that the answer follows.
    n: completions of each prompt, which is computed once. Each has a seed of its own, made from `seed` and its number;
        the first one's is `seed` itself, so that it equals the completion of n=1.
    num_beams: above 1, beam search as transformers' `generate(num_beams=...)`, with `temperature=0` (it draws nothing);
        `n` of the beams are returned, best first.
    length_penalty: a beam's score is its log-probability over its length to this power: above 0 favours long ones.
    early_stopping: True stops when there are `num_beams` finished ones, False when better ones are unlikely, "never"
        when there cannot be any.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = ALL
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    n: int = 1
    logits_processors: Sequence[Any] = ()
    structured_outputs: StructuredOutputs | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        check_types(self)
        self._set_lists()
        self._check_numbers()
        self._check_beams()

    def _set_lists(self) -> None:
        """Checks what holds several values, and makes tuples of it."""
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        check(all(self.stop), "a stop string must not be empty")
        check(
            all(word.strip() for word in self.bad_words), f"bad_words={self.bad_words!r:.80} must not have an empty one"
        )
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            check(bool(self.allowed_token_ids), "allowed_token_ids=[] leaves no token: give at least one")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        listed = isinstance(self.logits_processors, Sequence) and all(map(callable, self.logits_processors))
        check(listed, f"logits_processors={self.logits_processors!r:.80} must be a list of callables")
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        structured = self.structured_outputs
        check(
            structured is None or isinstance(structured, StructuredOutputs),
            f"structured_outputs={structured!r:.80} must be a StructuredOutputs",
        )

    def _check_numbers(self) -> None:
        check(self.max_tokens >= 1, f"max_tokens={self.max_tokens} must be at least 1")
        check(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} must be from 0 to max_tokens={self.max_tokens}",
        )
        check(
            0 <= self.temperature <= LARGEST_TEMPERATURE,
            f"temperature={self.temperature} must be from 0 to {LARGEST_TEMPERATURE}; 0 is greedy",
        )
        check(
            self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE,
            f"temperature={self.temperature} is too small to divide by: 0 is greedy, above that at least "
            f"{LEAST_TEMPERATURE}",
        )
        check(self.top_k >= ALL, f"top_k={self.top_k} must be at least 1; -1 is none")
        check(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]; 1 is none")
        check(0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]; 0 is none")
        for name in ("presence_penalty", "frequency_penalty"):
            check(-2 <= getattr(self, name) <= 2, f"{name}={getattr(self, name)} must be in [-2, 2]; 0 is none")
        check(
            REPETITION_PENALTIES[0] <= self.repetition_penalty <= REPETITION_PENALTIES[1],
            f"repetition_penalty={self.repetition_penalty} must be positive and from {REPETITION_PENALTIES[0]} to "
            f"{REPETITION_PENALTIES[1]}; 1 is none",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or value >= ALL, f"{name}={value} must be at least 0; -1 is the whole vocabulary")
        check(self.n >= 1, f"n={self.n} must be at least 1")

    def _check_beams(self) -> None:
        check(self.num_beams >= 1, f"num_beams={self.num_beams} must be at least 1; 1 is no beam search")
        check(math.isfinite(self.length_penalty), f"length_penalty={self.length_penalty} must be finite")
        check(
            self.early_stopping in (True, False, "never"),
            f"early_stopping={self.early_stopping!r}: True, False, 'never'",
        )
        if self.num_beams > 1:
            most = math.log(MOST_LENGTH_PENALTY) / math.log(max(2, self.max_tokens))
            check(
                abs(self.length_penalty) <= most,
                f"length_penalty={self.length_penalty} must be from {-most:.1f} to {most:.1f} with max_tokens="
                f"{self.max_tokens}",
            )
            check(
                self.temperature == 0,
                f"num_beams={self.num_beams} with temperature={self.temperature}: beam search draws no random tokens; "
                "set temperature=0, or num_beams=1 and n completions",
            )
            check(
                self.n <= self.num_beams, f"n={self.n} completions of num_beams={self.num_beams} beams: at most those"
            )
            for name in ("logprobs", "prompt_logprobs", "structured_outputs"):
                check(getattr(self, name) is None, f"{name} is not for beam search: set num_beams to 1")
            return
        changed = self.length_penalty != 1.0 or self.early_stopping is not False
        check(not changed, "length_penalty and early_stopping are for beam search: set num_beams above 1")
        check(
            self.n == 1 or self.temperature > 0,
            f"n={self.n} greedy completions would all be the same: set temperature above 0, or num_beams",
        )


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Several texts; one alone is one of them. Raises ConfigError for anything else."""
    texts = (value,) if isinstance(value, str) else value
    listed = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    check(listed, f"{name}={value!r:.80} must be a text or a list of texts")
    for text in texts:  # tokenizers refuse lone surrogates with a TypeError
        lone = any("\ud800" <= letter <= "\udfff" for letter in text)
        check(not lone, f"{name} has {text!r:.80}, which holds half of a surrogate pair; give valid Unicode")
    return tuple(texts)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """Several token ids. Raises ConfigError for anything else."""
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    whole = listed and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value)
    check(whole, f"{name}={value!r:.80} must be a list of token ids")
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    """What is added to logits, by token id; ids may be text, as in JSON. Raises ConfigError for anything else."""
    wanted = f"logit_bias={value!r:.80} must be a mapping of token ids to finite numbers"
    check(isinstance(value, Mapping), wanted)
    try:
        found = {int(token): float(bias) for token, bias in value.items()}
    except (TypeError, ValueError, OverflowError):
        found = {-1: 0.0}
    check(all(token >= 0 and math.isfinite(bias) for token, bias in found.items()), wanted)
    return found


def _schema(value: Any) -> dict[str, Any] | bool:
    """A JSON schema. Raises ConfigError for what is none."""
    try:
        found = json.loads(value) if isinstance(value, str) else json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        check(False, f"json={value!r:.80} is no JSON schema: {error}")
    check(isinstance(found, (dict, bool)), f"json={value!r:.80} is no JSON schema: it must be an object")
    return found  # type: ignore[no-any-return]
