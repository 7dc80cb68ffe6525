"""The part "trained" of `make gpu`: run trained models end to end on the device, and compare with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...llm import LLM
from ...sampling_params import SamplingParams
from ...utils.prefixes import common_prefix
from . import programs
from .gpu_job import GpuJob, Results
from .programs import CLI, KEPT_OUTPUT


def run_trained(job: GpuJob) -> Iterator[Results]:
    """Compare greedy tokens with transformers, and measure tokens per second, perplexity and needle retrieval.

    The models are the folders in `GpuSize.trained`. Folders that do not exist are skipped.
    """
    found: Results = {"text": job.size.text.name}
    for folder in job.size.trained:
        if not folder.exists():
            found[folder.name] = f"skipped: {folder.name} is not there"
            yield found
            continue
        found[folder.name] = own = dict[str, Any]()
        for dtype in (torch.float32, torch.bfloat16):
            own[str(dtype).removeprefix("torch.")] = _beside_transformers(job, folder, dtype)
            yield found
        for name in ("perplexity", "retrieval"):
            own[name] = _evaluated(job, folder, name)
            yield found


def _beside_transformers(job: GpuJob, folder: Path, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return one row per prompt length and policy.

    It contains the number of equal tokens, and the tokens per second of transformers and of this runtime.
    """
    ids = AutoTokenizer.from_pretrained(folder)(job.size.text.read_text("utf-8")[: 1 << 18])["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = model.to(job.device).eval()
    rows: list[dict[str, Any]] = []
    for length in job.size.trained_prompts:
        prompt = ids[:length]
        wanted, theirs = _greedy(job, model, prompt)
        for policy in ("full", "infinigen"):
            llm = LLM(str(folder), policy=policy, dtype=dtype, device=job.device.type, enable_prefix_caching=False)
            tokens, seconds, stats = _generated(job, llm, prompt)
            del llm
            same = common_prefix(tokens, wanted)
            row = {"prompt": length, "policy": policy, "tokens": len(wanted), "equal tokens": same} | seconds
            if same < len(wanted):
                row["margin of the first difference"] = _margin(model, prompt + wanted[:same])
            rows.append(row | {f"transformers {key}": value for key, value in theirs.items()} | {"stats": stats})
            print({key: value for key, value in rows[-1].items() if key != "stats"}, flush=True)
    return rows


@torch.inference_mode()
def _margin(model: Any, ids: list[int]) -> float:
    logits = model(torch.tensor([ids], device=model.device), logits_to_keep=1).logits[0, -1].float()
    best = logits.topk(2).values
    return float(best[0] - best[1])


def _greedy(job: GpuJob, model: Any, prompt: list[int]) -> tuple[list[int], dict[str, float]]:
    """Generate greedily with transformers. Return the tokens and the times."""
    given = torch.tensor([prompt], device=job.device)

    def run(tokens: int) -> Any:
        return model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )

    run(2)
    output, times = _timed(job, run)
    return output[0, len(prompt) :].tolist(), times


def _generated(job: GpuJob, llm: LLM, prompt: list[int]) -> tuple[list[int], dict[str, float], dict[str, Any]]:
    """Generate greedily with this package. Return the tokens, the times, and the statistics."""

    def run(tokens: int) -> Any:
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0)
        [output] = llm.generate(prompt, params)
        return output.outputs[0]

    run(8)  # compiles kernels and captures the graph
    output, times = _timed(job, run)
    stats = {key: value for key, value in vars(output.stats).items() if isinstance(value, int | float | str)}
    return list(output.token_ids), times, stats


def _timed(job: GpuJob, run: Callable[[int], Any]) -> tuple[Any, dict[str, float]]:
    """Return the output of `run` for all tokens and the times: seconds to the first token, and tokens per second."""
    first, _ = job.timed(lambda: run(1))
    whole, output = job.timed(lambda: run(job.size.trained_tokens))
    return output, {"first token s": first, "tokens/s": (job.size.trained_tokens - 1) / (whole - first)}


def _evaluated(job: GpuJob, folder: Path, name: str) -> dict[str, Any]:
    out = job.out / f"trained_{folder.name}"
    flags = ["--text", str(job.size.text), "--device", job.device.type, "--dtype", "bfloat16", "--quiet"]
    sizes = job.size.trained_perplexity if name == "perplexity" else job.size.trained_needles
    command = [*CLI, "eval", name, str(folder), *flags, "--policies", "full,infinigen", *sizes, "--out", str(out)]
    code, output = programs.run_program(command, job.size.trained_limit)
    path = out / f"{name}.json"
    table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return {"exit_code": code, "rows": table.get("rows", [])} | ({} if code == 0 else {"output": output[-KEPT_OUTPUT:]})
