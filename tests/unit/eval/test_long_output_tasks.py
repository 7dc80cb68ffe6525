"""Test the documents and scores of the tasks with long outputs. No model is used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from offload_rt.eval.quality.tasks import longproc, text2json

DATA = Path(os.environ.get("OFFLOAD_RT_DATA", Path(__file__).parents[4] / "shared" / "data"))


def test_every_template_names_every_field() -> None:
    for template in text2json.RECORDS:
        assert all("{" + field + "}" in template for field in text2json.FIELDS)


@pytest.mark.parametrize("records", [1, 16, 128])
def test_documents_contain_their_records_in_order(records: int) -> None:
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


def test_routes_score_correct_leading_steps() -> None:
    document = {"answer": "From A, take a bus to B.\nFrom B, take a car to C.\nFrom C, take a bus to D."}
    lines = document["answer"].splitlines()
    cases = {
        document["answer"] + "\n": (1.0, 1.0),
        "\n".join(lines[:2]): (2 / 3, 0.0),
        "\n".join([lines[0], lines[2]]): (1 / 3, 0.0),
        "\n".join([*lines, lines[0]]): (1.0, 0.0),
        "": (0.0, 0.0),
    }
    for answer, (leading, exact) in cases.items():
        assert longproc.route_results(document, [answer]) == {"leading_steps": leading, "exact": exact}


def test_pages_score_whole_rows() -> None:
    document = {"answer": "a\tb\n1\t2\n3\t4", "header": "a\tb"}
    assert longproc.page_results(document, ["a\tb\n1\t2\n3\t4\n"]) == {"f1": 1.0}
    assert longproc.page_results(document, ["1\t2\n3\t5\n"]) == {"f1": 0.5}
    assert longproc.page_results(document, [""]) == {"f1": 0.0}


@pytest.mark.skipif(not (DATA / "longproc").is_dir(), reason=f"no LongProc files in {DATA}")
def test_reference_answers_have_full_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="the extra 'eval' is not installed")
    monkeypatch.setenv("OFFLOAD_RT_DATA", str(DATA))
    routes, pages = longproc.routes()["test"], longproc.pages()["test"]
    assert (len(routes), len(pages)) == (60, 20)
    assert all(longproc.route_results(row, [row["answer"]])["exact"] == 1 for row in routes)
    assert all(longproc.page_results(row, [row["answer"]])["f1"] == 1 for row in pages)
    assert all("{" not in row["text"].split("```html")[0] for row in pages)
