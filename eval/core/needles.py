"""Needle-in-a-haystack tasks: facts are hidden in a book, and questions about them follow at the end.

The reference models were trained on the templates of the sentences. The names do not occur in the training data, so a
correct answer must come from the context. Names in answers (`LINKED`) are made of syllables from the training data,
because the reference models cannot generate other syllables.

Each kind of needle tests one way in which token selection can fail. Chains of facts in random order correspond to
variable tracking in RULER (Hsieh et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InputError
from .variants import Text

if TYPE_CHECKING:
    from .model_under_test import ModelUnderTest

Rng = np.random.Generator

_FIRST = ("Bran", "Cass", "Dun", "Eld", "Fin", "Gil", "Jor", "Kes", "Lin", "Nev", "Oss", "Pol", "Rav", "Sten", "Thal")
_LAST = ("amir", "beth", "dane", "ford", "gard", "helm", "ian", "lock", "mere", "nett", "rick", "stan", "wick", "wyn")
NAMES = tuple(first + last for first, last in product(_FIRST, _LAST))
LINKED = (
    "Almon", "Arvin", "Barpa", "Belmi", "Brenka", "Brenta", "Calson", "Cordra", "Cortor", "Dalva", "Dorra", "Elvin",
    "Falda", "Fenla", "Garia", "Gorba", "Halla", "Halsa", "Ilson", "Jarfa", "Jarna", "Jenden", "Kalel", "Korda",
    "Korpa", "Lanla", "Lanya", "Lornor", "Malgan", "Malten", "Marus", "Mormi", "Nalkin", "Noran", "Norva", "Pelgo",
    "Pelvin", "Perya", "Ralya", "Rospa", "Sallo", "Selda", "Talba", "Torel", "Tornor", "Ultor", "Vanlo", "Vantor",
    "Verna", "Waldra", "Walus", "Wenric", "Yarden", "Yarus", "Zanka", "Zordra",
)  # fmt: skip
CITIES = ("Athens", "Berlin", "Cairo", "Dublin", "Florence", "Geneva", "Lisbon", "London", "Moscow", "Paris", "Rome")
COLOURS = ("black", "white", "red", "green", "blue", "brown", "grey", "yellow", "golden", "silver", "purple")
THINGS = ("dog", "horse", "coat", "hat", "house", "boat", "door", "ring", "chair", "garden")
OBJECTS = ("lamp", "rope", "bell", "book", "knife", "sword", "candle", "basket", "bottle", "mirror", "key", "drum")
ORDINALS = ("first", "second", "third")

PROMPT_AND_ANSWER = tuple[str, str]


@dataclass(frozen=True)
class Needle:
    """Statements to hide in a text in any order, and questions about them.

    Each question is a sequence of (prompt, answer) pairs. It counts as correct only if all of the answers are correct.
    """

    statements: tuple[str, ...]
    questions: tuple[tuple[PROMPT_AND_ANSWER, ...], ...]


def _number(rng: Rng, who: str) -> PROMPT_AND_ANSWER:
    return f" The number of {who} is", f" {rng.integers(10, 1000)}"


def _birthplace(rng: Rng, who: str) -> PROMPT_AND_ANSWER:
    return f" {who} was born in", f" {rng.choice(CITIES)}"


def _attribute(rng: Rng, who: str) -> PROMPT_AND_ANSWER:
    return f" {who}'s {rng.choice(THINGS)} is", f" {rng.choice(COLOURS)}"


FACTS = (_number, _birthplace, _attribute)


def _people(rng: Rng, count: int, names: Sequence[str] = NAMES) -> list[str]:
    return [names[int(i)] for i in rng.choice(len(names), size=count, replace=False)]


def _told(pairs: Sequence[PROMPT_AND_ANSWER]) -> tuple[str, ...]:
    return tuple(f"{prompt}{answer}." for prompt, answer in pairs)


def _single(rng: Rng) -> Needle:
    pair = FACTS[int(rng.integers(len(FACTS)))](rng, _people(rng, 1)[0])
    return Needle(_told([pair]), ((pair,),))


def _several_keys(rng: Rng) -> Needle:
    fact = FACTS[int(rng.integers(2))]
    pairs = [fact(rng, who) for who in _people(rng, 8)]
    return Needle(_told(pairs), ((pairs[0],),))


def _several_values(rng: Rng) -> Needle:
    wishes = []
    for who in _people(rng, 2):
        objects = rng.choice(OBJECTS, size=3, replace=False)
        wishes.append(tuple((f" {who}'s {nth} wish is a", f" {o}") for nth, o in zip(ORDINALS, objects, strict=True)))
    return Needle(_told([*wishes[0], *wishes[1]]), (wishes[0],))


def _several_queries(rng: Rng) -> Needle:
    pairs = [FACTS[int(rng.integers(len(FACTS)))](rng, who) for who in _people(rng, 4)]
    return Needle(_told(pairs), tuple((pair,) for pair in pairs))


def _chain(rng: Rng) -> Needle:
    """Create two chains of four names, and a question that requires following the first chain to its end."""
    people = _people(rng, 8, LINKED)
    chains = [tuple((f" After {a} comes", f" {b}") for a, b in pairwise(names)) for names in (people[:4], people[4:])]
    return Needle(_told([*chains[0], *chains[1]]), (chains[0],))


KINDS: dict[str, Callable[[Rng], Needle]] = {
    "single": _single,
    "several keys": _several_keys,
    "several values": _several_values,
    "several queries": _several_queries,
    "chain": _chain,
}


@dataclass(frozen=True)
class Question:
    answers: tuple[int, ...]  # positions of the answer tokens
    distance: int  # number of tokens between the first statement that the question refers to and the first answer token


@dataclass(frozen=True)
class Passage:
    """A text that contains hidden statements and ends with questions about them.

    By default, all tokens before the first question are prefilled.
    """

    kind: str
    text: Text
    questions: tuple[Question, ...]


class Haystack:
    """A book in which needles are hidden.

    Raises:
        InputError: The model has no fast tokenizer, or the book contains no sentences.
    """

    def __init__(self, tested: ModelUnderTest, book: str) -> None:
        self._tokenizer: Any = tested.loaded.tokenizer
        ids, _, self._lead = tested.encode(book)
        self._ids = ids
        stops = {i for mark in (".", "!", "?") for i in self._piece(mark)[-1:]}
        self._starts = np.array([i + 1 for i, token in enumerate(ids[:-1]) if token in stops])
        if len(self._starts) < 2:
            raise InputError("the book has no sentences to insert needles between; use ordinary prose")

    def _piece(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def hide(self, rng: Rng, kind: str, length: int) -> Passage:
        """Build a passage of exactly `length` tokens from the book.

        The statements of a needle are inserted before random sentences.

        Raises:
            InputError: The needle and its questions do not fit, or the book is too short.
        """
        needle = KINDS[kind](rng)
        statements = [self._piece(s) for s in needle.statements]
        asked, marks = self._ask(needle)
        room = length - len(self._lead) - sum(map(len, statements)) - len(asked)
        last = len(self._ids) - room
        if room < 0 or last < self._starts[0]:
            raise InputError(
                f"a needle of kind {kind!r} does not fit into {length} tokens of this book; use longer texts"
            )
        begin = int(rng.choice(self._starts[self._starts <= last]))
        inside = self._starts[(self._starts >= begin) & (self._starts <= begin + room)]
        places = np.sort(rng.choice(inside, size=len(statements)))
        tokens, told, at = list(self._lead), {}, begin
        for place, which in zip(places.tolist(), rng.permutation(len(statements)).tolist(), strict=True):
            tokens += self._ids[at:place]
            told[which], at = len(tokens), place
            tokens += statements[which]
        tokens += self._ids[at : begin + room]
        start = len(tokens)
        questions = []
        first = 0  # index of the question's first statement; statements are in the same order as questions
        for question, positions in zip(needle.questions, marks, strict=True):
            stated = min(told[first + i] for i in range(len(question)))
            first += len(question)
            questions.append(Question(tuple(start + p for p in positions), start + positions[0] - stated))
        assert len(tokens) + len(asked) == length
        return Passage(kind, Text((*tokens, *asked), start - 1, start), tuple(questions))

    def _ask(self, needle: Needle) -> tuple[list[int], list[list[int]]]:
        tokens: list[int] = []
        marks: list[list[int]] = []
        for question in needle.questions:
            marks.append([])
            for prompt, answer in question:
                tokens += self._piece(prompt)
                ids = self._piece(answer)
                marks[-1] += range(len(tokens), len(tokens) + len(ids))
                tokens += ids + self._piece(".")
        return tokens, marks
