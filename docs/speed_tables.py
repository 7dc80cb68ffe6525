"""Speed tables for the results page: CPU, threads, drafts and disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from result_rows import NAMES, RESULTS, Row, load
from tables import table

DYNAMIC = "transformers, DynamicCache"


RUNTIMES = (
    DYNAMIC, "transformers, StaticCache", "transformers, QuantizedCache", "kvpress", "llama.cpp, 16-bit KV",
    "full", "infinigen", "auto",
)  # fmt: skip
"""Rows of the table that shows other runtimes. llama.cpp is slower with 8-bit and 4-bit KV than with 16-bit KV."""


def others() -> str:
    """Prompt time and time per token of other runtimes, on Qwen at two context lengths."""
    found: dict[str, dict[int, Row]] = {}
    # If a runtime was measured twice, use the times of the newer run, which is in the later file.
    for name in ("rivals", "rivals/8000", "rows_in_c", "rows_in_c/long"):
        for row in load(f"qwen/{name}/real_speed"):
            found.setdefault(row["runtime"], {})[8192 if row["context"] == 8000 else row["context"]] = row
    rows = []
    for runtime in RUNTIMES:
        cells = []
        for context in (2048, 8192):
            row = found[runtime].get(context)
            cells += ["", ""] if row is None else [f"{row['prefill']:.1f}", f"{row['step']:.0f}"]
        rows.append([_runtime(runtime), *cells])
    return table(("runtime", *_per_context(("2,048", "8,192"))), rows)


def _per_context(contexts: Sequence[str]) -> list[str]:
    return [f"{context}: {time}" for context in contexts for time in ("prompt, s", "ms per token")]


def _runtime(name: str) -> str:
    return f"offload-rt, `{name}`" if name in ("full", "infinigen", "auto") else name


PACKED = {
    DYNAMIC: (DYNAMIC, "16 bits"),
    "full": ("offload-rt, `full`", "16 bits"),
    "full, GGUF": ("offload-rt, `full`", "Q4_K_M"),
    "infinigen, GGUF": ("offload-rt, `infinigen`", "Q4_K_M"),
    "llama.cpp, 16-bit KV": ("llama.cpp, 16-bit KV", "Q4_K_M"),
}
"""Maps runtimes in the table of packed weights to their labels and their weights."""


def packed_weights() -> str:
    """Time and memory of a 1.5B model with packed weights, compared with 16-bit weights."""
    return _packed({context: f"qwen15/packed/real_speed_{name}" for context, name in ((2048, "2k"), (8192, "8k"))})


def packed_without_bfloat16() -> str:
    """Like `packed_weights`, but on a processor without bfloat16 instructions, and also with AVX2 only."""
    files = {512: "", 2048: "", 8192: "_8k", 16384: "_16k"}
    found = {context: _by_runtime(f"qwen15/packed/real_speed_avx512{part}", context) for context, part in files.items()}
    avx2 = _by_runtime("qwen15/packed/real_speed_avx2", 2048)
    rows = []
    for runtime, cells in PACKED.items():
        steps = [by_runtime.get(runtime, {}).get("step") for by_runtime in (*found.values(), avx2)]
        longest = found[8192][runtime]
        times = ["" if step is None else f"{step:.0f}" for step in steps]
        rows.append([*cells, *times, f"{longest['prefill']:.0f}", f"{longest['peak'] / 1024:.1f}"])
    lengths = [f"{context:,}: ms per token" for context in found]
    head = ("runtime", "weights", *lengths, "AVX2, 2,048", "8,192: prompt, s", "8,192: memory, GiB")
    return table(head, rows)


def _by_runtime(name: str, context: int) -> dict[str, Any]:
    return {row["runtime"]: row for row in load(name) if row["context"] == context}


def _packed(files: Mapping[int, str]) -> str:
    """One row per runtime: times for each context length, and memory for the longest.

    `files` maps context lengths to names of result files.
    """
    by_context = [_by_runtime(name, context) for context, name in files.items()]
    rows = []
    for runtime, cells in PACKED.items():
        found = [by_runtime[runtime] for by_runtime in by_context]
        times = [f"{row[time]:.0f}" for row in found for time in ("prefill", "step")]
        rows.append([*cells, *times, f"{found[-1]['peak'] / 1024:.1f}"])
    lengths = [f"{context:,}" for context in files]
    return table(("runtime", "weights", *_per_context(lengths), f"{lengths[-1]}: memory, GiB"), rows)


LENGTHS = {
    "smollm2/rows_in_c": ("EPYC", "smollm2"),
    "smollm2/rows_in_c/long": ("EPYC", "smollm2"),
    "qwen/rows_in_c": ("EPYC", "qwen"),
    "qwen/rows_in_c/long": ("EPYC", "qwen"),
    "cpu/intel/native": ("Xeon", "smollm2"),
    "cpu/intel/avx2_smollm2": ("Xeon (AVX2)", "smollm2"),
    "cpu/intel/avx2": ("Xeon (AVX2)", "smollm2"),
    "cpu/intel/avx2_qwen": ("Xeon (AVX2)", "qwen"),
}
"""Maps the result folders in the table of context lengths to the processor and the model."""


ELSEWHERE = {("qwen/rows_in_c", 2048), ("qwen/rows_in_c/long", 8192), ("smollm2/rows_in_c", 4096)}
"""(folder, context) pairs that this table omits.

