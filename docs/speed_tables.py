"""Tables of the results page on speed: CPU, threads, drafts, disk and GPU."""

from __future__ import annotations

import json

from result_rows import NAMES, RESULTS, Row, load
from tables import table

DYNAMIC = "transformers, DynamicCache"


def others() -> str:
    """Prompt time and time per token of other runtimes on Qwen at 2,048 tokens."""
    ours, theirs = load("qwen/rows_in_c/real_speed"), load("qwen/rivals/real_speed")
    names = {row["runtime"] for row in ours}
    rows = [row for row in theirs if row["runtime"] not in names]
    rows += [row for row in ours if "float32" not in row["runtime"]]
    cells = [[_runtime(row["runtime"]), f"{row['prefill']:.1f}", f"{row['step']:.0f}"] for row in rows]
    return table(("runtime", "prompt, s", "ms per token"), cells)


def _runtime(name: str) -> str:
    return f"offload-rt, `{name}`" if name in ("full", "infinigen", "auto") else name


PACKED = {
    DYNAMIC: (DYNAMIC, "16 bits"),
    "full": ("offload-rt, `full`", "16 bits"),
    "full, GGUF": ("offload-rt, `full`", "Q4_K_M"),
    "infinigen, GGUF": ("offload-rt, `infinigen`", "Q4_K_M"),
    "llama.cpp, 16-bit KV": ("llama.cpp, 16-bit KV", "Q4_K_M"),
}
"""Runtimes of the table of packed weights, with their weights."""


def packed_weights() -> str:
    """Time and memory of a 1.5B model with packed weights, beside 16-bit weights."""
    rows = []
    for name in ("2k", "8k"):
        for row in load(f"qwen15/packed/real_speed_{name}"):
            numbers = f"{row['prefill']:.0f}", f"{row['step']:.0f}", f"{row['peak'] / 1024:.1f}"
            rows.append([f"{row['context']:,}", *PACKED[row["runtime"]], *numbers])
    return table(("context", "runtime", "weights", "prompt, s", "ms per token", "memory, GiB"), rows)


LENGTHS = {
    "smollm2/rows_in_c": ("EPYC", "smollm2"),
    "smollm2/rows_in_c/long": ("EPYC", "smollm2"),
    "qwen/rows_in_c": ("EPYC", "qwen"),
    "qwen/rows_in_c/long": ("EPYC", "qwen"),
    "cpu/intel/native": ("Xeon", "smollm2"),
    "cpu/intel/avx2_smollm2": ("Xeon, AVX2 only", "smollm2"),
    "cpu/intel/avx2": ("Xeon, AVX2 only", "smollm2"),
    "cpu/intel/avx2_qwen": ("Xeon, AVX2 only", "qwen"),
}
"""Folders of the table of context lengths, with the processor and the model."""


def lengths() -> str:
    """Prompt time and time per token compared with transformers, by processor and context length."""
    rows = []
    for folder, (processor, model) in LENGTHS.items():
        found: dict[int, dict[str, Row]] = {}
        for row in load(f"{folder}/real_speed"):
            found.setdefault(row["context"], {})[row["runtime"]] = row
        for context, by in found.items():
            prompts = [f"{by[name]['prefill']:.1f}" for name in (DYNAMIC, "full")]
            steps = [f"{by[name]['step']:.0f}" for name in (DYNAMIC, "full", "infinigen", "auto")]
            rows.append([processor, NAMES[model], f"{context:,}", *prompts, *steps])
    head = ["prompt, s: `DynamicCache`", "`full`", "ms per token: `DynamicCache`", "`full`", "`infinigen`", "`auto`"]
    return table(("processor", "model", "context", *head), rows)


