"""Perplexity after a truncation: rows kept with their positions, against the kept text computed anew, and against
closing the gap without turning the keys (CachedAttention §3.4, figure 12's claim)."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ..config import SamplingParams
from ..errors import InputError
from ..llm import LLM
from ..runtime.sessions import SINKS, Session
from .bootstrap import paired_bootstrap, perplexity_change
from .report import Column, Report, Row

ONE = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
VARIANTS = ("recomputed", "kept positions", "naive", "not truncated")
COLUMNS = (
    Column("after the cut", "variant"), Column("perplexity", "perplexity", ".4f"),
    Column("change", "change", "+.3%"), Column("95 % interval", "interval"), Column("windows", "windows", "d"),
    Column("tokens scored", "tokens", ",d"),
)  # fmt: skip


def score(session: Session, known: Sequence[int]) -> float:
    """Nats of `known`, given to the session one token after the other in place of what it would say."""
    runner, total = session._runner, 0.0
    sequence = session._materialise()
    sequence.tokens = sequence.tokens[: sequence.position] + list(known)
    for token in known[1:]:
        logits = runner.decode([sequence])[0]
        total -= float(logits.log_softmax(-1)[token])
    return total


def one_window(llm: LLM, folder: Path, text: Sequence[int], context: int, keep: int, scored: int) -> dict[str, float]:
    """Nats of the same `scored` tokens after each way of forgetting all but the first and the last `keep` tokens."""
    following = list(text[context : context + scored + 1])
    kept = [*text[:SINKS], *text[context - keep : context]]
    found = {}
    for variant in VARIANTS:
        session = llm.session(variant, folder)
        list(session.send(kept if variant == "recomputed" else list(text[:context]), ONE))
        if variant in ("kept positions", "naive"):
            session.truncate(keep_last=keep)
        if variant == "naive":
            session._materialise().shift = 0
        found[variant] = score(session, following)
        session._history.computed = 0  # nothing of this is worth saving
        session._history.tokens = []
        session._drop()
        session.close()
    return found


def measure(llm: LLM, text: Sequence[int], *, context: int, keep: int, scored: int, windows: int) -> list[Row]:
    """Rows of all variants over `windows` parts of `text`. Raises InputError where the text is too short."""
    step = (len(text) - context - scored - 1) // max(1, windows)
    if step < 1:
        raise InputError(f"the text has {len(text)} tokens: too few for {windows} windows of {context + scored + 1}")
    with tempfile.TemporaryDirectory() as folder:
        nats = [one_window(llm, Path(folder) / str(i), text[i * step :], context, keep, scored) for i in range(windows)]
    rows = []
    for variant in VARIANTS:
        pairs = [one[variant] for one in nats], [one["recomputed"] for one in nats]
        change = paired_bootstrap(*pairs, [scored] * len(nats), change=perplexity_change)
        mean = sum(one[variant] for one in nats) / (len(nats) * scored)
        rows.append(
            {
                "variant": variant,
                "perplexity": math.exp(mean),
                "change": change.value,
                "interval": f"{change.low:+.3%} to {change.high:+.3%}",
                "windows": windows,
                "tokens": windows * scored,
                "samples": nats,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes truncation.{json,csv,md}."""
    parser = argparse.ArgumentParser(prog="offload_rt.eval.truncation", description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--keep", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--windows", type=int, default=16)
    args = parser.parse_args(argv)
    llm = LLM("reference", policy="full", host_memory="512MiB", prefix_sharing=False)
    text = llm.encode(args.text.read_text(encoding="utf-8-sig"))
    sizes = {name: getattr(args, name) for name in ("context", "keep", "scored", "windows")}
    rows = measure(llm, text, **sizes)
    about = {"model": llm.name, "text": args.text.name, "policy": "full", "sinks": SINKS, **sizes}
    about |= {"threads": torch.get_num_threads()}
    Report("truncation", "Perplexity after a truncation", about, COLUMNS, rows).write(args.out)


if __name__ == "__main__":
    main()
