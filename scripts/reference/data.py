"""Training data for the reference models: packed novels, and recall passages that are generated on the fly.

A recall passage states facts about people, with text from the novels in between, and later asks for every fact once.
The questions use the wording of the statements (except in `paraphrase`), so that the model learns to copy from its
context. Batches depend only on the seed and the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TEST_BOOK = "war_and_peace.txt"  # test text for bits per byte; not used for training or model selection
VALIDATION_BOOK = "Stevenson_Arrow_1888.txt"  # evaluated during training
HELD_OUT_BOOKS = frozenset({TEST_BOOK, VALIDATION_BOOK})

Ids = NDArray[np.uint16]
Rng = np.random.Generator


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_REAL_NAMES = _words(
    "Ada Agnes Alfred Alice Amos Anna Arthur Basil Beatrice Bertha Boris Caleb Carla Cecil Clara Conrad Cora "
    "Cyril Daisy Daniel Dora Edgar Edith Edmund Elsa Emil Emma Ernest Esther Eva Felix Flora Frank Gilbert Gloria "
    "Grace Greta Gustav Hannah Harold Hector Helga Hugo Ida Irene Isaac Ivan Ivy Jasper Joan Jonas Judith Julia "
    "Karl Katya Laura Leo Lewis Lionel Lucy Luther Lydia Mabel Marcus Martha Martin Max Mildred Mina Miriam Nadia "
    "Nora Olaf Olga Oscar Otto Pavel Pedro Petra Quentin Rachel Ralph Rebecca Rolf Rosa Rufus Ruth Sarah Selma "
    "Silas Simon Stella Sven Theo Thora Ulric Ursula Vera Victor Viola Walter Wanda Wilma Winston Xenia Yvonne "
    "Zelda"
)
_FIRST = _words(
    "Al Ar Bar Bel Bren Cal Cor Dal Dor El Er Fal Fen Gar Gor Hal Hes Il Jar Jen Kal Kor Lan Lor Mal Mar Mor Nal "
    "Nor Or Pel Per Ral Ros Sal Sel Tal Tor Ul Van Ver Wal Wen Yar Zan Zor"
)
_LAST = _words(
    "a an ba bo da den dis dra el en fa gan go ia in ka kin la len lo man mi mon na nor o pa ra ric ro sa son ta "
    "ten tor us va vin wen ya zo"
)
CITIES = _words(
    "Athens Berlin Boston Bristol Cairo Calais Chester Dover Dresden Dublin Durham Exeter Florence Geneva Genoa "
    "Glasgow Hamburg Leeds Lisbon London Lyons Madrid Milan Moscow Munich Naples Oxford Paris Prague Rome Turin "
    "Venice Vienna Warsaw York Zurich"
)
COLOURS = _words("black white red green blue brown grey yellow golden silver purple scarlet")
THINGS = _words("dog horse coat hat house boat door ring chair carriage garden flag")
OBJECTS = _words(
    "lamp rope bell book knife sword candle basket bottle mirror key pipe drum stone shell hammer needle button "
    "letter pistol clock violin spoon plate blanket ribbon pencil ladder barrel lantern"
)
TRAINING_DIET = _words(
    "number birthplace attribute attribute paraphrase values values chain chain"
)  # difficult kinds appear twice
MOST_TRIES = 1000  # number of draws before facts are reported as too long
ORDINALS = ("first", "second", "third")


@lru_cache(maxsize=2)
def names(held_out: bool) -> tuple[str, ...]:
    """Return the training or held-out names in a fixed order. A digest of the name chooses one in six for testing."""
    every = dict.fromkeys([*_REAL_NAMES, *(first + last for first in _FIRST for last in _LAST)])
    return tuple(name for name in every if (hashlib.sha256(name.encode()).digest()[0] % 6 == 0) == held_out)


@dataclass(frozen=True)
class Fact:
    """Statements that are placed in a passage in any order, and a question about them as (prompt, answer) pairs."""

    kind: str
    key: tuple[str, ...]  # unique within a passage
    statements: tuple[str, ...]
    question: tuple[tuple[str, str], ...]


def _pick(rng: Rng, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


def _number(rng: Rng, people: Sequence[str], others: Sequence[str]) -> Fact:
    who, value = _pick(rng, people), f" {rng.integers(10, 1000)}"
    prompt = f" The number of {who} is"
    return Fact("number", ("number", who), (f"{prompt}{value}.",), ((prompt, value),))


def _birthplace(rng: Rng, people: Sequence[str], others: Sequence[str]) -> Fact:
    who, value = _pick(rng, people), f" {_pick(rng, CITIES)}"
    prompt = f" {who} was born in"
    return Fact("birthplace", ("born", who), (f"{prompt}{value}.",), ((prompt, value),))


def _attribute(rng: Rng, people: Sequence[str], others: Sequence[str]) -> Fact:
    who, thing, value = _pick(rng, people), _pick(rng, THINGS), f" {_pick(rng, COLOURS)}"
    prompt = f" {who}'s {thing} is"
    return Fact("attribute", ("thing", who, thing), (f"{prompt}{value}.",), ((prompt, value),))


def _paraphrase(rng: Rng, people: Sequence[str], others: Sequence[str]) -> Fact:
    who, thing, value = _pick(rng, people), _pick(rng, THINGS), f" {_pick(rng, COLOURS)}"
    statement = f" {who} has a{value} {thing}."
    return Fact("paraphrase", ("thing", who, thing), (statement,), ((f" {who}'s {thing} is", value),))


def _values(rng: Rng, people: Sequence[str], others: Sequence[str]) -> Fact:
    who, count = _pick(rng, people), int(rng.integers(2, 4))
    objects = rng.choice(len(OBJECTS), size=count, replace=False)
    parts = tuple((f" {who}'s {ORDINALS[i]} wish is a", f" {OBJECTS[int(o)]}") for i, o in enumerate(objects))
    return Fact("values", ("wish", who), tuple(f"{prompt}{answer}." for prompt, answer in parts), parts)


def _chain(rng: Rng, people: Sequence[str], others: Sequence[str]) -> Fact:
    length = int(rng.integers(3, 5))
    links = [others[int(i)] for i in rng.choice(len(others), size=length, replace=False)]
    parts = tuple((f" After {a} comes", f" {b}") for a, b in pairwise(links))
    return Fact("chain", ("chain", *sorted(links)), tuple(f"{prompt}{answer}." for prompt, answer in parts), parts)


KINDS: dict[str, Callable[[Rng, Sequence[str], Sequence[str]], Fact]] = {
    "number": _number,
    "birthplace": _birthplace,
    "attribute": _attribute,
    "paraphrase": _paraphrase,
    "values": _values,
    "chain": _chain,
}


def make_facts(rng: Rng, count: int, *, held_out: bool, kinds: Sequence[str] = tuple(KINDS)) -> list[Fact]:
    """Draw `count` facts with different keys about only a few people, so that an answer depends on both the name and
    the kind.

    Raises ValueError if a kind is unknown or the count is below 1.
    """
    if count < 1 or not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"need count >= 1 and kinds out of {sorted(KINDS)}, got {count} and {list(kinds)}")
    pool = names(held_out)
    single = set(kinds) <= {"number", "birthplace", "values"}  # one key per person, so as many people as facts
    crowd = max(2, count if single else (count + 1) // 2)
    drawn = [pool[int(i)] for i in rng.choice(len(pool), size=crowd + 4 * count, replace=False)]
    people, others = drawn[:crowd], drawn[crowd:]
    facts: dict[tuple[str, ...], Fact] = {}
    linked: set[str] = set()
    while len(facts) < count:
        fact = KINDS[_pick(rng, kinds)](rng, people, [name for name in others if name not in linked])
        if fact.key not in facts:
            facts[fact.key] = fact
            linked.update(fact.key[1:] if fact.kind == "chain" else ())
    return list(facts.values())


class Encoder:
    """Tokenizes short texts and caches the result.

    The texts begin with a space or are a period, so BPE never merges two of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.piece: Callable[[str], tuple[int, ...]] = lru_cache(maxsize=1 << 16)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Corpus:
    """All books as one token sequence.

    Each book is followed by an end-of-text token. `starts` `[n]` are the positions where sentences start.
    """

    ids: Ids
    starts: NDArray[np.int64]

    @classmethod
    def from_ids(cls, ids: Ids, tokenizer: Tokenizer) -> Corpus:
        stops = [i for i in (tokenizer.token_to_id(mark) for mark in (".", "!", "?")) if i is not None]
        starts = np.flatnonzero(np.isin(ids[:-1], stops)) + 1
        return cls(ids, starts[starts < len(ids) - 1])

    def window(self, rng: Rng, length: int) -> Ids:
        if length > len(self.ids):
            raise ValueError(f"the corpus has {len(self.ids)} tokens, fewer than one sequence of {length}")
        start = int(rng.integers(len(self.ids) - length + 1))
        return self.ids[start : start + length]

    def sentences(self, rng: Rng, at_most: int) -> Ids:
        """Return complete sentences of at most `at_most` tokens in total: none if the first sentence is too long."""
        first = int(rng.integers(len(self.starts)))
        begin = int(self.starts[first])
        last = int(np.searchsorted(self.starts, begin + at_most, side="right")) - 1
        return self.ids[begin : int(self.starts[last])]


