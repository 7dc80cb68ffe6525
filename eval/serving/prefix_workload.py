"""What a batch on one prompt costs, end to end on the reference model: a workload of requests that share a long prompt,
and the decode step beside one whose attention does nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ...engine.engine import Engine
from ...engine.runner import Runner
from ...llm import LLM
from ...model_runner.batch import DecodeBatch, LayerFetch
from ...model_runner.decode import DecodeStep
from ...model_runner.per_sequence import PerSequenceMode
from ...models.shape import load_shape
from ..core.report import Column, Report, Row
from .poisson_load import Scale, greedy, make, token_lists

OWN = 64
"""Tokens that each request of the workload has for itself."""

TOGETHER = 8
"""Steps in which all requests of the workload decode: one joins a step, so each needs as many new tokens as there are
requests, and these."""

MODEL = "reference, float32"


# -------------------------------------------------------------------------------------------------------- a workload


def serve(llm: LLM, prompts: Sequence[list[int]], answer: int) -> Row:
    """Serves all prompts together, each for `answer` new tokens; what was computed, held and moved. Link
    bytes are those of the steps in which all of them decode."""
    runner = llm.runner
    runner.pool.bytes_peak = runner.pool.bytes_used
    engine = Engine(runner, max_num_seqs=len(prompts))
    requests = [engine.add(prompt, greedy(answer)) for prompt in prompts]
    began, crossed, steps = time.process_time(), 0, 0
    while not engine.idle:
        whole = len(engine.scheduler.running) == len(prompts)
        traces = [sequence.trace for one in requests for sequence in one.sequences] if whole else []
        before = sum(trace.bytes_to_device for trace in traces)
        engine.step()
        crossed += sum(trace.bytes_to_device for trace in traces) - before
        steps += whole
    assert steps, "the first has ended before the last begins: more new tokens, or more prefill a step"
    stats = [done.stats for one in requests for done in one.completions() if done.stats is not None]
    return {
        "prefilled": sum(s.prompt_tokens - s.reused_tokens for s in stats),
        "peak_mib": runner.pool.bytes_peak / 2**20,
        "step_mib": crossed / steps / 2**20,
        "seconds": time.process_time() - began,
    }


def workload_report(scale: Scale) -> Report:
    """Requests that share a prompt, served with and without sharing: prefill tokens, KV bytes, link bytes a step."""
    rows: list[Row] = []
    answer = scale.requests + TOGETHER
    shared = min(scale.shared, (load_shape("reference").geometry.max_positions - OWN - answer) // 64 * 64)
    for policy in ("full", "infinigen"):
        for sharing in (False, True):
            llm = make(sharing=sharing, policy=policy, max_num_batched_tokens=shared + OWN)  # one prompt a step
            [stem] = token_lists(llm, 1, shared, 0)
            found = serve(llm, [stem + rest for rest in token_lists(llm, scale.requests, OWN, 1)], answer)
            rows.append({"policy": policy, "sharing": "yes" if sharing else "no", **found})
        apart, together = rows[-2:]
        kv_mib = llm.runner.pool.chunk_bytes * shared / 64 / 2**20
        spared = scale.requests - 1
        together["prefill_saved"] = (apart["prefilled"] - together["prefilled"]) / (spared * shared)
        together["kv_saved"] = (apart["peak_mib"] - together["peak_mib"]) / (spared * kv_mib)
        together["link_saved"] = 1 - together["step_mib"] / apart["step_mib"]
        if policy == "full":
            together["shared_times"] = scale.requests - (apart["step_mib"] - together["step_mib"]) / kv_mib
    columns = (
        Column("policy", "policy"),
        Column("sharing", "sharing"),
        Column("tokens prefilled", "prefilled", ",d"),
        Column("of the shared part saved", "prefill_saved", ".1%"),
        Column("peak KV MiB", "peak_mib", ".1f"),
        Column("of the shared part saved", "kv_saved", ".1%"),
        Column("link MiB a step", "step_mib", ".1f"),
        Column("less by", "link_saved", ".1%"),
        Column("shared part crosses, times", "shared_times", ".2f"),
        Column("seconds", "seconds", ".1f"),
    )
    about = {
        "model": MODEL,
        "requests": f"{scale.requests}, of {shared} tokens in common, {OWN} of their own and {answer} new ones, random",
        "clock": "CPU time, one thread",
    }
    notes = (
        "The shared part is what sharing could save: all but one of the requests' shared tokens. Under infinigen a "
        "step moves the union of what the sequences select, and everything of the dense layer.",
    )
    title = f"{scale.requests} requests on one prompt"
    return Report("sharing_workload", title, about, columns, rows, notes)


# ------------------------------------------------------------------------------------------------------- decode steps


class Nothing:
    """Attention that does nothing: what no kernel can be faster than."""

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """q `[H, B, d]` as `[B, H * d]`."""
        return q.transpose(0, 1).flatten(1)


class NoAttention(DecodeStep):
    """A step that fetches as ever and attends to nothing."""

    def _fetch_dense(self, layer: int) -> LayerFetch | None:
        return None if super()._fetch_dense(layer) is None else Nothing()


def step_seconds(runner: Runner, document: list[int], batch: int, step: type[DecodeStep], repeats: int) -> float:
    """CPU seconds of a decode step of `batch` sequences on one document, the least of `repeats`."""
    first = runner.new_sequence([*document, *[5] * (repeats + 2)], len(document) + repeats + 2)
    runner.prefill(first, len(document))
    sequences = [first, *(runner.fork(first, len(document) + repeats + 2) for _ in range(batch - 1))]
    best = float("inf")
    for _ in range(repeats):
        for sequence in sequences:
            sequence.slots.begin_step(sequence.blocks, sequence.position)
        sharing = runner.prefixes.of([s.blocks for s in sequences])
        with torch.inference_mode():
            began = time.process_time()
            members = [sequences[i] for i in sharing.order]
            ordered = DecodeBatch(members, runner.adapter, runner.policy, runner.link, sharing)
            step(ordered, PerSequenceMode(ordered)).run()
            best = min(best, time.process_time() - began)
        for sequence in sequences:
            sequence.position += 1
            runner.pool.commit(sequence.blocks, sequence.slots.context)
    for sequence in sequences:
        runner.free(sequence)
    return best


def steps_report(scale: Scale) -> Report:
    """Decode steps of a batch on one prompt: every sequence by itself, with segments, and with attention that does
    nothing (Hydragen's Figure 4)."""
    apart, together = make(sharing=False), make(sharing=True)
    longest = (together.geometry.max_positions - 64) // 64 * 64
    rows: list[Row] = []
    for batch in scale.batches:
        for prefix in sorted({min(tokens, longest) for tokens in scale.prefixes if tokens}):
            [document] = token_lists(together, 1, prefix, 0)
            kinds = ((apart, DecodeStep), (together, DecodeStep), (together, NoAttention))
            times = [step_seconds(llm.runner, document, batch, step, scale.repeats) for llm, step in kinds]
            rate = [batch / seconds for seconds in times]
            rows.append(
                {"batch": batch, "prefix": prefix, "apart": rate[0], "segments": rate[1], "none": rate[2]}
                | {"gain": rate[1] / rate[0], "ceiling": rate[1] / rate[2]}
            )
    columns = (
        Column("batch", "batch"),
        Column("prefix", "prefix", ",d"),
        Column("one by one, tokens/s", "apart", ",.0f"),
        Column("segments, tokens/s", "segments", ",.0f"),
        Column("no attention, tokens/s", "none", ",.0f"),
        Column("gain", "gain", ".2f"),
        Column("of the ceiling", "ceiling", ".0%"),
    )
    about = {
        "model": f"{MODEL}, policy full (all layers dense)",
        "clock": f"CPU time, one thread, best of {scale.repeats}",
    }
    title = "Decode steps on one prompt, and the ceiling of no attention"
    return Report("sharing_steps", title, about, columns, rows)
