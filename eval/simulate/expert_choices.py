"""Which experts a text's tokens choose in every layer, and which they were guessed to choose a layer ahead: how often a
cache of some experts has them, and what fetching by the guess would bring in vain.

The guess is what `InfiniGen`'s is for attention: the layer's own norm and router, given the residual stream behind the
attention of the layer before. Tokens come one by one, as they are decoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core import KVPart
from ...errors import ConfigError, InputError
from ...models.full_attention import residual_after_attention
from ...models.loading import LoadedModel, load_model
from ...models.weights import experts_of
from ..core.report import Column, Report, Row


@dataclass(frozen=True)
class Choices:
    """Of one layer: `chosen` and `guessed` `[T, k]`, the latter None where no layer is before it; bytes of an expert,
    and how many there are."""

    chosen: torch.Tensor
    guessed: torch.Tensor | None
    bytes: int
    count: int


@torch.inference_mode()
def choices_of(model: LoadedModel, tokens: Sequence[int]) -> list[Choices]:
    """What the tokens choose in each layer with experts. Raises ConfigError where there is none."""
    adapter, found, before = model.adapter, [], None
    positions = torch.arange(len(tokens), device=adapter.device)
    hidden = adapter.embed(torch.tensor(tokens, device=adapter.device), positions)
    for layer, module in enumerate(model.layers):
        q, k, v = adapter.qkv(layer, adapter.attention_input(layer, hidden), positions)
        residual = residual_after_attention(adapter, layer, hidden, q, KVPart(k, v), len(tokens))
        experts = experts_of(module)
        seen: list[torch.Tensor] = []
        if experts is None:
            hidden, before = adapter.mlp(layer, residual), residual
            continue
        handle = experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1].cpu()))
        hidden = adapter.mlp(layer, residual)
        if before is not None:
            adapter.mlp(layer, before)
        handle.remove()
        size = sum(weight[0].nbytes for weight in experts.parameters())
        found.append(Choices(seen[0], seen[1] if before is not None else None, size, int(experts.num_experts)))
        before = residual
    if not found:
        raise ConfigError(f"{model.name} has no mixture of experts that transformers stacks")
    return found


def replayed(choices: Choices, slots: int, *, ahead: bool) -> tuple[int, int, int]:
    """Of a layer that keeps `slots` experts, those used last: how many choices it had, how many were fetched when they
    were chosen, and how many in all. ahead: what is guessed is fetched before."""
    held: OrderedDict[int, None] = OrderedDict()

    def bring(expert: int) -> bool:
        missing = expert not in held
        held[expert] = None
        held.move_to_end(expert)
        if len(held) > slots:
            held.popitem(last=False)
        return missing

    found = late = early = 0
    for token, chosen in enumerate(choices.chosen.tolist()):
        if ahead and choices.guessed is not None:
            early += sum(bring(expert) for expert in choices.guessed[token].tolist())
        missing = sum(bring(expert) for expert in chosen)
        found, late = found + len(chosen) - missing, late + missing
    return found, late, late + early


COLUMNS = (
    Column("on the device", "slots"),
    Column("of", "experts"),
    Column("chosen", "chosen"),
    Column("guess is right", "recall", ".0%"),
    Column("by chance", "chance", ".0%"),
    Column("found there", "found", ".0%"),
    Column("fetched a token, MB", "fetched", ",.3f"),
    Column("waited for with guesses, MB", "waited", ",.3f"),
    Column("fetched with guesses, MB", "fetched_ahead", ",.3f"),
)


def rows_of(layers: Sequence[Choices], shares: Sequence[float]) -> list[Row]:
    """A row for each share of the experts that stay on the device; means over layers and tokens."""
    count, k, tokens = layers[0].count, layers[0].chosen.shape[1], len(layers[0].chosen)
    guessed = [(c.chosen, c.guessed) for c in layers if c.guessed is not None]
    right = [(g[:, :, None] == c[:, None, :]).any(1).float().mean() for c, g in guessed]
    rows = []
    for slots in sorted({max(k, round(share * count)) for share in shares}):
        plain, ahead = ([replayed(c, slots, ahead=way) for c in layers] for way in (False, True))
        megabytes = layers[0].bytes / 1e6 / tokens
        rows.append(
            {"slots": slots, "experts": count, "chosen": k, "chance": k / count,
             "recall": float(torch.stack(right).mean()) if right else None,
             "found": sum(one[0] for one in plain) / (len(layers) * tokens * k),
             "fetched": megabytes * sum(one[2] for one in plain),
             "waited": megabytes * sum(one[1] for one in ahead),
             "fetched_ahead": megabytes * sum(one[2] for one in ahead)}
        )  # fmt: skip
    return rows


def run_expert_choices(
    model: str, text: str, named: str, out: Path, *, context: int, shares: Sequence[float], dtype: str
) -> Report:
    """The table of a model on the first `context` tokens of a text. Raises InputError for a model without a tokenizer,
    ConfigError for one without experts."""
    loaded = load_model(model, dtype=dtype)
    if loaded.tokenizer is None:
        raise InputError(f"{model} has no tokenizer, which a text needs")
    tokens: list[int] = loaded.tokenizer(text, verbose=False)["input_ids"][:context]
    rows = rows_of(choices_of(loaded, tokens), shares)
    about: dict[str, Any] = {"model": loaded.name.rsplit("/", 1)[-1], "text": named, "tokens": len(tokens)}
    report = Report("experts", "Experts that a text's tokens choose", about, COLUMNS, rows)
    report.write(out)
    return report
