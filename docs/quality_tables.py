"""Tables of the results page on quality: perplexity, divergence, tasks."""

from __future__ import annotations

from result_rows import DEFAULT, FIVE, FIVE_OFF, NAMES, NOVEL, Row, change, load, most_windows, score, setting
from tables import table


def perplexity() -> str:
    """Qwen and SmolLM2 on the novel at 8,192 tokens under every setting."""
    models = [most_windows(load(f"{model}/perplexity")) for model in ("qwen", "smollm2")]
    keys = [key for key in dict.fromkeys(key for model in models for key in model) if key[:2] == (NOVEL, 8192)]
    keys.sort(key=lambda key: (key[2] != DEFAULT, "approximate KV" not in key[2] and "values" not in key[2]))
    rows = []
    for key in keys:
        row = next(model[key] for model in models if key in model)  # shares are equal on both models
        shares = [f"{row[column]:.1%}" for column in ("attended", "link")]
        if row["policy"] != "full":
            rows.append([key[2], *shares, *(change(model[key]) if key in model else "" for model in models)])
    return table(("setting", "exact", "fetched", NAMES["qwen"], NAMES["smollm2"]), rows)


DIVERGENCE = {"smollm2/divergence": "float32", "smollm2/divergence_bfloat16": "bfloat16"}
"""Files of the divergence table, with the dtype of the model."""


def divergence() -> str:
    """Distance of SmolLM2's next-token distribution from full attention, on the novel."""
    found = {dtype: {setting(row): row for row in load(name)} for name, dtype in DIVERGENCE.items()}
    rows = []
    for name, row in found["float32"].items():
        if name != "`full`":
            cells = [cell for own in found.values() for cell in _distance(own[name])]
            rows.append([name, f"{row['sparse_link'] or row['link']:.1%}", *cells])
    head = [f"{dtype}: {column}" for dtype in found for column in ("KL", "99th percentile", "same top token")]
    return table(("setting", "fetched", *head), rows)


def _distance(row: Row) -> list[str]:
    return [f"{row['kl']:.1e}", f"{row['kl_p99']:.1e}", f"{row['top_1']:.1%}"]


def texts() -> str:
    """The default and two settings with 5 % on other texts and at other lengths."""
    files = {
        "qwen": ["qwen/perplexity"],
        "smollm2": ["smollm2/perplexity", "smollm2/wikipedia"],
        "gemma": ["gemma/perplexity_8192", "gemma/perplexity_16384", "gemma/perplexity_32768"],
    }
    rows = []
    for model, names in files.items():
        found = most_windows(row for name in names for row in load(name))
        for text, context in dict.fromkeys(key[:2] for key in found):
            first = found[text, context, DEFAULT]
            cells = [found.get((text, context, name)) for name in (DEFAULT, FIVE, FIVE_OFF)]
            if all(cell is None or cell["windows"] == first["windows"] for cell in cells) or cells[1] is not None:
                same = [change(cell) if cell and cell["windows"] == first["windows"] else "" for cell in cells]
                rows.append([NAMES[model], NAMES[text], f"{context:,}", str(first["windows"]), *same])
    return table(("model", "text", "context", "windows", "default", FIVE, FIVE_OFF), rows)


def ruler() -> str:
    """Mean RULER scores by model and context, with the number of responses equal to full attention."""
    rows = []
    for model, contexts in (("qwen", ("", "_8192", "_16384", "_32000")), ("smollm2", ("",)), ("gemma", ("", "_16384"))):
        for context in contexts:
            found: dict[str, list[Row]] = {}
            for row in load(f"{model}/ruler{context}"):
                found.setdefault(setting(row), []).append(row)
            tasks = len(found["`full`"])
            documents = found["`full`"][0]["documents"]
            cells = [NAMES[model], f"{int(next(iter(found['`full`'][0]['metrics']))):,}", f"{tasks} x {documents}"]
            for name in ("`full`", DEFAULT, FIVE, FIVE_OFF):
                part = found.get(name, [])
                same = round(sum(row["agreement"] * row["documents"] for row in part))
                mean = sum(map(score, part)) / max(len(part), 1)
                shown = f"{mean:.1f}" if name == "`full`" else f"{mean:.1f} ({same} of {documents * tasks})"
                cells.append(shown if len(part) == tasks else "")
            rows.append(cells)
    return table(("model", "context", "tasks x documents", "`full`", "default", FIVE, FIVE_OFF), rows)


