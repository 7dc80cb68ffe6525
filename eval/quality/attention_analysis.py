"""Attention analysis of InfiniGen for a model and a text.

Covers the similarity of the inputs of neighbouring layers (Table 1), the similarity of sparse and exact attention
(Figure 4), the number of tokens that a query needs (Figures 5 and 20a), token weights over time (Figure 20b), and the
recall of partial scoring keys (Figures 13 and 17b).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ...core import KVPart
from ...models.adapter import ModelAdapter
from ...models.full_attention import attend_layer
from ..core.figures import lines, picture
from ..core.model_under_test import ModelUnderTest, Variant
from ..core.report import Column, Report, Row
from ..core.teacher_forced import LayerView
from .attention_weights import kept_similarity, spread, tokens_for_mass, top_recall, weights
from .perplexity import PerplexityConfig, Window, about, cut_windows

STRIDE = 16
"""Sampling stride over decoded positions."""

BUDGET = 0.1
MASS = 0.9
RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
POINTS = 16
"""Number of points of a curve along the text."""

TRACED = 6
"""Number of tokens whose weight is plotted over time."""

Series = dict[str, list[tuple[float, float]]]


def run_analysis(
    tested: ModelUnderTest,
    text: str,
    name: str,
    config: PerplexityConfig,
    out: Path,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Analyse `text` (called `name`). Writes analysis.json, .csv, .md (a row per layer) and the plots to `out`."""
    windows = cut_windows(tested, text, config)
    rows: list[Row] = [{"layer": layer} for layer in range(tested.geometry.layers)]
    title = f"{tested.name} on {name}"
    for step in (_inputs, _needed, _kept, _recalled):
        step(tested, windows, rows, title, out)
        say(f"analysis: {(step.__doc__ or '').splitlines()[0]}")
    report = Report("analysis", f"Attention of {title}", about(tested, text, name, config), COLUMNS, rows, NOTES)
    report.write(out)
    return report


def _inputs(tested: ModelUnderTest, windows: Sequence[Window], rows: list[Row], title: str, out: Path) -> None:
    """Measure the similarity of the inputs of neighbouring layers (Table 1)."""
    sums: dict[int, dict[str, list[float]]] = {}
    for window in windows:
        for layer, alike in block_similarities(tested.loaded.adapter, window.text.tokens).items():
            for key, value in alike.items():
                sums.setdefault(layer, {}).setdefault(key, []).append(value)
    for layer, found in sums.items():
        rows[layer] |= {key: sum(values) / len(values) for key, values in found.items()}


@torch.inference_mode()
def block_similarities(adapter: ModelAdapter, tokens: Sequence[int]) -> dict[int, dict[str, float]]:
    """Compare the input of each layer i > 0 with layer i - 1, as mean cosine similarities.

    The input is compared with the input, the attention output and the MLP output of layer i - 1. An output is the
    difference that the layer adds to the residual stream.
    """
    geometry = adapter.geometry
    positions = torch.arange(len(tokens), device=adapter.device)
    x = adapter.embed(torch.tensor(tokens, device=adapter.device), positions)
    found: dict[int, dict[str, float]] = {}
    for layer in range(geometry.layers):
        q, k, v = adapter.qkv(layer, adapter.attention_input(layer, x), positions)
        out = attend_layer(adapter, layer, q, KVPart(k, v), 0)
        residual = adapter.after_attention(layer, x, out.transpose(0, 1).flatten(1))
        output = adapter.mlp(layer, residual)
        others = {"input_similarity": x, "attention_similarity": residual - x, "mlp_similarity": output - residual}
        if layer + 1 < geometry.layers:
            found[layer + 1] = {
                key: float(torch.cosine_similarity(output.float(), other.float(), dim=-1).mean())
                for key, other in others.items()
            }
        x = output
    return found