@dataclass(frozen=True)
class FactPassage:
    """A recall passage.

    Attributes:
        ids: Token ids `[length]`.
        answer: Mask of answer tokens `[length]`.
        questions: For each question, its kind, the positions of its answer tokens, and the distance in tokens from its
            earliest statement to its first answer.
    """

    ids: Ids
    answer: NDArray[np.bool_]
    questions: tuple[tuple[str, tuple[int, ...], int], ...]


def _order(rng: Rng, facts: Sequence[Fact], interleave: bool) -> list[tuple[int, int]]:
    """Return the order of events, each as (fact, statement). The question of a fact has the statement -1.

    All questions come last. If `interleave` is set, each question is instead at a random position after its statements.
    """
    told = [(i, j) for i, fact in enumerate(facts) for j in range(len(fact.statements))]
    told = [told[int(i)] for i in rng.permutation(len(told))]
    asked = [(int(i), -1) for i in rng.permutation(len(facts))]
    if not interleave:
        return told + asked
    spots = {fact: max(at for at, event in enumerate(told) if event[0] == fact) for fact, _ in asked}
    place = {fact: rng.uniform(spot + 0.5, len(told)) for fact, spot in spots.items()}
    return [event for _, event in sorted([*enumerate(told), *((place[fact], (fact, -1)) for fact, _ in asked)])]


