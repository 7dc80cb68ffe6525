"""Tables of `docs/pages/results.md` and the README, generated from `eval/results`.

`python docs/results.py` writes them between the marks of both files. A test checks that they are up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from tables import fill, table  # noqa: E402

RESULTS = ROOT / "eval" / "results"
PAGE = ROOT / "docs" / "pages" / "results.md"
README = ROOT / "README.md"

Row = Mapping[str, Any]

NAMES = {
    "qwen": "Qwen2.5-Coder-0.5B",
    "smollm2": "SmolLM2-135M",
    "gemma": "Gemma 3 270M",
    "war_and_peace.txt": "novel",
    "standard library (Python)": "code",
    "wikitext-2 valid_raw.txt": "Wikipedia",
}
"""Names on the page for models and texts in the results."""


def load(name: str) -> list[Row]:
    """Return the rows of `eval/results/NAME.json`."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def setting(row: Row) -> str:
    """Describe the policy of `row` and its options in words."""
    options, policy = dict(row["options"]), row["policy"]
    share = f"{options['budget']:.0%}" if options.get("budget", 0) >= 0.01 else ""
    stored = row["engine"].get("kv_format") or row["engine"].get("kv_cache_dtype")
    if stored:
        return f"`{policy}`, KV stored as {stored}" + (f", {share}" if share else "")
    if policy != "infinigen":
        return f"`{policy}`" + (f", {share}" if share else "")
    if "preset" in options:
        return DEFAULT if options["preset"] == "default" else f'`preset="{options["preset"]}"`'
    none = "no approximate KV"
    stored = {"int4": "4-bit approximate KV", "int2": "4-bit keys, 2-bit values", "off": none, None: none}
    return f"{share or 'sinks and recent tokens only'}, {stored[options.get('approximate_kv')]}"


def change(row: Row) -> str:
    """Format the change of perplexity against full attention with its 95 % interval."""
    low, high = row["against_full_perplexity_low"], row["against_full_perplexity_high"]
    shown = f"{row['against_full_perplexity']:+.1%} [{100 * low:+.1f}, {100 * high:+.1f}]"
    return re.sub(r"[+-](0\.0\b)", r"\1", shown)