def _needed(tested: ModelUnderTest, windows: Sequence[Window], rows: list[Row], title: str, out: Path) -> None:
    """Count the tokens that hold 90 % of the attention of a query (Figures 5, 20a); trace weights (Figure 20b)."""
    counts: dict[int, list[tuple[int, int]]] = {}
    traced: dict[str, Series] = {}

    def observe(view: LayerView) -> None:
        positions = _sample(view)
        exact = weights(view, positions)
        seen = view.causal[positions].sum(1)
        needed = tokens_for_mass(exact, MASS)
        pairs = [(int(n), int(s)) for head in needed for n, s in zip(head, seen, strict=True)]
        counts.setdefault(view.layer, []).extend(pairs)
        traced.setdefault(f"layer {view.layer}", _trace(exact, seen))

    texts = [window.text for window in windows]
    for text in texts:
        tested.score(Variant("full"), [text], observe=observe)
    for layer, pairs in counts.items():
        found = spread(n for n, _ in pairs)
        rows[layer] |= {f"tokens_{key}": value for key, value in found.items()}
        rows[layer]["few_keys"] = sum(n < 0.05 * s for n, s in pairs) / len(pairs)
    _draw_needed(counts, f"Tokens that hold {MASS:.0%} of a query's attention, {title}", out)
    _draw_by_length(counts, f"Queries that need less than 5 % of the keys, {title}", out)
    data = {name: traced[name] for name in list(traced)[:: max(1, len(traced) // 4)][:4]}
    path = out / "attention_weight_of_tokens_over_steps.png"
    with picture(path, f"Weight of six tokens in head 0, {title}", data, panels=(2, 2)) as axes:
        for axis, (name, series) in zip(axes, data.items(), strict=False):
            lines(axis, series, x="token that asks", y="attention weight")
            axis.set_title(name, fontsize=9, loc="left")


def _sample(view: LayerView) -> torch.Tensor:
    return torch.arange(STRIDE - 1, view.query.shape[1], STRIDE, device=view.query.device)


def _trace(exact: torch.Tensor, seen: torch.Tensor) -> Series:
    """Trace the weights of the tokens with the largest variation in head 0 over the positions."""
    head = exact[0]
    old = int(seen[0])
    change = head[:, 1:old].std(0) if len(head) > 1 and old > 2 else head[:, :1].sum(0)
    picked = (change.topk(min(TRACED, len(change))).indices + 1).tolist()
    return {f"token {t}": [(float(s), float(w)) for s, w in zip(seen, head[:, t], strict=True)] for t in picked}


def _draw_needed(counts: dict[int, list[tuple[int, int]]], title: str, out: Path) -> None:
    columns = min(4, len(counts))
    panels = (-(-len(counts) // columns), columns)
    data = {f"layer {layer}": [n for n, _ in pairs] for layer, pairs in counts.items()}
    path = out / "tokens_needed_for_90_percent_of_attention.png"
    with picture(path, title, data, panels=panels) as axes:
        for axis, (name, numbers) in zip(axes, data.items(), strict=False):
            axis.hist(numbers, bins=40, color="#4c78a8")
            axis.set(xlabel="key tokens", ylabel="queries")
            axis.set_title(name, fontsize=9, loc="left")


def _draw_by_length(counts: dict[int, list[tuple[int, int]]], title: str, out: Path) -> None:
    longest = max(s for pairs in counts.values() for _, s in pairs)
    edges = [longest * i // 6 for i in range(7)]
    series: Series = {}
    for layer, pairs in counts.items():
        for low, high in pairwise(edges):
            band = [n < 0.05 * s for n, s in pairs if low < s <= high]
            if band:
                series.setdefault(f"layer {layer}", []).append((high, sum(band) / len(band)))
    with picture(out / "queries_that_need_few_keys_by_length.png", title, series) as (axis,):
        lines(axis, series, x="tokens in context", y="share of queries", percent="y")


def _kept(tested: ModelUnderTest, windows: Sequence[Window], rows: list[Row], title: str, out: Path) -> None:
    """Measure the similarity of the attention of each policy with exact attention at a 10 % budget (Figure 4)."""
    data: dict[str, Series] = {}
    for policy in ("h2o", "streaming", "quest", "infinigen", "oracle"):
        found: dict[int, dict[int, list[float]]] = {}

        def observe(view: LayerView, found: dict[int, dict[int, list[float]]] = found) -> None:
            if view.guess is None:
                return
            positions = _sample(view)
            likeness = kept_similarity(weights(view, positions), view.attended[:, positions]).mean(0)
            for seen, value in zip(view.causal[positions].sum(1).tolist(), likeness.tolist(), strict=True):
                found.setdefault(view.layer, {}).setdefault(seen, []).append(value)

        variant = Variant(policy, {"budget": BUDGET})
        for window in windows:
            tested.score(variant, [window.text], observe=observe)
        for layer, at in found.items():
            values = [value for some in at.values() for value in some]
            rows[layer][f"similarity_{policy}"] = sum(values) / len(values)
            data.setdefault(f"layer {layer}", {})[policy] = _smooth(at)
    columns = min(3, len(data)) or 1
    path = out / "attention_similarity_along_the_text.png"
    panels = (-(-max(1, len(data)) // columns), columns)
    with picture(path, f"Likeness with exact attention at {BUDGET:.0%}, {title}", data, panels=panels) as axes:
        for axis, (name, series) in zip(axes, data.items(), strict=False):
            lines(axis, series, x="token", y="cosine similarity")
            axis.set_title(name, fontsize=9, loc="left")


def _smooth(at: dict[int, list[float]]) -> list[tuple[float, float]]:
    """Average the values by position over `POINTS` sections of the text. Returns (mean position, mean value)."""
    seen = sorted(at)
    size = max(1, -(-len(seen) // POINTS))
    points = []
    for some in (seen[i : i + size] for i in range(0, len(seen), size)):
        values = [value for position in some for value in at[position]]
        points.append((sum(some) / len(some), sum(values) / len(values)))
    return points


def _recalled(tested: ModelUnderTest, windows: Sequence[Window], rows: list[Row], title: str, out: Path) -> None:
    """Measure the recall of the heaviest 10 % of tokens by partial scoring keys (Figures 13, 17b)."""
    bases = {name: _basis(tested, name) for name in ("svd", "balanced", "none")}
    hits: dict[str, dict[float, list[float]]] = {}
    by_layer: dict[int, list[float]] = {}

    def observe(source: str, view: LayerView) -> None:
        if view.guess is None:
            return
        positions = _sample(view)
        truth = weights(view, positions)
        n = max(1, int(BUDGET * float(view.causal[positions].sum(1).float().mean())))
        for skew, (query, key) in bases.items():
            if source != "residual" and skew != "svd":
                continue
            corrected = "" if source == "residual" else ", not corrected"
            for ratio in RATIOS:
                scores = _partial(view, positions, query[view.layer], key[view.layer], ratio, prompt=skew == "none")
                recall = float(top_recall(scores, truth, n).mean())
                hits.setdefault(f"{skew}, {source}{corrected}", {}).setdefault(ratio, []).append(recall)
                if (skew, source, ratio) == ("svd", "residual", 0.3):
                    by_layer.setdefault(view.layer, []).append(recall)

    for source in ("residual", "attention_input"):
        options = {"preset": "rows", "budget": 1.0, "source": source, "corrected": source == "residual"}
        variant = Variant("infinigen", options)
        for window in windows:
            tested.score(variant, [window.text], observe=partial(observe, source))
    for layer, values in by_layer.items():
        rows[layer]["recall"] = sum(values) / len(values)
    series = {
        name: [(ratio, sum(values) / len(values)) for ratio, values in found.items()] for name, found in hits.items()
    }
    path = out / "recall_of_heaviest_tokens_by_partial_ratio.png"
    with picture(path, f"Heaviest {BUDGET:.0%} found by partial scoring keys, {title}", series) as (axis,):
        lines(axis, series, x="partial ratio", y="recall", percent="y")


def _basis(tested: ModelUnderTest, skew: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the query and key bases `[L, Hkv, d, d]`; "none" is the identity."""
    artifact: Any = tested.artifact("balanced" if skew == "balanced" else "svd")
    if skew != "none":
        return artifact.query.float(), artifact.key.float()
    unit = torch.eye(artifact.query.shape[-1]).expand_as(artifact.query)
    return unit, unit


def _partial(
    view: LayerView, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, ratio: float, *, prompt: bool
) -> torch.Tensor:
    """Estimate scores `[H, P, N]` from a fraction `ratio` of the columns of the bases `[Hkv, d, d]`.

    Uses the leading columns (as calibrated), or with `prompt` those with the largest sum of |q| + |k| (as in the
    paper).
    """
    assert view.guess is not None
    guess = view.guess[:, positions]
    q = guess.float().reshape(len(view.k), -1, *guess.shape[1:]) @ query.to(guess.device).unsqueeze(1)
    k = view.k.float() @ key.to(guess.device)
    kept = max(1, int(ratio * k.shape[-1] + 1e-9))
    columns = torch.arange(kept, device=k.device).expand(len(k), -1)
    if prompt:
        columns = (q.abs().sum((1, 2)) + k.abs().sum(1)).topk(kept, -1).indices
    q = q.gather(-1, columns[:, None, None].expand(-1, q.shape[1], q.shape[2], -1))
    k = k.gather(-1, columns[:, None].expand(-1, k.shape[1], -1))
    scores = (q @ k.transpose(1, 2).unsqueeze(1)).masked_fill_(~view.causal[positions], -torch.inf)
    return scores.flatten(0, 1)


COLUMNS = (
    Column("layer", "layer"),
    Column("input like input before (Table 1)", "input_similarity", ".3f"),
    Column("like attention out before", "attention_similarity", ".3f"),
    Column("like MLP out before", "mlp_similarity", ".3f"),
    Column("tokens for 90 %, mean", "tokens_mean", ".0f"),
    Column("median", "tokens_median", ".0f"),
    Column("queries that need < 5 %", "few_keys", ".1%"),
    Column("likeness at 10 %: streaming", "similarity_streaming", ".3f"),
    Column("h2o", "similarity_h2o", ".3f"),
    Column("quest", "similarity_quest", ".3f"),
    Column("infinigen", "similarity_infinigen", ".3f"),
    Column("oracle", "similarity_oracle", ".3f"),
    Column("recall at ratio 0.3", "recall", ".3f"),
)

NOTES = (
    "Likeness is the cosine of a query's attention weights over the attended tokens with its exact ones, at every",
    f"{STRIDE}th decoded position, all heads. Recall: share of the truly heaviest 10 % of tokens among the 10 % that",
    "partial scoring keys rank highest, speculated from the residual with the svd skew.",
)
