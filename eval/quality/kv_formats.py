"""Measure how far published 4-bit and 2-bit KV caches move the next-token distribution from that of a 16-bit KV cache.

The KV caches are simulated with transformers: keys and values are quantised and immediately dequantised. A prompt is
processed with exact keys and values, which are quantised before the next token, as in KIVI. Layers with sliding windows
keep exact keys and values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ...kernels.low_bit import mixing
from ...kv_cache.kv_format import Quantised
from ...models.source import find_source
from ..core.report import Column, Report, Row, RowStore
from ..core.variants import Text, text_digest
from .divergence import COSTS, Divergence, summary
from .perplexity import PerplexityConfig, cut_windows

if TYPE_CHECKING:
    from ..core.model_under_test import Evaluation

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Quantises and dequantises keys or values `[B, Hkv, n, d]`."""


def per_token(bits: int, group: int = 64) -> Rounding:
    """Quantise each token's vector in groups of up to `group` channels, as `kv_cache_dtype` does."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        grouped = rows.unflatten(-1, (-1, math.gcd(group, rows.shape[-1])))
        format = Quantised(bits, rows.dtype, grouped.shape[-1])
        return format.decode(format.encode(grouped)).flatten(-2)

    return rounded


def per_channel(bits: int, tokens: int) -> Rounding:
    """Quantise each channel in groups of `tokens` adjacent tokens."""
    along_tokens = per_token(bits, tokens)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        grouped = rows.unflatten(-2, (-1, tokens)).transpose(-1, -2)
        return along_tokens(grouped).transpose(-1, -2).flatten(-3, -2)

    return rounded


def rotated(rounding: Rounding) -> Rounding:
    """Rotate vectors with a Hadamard matrix before quantisation, and back after it."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        rotation = mixing(rows.shape[-1]).to(rows)
        return rounding(rows @ rotation) @ rotation.T

    return rounded


@dataclass(frozen=True)
class PublishedFormat:
    name: str
    keys: Rounding
    values: Rounding
    key_tokens: int = 1  # keys are quantised as soon as this many tokens are complete
    exact_values: int = 0  # the values of this many newest tokens stay exact


def kivi(bits: int) -> PublishedFormat:
    """Return the format of KIVI (arXiv 2402.02750): keys per channel, values per token, groups of 32 elements.

    The values of the newest 128 tokens stay exact. Keys stay exact until 128 of them are complete (algorithm 1).
    """
    return PublishedFormat(f"KIVI, {bits} bits", per_channel(bits, 32), per_token(bits, 32), 128, 128)


FORMATS = (
    PublishedFormat("per token, 8 bits", per_token(8), per_token(8)),
    PublishedFormat("per token, 4 bits", per_token(4), per_token(4)),
    # QuaRot (arXiv 2404.00456) quantises the KV cache after such a rotation.
    PublishedFormat("Hadamard rotation, 4 bits", rotated(per_token(4)), rotated(per_token(4))),
    kivi(4),
    kivi(2),
)


