"""What a truncation costs: rows kept with their positions, against the kept text computed anew, and against closing the
gap without turning the keys (CachedAttention §3.4, figure 12's claim). Perplexity of a held-out text, and questions
about facts in what is kept."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import InputError
from ...llm import LLM
from ...model_runner.sequence import Sequence as RunningSequence
from ...sampling_params import SamplingParams
from ...sessions.session import Session
from ...sessions.truncate import SINKS
from ..core.model_under_test import ModelUnderTest
from ..core.needles import Haystack
from ..core.report import Column, Report, Row
from ..core.stats import paired_bootstrap, perplexity_change, share_error

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
VARIANTS = ("recomputed", "kept positions", "naive", "not truncated")
KINDS = ("single", "several keys", "several queries")
"""Of facts: those that the reference model answers."""
TOGETHER = 8
"""Texts whose variants are decoded in one batch."""
STORE = "64MiB"
"""Sessions need a folder; what is cut here is not worth saving."""

PERPLEXITY = (
    Column("after the cut", "variant"), Column("perplexity", "perplexity", ".4f"),
    Column("change", "change", "+.3%"), Column("95 % interval", "interval"), Column("windows", "windows", "d"),
    Column("tokens scored", "tokens", ",d"),
)  # fmt: skip
RECALL = (
    Column("after the cut", "variant"), Column("right", "right", ".1%"), Column("±", "error", ".1%"),
    Column("against recomputed", "change", "+.1%"), Column("95 % interval", "interval"),
    Column("questions", "questions", "d"),
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """`text` is computed, all but its first `SINKS` and its last `keep` tokens are forgotten, and `following` comes
    after it, given token by token in place of what the model would say. questions: of each, where its answers stand in
    `following`."""

    text: tuple[int, ...]
    keep: int
    following: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Followed:
    """Of each token of `following` but the first: its nats, and whether it was the likeliest."""

    nats: list[float]
    likeliest: list[bool]


def sessions_after(llm: LLM, folder: Path, name: str, cut: Cut) -> dict[str, Session]:
    """A session for each of `VARIANTS`. The text is computed once: the variants that keep rows are its forks."""
    whole = llm.session(f"{name} not truncated", folder, limit=STORE, overflow="error")
    list(whole.send(list(cut.text), ONE))
    kept = whole.fork(f"{name} kept positions")
    kept.truncate(keep_last=cut.keep)
    naive = kept.fork(f"{name} naive")
    naive.kv.materialise().shift = 0
    recomputed = llm.session(f"{name} recomputed", folder)
    list(recomputed.send([*cut.text[:SINKS], *cut.text[-cut.keep :]], ONE))
    return {"recomputed": recomputed, "kept positions": kept, "naive": naive, "not truncated": whole}


def follow(llm: LLM, sessions: Sequence[Session], following: Sequence[Sequence[int]]) -> list[Followed]:
    """Gives each session its tokens, all in one batch of decode steps."""
    runner, found = llm.runner, [Followed([], []) for _ in sessions]
    sequences: list[RunningSequence] = []
    for session, known in zip(sessions, following, strict=True):
        sequence = session.kv.materialise()
        sequence.tokens = sequence.tokens[: sequence.position] + list(known)
        sequences.append(sequence)
    for step in range(1, max(map(len, following))):
        going_on = [i for i, known in enumerate(following) if step < len(known)]
        logits = runner.decode([sequences[i] for i in going_on])
        nats, best = -logits.log_softmax(-1), logits.argmax(-1).tolist()
        for row, i in enumerate(going_on):
            token = following[i][step]
            found[i].nats.append(float(nats[row, token]))
            found[i].likeliest.append(best[row] == token)
    return found


def measure(llm: LLM, cuts: Sequence[Cut], progress: Callable[[int], None]) -> Iterator[dict[str, Followed]]:
    """What follows each cut, by variant."""
    for first in range(0, len(cuts), TOGETHER):
        together = cuts[first : first + TOGETHER]
        with tempfile.TemporaryDirectory() as folder:
            made = [sessions_after(llm, Path(folder), str(i), cut) for i, cut in enumerate(together)]
            flat = [session for sessions in made for session in sessions.values()]
            done = follow(llm, flat, [cut.following for cut in together for _ in VARIANTS])
            for session in flat:
                session.discard()
        progress(first + len(together))
        for i in range(len(together)):
            yield dict(zip(VARIANTS, done[i * len(VARIANTS) : (i + 1) * len(VARIANTS)], strict=True))


# ---------------------------------------------------------------------------------------------------------- perplexity


def windows_of(text: Sequence[int], *, context: int, keep: int, scored: int, windows: int) -> list[Cut]:
    """Parts of `text`, evenly spread. Raises InputError where it is too short."""
    step = (len(text) - context - scored - 1) // max(1, windows)
    if step < 1 or not 0 < keep < context:
        raise InputError(
            f"the text has {len(text)} tokens: {windows} windows of {context + scored + 1} need more; "
            f"keep={keep} must be below context={context}"
        )
    starts = (i * step for i in range(windows))
    return [
        Cut(tuple(text[a : a + context]), keep, tuple(text[a + context : a + context + scored + 1])) for a in starts
    ]


def perplexity_rows(found: Sequence[dict[str, Followed]]) -> list[Row]:
    """A row for each variant; the change is against `recomputed`, its interval over windows."""
    rows = []
    weights = [len(one["recomputed"].nats) for one in found]
    base = [sum(one["recomputed"].nats) for one in found]
    for variant in VARIANTS:
        nats = [sum(one[variant].nats) for one in found]
        change = paired_bootstrap(nats, base, weights, change=perplexity_change)
        rows.append(
            {
                "variant": variant,
                "perplexity": math.exp(sum(nats) / sum(weights)),
                "change": change.value,
                "low": change.low,
                "high": change.high,
                "interval": f"{change.low:+.3%} to {change.high:+.3%}",
                "windows": len(found),
                "tokens": sum(weights),
                "samples": nats,
            }
        )
    return rows


# -------------------------------------------------------------------------------------------------------------- recall


def passages_of(
    tested: ModelUnderTest,
    book: str,
    *,
    context: int,
    keep: int,
    passages: int,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
) -> list[Cut]:
    """Passages of `keep` tokens with facts and, at the end, questions about them, behind as much other prose of the
    book as makes `context` tokens; `passages` of each kind. Raises InputError where they do not fit."""
    haystack, rng = Haystack(tested, book), np.random.default_rng(seed)
    prose = tested.loaded.tokenizer(book[: 16 * context], add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    before = tuple(prose[: context - keep])
    cuts = []
    for kind in kinds:
        for _ in range(passages):
            passage = haystack.hide(rng, kind, keep)
            tokens, first = passage.text.tokens, passage.text.scored_from - 1
            questions = tuple(tuple(at - first for at in question.answers) for question in passage.questions)
            cuts.append(Cut((*before, *tokens[:first]), first, tokens[first:], questions))
    return cuts


def recall_rows(cuts: Sequence[Cut], found: Sequence[dict[str, Followed]]) -> list[Row]:
    """A row for each variant: the share of questions with every answer token right, against `recomputed`."""
    right = {
        variant: [
            all(one[variant].likeliest[at - 1] for at in question)
            for cut, one in zip(cuts, found, strict=True)
            for question in cut.questions
        ]
        for variant in VARIANTS
    }
    rows = []
    for variant, mine in right.items():
        change = paired_bootstrap(np.array(mine, float), np.array(right["recomputed"], float), np.ones(len(mine)))
        rows.append(
            {
                "variant": variant,
                "right": sum(mine) / len(mine),
                "error": share_error(sum(mine), len(mine)),
                "change": change.value,
                "low": change.low,
                "high": change.high,
                "interval": f"{change.low:+.1%} to {change.high:+.1%}",
                "questions": len(mine),
                "samples": mine,
            }
        )
    return rows


@dataclass(frozen=True)
class TruncationConfig:
    """context: tokens before the truncation; keep: of them kept; scored: tokens scored after it; windows: of the text;
    passages: of each kind of question; seed: of the questions."""

    context: int = 1920
    keep: int = 960
    scored: int = 128
    windows: int = 96
    passages: int = 64
    seed: int = 0


def run_truncation(
    model: str, text: str, name: str, config: TruncationConfig, out: Path, say: Callable[[str], None]
) -> list[Report]:
    """Measures on `text` (called `name`), and writes truncation.{json,csv,md} and truncation_recall.{json,csv,md} to
    `out`. Raises InputError where the text is too short."""
    llm = LLM(model, policy="full", host_memory="1GiB", enable_prefix_caching=False)
    sizes: dict[str, Any] = {"context": config.context, "keep": config.keep}
    about = {"model": llm.name, "text": name, "policy": "full", "sinks": SINKS, **sizes}
    about |= {"threads": torch.get_num_threads()}

    def progress(what: str, total: int) -> Callable[[int], None]:
        return lambda done: say(f"{what}: {done} of {total}")

    cuts = windows_of(llm.encode(text), scored=config.scored, windows=config.windows, **sizes)
    rows = perplexity_rows(list(measure(llm, cuts, progress("windows", len(cuts)))))
    told = about | {"scored": f"{config.scored} tokens of each window"}
    kept = Report("truncation", "Perplexity after a truncation", told, PERPLEXITY, rows)
    kept.write(out)
    asked = passages_of(ModelUnderTest(model), text, passages=config.passages, seed=config.seed, **sizes)
    rows = recall_rows(asked, list(measure(llm, asked, progress("passages", len(asked)))))
    told = about | {"questions": f"facts in the kept part, {', '.join(KINDS)}; every answer token right"}
    recalled = Report("truncation_recall", "Questions answered after a truncation", told, RECALL, rows)
    recalled.write(out)
    return [kept, recalled]
