"""Analyse the attention of a model on a text, as in the InfiniGen paper.

Measures the similarity of the inputs of consecutive layers (Table 1), and how many tokens a query needs (Figure 5).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, median

import torch

from ...core import KVPart
from ...models.adapter import ModelAdapter
from ...models.full_attention import attend_layer, query_and_kv
from ..core.model_under_test import Evaluation
from ..core.plots import picture
from ..core.report import Column, Report, Row
from .perplexity import PerplexityConfig, about, cut_windows

STRIDE = 16

MASS, FEW = 0.9, 0.05

COLUMNS = (
    Column("layer", "layer"),
    Column("input like input before (Table 1)", "input_similarity", ".3f"),
    Column("like attention out before", "attention_similarity", ".3f"),
    Column("like MLP out before", "mlp_similarity", ".3f"),
    Column("tokens for 90 %, mean", "tokens_mean", ".0f"),
    Column("median", "tokens_median", ".0f"),
    Column("queries that need < 5 %", "few_keys", ".1%"),
)


def run_analysis(evaluation: Evaluation, config: PerplexityConfig) -> Report:
    """Analyse the attention to a text. Write analysis.json, .csv, .md (a row per layer) and a plot."""
    tested = evaluation.tested
    alike: dict[tuple[int, str], list[float]] = defaultdict(list)
    needed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for window in cut_windows(tested, evaluation.text, config):
        observe(tested.loaded.adapter, window.text.tokens, config.start, alike, needed)
    rows: list[Row] = [{"layer": layer} for layer in range(tested.geometry.layers)]
    for (layer, key), values in alike.items():
        rows[layer][key] = mean(values)
    for layer, pairs in needed.items():
        counts = [n for n, _ in pairs]
        rows[layer] |= {"tokens_mean": mean(counts), "tokens_median": median(counts)}
        rows[layer]["few_keys"] = mean(n < FEW * seen for n, seen in pairs)
    title = f"{tested.name} on {evaluation.name}"
    report = Report("analysis", f"Attention of {title}", about(evaluation, config), COLUMNS, rows)
    report.write(evaluation.out)
    data = {f"layer {layer}": [n for n, _ in pairs] for layer, pairs in needed.items()}
    panels = (-(-len(data) // 4), min(4, len(data)))
    path = evaluation.out / "tokens_needed_for_90_percent_of_attention.png"
    with picture(path, f"Tokens that hold {MASS:.0%} of a query's attention, {title}", data, panels=panels) as axes:
        for axis, (label, numbers) in zip(axes, data.items(), strict=False):
            axis.hist(numbers, bins=40, color="#4c78a8")
            axis.set(xlabel="key tokens", ylabel="queries", title=label)
    return report


@torch.inference_mode()
def observe(
    adapter: ModelAdapter,
    tokens: Sequence[int],
    start: int,
    alike: dict[tuple[int, str], list[float]],
    needed: dict[int, list[tuple[int, int]]],
) -> None:
    """Run a window through all layers, and record how similar layer inputs are and how many tokens queries need.

    Args:
        adapter: The model.
        tokens: Token ids of a window.
        start: First position whose attention is sampled.
        alike: Output. `alike[i, "input_similarity"]` gets the mean cosine similarity of the inputs of layers i - 1 and
            i. "attention_similarity" and "mlp_similarity" compare the input of layer i with the vector that the
            attention or MLP of layer i - 1 adds to the residual stream.
        needed: Output. `needed[i]` gets an entry per sampled query: the smallest number of tokens whose attention
            weights sum to `MASS`, and the number of tokens that the query attends to.
    """
    positions = torch.arange(len(tokens), device=adapter.device)
    adapter, whole = adapter.for_new_sequence(), [slice(None)]
    ids, shared = torch.tensor(tokens, device=adapter.device), dict[int, KVPart]()
    x = adapter.embed(ids, positions)
    adapter.run_stages(-1, x, whole)
    for layer in range(adapter.geometry.layers):
        q, kv = query_and_kv(adapter, layer, adapter.attention_input(layer, x), positions, shared)
        weights, seen = attention_weights(adapter, layer, q, kv.k, positions[start::STRIDE])
        for head in tokens_for_mass(weights, MASS).tolist():
            needed[layer] += zip(head, seen.tolist(), strict=True)
        out = attend_layer(adapter, layer, q, kv, 0)
        residual = adapter.after_attention(layer, x, out.transpose(0, 1).flatten(1))
        output = adapter.mlp(layer, residual, ids)
        others = {"input_similarity": x, "attention_similarity": residual - x, "mlp_similarity": output - residual}
        if layer + 1 < adapter.geometry.layers:
            for key, other in others.items():
                alike[layer + 1, key].append(
                    float(torch.cosine_similarity(output.float(), other.float(), dim=-1).mean())
                )
        x = output
        adapter.run_stages(layer, x, whole)


def attention_weights(
    adapter: ModelAdapter, layer: int, q: torch.Tensor, k: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention weights of the queries q `[H, N, d]` at the positions `at` `[P]`.

    Returns:
        The weights, float32 `[H, P, N]`, and the number of tokens that each position attends to, `[P]`.
    """
    geometry = adapter.geometry
    ago = at[:, None] - torch.arange(k.shape[1], device=at.device)
    windows = torch.tensor([geometry.window_at(layer, t) or k.shape[1] for t in at.tolist()], device=at.device)
    visible = (ago >= 0) & (ago < windows[:, None])
    grouped = q[:, at].reshape(len(k), -1, len(at), k.shape[-1]) * geometry.scales[layer]
    scores = (grouped @ k.transpose(1, 2).unsqueeze(1)).float().masked_fill(~visible, -math.inf)
    return scores.softmax(-1).flatten(0, 1), visible.sum(1)


def tokens_for_mass(attention: torch.Tensor, share: float) -> torch.Tensor:
    """Return the smallest number of tokens `[...]` whose weights `attention` `[..., N]` sum to `share` (Figure 5)."""
    caught = attention.sort(dim=-1, descending=True).values.cumsum(-1)
    return (caught < share).sum(-1) + 1