The table of other runtimes already shows the omitted contexts of Qwen.
"""


def lengths() -> str:
    """Prompt time and time per token, compared with transformers, by processor and context length."""
    rows = []
    for folder, (processor, model) in LENGTHS.items():
        found: dict[int, dict[str, Row]] = {}
        for row in load(f"{folder}/real_speed"):
            found.setdefault(row["context"], {})[row["runtime"]] = row
        for context, by in found.items():
            if (folder, context) in ELSEWHERE:
                continue
            prompts = [f"{by[name]['prefill']:.1f}" for name in (DYNAMIC, "full")]
            steps = [f"{by[name]['step']:.0f}" for name in (DYNAMIC, "full", "infinigen")]
            rows.append([f"{processor}, {NAMES[model]}", f"{context:,}", *prompts, *steps])
    head = ["prompt, s: `DynamicCache`", "prompt, s: `full`", "ms: `DynamicCache`", "ms: `full`", "ms: `infinigen`"]
    return table(("processor, model", "context", *head), rows)


THREADS = {
    "EPYC": [f"cpu/threads/{name}_selecting" for name in ("smollm2_16k", "smollm2_32k", "qwen_8k", "qwen_16k")],
    "Xeon": [f"cpu/intel/auto/{model}_{context}" for model in ("smollm2", "qwen") for context in (2000, 8000, 16000)],
}
"""Maps processors to the result folders for the table of full attention and selection."""


def selecting() -> str:
    """Wall time per token of full attention, selection and `auto` on an idle machine."""
    rows = []
    for processor, folders in THREADS.items():
        for folder in folders:
            about = json.loads((RESULTS / folder / "threads.json").read_text(encoding="utf-8"))["about"]
            idle = (row for row in load(f"{folder}/threads") if not row["busy"])
            times = {row["policy"]: f"{row['median']:.0f}" for row in idle}
            cells = [times.get(policy, "") for policy in ("full", "infinigen", "auto")]
            rows.append([f"{processor}, {NAMES[about['model']]}", f"{about['context']:,}", *cells])
    return table(("processor, model", "context", "`full`", "`infinigen`", "`auto`"), rows)


def drafts() -> str:
    """Copied KV and speed-up of lossless mode, by text and kind of draft."""
    kinds = {"default": "`exact=True`", "lookup": '`exact="lookup"`'}
    found: dict[str, list[str]] = {}
    for row in load("qwen/drafts"):
        if row["kind"] in kinds and row["context"] == 16384:
            text = f"{row['text']}, {'greedy' if not row['temperature'] else 'temperature 0.8'}"
            found.setdefault(text, []).extend((f"{row['bytes_share']:.0%}", f"{row['ratio']:.2f}"))
    head = (f"{kind}: {value}" for kind in kinds.values() for value in ("copied KV", "speed-up"))
    return table(("text", *head), [[text, *cells] for text, cells in found.items()])


def disk() -> str:
    """Bytes read and time of decode steps with KV on disk."""
    rows = []
    for name in ("qwen", "million"):
        for row in sorted(load(f"disk/{name}/disk_steps"), key=lambda row: (row["context"], row["what"])):
            if row["context"] not in (16_000, 1_048_576):
                continue
            cells = [f"{row['host_share']:.0%}", f"{row['mb_read']:.0f}", f"{row['step_ms']:.0f}"]
            exact = "100%" if row["what"] == "full" else "5%"
            rows.append([f"{row['context']:,}", exact, *cells, f"{row['times_full']:.1f}"])
    return table(("context", "exact", "KV in memory", "read, MB", "step, ms", "speed-up"), rows)