def questions() -> str:
    """Accuracy on multiple-choice tasks."""
    rows = []
    tasks: list[str] = []
    for model in ("smollm2", "qwen"):
        found: dict[str, list[str]] = {}
        for row in load(f"{model}/questions"):
            found.setdefault(setting(row), []).append(f"{100 * row['metrics']['acc'][0]:.0f}")
            task = row["task"].removesuffix("_local")
            tasks += [task] * (task not in tasks)
        rows += [[NAMES[model], name, *cells] for name, cells in found.items()]
    return table(("model", "setting", *tasks), rows)


def needles() -> str:
    """Share of answered questions about facts hidden in a text, by policy."""
    rows = []
    for model, name in (("qwen", NAMES["qwen"]), ("reference", "reference model")):
        for row in load(f"{model}/retrieval"):
            wanted = row["budget"] in (None, 0.05) and "kv_format" not in row["variant"]
            if wanted and row["length"] in (2048, 4096):
                kinds = (row[f"right {kind}"] for kind in ("single", "several keys", "several queries", "chain"))
                shares = [f"{100 * share:.0f}" for share in (row["right"], *kinds)]
                rows.append([name, f"{row['length']:,}", setting(row), str(row["asked"]), *shares])
    return table(
        ("model", "context", "setting", "questions", "all", "one fact", "several keys", "several queries", "chains"),
        rows,
    )


def formats() -> str:
    """Perplexity with a quantised KV cache, compared with approximate KV."""
    models = [most_windows(load(f"{model}/bytes")) for model in ("qwen", "smollm2")]
    rows = [[key[2], *(change(model[key]) for model in models)] for key in models[0] if key[2] != "`full`"]
    return table(("setting", NAMES["qwen"], NAMES["smollm2"]), rows)


ROWS = "infinigen preset=rows budget=0.05"
CHANGED = {
    ROWS: '`preset="rows"`',
    "oracle budget=0.05": "true top tokens (`oracle`)",
    f"{ROWS} source=attention_input": 'guess from the attention input (`source="attention_input"`)',
    f"{ROWS} source=attention_input corrected=False": "the same, guess not corrected",
    f"{ROWS} scorer=int4": "4-bit scoring keys of all columns",
    f"{ROWS} scorer=int2": "2-bit scoring keys of all columns",
    f"{ROWS} scorer=partial partial_ratio=0.125": "16-bit scoring keys of an eighth of the columns",
    f"{ROWS} scorer=partial columns=prompt skew=svd": "columns chosen from the prompt (paper)",
    f"{ROWS} sinks=0 recent=1": "no sinks, no recent window",
    f"{ROWS} dense_layers=": "no dense layer",
    f"{ROWS} approximate_kv=int4": "approximate KV added, 4-bit values",
    f"{ROWS} approximate_kv=int2": "approximate KV added, 2-bit values",
    "infinigen preset=paper budget=0.05": '`preset="paper"`',
}
"""Variants of the ablation that the page shows, with their descriptions."""


def ablation() -> str:
    """Missed attention mass and perplexity with one part of the selection replaced."""
    models = [{row["variant"]: row for row in load(f"{model}/ablation")} for model in ("qwen", "smollm2")]
    rows = []
    for variant, label in CHANGED.items():
        pair = [model[variant] for model in models]
        rows.append([label, *(cell for row in pair for cell in (f"{row['missed']:.2f}", change(row)))])
    columns = ("missed attention mass", "perplexity")
    head = [f"{NAMES[model]}: {column}" for model in ("qwen", "smollm2") for column in columns]
    return table(("changed", *head), rows)


def reference() -> str:
    """The shipped model's perplexity under every policy."""
    rows = []
    for row in load("reference/perplexity"):
        if row["policy"] != "full" and row["budget"] in (0.05, 0.1) and not row["engine"]:
            shares = [f"{row[column]:.1%}" for column in ("sparse_attended", "sparse_link")]
            rows.append([f"`{row['policy']}`", *shares, change(row)])
    return table(("policy", "exact, sparse layers", "fetched", "perplexity"), rows)
