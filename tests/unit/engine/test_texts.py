"""Test that text is read from plain files, tables and datasets, and that unreadable text is reported."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from offload_rt.errors import ConfigError, InputError
from offload_rt.utils import texts
from offload_rt.utils.texts import check_writable, read_text, text_name

ROWS = [{"text": "One.", "id": 1}, {"text": "Two.\n", "id": 2}, {"text": " ", "id": 3}, {"text": "Four", "id": 4}]


@pytest.fixture
def table_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    pyarrow, csv, parquet = (pytest.importorskip(f"pyarrow{name}") for name in ("", ".csv", ".parquet"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = pyarrow.Table.from_pylist(ROWS)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    csv.write_csv(rows, tmp_path / "a.csv")
    parquet.write_table(rows, tmp_path / "a.parquet")
    return {name: str(tmp_path / f"a.{name}") for name in ("jsonl", "csv", "parquet")}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_tables_are_read_row_by_row(table_paths: dict[str, str], kind: str) -> None:
    assert read_text(table_paths[kind]) == "One.\nTwo.\n \nFour\n"
    assert read_text(f"{table_paths[kind]}:text") == read_text(table_paths[kind])
    assert text_name(table_paths[kind]) == f"a.{kind}"


def test_a_column_must_exist_and_contain_strings(table_paths: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column 'id' of strings; columns of strings: text"):
        read_text(f"{table_paths['jsonl']}:id")
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "Why?", "n": 1}) + "\n")
    assert read_text(str(tmp_path / "b.jsonl")) == "Why?\n"
    (tmp_path / "c.jsonl").write_text(json.dumps({"question": "Why?", "answer": "So."}) + "\n")
    assert read_text(f"{tmp_path / 'c.jsonl'}:answer") == "So.\n"
    with pytest.raises(InputError, match="choose one"):
        read_text(str(tmp_path / "c.jsonl"))


def test_plain_files_are_read_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a:b.txt").write_text("One line.\n\n Another.\n")
    assert read_text(str(tmp_path / "a:b.txt")) == "One line.\n\n Another.\n"
    for name in ("none.txt", "none.jsonl", "none.csv:text"):
        with pytest.raises(InputError, match="cannot read"):
            read_text(str(tmp_path / name))


@pytest.mark.parametrize(
    ("spec", "arguments", "column"),
    [
        ("wikitext:test", ("wikitext", None, "test"), "text"),
        ("wikitext:raw-v1:test", ("wikitext", "raw-v1", "test"), "text"),
        ("owner/name::validation:body", ("owner/name", None, "validation"), "body"),
    ],
)
@pytest.mark.parametrize("offline", [False, True])
def test_datasets_are_streamed_or_read_from_the_cache_offline(
    spec: str, arguments: tuple[str, str | None, str], column: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return [{column: "A line.", "other": "x"}] * 3

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    assert read_text(spec) == "A line.\n" * 3
    assert asked == [(*arguments, not offline)]
    assert text_name(spec) == spec


def test_datasets_that_cannot_be_loaded_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load(*arguments: object, **keywords: object) -> None:
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match="cannot load 'a:b': Couldn't reach the hub; without network access"):
        read_text("a:b")
    for spec in ("a:b:c:d:e", ":b", "a:"):
        with pytest.raises(InputError, match="neither a file nor a dataset"):
            read_text(spec)


def test_a_missing_datasets_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"'a:b' needs the package datasets.* pip install .*'datasets>="):
        read_text("a:b")


def test_a_long_dataset_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: ({"text": "12345"} for _ in iter(int, 1)))
    monkeypatch.setattr(texts, "CHARACTERS", 20)
    assert read_text("a:b") == "12345\n" * 4


def test_unreadable_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: [])
    with pytest.raises(InputError, match="'a:b' has no rows"):
        read_text("a:b")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: [{"text": ""}] * 3)
    with pytest.raises(InputError, match="'a:b' contains no text"):
        read_text("a:b")
    for name, data, message in (("a", b" \n", "is empty"), ("b", b"x\0", "NUL"), ("c", b"\xff", "byte 0 is not UTF-8")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=message):
            read_text(str(tmp_path / name))


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfOne.\n\nTwo.")))
    assert read_text("-") == "One.\n\nTwo."


def test_an_unwritable_output_is_reported_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(None)
    check_writable(str(tmp_path / "new.json"))
    with pytest.raises(InputError, match="there is no folder"):
        check_writable(str(tmp_path / "none" / "new.json"))
    with pytest.raises(InputError, match="it is a folder"):
        check_writable(str(tmp_path))
    monkeypatch.setattr("os.access", lambda *given: False)
    with pytest.raises(InputError, match="writing is not permitted"):
        check_writable(str(tmp_path / "new.json"))
