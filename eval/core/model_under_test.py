"""Load a model once, and evaluate it under several variants (policy, options, pool settings)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...config import DType
from ...core import ModelGeometry
from ...engine.scoring import Score
from ...engine.scoring import score as score_continuations
from ...errors import InputError
from ...llm import LLM
from ...model_runner.trace import Recorder
from ...models.loading import LoadedModel
from ...policies.base import Policy
from ...policies.registry import parse_options
from ...skewing.tuned import default_options
from .report import Say, say_nothing
from .rival_options import register_rivals
from .variants import Scored, Text, Variant, text_digest


class ModelUnderTest:
    """A model to evaluate. `LLM.score` computes the scores, using the decode steps of the runtime.

    Args:
        skew: Skew artifact, or a folder with tuned options. If None, the model is calibrated on first use.
        batch: Number of texts that `LLM.score` processes as one batch.
    """

    def __init__(
        self, model: str, *, device: str = "auto", dtype: DType = "auto", skew: str | None = None, batch: int = 32
    ) -> None:
        register_rivals()
        self.model, self.batch = model, batch
        self._settings: dict[str, Any] = {"device": device, "dtype": dtype, "skew": skew and Path(skew)}
        self._other: tuple[str, LLM] | None = None
        self._encoded: dict[str, tuple[list[int], list[int], tuple[int, ...]]] = {}

    @cached_property
    def _first(self) -> LLM:
        return LLM(self.model, policy="full", **self._settings)

    @property
    def loaded(self) -> LoadedModel:
        return self._first.runner.model

    @property
    def name(self) -> str:
        """The model name without folders. Models with different weights may have the same name."""
        return self.loaded.name.rstrip("/").rsplit("/", 1)[-1]

    @property
    def geometry(self) -> ModelGeometry:
        return self.loaded.adapter.geometry

    @property
    def identity(self) -> dict[str, Any]:
        """The columns that identify the model in every result row."""
        adapter = self.loaded.adapter
        return {
            "model": self.name,
            "fingerprint": self.loaded.fingerprint,
            "dtype": str(adapter.dtype).removeprefix("torch."),
            "device": str(adapter.device),
            "layers": adapter.geometry.layers,
        }

    def encode(self, text: str) -> tuple[list[int], list[int], tuple[int, ...]]:
        digest = text_digest(text)
        if digest not in self._encoded:
            self._encoded[digest] = encode_text(self, text)
        return self._encoded[digest]

    def options(self, variant: Variant) -> dict[str, Any]:
        """Return the policy options that the variant sets, plus tuned values for all other options."""
        skew, fingerprint = self._settings["skew"], self.loaded.fingerprint
        options = dict(default_options(skew, variant.policy, variant.options, fingerprint))
        if variant.policy in ("infinigen", "auto") and options.get("preset") != "paper" and "ahead" not in options:
            # On a CPU, selection uses the layer's true query by default. Use a predicted query, as on an accelerator,
            # so that results measured on a CPU also hold for accelerators.
            options.setdefault("source", "attention_input")
        return options

    def policy(self, variant: Variant, context: int | None = None) -> Policy:
        """Build the policy of the variant for this model.

        Raises:
            ConfigError: An option is unknown, or with `context` tokens the budget is too small to select any token.
        """
        options = self.options(variant)
        if context is not None:
            parse_options(variant.policy, options).check_context(context)
        return self._first.under(variant.policy, options).runner.policy

    def key(self, variant: Variant) -> dict[str, Any]:
        """Return the part of a `RowStore` key that identifies the variant and its settings for this model."""
        # The key covers all options, including defaults. Equal variants are thus measured only once, and again if a
        # default changes.
        provenance_key = self.policy(variant).provenance_key
        return {"policy": variant.policy, "engine": variant.key["engine"], "provenance": provenance_key}

    def describe(self, variant: Variant) -> dict[str, Any]:
        """Return the columns of a result row that describe the model and the variant.

        The column `provenance` (KV provenance key) identifies the policy's options, defaults and skew artifact.
        """
        policy = self.policy(variant)
        return {
            **self.identity,
            "policy": variant.policy,
            "variant": variant.label,
            "options": self.options(variant),
            "engine": dict(variant.engine),
            "budget": variant.options.get("budget"),
            "dense_layers": sorted(policy.dense_layers),
            "provenance": policy.provenance_key,
        }

    def llm(self, variant: Variant) -> LLM:
        """Return a runtime for the variant. Runtimes with equal engine settings share weights and prefilled blocks."""
        return self._with(variant.engine).under(variant.policy, self.options(variant))

    def _with(self, engine: Mapping[str, Any]) -> LLM:
        """Return a runtime with these engine settings.

        The default runtime and the most recent other runtime are cached.
        """
        if not engine:
            return self._first
        name = json.dumps(dict(engine), sort_keys=True)
        if self._other is None or self._other[0] != name:
            self._other = None  # free the KV cache before the next one is allocated
            self._other = name, LLM(self.model, policy="full", **self._settings, **engine)
        return self._other[1]

    def score(self, variant: Variant, texts: Sequence[Text]) -> list[Scored]:
        """Score each text under the variant.

        Texts with the same `decode_from` are scored in one call of `LLM.score`.
        """
        llm = self.llm(variant)
        batch = 1 if "host_memory" in variant.engine else self.batch  # the limit applies to a single sequence
        done: dict[int, Scored] = {}
        for start in sorted({text.decode_from for text in texts}):
            which = [i for i, text in enumerate(texts) if text.decode_from == start]
            prompts = [texts[i].tokens[: texts[i].scored_from] for i in which]
            targets = [texts[i].tokens[texts[i].scored_from :] for i in which]
            for i, score in zip(which, llm.score(prompts, targets, start, batch=batch), strict=True):
                done[i] = _scored(score)
        return [done[i] for i in range(len(texts))]

    def score_observed(
        self,
        variant: Variant,
        text: Text,
        on_logprobs: Callable[[torch.Tensor], None],
        recorder: Recorder | None = None,
    ) -> Scored:
        """Score one text. For each scored token in order, `on_logprobs` is called with the log-probabilities `[V]`.

        `recorder` receives the tokens that each layer selects.
        """
        runner = self.llm(variant).runner
        with runner.pool.lock:
            [score] = score_continuations(
                runner,
                [text.tokens[: text.scored_from]],
                [text.tokens[text.scored_from :]],
                decode_from=text.decode_from,
                batch=1,
                on_logprobs=lambda _, logprobs: on_logprobs(logprobs),
                recorder=recorder,
            )
        return _scored(score)


def _scored(score: Score) -> Scored:
    stats = score.stats
    return Scored(
        nats=[-value for value in score.logprobs],
        is_greedy=score.is_greedy,
        attended=stats.exact_fraction,
        fetched=stats.fetched_fraction,
        sparse_attended=stats.sparse_exact_fraction,
        sparse_fetched=stats.sparse_fetched_fraction,
        missed=stats.missed_mass,
        worst_layer=stats.missed_mass_worst_layer,
    )


def encode_text(tested: ModelUnderTest, text: str) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Tokenize `text`.

    Returns:
        The token ids, the byte offset (in UTF-8) at which each token ends, and the special tokens that precede a text.

    Raises:
        InputError: The model has no fast tokenizer.
    """
    tokenizer = tested.loaded.tokenizer
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise InputError(f"{tested.model} has no fast tokenizer, which is needed to measure bits per byte")
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    size = [0]
    for character in text:
        size.append(size[-1] + len(character.encode("utf-8", "surrogatepass")))
    ends = [size[stop] for _, stop in encoded["offset_mapping"]]
    probe: Any = tokenizer("a")["input_ids"]
    bare: Any = tokenizer("a", add_special_tokens=False)["input_ids"]
    specials = next(i for i in range(len(probe)) if list(probe[i : i + len(bare)]) == list(bare))
    return list(encoded["input_ids"]), ends, tuple(probe[:specials])


@dataclass(frozen=True)
class Evaluation:
    """Everything that an evaluation needs: a model, a text to evaluate it on, and a folder for the results."""

    tested: ModelUnderTest
    text: str
    name: str  # name of the text in results
    out: Path  # Folder of the results. Rows in this folder are not measured again.
    say: Say = say_nothing  # shows a line about progress
    deadline_passed: Callable[[], bool] = lambda: False  # if it returns True, no new row is measured

    def about(self, config: Any = None) -> dict[str, Any]:
        """Return the settings that all rows share: the model, the text, and the fields of the dataclass `config`."""
        text = {"text": self.name, "text_digest": text_digest(self.text)}
        return {**self.tested.identity, **text, **(asdict(config) if config is not None else {})}
