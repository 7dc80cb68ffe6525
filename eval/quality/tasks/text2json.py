"""A task that depends on most of its context: convert records that are described in prose to JSON.

It is modelled on Text2JSON in "KV Cache Offloading for Context-Intensive Tasks" (arXiv 2604.08426). The texts are
generated: one paragraph per person, with filler sentences between paragraphs.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

FIELDS = ("name", "city", "profession", "year", "badge")

FIRST = (
    "Alma", "Bruno", "Clara", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Klara", "Lukas", "Marta",
    "Nadia", "Oskar", "Petra", "Quentin", "Rosa", "Simon", "Tilda", "Ulrich", "Vera", "Walter", "Yvonne",
)  # fmt: skip
LAST = (
    "Adler", "Bergmann", "Castell", "Dupont", "Eriksen", "Falk", "Gruber", "Holm", "Ivers", "Jansen", "Kessler", "Lund",
    "Moreau", "Novak", "Olsen", "Pereira", "Quist", "Rossi", "Sandberg", "Thorne", "Ulmer", "Vance", "Weiss", "Zeller",
)  # fmt: skip
CITIES = ("Bergen", "Cork", "Delft", "Genoa", "Graz", "Leuven", "Lyon", "Malmo", "Porto", "Seville", "Tartu", "Turku")
PROFESSIONS = (
    "architect", "baker", "botanist", "carpenter", "chemist", "engraver", "geologist", "librarian", "pilot", "surveyor",
    "translator", "watchmaker",
)  # fmt: skip

RECORDS = (
    "The next entry belongs to {name}, who has lived in {city} for as long as anyone remembers. A {profession} by "
    "training, this person joined in {year}. The badge reads {badge}.",
    "In {year} the office in {city} hired {name}. The post was that of a {profession}, and badge {badge} was issued on "
    "the first morning.",
    "Badge {badge} was handed to {name} in {year}. Colleagues describe a patient {profession} who takes the early "
    "train from {city}.",
    "A {profession} from {city} signed the register next: {name}. The ink is faded, but the year {year} and the badge "
    "number {badge} can still be read.",
)
"""Templates for the paragraph about a record. Each contains all of the `FIELDS`."""

FILLER = (
    "The afternoon was quiet and the corridor smelled of floor polish.",
    "The clock above the door had stood still since the winter.",
    "A cart with old folders stood beside the window, and rain ran down the glass.",
    "The clerk turned the page, sharpened a pencil and went on.",
    "Somewhere below, a radio played a tune that stopped in the middle.",
    "Tea was served at four, as on every other day.",
    "The stairs creaked whenever the wind came from the river.",
    "A note in the margin asked for new lamps, and another one answered that there was no money for them.",
)

QUESTION = (
    "Read the register below. Then list every person in it as JSON, in the order of the register.\n\n{register}\n\n"
    "All people of the register as a JSON list, one object per line with the keys "
    '"name", "city", "profession", "year" and "badge":\n```json\n'
)

PREFIX = "["


def documents(records: int = 16, filler: int = 4, samples: int = 50, **metadata: Any) -> dict[str, Any]:
    """Create the split "test" of `samples` documents.

    Each document has `records` records, and each record is followed by `filler` sentences.
    """
    from datasets import Dataset

    return {"test": Dataset.from_list([document(seed, records, filler) for seed in range(samples)])}


def document(seed: int, records: int, filler: int) -> dict[str, Any]:
    """Create one document. No two of its records have the same name or badge."""
    rng = random.Random(f"{seed} {records} {filler}")
    names = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], records)
    badges = rng.sample(range(10_000, 100_000), records)
    made = [
        {
            "name": name,
            "city": rng.choice(CITIES),
            "profession": rng.choice(PROFESSIONS),
            "year": rng.randrange(1950, 2020),
            "badge": badge,
        }
        for name, badge in zip(names, badges, strict=True)
    ]
    paragraphs = [" ".join([rng.choice(RECORDS).format(**record), *rng.choices(FILLER, k=filler)]) for record in made]
    return {"text": QUESTION.format(register="\n\n".join(paragraphs)), "records": json.dumps(made), "count": records}


def process_results(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the F1 score over (person, field, value) triples, and the fraction of records that are completely
    correct.
    """
    expected, found = triples(json.loads(document["records"])), triples(objects(PREFIX + results[0]))
    right = len(expected & found)
    people = {person for person, _, _ in expected}
    whole = sum({t for t in expected if t[0] == person} == {t for t in found if t[0] == person} for person in people)
    return {"f1": 2 * right / (len(expected) + len(found)), "records_correct": whole / len(people)}


def objects(answer: str) -> Iterator[dict[str, Any]]:
    for text in re.findall(r"\{[^{}]*\}", answer):
        try:
            yield json.loads(text)
        except ValueError:
            continue


def triples(records: Any) -> set[tuple[str, str, str]]:
    """Return the (person, field, value) triples in `records`. Numbers are converted to text."""
    return {(str(r.get("name")), field, str(r.get(field))) for r in records for field in FIELDS if field in r}
