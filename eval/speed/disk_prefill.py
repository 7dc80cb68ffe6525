"""Compare the CPU time of a prompt with the KV cache on disk and in memory, alternately."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...kv_cache.disk.file_arena import DiskUse
from ...llm import LLM
from ...sampling_params import SamplingParams
from ..core.report import Column, Report, Row

APART = 100
"""Distance between the starts of two prompts in tokens."""

FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class PrefillConfig:
    """Settings of the measurement.

    Attributes:
        context: Tokens per prompt.
        host: Host memory as a fraction of the KV cache of a prompt.
        repeats: Number of prompts, from different positions in the text.
        policy: Policy.
        dtype: Data type of the model.
    """

    context: int = 8000
    host: float = 0.25
    repeats: int = 3
    policy: str = "full"
    dtype: str = "bfloat16"


def run_disk_prefill(model: str, text: str, disk: Path, config: PrefillConfig) -> Report:
    """Run each prompt of `text` in memory and with `disk`, each time in a new engine.

    Raises InputError if the text is too short.
    """
    with LLM(model, dtype=config.dtype, policy=config.policy) as llm:
        tokens = llm.encode(text)
        size = llm.geometry.kv_bytes(config.context, llm.runner.adapter.dtype)
    needed = config.context + APART * (config.repeats - 1)
    if len(tokens) < needed:
        raise InputError(f"the text has {len(tokens):,} tokens: {needed:,} are needed")
    limits = {"host_memory": int(config.host * size), "disk": disk, "disk_limit": 2 * size}
    pairs = []
    for number in range(config.repeats):
        prompt = tokens[number * APART :][: config.context]
        pairs.append([_prompt(model, prompt, config, **named) for named in ({}, limits)])
    ratios = [stored["cpu_s"] / memory["cpu_s"] for memory, stored in pairs]
    median = {i: statistics.median(pair[i]["cpu_s"] for pair in pairs) for i in (0, 1)}
    rows: list[Row] = [
        {"where": "memory", "cpu_s": median[0]},
        {
            "where": "disk", "cpu_s": median[1], "over": statistics.median(ratios), "least": min(ratios),
            "most": max(ratios), "mb_read": pairs[0][1]["read"] / 1e6, "mb_written": pairs[0][1]["written"] / 1e6,
            "same": sum(memory["token"] == stored["token"] for memory, stored in pairs) / len(pairs),
        },
    ]  # fmt: skip
    about = {
        "model": Path(model).name, "tokens": config.context, "policy": config.policy, "dtype": config.dtype,
        "host memory, of KV": f"{config.host:.0%}", "prompts": config.repeats,
    }  # fmt: skip
    return Report("disk_prefill", "A prompt whose rows go to a disk", about, COLUMNS, rows, NOTES)


def _prompt(model: str, prompt: list[int], config: PrefillConfig, **limits: Any) -> dict[str, Any]:
    with LLM(model, dtype=config.dtype, policy=config.policy, **limits) as llm:
        began = time.process_time()
        [output] = llm.generate([prompt], FIRST)
        took, file = time.process_time() - began, llm.runner.pool.file
    use = DiskUse() if file is None else file.use
    said = output.outputs[0].token_ids[0]
    return {"cpu_s": took, "token": said, "read": use.bytes_read, "written": use.bytes_written}


COLUMNS = (
    Column("rows", "where"),
    Column("CPU s", "cpu_s", ",.1f"),
    Column("over memory's", "over", ".2f"),
    Column("least", "least", ".2f"),
    Column("most", "most", ".2f"),
    Column("same first token", "same", ".0%"),
    Column("read MB", "mb_read", ",.0f"),
    Column("written MB", "mb_written", ",.0f"),
)

NOTES = ("CPU s: of all threads, from the prompt to its first token; medians, and of the ratios of pairs.",)
