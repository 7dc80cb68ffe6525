"""`SamplingParams`, with the field names of vLLM. Values are validated when an object is created."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .utils.config_fields import check, check_fields

EarlyStopping = bool | Literal["never"]

# With values outside these ranges, logits or scores would overflow or underflow in float32.
MIN_TEMPERATURE, LARGEST_TEMPERATURE = 1e-5, 1e30

REPETITION_PENALTIES = 1e-30, 1e30
MAX_LENGTH_PENALTY = 1e25  # largest allowed value of `max_tokens ** abs(length_penalty)`

ALL = -1
"""As `top_k`, this value disables the filter. As `logprobs`, it requests the whole vocabulary."""


@dataclass(frozen=True)
class StructuredOutputs:
    """A format that the output must follow. Set exactly one field.

    Attributes:
        json: JSON schema, as a mapping or a string.
        regex: Regular expression that the whole output matches.
        choice: List of strings. The output is one of them.
        grammar: Context-free grammar in Lark notation, as read by llguidance.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        check(len(given) == 1, f"structured outputs have {' and '.join(given) or 'nothing'}: set one of json, regex, "
              "choice, grammar")  # fmt: skip
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts("choice", self.choice))
            check(bool(self.choice), "choice=[] allows no output: it needs at least one string")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. The same seed gives the same text, except for rounding after a cached prefix.

    Logits are processed in the same order as in transformers: `logit_bias`, penalties, `bad_words`, `min_tokens`,
    `allowed_token_ids`, `structured_outputs`, `logits_processors`, temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: Maximum number of new tokens.
        min_tokens: Minimum number of new tokens. Until it is reached, end-of-text tokens and stop strings do not end
            the output.
        temperature: 0 is greedy decoding.
        top_k: Sample from the `top_k` most probable tokens; -1 or 0 disables it.
        top_p: Sample from the smallest set of most probable tokens whose total probability is at least `top_p`; 1
            disables it.
        min_p: Exclude tokens whose probability is below `min_p` times that of the most probable token. 0 disables it.
        presence_penalty: Subtracted from the logits of all tokens that occur in the output.
        frequency_penalty: Subtracted from a token's logit once for each time that the token occurs in the output.
        repetition_penalty: Applied to tokens that occur in the prompt or the output. Positive logits are divided by it,
            and negative logits are multiplied by it.
        seed: Seed of the random numbers. If None, a random seed is chosen. The random number for a token depends on the
            seed and on the token's position in the text. The first of n completions uses `seed`, and the others use
            seeds derived from it.
        stop: String or strings that end the output and are not part of it.
        stop_token_ids: Tokens that end the output.
        include_stop_str_in_output: Keep the stop string in the output.
        skip_special_tokens: Leave special tokens out of the text.
        ignore_eos: Continue after end-of-text tokens.
        logprobs: Number of most probable tokens per position for which log-probabilities are returned, in addition to
            the sampled token. They are computed before any filter. 0 returns only the sampled token, and -1 the whole
            vocabulary.
        prompt_logprobs: The same as `logprobs`, for prompt tokens. The prompt is then computed without cached KV.
        bad_words: Strings that are never generated.
        logit_bias: Values that are added to logits, by token id.
        allowed_token_ids: The only tokens that may be generated.
        n: Number of completions per prompt. The prompt is computed only once.
        logits_processors: transformers' `LogitsProcessor` objects. They are called with the token ids `[1, T]` and
            logits `[1, V]` of one completion at a time.
        structured_outputs: Format that the output must follow.
        num_beams: Number of beams. Values above 1 select beam search as in transformers' `generate`, which needs
            `temperature=0`. The best `n` beams are returned.
        length_penalty: Beam scores are divided by (length of the output) ** `length_penalty`. Values above 0 prefer
            long outputs.
        early_stopping: When beam search ends: as soon as `num_beams` beams have finished (True), when better beams are
            unlikely (False), or when no running beam can become better than the finished beams ("never").
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
    skip_special_tokens: bool = True
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
        check_fields(self)
        self._set_lists()
        self._check_numbers()
        self._check_beams()

    def _set_lists(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        check(all(self.stop), "a stop string must not be empty")
        check(
            all(word.strip() for word in self.bad_words),
            f"bad_words={self.bad_words!r:.80} must not contain an empty string",
        )
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            check(bool(self.allowed_token_ids), "allowed_token_ids=[] allows no token: it needs at least one id")
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
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
            f"temperature={self.temperature} is too small to divide by: 0 is greedy, above that at least "
            f"{MIN_TEMPERATURE}",
        )
        check(self.top_k >= ALL, f"top_k={self.top_k} must be at least 1; -1 disables it")
        check(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]; 1 disables it")
        check(0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]; 0 disables it")
        for name in ("presence_penalty", "frequency_penalty"):
            check(-2 <= getattr(self, name) <= 2, f"{name}={getattr(self, name)} must be in [-2, 2]; 0 disables it")
        check(
            REPETITION_PENALTIES[0] <= self.repetition_penalty <= REPETITION_PENALTIES[1],
            f"repetition_penalty={self.repetition_penalty} must be positive and from {REPETITION_PENALTIES[0]} to "
            f"{REPETITION_PENALTIES[1]}; 1 disables it",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or value >= ALL, f"{name}={value} must be at least 0; -1 is the whole vocabulary")
        check(self.n >= 1, f"n={self.n} must be at least 1")

    def _check_beams(self) -> None:
        check(self.num_beams >= 1, f"num_beams={self.num_beams} must be at least 1; 1 disables beam search")
        check(math.isfinite(self.length_penalty), f"length_penalty={self.length_penalty} must be finite")
        check(
            self.early_stopping in (True, False, "never"),
            f"early_stopping={self.early_stopping!r} must be True, False or 'never'",
        )
        if self.num_beams > 1:
            most = math.log(MAX_LENGTH_PENALTY) / math.log(max(2, self.max_tokens))
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
            check(self.n <= self.num_beams, f"n={self.n} must not exceed num_beams={self.num_beams}")
            for name in ("logprobs", "prompt_logprobs", "structured_outputs"):
                check(getattr(self, name) is None, f"{name} is not available for beam search: set num_beams=1")
            return
        changed = self.length_penalty != 1.0 or self.early_stopping is not False
        check(not changed, "length_penalty and early_stopping need beam search: set num_beams above 1")


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    listed = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    check(listed, f"{name}={value!r:.80} must be a string or a list of strings")
    for text in texts:  # tokenizers reject lone surrogates with a TypeError
        lone = any("\ud800" <= letter <= "\udfff" for letter in text)
        check(not lone, f"{name} has {text!r:.80}, which contains a lone surrogate; it must be valid Unicode")
    return tuple(texts)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    whole = listed and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value)
    check(whole, f"{name}={value!r:.80} must be a list of token ids")
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    # Keys may be strings, as in JSON.
    wanted = f"logit_bias={value!r:.80} must be a mapping of token ids to finite numbers"
    check(isinstance(value, Mapping), wanted)
    try:
        found = {int(token): float(bias) for token, bias in value.items()}
    except (TypeError, ValueError, OverflowError):
        found = {-1: 0.0}
    check(all(token >= 0 and math.isfinite(bias) for token, bias in found.items()), wanted)
    return found


def _schema(value: Any) -> dict[str, Any] | bool:
    try:
        found = json.loads(value) if isinstance(value, str) else json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        check(False, f"json={value!r:.80} is not a JSON schema: {error}")
    check(isinstance(found, (dict, bool)), f"json={value!r:.80} is not a JSON schema: it must be an object")
    return found  # type: ignore[no-any-return]
