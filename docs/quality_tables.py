"""Quality tables for the results page: perplexity, divergence, formats of the KV cache."""

from __future__ import annotations

from result_rows import DEFAULT, NAMES, NOVEL, Row, change, load, most_windows, setting
from tables import table

OMITTED = ("2%, 4-bit keys, 2-bit values", "no selected tokens, 4-bit keys, 2-bit values", "`oracle`, 2%")
"""Measured settings that the perplexity table does not show."""


def perplexity() -> str:
    """Perplexity of Qwen and SmolLM2 on a novel at 8,192 tokens, by setting."""
    models = [most_windows(load(f"{model}/perplexity")) for model in ("qwen", "smollm2")]
    keys = [key for key in dict.fromkeys(key for model in models for key in model) if key[:2] == (NOVEL, 8192)]
    keys.sort(key=lambda key: (key[2] != DEFAULT, "approximate KV" not in key[2] and "values" not in key[2]))
    rows = []
    for key in keys:
        row = next(model[key] for model in models if key in model)  # shares are equal on both models
        if row["policy"] != "full" and not key[2].startswith(OMITTED):
            changes = (change(model[key]) if key in model else "" for model in models)
            rows.append([_with_share(key[2], f"{row['attended']:.1%} exact"), *changes])
    return table(("setting", NAMES["qwen"], NAMES["smollm2"]), rows)


def _with_share(name: str, share: str) -> str:
    """Append the measured `share` of tokens to `name`, unless the name already states it."""
    return f"{name} ({share})" if name == DEFAULT or "preset" in name else name


CODE = "standard library (Python)"

DIVERGENCE = (
    ("SmolLM2, novel", NOVEL, ("smollm2/divergence", "smollm2/divergence_presets")),
    ("SmolLM2, code", CODE, ("smollm2/divergence_code",)),
    ("Qwen, novel", NOVEL, ("qwen/divergence",)),
    ("Qwen, code", CODE, ("qwen/divergence_code",)),
    ("Gemma 3, novel", NOVEL, ("gemma/divergence",)),
    ("Gemma 3, code", CODE, ("gemma/divergence",)),
)
"""Columns of the divergence table: heading, text and files."""

NOT_SHOWN = ("`full`", "`oracle`, 10%")
"""Settings that the divergence table omits: the reference, and a setting that not all columns have."""


def divergence() -> str:
    """KL divergence from full attention by model and text, with the top-1 agreement in parentheses."""
    columns: list[dict[str, Row]] = []
    for _, text, files in DIVERGENCE:
        columns.append({})
        for row in (row for file in files for row in load(file) if row["text"] == text):
            columns[-1].setdefault(setting(row), row)
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column if name not in NOT_SHOWN):
        found = [column.get(name) for column in columns]
        row = next(each for each in found if each is not None)
        divergences = ("" if each is None else f"{each['kl']:.1e} ({each['top_1']:.1%})" for each in found)
        rows.append([_with_share(name, f"{row['sparse_fetched']:.1%} fetched"), *divergences])
    return table(("setting", *(heading for heading, _, _ in DIVERGENCE)), rows)


def published_formats() -> str:
    """Divergence that published formats of the KV cache cause, with the top-1 agreement in parentheses."""
    columns = [{row["format"]: row for row in load(f"{model}/kv_formats")} for model in ("smollm2", "qwen", "gemma")]
    names = [name for name in columns[0] if name != "full"]
    rows = [[name, *(f"{each[name]['kl']:.1e} ({each[name]['top_1']:.1%})" for each in columns)] for name in names]
    return table(("format", "SmolLM2", "Qwen", "Gemma 3"), rows)


def formats() -> str:
    """Perplexity with a quantised KV cache, compared with approximate KV."""
    models = [most_windows(load(f"{model}/bytes")) for model in ("qwen", "smollm2")]
    keys = [key for key in models[0] if "KV cache" in key[2] or key[2] == "2%, 4-bit approximate KV"]
    rows = [[key[2], *(change(model[key]) for model in models)] for key in keys]
    return table(("setting", NAMES["qwen"], NAMES["smollm2"]), rows)