def instructions() -> str:
    """Time of a decode step with random weights, with all instructions of the Xeon and with AVX2 only."""
    found: dict[tuple[str, int], list[str]] = {}
    for level in ("avx512_bf16", "avx2", "avx2_float32"):
        times: dict[tuple[str, int], dict[str, float]] = {}
        for row in load(f"cpu/intel/steps/{level}/decode_step"):
            times.setdefault((row["shape"], row["context"]), {})[row["name"]] = row["median"]
        for case, by in times.items():
            found.setdefault(case, []).extend(f"{step:.0f}" for step in by.values())
    rows = [[NAMES[shape.removesuffix("-0.5b")], f"{tokens:,}", *cells] for (shape, tokens), cells in found.items()]
    head = ["all instructions: `DynamicCache`", "`full`", "`infinigen`"]
    head += ["AVX2: `DynamicCache`", "`full`", "`infinigen`", "AVX2, float32: `full`", "`infinigen`"]
    return table(("model", "context", *head), rows)


def choosing() -> str:
    """Wall time per token of `auto` beside the two policies between which it chooses."""
    rows = []
    for model in ("smollm2", "qwen"):
        for context in (2000, 8000, 16000):
            by = {row["policy"]: row["median"] for row in load(f"cpu/intel/auto/{model}_{context}/threads")}
            ratio = by["auto"] / min(by["full"], by["infinigen"])
            cells = [f"{by[policy]:.0f}" for policy in ("full", "infinigen", "auto")]
            rows.append([NAMES[model], f"{context:,}", *cells, f"{ratio:.2f}"])
    return table(("model", "context", "`full`", "`infinigen`", "`auto`", "`auto` relative to the faster one"), rows)


def selecting() -> str:
    """Wall time per token of full attention and selection with one and two threads, also beside a busy process."""
    rows = []
    for name in ("smollm2_16k", "smollm2_32k", "qwen_8k", "qwen_16k"):
        rows += _threads("EPYC", f"cpu/threads/{name}_selecting/threads")
    for name in ("threads_smollm2", "offload_smollm2", "threads_qwen", "offload_qwen"):
        processor = "Xeon, `offload`" if name.startswith("offload") else "Xeon"
        rows += _threads(processor, f"cpu/intel/{name}/threads")
    head = ["1 thread: `full`", "`infinigen`", "2 threads: `full`", "`infinigen`"]
    return table(("processor", "model", "context", "other process", *head), rows)


def _threads(processor: str, name: str) -> list[list[str]]:
    about = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["about"]
    found: dict[float, dict[tuple[int, str], str]] = {}
    for row in load(name):
        found.setdefault(row["busy"], {})[row["threads"], row["policy"]] = f"{row['median']:.0f}"
    return [
        [processor, NAMES[about["model"]], f"{about['context']:,}", f"{busy:.0%}",
         *(by.get((threads, policy), "") for threads in (1, 2) for policy in ("full", "infinigen"))]
        for busy, by in found.items() if busy != 0.5
    ]  # fmt: skip


def drafts() -> str:
    """Lossless mode by kind of draft."""
    kinds = {"default": "`exact=True`", "lookup": '`exact="lookup"`'}
    rows = []
    for row in load("qwen/drafts"):
        if row["kind"] in kinds and row["context"] == 16384:
            text = f"{row['text']}, {'greedy' if not row['temperature'] else 'temperature 0.8'}"
            cells = [f"{row['length']:.1f}", f"{row['bytes_share']:.0%}", f"{row['ratio']:.2f}"]
            rows.append([text, kinds[row["kind"]], *cells])
    return table(("text", "drafts", "tokens per pass", "copied KV", "speed-up"), rows)


def disk() -> str:
    """Decode steps whose KV is on a disk."""
    rows = []
    for name, shape in (("qwen", "24 layers, recorded"), ("million", "2 layers, random")):
        for row in sorted(load(f"disk/{name}/disk_steps"), key=lambda row: (row["context"], row["what"])):
            if row["context"] not in (16_000, 1_048_576):
                continue
            cells = [f"{row['host_share']:.0%}", f"{row['mb_read']:.0f}", f"{row['step_ms']:.0f}"]
            exact = "100%" if row["what"] == "full" else "5%"
            rows.append([shape, f"{row['context']:,}", exact, *cells, f"{row['times_full']:.1f}"])
    head = ("layers and selections", "context", "exact", "KV in memory", "read, MB", "step, ms", "speed-up")
    return table(head, rows)
