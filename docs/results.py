"""Generate the tables in `docs/pages/results.md` and the README from `eval/results`.

`python docs/results.py` writes the tables between the marks in both files. A test checks that they are up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_tables import gpu, gpu_sessions, h200_trained, predicted, step_times, working_sets
from quality_tables import divergence, formats, perplexity, published_formats
from result_rows import DEFAULT, NOVEL, ROOT, change, load, most_windows
from speed_tables import DYNAMIC, disk, drafts, lengths, others, packed_weights, packed_without_bfloat16, selecting
from tables import fill, table
from task_tables import tasks

PAGE = ROOT / "docs" / "pages" / "results.md"
README = ROOT / "README.md"


def readme() -> str:
    """The README's table: offload-rt compared with the alternatives."""
    quality = most_windows(load("qwen/perplexity"))[NOVEL, 8192, DEFAULT]
    on_gpu = step_times()
    steps = {row["runtime"]: row["step"] for row in load("qwen/rows_in_c/long/real_speed") if row["context"] == 8192}
    llama = {row["runtime"]: row["step"] for row in load("qwen/rivals/8000/real_speed")}["llama.cpp, 16-bit KV"]

    def device(name: str) -> list[str]:
        times = on_gpu[name]
        return [f"{times[context]:.0f}" if context in times else unknown for context in (32768, 131072)]

    def cpu(runtime: str) -> str:
        return f"{steps[runtime]:.0f}"

    full, unknown = "0", "–"
    rows = [
        ["offload-rt, default", "26% (approximate KV)", "2%", change(quality),
         *device("infinigen, int4 tail"), cpu("infinigen")],
        ['offload-rt, `policy="full"`', "none", "all", full, *device("full"), cpu("full")],
        ["transformers, `StaticCache`", "all", "none", full, *device("StaticCache"), unknown],
        ["transformers, `DynamicCache`", "all", "none", full, *device("DynamicCache"), cpu(DYNAMIC)],
        ["transformers, offloaded cache", "one layer", "all", full, *device("OffloadedCache"), unknown],
        ["llama.cpp, 16-bit KV", "all", "none", full, unknown, unknown, f"{llama:.0f}"],
    ]  # fmt: skip
    head = ["KV on the GPU", "KV copied to the GPU per token", "change of perplexity"]
    head += ["H100, 32,768 tokens", "H100, 131,072 tokens", "CPU, 8,192 tokens"]
    return table(("", *head), rows)


TABLES: Sequence[Callable[[], str]] = (
    perplexity, divergence, tasks, formats, published_formats,
    others, packed_weights, packed_without_bfloat16, lengths, selecting, drafts, disk,
    gpu, predicted, working_sets, h200_trained, gpu_sessions,
)  # fmt: skip


def pages() -> dict[Path, str]:
    made = {PAGE: {one.__name__: one() for one in TABLES}, README: {"results": readme()}}
    return {path: fill(path.read_text(encoding="utf-8"), tables) for path, tables in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