def make_passage(
    rng: Rng,
    length: int,
    facts: Sequence[Fact],
    corpus: Corpus,
    encoder: Encoder,
    *,
    interleave: bool = False,
    fills: Sequence[float] = (0.95,),
) -> FactPassage | None:
    """Build a recall passage of exactly `length` tokens. Return None if the facts and questions do not fit.

    Sentences from `corpus` fill gaps of random size before each statement and after the last one. Together, the gaps
    get a fraction of the free tokens, which is drawn from `fills`. The remaining free tokens become text at the start
    of the passage.
    """
    events = _order(rng, facts, interleave)
    pieces = [_pieces(facts[i], j, encoder) for i, j in events]
    room = length - sum(len(ids) for event in pieces for ids, _ in event)
    if room < 0:
        return None
    gaps = sum(1 for _, j in events if j >= 0) + 1
    sizes = iter((rng.dirichlet(np.full(gaps, 0.7)) * room * rng.choice(fills)).astype(int))
    stated = 0
    row: list[int] = []
    marks: list[bool] = []
    told: dict[int, int] = {}
    found: list[tuple[str, list[int], int]] = []
    for (fact, j), event in zip(events, pieces, strict=True):
        if j >= 0 or stated == gaps - 1:  # a gap before every statement and a gap after the last
            size = next(sizes, 0)
            row.extend(map(int, corpus.sentences(rng, size)) if size > 4 else ())
        if j >= 0:
            stated += 1
            told.setdefault(fact, len(row))
        else:
            found.append((facts[fact].kind, [], told[fact]))
        for ids, is_answer in event:
            marks.extend([False] * (len(row) - len(marks)))
            if is_answer:
                found[-1][1].extend(range(len(row), len(row) + len(ids)))
            row.extend(ids)
            marks.extend([is_answer] * len(ids))
    lead = length - len(row)
    questions = tuple((k, tuple(p + lead for p in positions), positions[0] - at) for k, positions, at in found)
    whole = np.concatenate([corpus.window(rng, lead), np.array(row, dtype=np.uint16)])
    return FactPassage(whole, np.concatenate([np.zeros(lead, bool), np.array(marks, bool)]), questions)


def _pieces(fact: Fact, statement: int, encoder: Encoder) -> list[tuple[tuple[int, ...], bool]]:
    if statement >= 0:
        return [(encoder.piece(fact.statements[statement]), False)]
    stop = encoder.piece(".")
    return [
        piece
        for prompt, answer in fact.question
        for piece in ((encoder.piece(prompt), False), (encoder.piece(answer), True), (stop, False))
    ]