class FormattedLayer(DynamicLayer):
    """Layer of a transformers cache that rounds its tokens to a format."""

    def __init__(self, exact: DynamicLayer, format: PublishedFormat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._format, self._keys, self._values = format, 0, 0  # numbers of tokens that are already rounded
        assert exact.keys is not None and exact.values is not None, "the prompt was processed"
        super().update(exact.keys, exact.values)  # copies both

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round the tokens that need not stay exact any more, then append the new tokens."""
        assert self.keys is not None and self.values is not None
        length, format = self.get_seq_length(), self._format
        keys = slice(self._keys, length - length % format.key_tokens)
        values = slice(self._values, max(0, length - format.exact_values))
        if keys.start < keys.stop:
            self.keys[:, :, keys] = format.keys(self.keys[:, :, keys])
        if values.start < values.stop:
            self.values[:, :, values] = format.values(self.values[:, :, values])
        self._keys, self._values = keys.stop, values.stop
        return super().update(key_states, value_states, *args, **kwargs)


class ExactWindow:
    """One window of text with a 16-bit KV cache, computed once for all formats."""

    def __init__(self, model: PreTrainedModel, text: Text) -> None:
        self._model, self.text = model, text

    @cached_property
    def _prompt(self) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        prompt = torch.tensor([self.text.tokens[: self.text.decode_from]], device=self._model.device)
        self._model(prompt, past_key_values=cache, logits_to_keep=1)
        return cache

    @cached_property
    def exact(self) -> torch.Tensor:
        """Log-probabilities `[n, V]` at the scored positions."""
        return self.logprobs(None)

    def logprobs(self, format: PublishedFormat | None) -> torch.Tensor:
        """Return the log-probabilities `[n, V]` at the scored positions with the format, computed token by token."""
        cache = copy.deepcopy(self._prompt)
        if format is not None:
            cache.layers = [
                FormattedLayer(layer, format) if type(layer) is DynamicLayer else layer for layer in cache.layers
            ]
        found = []
        for position in range(self.text.decode_from, len(self.text.tokens) - 1):
            token = torch.tensor([[self.text.tokens[position]]], device=self._model.device)
            logits = self._model(token, past_key_values=cache).logits[0, -1]
            found.append(logits.float().log_softmax(-1).cpu())
        return torch.stack(found[self.text.scored_from - self.text.decode_from - 1 :])


@torch.no_grad()
def measure(window: ExactWindow, format: PublishedFormat | None) -> Row:
    divergence, targets = Divergence(), torch.tensor(window.text.tokens[window.text.scored_from :])
    logprobs = window.exact if format is None else window.logprobs(format)
    for exact, found in zip(window.exact, logprobs, strict=True):
        divergence.add(exact, found)
    nats = -float(logprobs.gather(1, targets[:, None]).double().sum())
    return {**asdict(divergence), "nats": nats, "tokens": len(targets), **dict.fromkeys(COSTS)}


def run_kv_formats(
    evaluation: Evaluation, config: PerplexityConfig, formats: Sequence[PublishedFormat] = FORMATS
) -> Report:
    """Measure each format on the windows of a text."""
    tested, store = evaluation.tested, RowStore(evaluation.out)
    source, adapter = find_source(tested.model), tested.loaded.adapter
    model = AutoModelForCausalLM.from_pretrained(source.name_or_path, gguf_file=source.gguf, dtype=adapter.dtype)
    model.eval().to(adapter.device)
    shared = {"suite": "kv_formats", **tested.identity, "text": text_digest(evaluation.text), **asdict(config)}
    every: list[tuple[str, PublishedFormat | None]] = [("full", None), *((format.name, format) for format in formats)]
    found: dict[str, list[Row]] = {name: [] for name, _ in every}
    for number, window in enumerate(cut_windows(tested, evaluation.text, config)):
        exact = ExactWindow(model, window.text)
        for name, format in every:
            key = shared | {"format": name, "window": number}
            if format is not None and format.exact_values:
                key["exact"] = [format.key_tokens, format.exact_values]
            found[name].append(store.once(key, partial(measure, exact, format)))
            evaluation.say(f"{evaluation.name}, window {number}, {name}: KL {np.mean(found[name][-1]['kl']):.2e}")
    about = {"text": evaluation.name, "context": config.context}
    rows = [
        {"model": tested.name, "format": name, **about} | summary(mine, found["full"]) for name, mine in found.items()
    ]
    title = f"Divergence of published KV formats under {tested.name}"
    report = Report("kv_formats", title, evaluation.about(config), COLUMNS, rows)
    report.write(evaluation.out)
    return report


COLUMNS = (
    Column("format", "format"),
    Column("windows", "windows"),
    Column("KL mean", "kl", ".5f"),
    Column("99th percentile", "kl_p99", ".4f"),
    Column("same top token", "top_1", ".2%"),
    Column("perplexity against full [95 %]", "against_full_shown"),
)
