"""The task Text2JSON: its documents and its scores, without a model."""

from __future__ import annotations

import json

import pytest

from offload_rt.eval.quality.tasks import text2json


def test_every_template_names_every_field() -> None:
    for template in text2json.RECORDS:
        assert all("{" + field + "}" in template for field in text2json.FIELDS)


@pytest.mark.parametrize("records", [1, 16, 128])
def test_documents_hold_their_records_in_order(records: int) -> None:
    document = text2json.document(3, records, 2)
    made = json.loads(document["records"])
    places = [document["text"].index(str(record["badge"])) for record in made]
    assert places == sorted(places)
    assert len({record["name"] for record in made}) == len({record["badge"] for record in made}) == records
    assert document == text2json.document(3, records, 2)
    assert document["text"] != text2json.document(4, records, 2)["text"]


def test_text2json_scores_fields_and_records() -> None:
    document = text2json.document(0, 4, 0)
    made = json.loads(document["records"])

    def scores(answer: str) -> tuple[float, float]:
        found = text2json.process_results(document, [answer.removeprefix(text2json.PREFIX)])
        return found["f1"], found["records_correct"]

    assert scores(json.dumps(made)) == (1.0, 1.0)
    assert scores(json.dumps([r | {"year": str(r["year"])} for r in made])) == (1.0, 1.0)
    assert scores(json.dumps(made)[: json.dumps(made).index(made[2]["name"])]) == (2 * 10 / 30, 0.5)  # ends early
    assert scores(json.dumps([made[0] | {"badge": 1}, *made[1:]])) == (2 * 19 / 40, 0.75)
    assert scores(json.dumps([*made, made[0] | {"name": "Nobody"}])) == (2 * 20 / 45, 1.0)  # an invented record
    assert scores("no list") == (0.0, 0.0)