def copy_passage(rng: Rng, length: int, corpus: Corpus) -> FactPassage:
    """Build a passage of text, a section of shuffled tokens, more text, and the same section again."""
    stretch = rng.permutation(corpus.window(rng, int(rng.integers(length // 8, length // 3 + 1))))
    rest = length - 2 * len(stretch)
    middle = int(rng.integers(rest + 1))
    ids = np.concatenate([corpus.window(rng, rest - middle), stretch, corpus.window(rng, middle), stretch])
    answer = np.zeros(length, bool)
    answer[length - len(stretch) + 2 :] = True
    return FactPassage(ids, answer, ())


def recall_passage(rng: Rng, length: int, corpus: Corpus, encoder: Encoder) -> FactPassage:
    """Draw a training passage that has training names, a random layout, and from 2 to `length` / 20 facts (at most 48).

    Raises ValueError if the facts do not fit into `length` tokens.
    """
    for _ in range(MOST_TRIES):
        most = min(48, max(3, length // 20))
        facts = make_facts(rng, int(rng.integers(2, most + 1)), held_out=False, kinds=TRAINING_DIET)
        interleave = bool(rng.random() < 0.4)
        passage = make_passage(rng, length, facts, corpus, encoder, interleave=interleave, fills=(0.0, 0.5, 0.95, 0.95))
        if passage is not None:
            return passage
    raise ValueError(
        f"facts and questions do not fit into {length} tokens: use longer sequences or a larger vocabulary"
    )


@dataclass(frozen=True)
class Mixture:
    """Fractions and loss weights of recall and copy sequences. All other sequences are text."""

    recall: float = 0.5
    copy: float = 0.04
    answer_weight: float = 3.0
    rest_weight: float = 0.15

    def __post_init__(self) -> None:
        if self.recall < 0 or self.copy < 0 or self.recall + self.copy > 1:
            raise ValueError(f"shares must be >= 0 and at most 1 together, got recall={self.recall} copy={self.copy}")
        if self.answer_weight < 0 or self.rest_weight < 0:
            raise ValueError("loss weights must be >= 0")


def make_batch(
    seed: int, step: int, rows: int, length: int, mixture: Mixture, corpus: Corpus, encoder: Encoder
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return token ids and loss weights, each `[rows, length]`. They depend only on the arguments."""
    rng = np.random.default_rng([seed, step])
    recall = int(rows * mixture.recall + rng.random())
    copies = int(rows * mixture.copy + rng.random())
    ids = np.empty((rows, length), np.int64)
    weights = np.ones((rows, length), np.float32)
    for row in range(rows):
        if row < min(recall + copies, rows):
            wanted = row < recall
            passage = recall_passage(rng, length, corpus, encoder) if wanted else copy_passage(rng, length, corpus)
            ids[row] = passage.ids
            weights[row] = np.where(passage.answer, mixture.answer_weight, mixture.rest_weight)
        else:
            ids[row] = corpus.window(rng, length)
    return ids, weights


def training_books(data: Path) -> list[Path]:
    """Return the .txt files in `data` in sorted order, without the held-out books.

    Raise FileNotFoundError if there are none.
    """
    books = sorted(path for path in data.glob("*.txt") if path.name not in HELD_OUT_BOOKS)
    if not books:
        raise FileNotFoundError(f"{data} holds no .txt file to train on (held-out books do not count)")
    return books


def train_tokenizer(books: Sequence[Path], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016) with `vocab_size` tokens.

    Token 0 is the end-of-text token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(book) for book in books], trainer)
    return tokenizer


def load_corpus(books: Sequence[Path], tokenizer: Tokenizer) -> Corpus:
    """Tokenize and pack the books. Raises ValueError if the vocabulary does not fit into 16 bits."""
    if tokenizer.get_vocab_size() > 1 << 16:
        raise ValueError(f"token ids are packed in 16 bits; {tokenizer.get_vocab_size()} tokens do not fit")
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows = []
    for book in books:
        ids = tokenizer.encode(book.read_text(encoding="utf-8"), add_special_tokens=False).ids
        rows.append(np.array([*ids, end], dtype=np.uint16))
    return Corpus.from_ids(np.concatenate(rows), tokenizer)
