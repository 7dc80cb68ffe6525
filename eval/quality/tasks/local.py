"""Load the documents of the local tasks from $OFFLOAD_RT_DATA/tasks, without network access."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

Documents = dict[str, Any]


def _folder() -> Path:
    folder = Path(os.environ.get("OFFLOAD_RT_DATA", Path("..") / "shared" / "data")) / "tasks"
    if not folder.is_dir():
        raise FileNotFoundError(f"no task files in {folder}: set OFFLOAD_RT_DATA to the folder that contains tasks/")
    return folder


def _dataset(documents: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(documents)


def lines(file: str, **metadata: Any) -> Documents:
    text = (_folder() / file).read_text(encoding="utf-8")
    return {"validation": _dataset([json.loads(line) for line in text.splitlines() if line.strip()])}


def rte(**metadata: Any) -> Documents:
    found = {}
    for split, file in (("train", "train.tsv"), ("validation", "dev.tsv")):
        with (_folder() / "rte" / file).open(encoding="utf-8", newline="") as rows:
            documents = list(csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE))
        found[split] = _dataset([{**row, "label": int(row["label"])} for row in documents])
    return found
