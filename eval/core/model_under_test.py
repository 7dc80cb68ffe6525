"""Model under test: loaded once and evaluated under several variants (policy, options, KV pool settings)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...config import DType, EngineConfig, SkewMethod
from ...core import ModelGeometry
from ...engine.build import build_policy, named_method
from ...errors import ConfigError, InputError
from ...kv_cache.machine import available_memory
from ...llm import LLM
from ...models.loading import LoadedModel, load_model
from ...policies.base import Policy
from ...policies.registry import parse_options
from ...skewing.artifact import SkewArtifact
from ...skewing.calibrate import cached_artifact
from ...skewing.tuned import check_method, default_options, load_artifact
from ...utils.config_fields import check_choice, check_keys, from_mapping
from .slot_simulator import PoolSettings
from .teacher_forced import Observer, Prefix, prefill_layers, score_layerwise

PATHS = ("layers", "steps")

PREFIX_BYTES = 3 << 30
"""Upper limit of the memory for cached exact prefills; a quarter of the available memory is a second limit."""


@dataclass(frozen=True)
class Variant:
    """A policy, its options and further `LLM` arguments (`host_memory`, `eviction`, ...), as plain JSON values."""

    policy: str = "full"
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Policy and all settings as text, for tables."""
        parts = [f"{key}={_plain(value)}" for key, value in (*self.options.items(), *self.engine.items())]
        return " ".join([self.policy, *parts])

    @property
    def key(self) -> dict[str, Any]:
        """All fields as plain JSON values; unique per variant."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def grid(policies: Sequence[str], budgets: Sequence[float], options: Mapping[str, Any] | None = None) -> list[Variant]:
    """Return the variants to compare: the baseline `full`, then every other policy at every budget.

    Without budgets, each policy appears once with its default budget. `options` apply to every policy except `full`.
    """
    variants, shared = [Variant("full")], dict(options or {})
    for policy in policies:
        if policy != "full":
            sized = [Variant(policy, shared | {"budget": budget}) for budget in budgets]
            variants += sized or [Variant(policy, shared)]
    return variants


@dataclass(frozen=True)
class Text:
    """Token ids; `[0, decode_from)` is prefilled with full attention, `[scored_from, N)` is scored."""

    tokens: tuple[int, ...]
    decode_from: int
    scored_from: int

    def __post_init__(self) -> None:
        assert 0 <= self.decode_from < self.scored_from < len(self.tokens)


@dataclass(frozen=True)
class Scored:
    """Scores and costs of one text. A metric is None if it was not measured.

    Attributes:
        nats: Negative log-probability of each scored token, `[n]`.
        is_greedy: Whether each scored token is the most probable one, `[n]`.
        attended: Fraction of the visible KV entries attended exactly, mean over all layers and decoded positions.
        link: Fraction of the visible KV entries fetched from the host, mean over all layers and decoded positions.
        sparse_attended: As `attended`, over the sparse layers only.
        sparse_link: As `link`, over the sparse layers only.
        missed: Missed attention mass (attention weight of tokens not attended), mean over the sparse layers.
        missed_worst: Missed attention mass of the worst layer.
        output_error: Relative error |out - exact| / |exact| of the attention output, mean over the sparse layers
            (path "layers" only).
        output_error_worst: Relative error of the worst layer.
    """

    nats: list[float]
    is_greedy: list[bool]
    attended: float
    link: float
    sparse_attended: float
    sparse_link: float
    missed: float | None
    missed_worst: float | None
    output_error: float | None = None
    output_error_worst: float | None = None


class ModelUnderTest:
    """A model under test.

    Args:
        model: Model name or folder.
        device: Device, as in `LLM`.
        dtype: Data type, as in `LLM`.
        skew: Skew artifact or folder of tuned options; None calibrates on first use.
        path: "steps" scores with `LLM.score`. "layers" computes the same scores layer by layer, much faster on a CPU.
        batch: Number of texts per `LLM.score` batch.
        progress: Called after each scored text.

    Raises:
        ConfigError: If `path` is unknown. Using the model also raises the errors of `LLM`.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: DType = "auto",
        skew: str | None = None,
        path: str = "layers",
        batch: int = 32,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        check_choice("path", path, PATHS)
        self.model, self.path, self.batch, self.progress = model, path, batch, progress
        self._device, self._dtype, self._skew = device, dtype, None if skew is None else Path(skew)
        self._artifacts: dict[str, SkewArtifact] = {}
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._encoded: dict[str, tuple[list[int], list[int], tuple[int, ...]]] = {}

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, loaded on first access."""
        return load_model(self.model, device=self._device, dtype=self._dtype)

    @property
    def name(self) -> str:
        """Model name without leading folders; the fingerprint identifies the weights."""
        return self.loaded.name.rstrip("/").rsplit("/", 1)[-1]

    @property
    def geometry(self) -> ModelGeometry:
        """Shape parameters of the model."""
        return self.loaded.adapter.geometry

    @property
    def identity(self) -> dict[str, Any]:
        """Model columns of every result row."""
        adapter = self.loaded.adapter
        return {
            "model": self.name,
            "fingerprint": self.loaded.fingerprint,
            "dtype": str(adapter.dtype).removeprefix("torch."),
            "device": str(adapter.device),
            "layers": adapter.geometry.layers,
        }

    def encode(self, text: str) -> tuple[list[int], list[int], tuple[int, ...]]:
        """Encode `text` with `encode_text` and cache the result."""
        digest = text_digest(text)
        if digest not in self._encoded:
            self._encoded[digest] = encode_text(self, text)
        return self._encoded[digest]

    def artifact(self, method: SkewMethod) -> SkewArtifact:
        """Return the given skew artifact, or the cached one for `method`."""
        if method not in self._artifacts:
            given = None if self._skew is None else load_artifact(self._skew, self.loaded.fingerprint)
            self._artifacts[method] = given or cached_artifact(self.loaded, method)
        return self._artifacts[method]

    def options(self, variant: Variant) -> dict[str, Any]:
        """Return the tuned options overridden by the options of the variant."""
        options = dict(default_options(self._skew, variant.policy, variant.options, self.loaded.fingerprint))
        if variant.policy in ("infinigen", "auto") and options.get("preset") != "paper":
            # An accelerator selects with a speculated query; a CPU defaults to the true query of the layer.
            # Evaluations on a CPU must predict the quality on an accelerator.
            options.setdefault("source", "attention_input")
        return options

    def policy(self, variant: Variant, context: int | None = None) -> Policy:
        """Build the policy of the variant for this model.

        Options of the variant override the tuned options in `skew`. The option "skew": "none" disables skewing (for
        ablations, path "layers" only).

        Raises:
            ConfigError: If an option is unknown, or if the budget selects no token of `context` tokens.
        """
        options = self.options(variant)
        unskewed = options.get("skew") == "none"
        if unskewed:
            del options["skew"]
        if self._skew is not None and (named := named_method(variant.policy, options)) is not None:
            check_method(self.artifact(named), named, self._skew)
        if context is not None:
            parse_options(variant.policy, options).check_context(context)
        return build_policy(self.loaded, variant.policy, options, self._identity if unskewed else self.artifact)

    def key(self, variant: Variant) -> dict[str, Any]:
        """Return the row-store key of the variant for this model."""
        # The resolved options, not the given ones: equal variants are measured once, changed defaults again.
        provenance_key = self.policy(variant).provenance_key
        return {"policy": variant.policy, "engine": variant.key["engine"], "lineage": provenance_key}

    def describe(self, variant: Variant) -> dict[str, Any]:
        """Return the model and variant columns of a result row.

        `provenance_key` identifies the options, defaults and skew artifact of the policy.
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
            "lineage": policy.provenance_key,
        }

    def _identity(self, method: SkewMethod) -> SkewArtifact:
        """Return an identity skew."""
        real = self.artifact(method)
        unit = torch.eye(real.query.shape[-1], dtype=real.query.dtype).expand_as(real.query).clone()
        return replace(real, query=unit, key=unit)

    def llm(self, variant: Variant) -> LLM:
        """Create a new `LLM` for the variant."""
        return LLM(
            self.model,
            policy=variant.policy,
            policy_options=self.options(variant),
            device=self._device,
            dtype=self._dtype,
            skew=self._skew,
            **variant.engine,
        )

    def score(self, variant: Variant, texts: Sequence[Text], observe: Observer | None = None) -> list[Scored]:
        """Score each text under the variant through the decode path.

        `observe` is called with every layer of every text (path "layers" only; ConfigError otherwise).
        """
        if self.path == "layers":
            policy, pool = self.policy(variant), pool_settings(variant.engine)
            return [self._by_layer(policy, pool, text, observe) for text in texts]
        if observe is not None:
            raise ConfigError("only path='layers' can be observed")
        return self.score_by_step(variant, texts)

    def _by_layer(self, policy: Policy, pool: PoolSettings, text: Text, observe: Observer | None) -> Scored:
        prefix = self._prefix(text.tokens[: text.decode_from])
        done = score_layerwise(
            self.loaded.adapter, policy, text.tokens, text.decode_from, text.scored_from, observe, prefix, pool
        )
        shares = done.fractions
        missed, worst = done.missed
        errors = list(done.output_error.values())
        self.progress()
        return Scored(
            nats=[-value for value in done.logprobs],
            is_greedy=done.is_greedy,
            attended=shares.attended,
            link=shares.link,
            sparse_attended=shares.sparse_attended,
            sparse_link=shares.sparse_link,
            missed=missed,
            missed_worst=worst,
            output_error=sum(errors) / len(errors) if errors else None,
            output_error_worst=max(errors) if errors else None,
        )

    def _prefix(self, tokens: tuple[int, ...]) -> Prefix:
        """Return the exact prefill of `tokens`, cached while memory allows."""
        # Policies are evaluated on the same texts one after another.
        if tokens not in self._prefixes:
            made = prefill_layers(self.loaded.adapter, tokens)
            kept = sum(prefix.nbytes for prefix in self._prefixes.values())
            if made.nbytes + kept > min(PREFIX_BYTES, kept + available_memory() // 4):
                return made
            self._prefixes[tokens] = made
        return self._prefixes[tokens]

    def forget(self) -> None:
        """Drop all cached prefills, for example before other texts are scored."""
        self._prefixes.clear()

    def score_by_step(self, variant: Variant, texts: Sequence[Text]) -> list[Scored]:
        """Score with `LLM.score` regardless of `path`; texts with equal `decode_from` share one call."""
        llm = self.llm(variant)
        done: dict[int, Scored] = {}
        for start in sorted({text.decode_from for text in texts}):
            which = [i for i, text in enumerate(texts) if text.decode_from == start]
            prompts = [texts[i].tokens[: texts[i].scored_from] for i in which]
            targets = [texts[i].tokens[texts[i].scored_from :] for i in which]
            for i, score in zip(which, llm.score(prompts, targets, start, batch=self.batch), strict=True):
                stats = score.stats
                done[i] = Scored(
                    nats=[-value for value in score.logprobs],
                    is_greedy=score.is_greedy,
                    attended=stats.exact_fraction,
                    link=stats.fetched_fraction,
                    sparse_attended=stats.sparse_exact_fraction,
                    sparse_link=stats.sparse_fetched_fraction,
                    missed=stats.missed_mass,
                    missed_worst=stats.missed_mass_worst_layer,
                )
                self.progress()
        return [done[i] for i in range(len(texts))]


def pool_settings(engine: Mapping[str, Any]) -> PoolSettings:
    """Parse the `engine` settings of a variant as `LLM` does. Raises ConfigError if they are invalid."""
    check_keys(PoolSettings, engine)
    config = from_mapping(EngineConfig, engine)
    return PoolSettings(**{name: getattr(config, name) for name in engine})


def text_digest(text: str) -> str:
    """Return a short digest of `text`, used in the keys of results."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def encode_text(tested: ModelUnderTest, text: str) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Tokenize `text` with byte offsets.

    Returns:
        Token ids, end offset of each token in UTF-8 bytes of `text`, and the leading special tokens (BOS if any).

    Raises:
        InputError: If the model has no fast tokenizer.
    """
    tokenizer = tested.loaded.tokenizer
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise InputError(f"{tested.model} has no fast tokenizer, which measuring by bytes needs")
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    size = [0]
    for character in text:
        size.append(size[-1] + len(character.encode("utf-8", "surrogatepass")))
    ends = [size[stop] for _, stop in encoded["offset_mapping"]]
    probe: Any = tokenizer("a")["input_ids"]
    bare: Any = tokenizer("a", add_special_tokens=False)["input_ids"]
    return list(encoded["input_ids"]), ends, tuple(probe[: _leading(probe, bare)])


def _leading(probe: Sequence[int], bare: Sequence[int]) -> int:
    """Count the special tokens before a text."""
    return next(i for i in range(len(probe)) if list(probe[i : i + len(bare)]) == list(bare))
