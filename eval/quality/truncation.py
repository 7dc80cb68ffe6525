"""Quality after truncating a session (CachedAttention §3.4, Figure 12).

Compares keeping the KV with its positions, recomputing the kept text, and closing the gap without rotating the keys.
Measures the perplexity of a held-out text and the accuracy of questions about the kept part.
"""

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
"""Kinds of needles that the reference model can answer."""
TOGETHER = 8
"""Number of texts whose variants are decoded in one batch."""
STORE = "64MiB"
"""Size limit of the session folder; sessions need one, although nothing is kept."""

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
    """A text to truncate and its continuation.

    Attributes:
        text: Tokens computed before the truncation.
        keep: Number of tokens kept at the end, besides the first `SINKS` tokens.
        following: Continuation, fed token by token (teacher forcing).
        questions: Positions of the answer tokens of each question in `following`.
    """

    text: tuple[int, ...]
    keep: int
    following: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Followed:
    """Nats, and whether it is the most probable one, of each token of `following` except the first."""

    nats: list[float]
    likeliest: list[bool]


def sessions_after(llm: LLM, folder: Path, name: str, cut: Cut) -> dict[str, Session]:
    """Create a session for each of `VARIANTS`. Variants that keep KV are forks, so the text is computed once."""
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
    """Feed each session its tokens and score them. All sessions are decoded in one batch."""
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
    """Yield the scores of the continuation of each cut by variant."""
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
    """Cut evenly spaced windows from `text`. Raises InputError if the text is too short."""
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
    """Return a row per variant: perplexity and its change against `recomputed`, with an interval over windows."""
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
    """Build `passages` passages of each kind: `keep` tokens with facts, and questions about them at the end.

    Other prose of the book precedes each passage, `context` tokens in total. Raises InputError if the facts do not fit.
    """
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
    """Return a row per variant: share of questions with all answer tokens correct, compared with `recomputed`."""
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
    """Settings of the evaluation.

    Attributes:
        context: Number of tokens before the truncation.
        keep: Number of tokens kept at the end.
        scored: Number of tokens scored after the truncation.
        windows: Number of windows of the text.
        passages: Number of passages of each kind of question.
        seed: Random seed of the questions.
    """

    context: int = 1920
    keep: int = 960
    scored: int = 128
    windows: int = 96
    passages: int = 64
    seed: int = 0


def run_truncation(
    model: str, text: str, name: str, config: TruncationConfig, out: Path, say: Callable[[str], None]
) -> list[Report]:
    """Measure on `text` (called `name`); write truncation.{json,csv,md} and truncation_recall.{json,csv,md} to `out`.

    Raises InputError if the text is too short.
    """
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
