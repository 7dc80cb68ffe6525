"""Evaluate a reference model: bits per byte by context length, and recall of facts by kind, number and distance.

The training loop, the model card and the regression test of the packaged checkpoint use this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from data import KINDS, MOST_TRIES, Corpus, Encoder, FactPassage, make_facts, make_passage
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import PreTrainedModel


def _hidden(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = cast(Any, model).base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the size in bytes of each token's text, `[vocab]`. Special tokens have size 0."""
    # Byte-level BPE represents each byte by one character.
    special = set(tokenizer.get_added_tokens_decoder())
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if index in special else len(token)
    return sizes


@torch.no_grad()
def nats_by_context(
    model: PreTrainedModel, ids: NDArray[np.integer], contexts: Sequence[int], *, windows: int, scored: int, batch: int
) -> dict[int, NDArray[np.float64]]:
    """Return the summed nats of the same tokens under each context length, as `{context: [windows]}`.

    There are `windows` sections of max(contexts) tokens, evenly spaced over `ids`. The last `scored` tokens of each
    section are scored. At context length c, the model sees only the last c tokens of a section. Raises ValueError if
    the text is shorter than a section, or if a context is not longer than `scored`.
    """
    longest = max(contexts)
    if len(ids) < longest or min(contexts) <= scored:
        raise ValueError(
            f"{len(ids)} tokens, contexts {list(contexts)}: need text >= longest context > {scored} scored"
        )
    begins = np.linspace(0, len(ids) - longest, windows).astype(int)
    pieces = torch.from_numpy(np.stack([ids[b : b + longest] for b in begins]).astype(np.int64)).to(model.device)
    head = cast(Any, model).lm_head
    out: dict[int, NDArray[np.float64]] = {}
    for context in contexts:
        sums = []
        rows = max(1, batch * 512 // context)
        for part in torch.split(pieces[:, -context:], rows):
            logits = head(_hidden(model, part[:, :-1])[:, -scored:]).float()
            losses = functional.cross_entropy(logits.flatten(0, 1), part[:, -scored:].flatten(), reduction="none")
            sums.append(losses.view(len(part), scored).double().sum(1))
        out[context] = torch.cat(sums).cpu().numpy()
    return out


def scored_bytes(
    tokenizer: Tokenizer, ids: NDArray[np.integer], longest: int, *, windows: int, scored: int
) -> NDArray[np.int64]:
    """Return the size in bytes of the tokens that `nats_by_context` scores in each window, `[windows]`."""
    begins = np.linspace(0, len(ids) - longest, windows).astype(int)
    sizes = token_bytes(tokenizer)
    return np.array([sizes[ids[b + longest - scored : b + longest]].sum() for b in begins])


def bits_per_byte(nats: NDArray[np.float64], sizes: NDArray[np.int64]) -> float:
    """Return the bits per byte over all windows. `nats` and `sizes` (in bytes) are `[windows]`."""
    return float(nats.sum() / sizes.sum() / math.log(2))


@dataclass(frozen=True)
class Answer:
    """Result for one question. `right` says whether greedy decoding would generate the answer."""

    kind: str
    distance: int
    right: bool


@torch.no_grad()
def ask(model: PreTrainedModel, passages: Sequence[FactPassage], *, batch: int = 8) -> list[Answer]:
    answers = []
    rows = max(1, batch * 512 // len(passages[0].ids))
    for i in range(0, len(passages), rows):
        part = passages[i : i + rows]
        ids = torch.from_numpy(np.stack([passage.ids for passage in part]).astype(np.int64)).to(model.device)
        hidden = _hidden(model, ids)
        for row, passage in enumerate(part):
            for kind, positions, distance in passage.questions:
                at = torch.tensor(positions, device=ids.device)
                right = cast(Any, model).lm_head(hidden[row, at - 1]).argmax(-1).eq(ids[row, at]).all()
                answers.append(Answer(kind, distance, bool(right)))
    return answers


def recall(
    model: PreTrainedModel,
    corpus: Corpus,
    encoder: Encoder,
    *,
    length: int,
    facts: int,
    passages: int,
    seed: int,
    held_out: bool = True,
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Answer]:
    """Evaluate `passages` recall passages.

    Each has `length` tokens and `facts` facts, and all questions are at the end.

    Raises ValueError if the facts do not fit.
    """
    rng = np.random.default_rng([seed, length, facts, passages])
    made: list[FactPassage] = []
    for _ in range(MOST_TRIES + passages):
        chosen = make_facts(rng, facts, held_out=held_out, kinds=kinds)
        passage = make_passage(rng, length, chosen, corpus, encoder)
        if passage is not None:
            made.append(passage)
        if len(made) == passages:
            return ask(model, made)
    raise ValueError(f"{facts} facts and their questions do not fit into {length} tokens")


def share_right(answers: Sequence[Answer]) -> float:
    return sum(answer.right for answer in answers) / len(answers)


def by_kind(answers: Sequence[Answer]) -> dict[str, float]:
    present = dict.fromkeys(answer.kind for answer in answers)
    return {kind: share_right([a for a in answers if a.kind == kind]) for kind in KINDS if kind in present}


def by_distance(answers: Sequence[Answer], edges: Sequence[int]) -> dict[str, tuple[float, int]]:
    """Return the accuracy and the number of questions for each non-empty distance band `[edges[i], edges[i + 1])`."""
    table = {}
    for low, high in pairwise(edges):
        band = [answer for answer in answers if low <= answer.distance < high]
        if band:
            table[f"{low}-{high - 1}"] = (share_right(band), len(band))
    return table


@dataclass(frozen=True)
class Pinned:
    """Scores that identify a checkpoint: bits per byte of a fixed text, and the number of held-out questions answered
    correctly.
    """

    bits_per_byte: float
    right: int
    asked: int


def pinned_scores(model: PreTrainedModel, tokenizer: Tokenizer, text: str, *, window: int = 1024) -> Pinned:
    """Score the first `window` tokens of `text`, and recall passages that are filled with `text`.

    The result depends only on the checkpoint and the text. Raises ValueError if the text is too short.
    """
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
    sample = {"windows": 1, "scored": window - 1}
    nats = nats_by_context(model, ids[:window], [window], batch=1, **sample)[window]
    sizes = scored_bytes(tokenizer, ids[:window], window, **sample)
    corpus = Corpus.from_ids(ids, tokenizer)
    answers = recall(model, corpus, Encoder(tokenizer), length=512, facts=4, passages=16, seed=3)
    return Pinned(bits_per_byte(nats, sizes), sum(answer.right for answer in answers), len(answers))