def most_windows(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """Index rows by text, context and setting. Of repeated measurements keep the one with the most windows."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["text"], row["context"], setting(row))
        if key not in found or row["windows"] > found[key]["windows"]:
            found[key] = row
    return found


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


NOVEL = "war_and_peace.txt"
DEFAULT, FIVE, FIVE_OFF = "default", "5%, 4-bit approximate KV", "5%, no approximate KV"


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


def score(row: Row) -> float:
    """The task's score in percent."""
    [[value, _]] = row["metrics"].values()
    return 100 * float(value)


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


def ruler_tasks() -> str:
    """Qwen's RULER scores at 4,096 tokens, task by task."""
    found: dict[str, dict[str, str]] = {}
    for row in load("qwen/ruler"):
        task = row["task"].partition(",")[0].removesuffix("_local")
        found.setdefault(task, {})[setting(row)] = f"{score(row):.0f}"
    columns = ["`full`", DEFAULT, FIVE, FIVE_OFF, "`quest`, 5%"]
    rows = [[f"`{task}`", *(cells.get(name, "") for name in columns)] for task, cells in found.items()]
    return table(("task", *columns), rows)


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


def others() -> str:
    """Prompt time, time per token and memory of other runtimes on Qwen at 2,048 tokens."""
    ours, theirs = load("qwen/rows_in_c/real_speed"), load("qwen/rivals/real_speed")
    names = {row["runtime"] for row in ours}
    rows = [row for row in theirs if row["runtime"] not in names]
    rows += [row for row in ours if "float32" not in row["runtime"]]
    cells = [
        [_runtime(row["runtime"]), f"{row['prefill']:.1f}", f"{row['step']:.0f}", f"{row['peak']:,.0f}"] for row in rows
    ]
    return table(("runtime", "prompt, s", "ms per token", "peak RSS, MiB"), cells)


def _runtime(name: str) -> str:
    return f"offload-rt, `{name}`" if name in ("full", "infinigen", "auto") else name


def lengths() -> str:
    """Prompt time and time per token compared with transformers, by context length."""
    rows = []
    for name in ("smollm2/rows_in_c", "smollm2/rows_in_c/long", "qwen/rows_in_c", "qwen/rows_in_c/long"):
        found: dict[int, dict[str, Row]] = {}
        for row in load(f"{name}/real_speed"):
            found.setdefault(row["context"], {})[row["runtime"]] = row
        for context, by in found.items():
            prompts = [f"{by[name]['prefill']:.1f}" for name in (DYNAMIC, "full")]
            steps = [f"{by[who]['step']:.0f}" if who in by else "" for who in (DYNAMIC, STATIC, "full", "infinigen")]
            rows.append([NAMES[name.partition("/")[0]], f"{context:,}", *prompts, *steps])
    head = ["prompt, s: `DynamicCache`", "`full`"]
    head += ["ms per token: `DynamicCache`", "`StaticCache`", "`full`", "`infinigen`"]
    return table(("model", "context", *head), rows)


DYNAMIC, STATIC = "transformers, DynamicCache", "transformers, StaticCache"


def threads() -> str:
    """Wall time per token by threads, idle and with another busy process."""
    found: dict[tuple[float, int], dict[str, float]] = {}
    for row in load("cpu/threads/smollm2_6k/threads"):
        found.setdefault((row["busy"], row["threads"]), {})[row["policy"]] = row["median"]
    rows = [
        ["none" if not busy else f"one, busy {busy:.0%} of the time", str(count)]
        + [f"{by[policy]:.1f}" for policy in ("full", "infinigen", "auto")]
        for (busy, count), by in found.items()
    ]
    return table(("other process", "threads", "`full`", "`infinigen`", "`auto`"), rows)


def selecting() -> str:
    """Wall time per token of full and selected attention over context length, two threads."""
    rows = []
    for name in ("smollm2_16k", "smollm2_32k", "qwen_8k", "qwen_16k"):
        path = f"cpu/threads/{name}_selecting/threads"
        about = json.loads((RESULTS / f"{path}.json").read_text(encoding="utf-8"))["about"]
        by = {row["policy"]: row["median"] for row in load(path)}
        cells = [f"{by['full']:.1f}", f"{by['infinigen']:.1f}", f"{by['infinigen'] / by['full']:.2f}"]
        rows.append([NAMES[about["model"]], f"{about['context']:,}", *cells])
    return table(("model", "context", "`full`", "`infinigen`", "ratio"), rows)


def avx2() -> str:
    """Time per token and memory compared with transformers, restricted to AVX2."""
    rows = []
    for name in ("smollm2", "qwen"):
        for row in load(f"cpu/avx2/{name}/real_speed"):
            cells = [f"{row['prefill']:.1f}", f"{row['step']:.0f}", f"{row['step_ratio']:.1f}", f"{row['peak']:,.0f}"]
            rows.append([NAMES[name], f"{row['context']:,}", _runtime(row["runtime"]), *cells])
    head = ("prompt, s", "ms per token", "times as fast as `DynamicCache`", "peak RSS, MiB")
    return table(("model", "context", "runtime", *head), rows)


def drafts() -> str:
    """Lossless mode by kind of draft."""
    kinds = {"default": "`exact=True`", "lookup": '`exact="lookup"`', "sparse": '`exact="sparse"`'}
    rows = []
    for row in load("qwen/drafts"):
        if row["kind"] in kinds and row["context"] == 16384:
            text = f"{row['text']}, {'greedy' if not row['temperature'] else 'temperature 0.8'}"
            cells = [f"{row['accepted']:.0%}", f"{row['length']:.1f}", f"{row['bytes_share']:.0%}"]
            rows.append([text, kinds[row["kind"]], *cells, f"{row['ratio']:.2f}"])
    head = ("accepted", "tokens per pass", "KV bytes relative to full attention", "speed-up")
    return table(("text", "drafts", *head), rows)


def disk() -> str:
    """Decode steps whose KV is on a disk."""
    rows = []
    for name, shape in (("qwen", "24 layers, recorded"), ("million", "2 layers, random")):
        for row in sorted(load(f"disk/{name}/disk_steps"), key=lambda row: (row["context"], row["what"])):
            shares = [f"{row['host_share']:.0%}", f"{row['hit_rate']:.0%}" if row["hit_rate"] else ""]
            times = [f"{row['mb_read']:.0f}", f"{row['step_ms']:.0f}"]
            ratios = [f"{row['over_alone']:.1f}", f"{row['times_full']:.1f}"]
            attended = "all" if row["what"] == "full" else "5%"
            rows.append([shape, f"{row['context']:,}", attended, *shares, *times, *ratios])
    head = ("KV in memory", "hit rate", "read, MB", "step, ms", "time relative to reads", "speed-up over all")
    return table(("selections", "context", "attended", *head), rows)


def gpu() -> str:
    """Time per token on a GPU by context length."""
    data = json.loads((RESULTS / "gpu" / "time_per_token.json").read_text(encoding="utf-8"))["data"]
    contexts = sorted({context for points in data.values() for context, _ in points})
    rows = []
    for name, label in GPU_ROWS.items():
        by = dict(map(tuple, data[name]))
        rows.append([label, *(f"{by[context]:.1f}" if context in by else "" for context in contexts)])
    return table(("", *(f"{context:,} tokens" for context in contexts)), rows)


GPU_ROWS = {
    "StaticCache": "transformers, `StaticCache`: all KV on the device",
    "DynamicCache": "transformers, `DynamicCache`: all KV on the device",
    "OffloadedCache": "transformers, offloaded cache",
    "full": "offload-rt, `full`: all KV copied from host memory",
    "infinigen": "offload-rt, selected KV only",
    "infinigen, int4 tail": "offload-rt, default (4-bit approximate KV)",
}


def readme() -> str:
    """The README's table: offload-rt compared with the alternatives."""
    quality = most_windows(load("qwen/perplexity"))[NOVEL, 8192, DEFAULT]
    on_gpu = json.loads((RESULTS / "gpu" / "time_per_token.json").read_text(encoding="utf-8"))["data"]
    steps = {row["runtime"]: row["step"] for row in load("qwen/rows_in_c/long/real_speed") if row["context"] == 8192}
    llama = {row["runtime"]: row["step"] for row in load("qwen/rivals/8000/real_speed")}["llama.cpp, 16-bit KV"]

    def device(name: str) -> list[str]:
        times = dict(map(tuple, on_gpu[name]))
        return [f"{times[context]:.0f}" if context in times else "not measured" for context in (32768, 131072)]

    def cpu(runtime: str) -> str:
        return f"{steps[runtime]:.0f}"

    full, unknown = "0 (full attention)", ["not measured"] * 2
    rows = [
        ["offload-rt, default", "26% of the KV cache: approximate KV", "2% of the KV cache (2)", change(quality),
         *device("infinigen, int4 tail"), cpu("infinigen")],
        ['offload-rt, `policy="full"`', "none", "all", full, *device("full"), cpu("full")],
        ["transformers, `StaticCache`", "all", "none", full, *device("StaticCache"), "not measured"],
        ["transformers, `DynamicCache`", "all", "none", full, *device("DynamicCache"), cpu(DYNAMIC)],
        ["transformers, offloaded cache", "one layer", "all", full, *device("OffloadedCache"), "not measured"],
        ["llama.cpp, 16-bit KV", "all", "none", full, *unknown, f"{llama:.0f} (8,000 tokens)"],
        ["vLLM", "all", "none", full, *unknown, "not measured"],
    ]  # fmt: skip
    head = ["KV on the device", "KV transferred per token", "perplexity change (1)"]
    head += ["H100, 32,768 tokens (2)", "H100, 131,072 tokens (2)", "CPU, 8,192 tokens (3)"]
    return table(("", *head), rows)


TABLES: Sequence[Callable[[], str]] = (
    perplexity, texts, ruler, ruler_tasks, questions, needles, formats, ablation, reference,
    others, lengths, avx2, threads, selecting, drafts, disk, gpu,
)  # fmt: skip


def pages() -> dict[Path, str]:
    """Return the current text of the results page and of the README."""
    made = {PAGE: {one.__name__: one() for one in TABLES}, README: {"results": readme()}}
    return {path: fill(path.read_text(encoding="utf-8"), tables) for path, tables in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
