"""Tables of the results page on quality: perplexity, divergence, tasks."""

from __future__ import annotations

from result_rows import DEFAULT, NAMES, NOVEL, Row, change, load, most_windows, score, setting
from tables import table

OMITTED = ("2%, 4-bit keys, 2-bit values", "sinks and recent tokens only", "`oracle`, 2%")
"""Measured settings that the perplexity table does not show."""


def perplexity() -> str:
    """Qwen and SmolLM2 on the novel at 8,192 tokens under every setting."""
    models = [most_windows(load(f"{model}/perplexity")) for model in ("qwen", "smollm2")]
    keys = [key for key in dict.fromkeys(key for model in models for key in model) if key[:2] == (NOVEL, 8192)]
    keys.sort(key=lambda key: (key[2] != DEFAULT, "approximate KV" not in key[2] and "values" not in key[2]))
    rows = []
    for key in keys:
        row = next(model[key] for model in models if key in model)  # shares are equal on both models
        if row["policy"] != "full" and not key[2].startswith(OMITTED):
            changes = (change(model[key]) if key in model else "" for model in models)
            rows.append([key[2], f"{row['attended']:.1%}", *changes])
    return table(("setting", "exact", NAMES["qwen"], NAMES["smollm2"]), rows)


DIVERGENCE = ("smollm2/divergence", "smollm2/divergence_bfloat16")
"""Files of the divergence table: with the model in float32 and in bfloat16."""


def divergence() -> str:
    """Distance of SmolLM2's next-token distribution from full attention, on the novel."""
    float32, bfloat16 = ({setting(row): row for row in load(name)} for name in DIVERGENCE)
    rows = [
        [name, f"{row['sparse_fetched'] or row['fetched']:.1%}", f"{row['kl']:.1e}", f"{row['top_1']:.1%}",
         f"{bfloat16[name]['kl']:.1e}"]
        for name, row in float32.items() if name != "`full`"
    ]  # fmt: skip
    return table(("setting", "fetched", "float32: KL", "float32: same top token", "bfloat16: KL"), rows)


def ruler() -> str:
    """Mean RULER scores of Qwen by context, with the number of responses equal to full attention."""
    rows = []
    for name in ("ruler", "ruler_8192", "ruler_16384", "ruler_32000"):
        found: dict[str, list[Row]] = {}
        for row in load(f"qwen/{name}"):
            found.setdefault(setting(row), []).append(row)
        first, tasks = found["`full`"][0], len(found["`full`"])
        cells = [f"{int(next(iter(first['metrics']))):,}", str(first["documents"] * tasks)]
        for policy in ("`full`", DEFAULT):
            cells.append(f"{sum(map(score, found[policy])) / tasks:.1f}")
        rows.append([*cells, str(round(sum(row["agreement"] * row["documents"] for row in found[DEFAULT])))])
    return table(("context", "responses", "`full`: score", "default: score", "default: same response"), rows)


def formats() -> str:
    """Perplexity with a quantised KV cache, compared with approximate KV."""
    models = [most_windows(load(f"{model}/bytes")) for model in ("qwen", "smollm2")]
    keys = [key for key in models[0] if "KV stored as" in key[2] or key[2] == "2%, 4-bit approximate KV"]
    rows = [[key[2], *(change(model[key]) for model in models)] for key in keys]
    return table(("setting", NAMES["qwen"], NAMES["smollm2"]), rows)
