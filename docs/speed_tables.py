"""Tables of the results page on speed: CPU, threads, drafts, disk and GPU."""

from __future__ import annotations

import json

from result_rows import NAMES, RESULTS, Row, load
from tables import table

DYNAMIC, STATIC = "transformers, DynamicCache", "transformers, StaticCache"


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


def intel() -> str:
    """Time per token compared with transformers on an Intel processor, with all its instructions and with AVX2."""
    measured = (
        ("SmolLM2-135M", "native", "AVX512-BF16, AMX"),
        ("SmolLM2-135M", "avx2", "AVX2"),
        ("Qwen2.5-Coder-0.5B", "qwen", "AVX512-BF16, AMX"),
        ("Qwen2.5-Coder-0.5B", "qwen_16k", "AVX512-BF16, AMX"),
    )
    rows = []
    for model, folder, level in measured:
        for row in load(f"cpu/intel/{folder}/real_speed"):
            cells = [f"{row['prefill']:.1f}", f"{row['step']:.0f}", row["quarters"], f"{row['step_ratio']:.1f}"]
            rows.append([model, level, f"{row['context']:,}", _runtime(row["runtime"]), *cells])
    head = ("prompt, s", "ms per token", "quartiles", "times as fast as `DynamicCache`")
    return table(("model", "instructions", "context", "runtime", *head), rows)


def intel_threads() -> str:
    """Wall time per token on an Intel processor by number of threads, on an idle machine and beside a busy process."""
    rows = []
    for name in ("smollm2", "qwen"):
        found: dict[tuple[float, int], dict[str, float]] = {}
        for row in load(f"cpu/intel/threads_{name}/threads"):
            found.setdefault((row["busy"], row["threads"]), {})[row["policy"]] = row["median"]
        for (busy, threads), times in found.items():
            ratios = (times["infinigen"] / times["full"], times["infinigen"] / found[busy, 1]["infinigen"])
            cells = [f"{times[policy]:.0f}" for policy in ("full", "infinigen", "auto")]
            rows.append([NAMES[name], f"{busy:.0%}", str(threads), *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    head = ("`full`", "`infinigen`", "`auto`", "`infinigen` / `full`", "`infinigen`: relative to one thread")
    return table(("model", "other process uses", "threads", *head), rows)


def cpu_kernels() -> str:
    """Time of the C kernels of a decode step relative to their lower bound, by instruction set level."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in load("cpu/intel/kernels/cpu_kernels"):
        if row["tokens"] in (8192, 131072) and not row["kernel"].startswith("prefill"):
            found.setdefault((row["kernel"], row["tokens"]), {})[row["level"]] = row
    levels = ("scalar", "avx2", "avx512", "avx512_bf16")
    rows = [
        [kernel, f"{tokens:,}", *(f"{by[level]['us']:,.0f} ({by[level]['times_floor']:.1f})" for level in levels)]
        for (kernel, tokens), by in found.items()
    ]
    return table(("kernel", "tokens", *levels), rows)


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
