"""Two tasks of LongProc (arXiv 2501.05414) that use local files.

Outputs have about 500 tokens and are scored by rules.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from offload_rt.utils.prefixes import common_prefix


def _load(task: str) -> tuple[str, list[dict[str, Any]], Path]:
    """Return the prompt template, the items and the folder of a task.

    Raise FileNotFoundError if the files do not exist.
    """
    folder = Path(os.environ.get("OFFLOAD_RT_DATA", Path("..") / "shared" / "data")) / "longproc" / task
    if not folder.is_dir():
        raise FileNotFoundError(f"no task files in {folder}: set OFFLOAD_RT_DATA to the folder that contains longproc/")
    template = yaml.safe_load((folder / "prompts.yaml").read_text(encoding="utf-8"))["USER_PROMPT"]
    return template, json.loads((folder / f"{task}_0.5k.json").read_text(encoding="utf-8")), folder


def _dataset(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(rows)}


def routes(**metadata: Any) -> dict[str, Any]:
    """Load the task path_traversal: find a route between two cities, and write one line per step."""
    template, items, _ = _load("path_traversal")
    rows = []
    for item in items:
        start, end = item["question_repr"]
        text = template.format(city_context=item["context_nl"], src_city=start, dst_city=end)
        rows.append({"text": text, "answer": item["answer_nl"]})
    return _dataset(rows)


def pages(max_bytes: int = 24_000, **metadata: Any) -> dict[str, Any]:
    """Load the task html_to_tsv: extract a table from a web page of at most `max_bytes` bytes."""
    template, items, folder = _load("html_to_tsv")
    rows = []
    for item in items:
        page = (folder / item["html_path"]).read_text(encoding="utf-8")
        if len(page.encode()) <= max_bytes:
            named = ("task_topic", "task_description", "filtering_instruction", "tsv_header")
            text = template.format(html_str=page, **{name: item[name] for name in named})
            rows.append({"text": text, "answer": item["gt"], "header": item["tsv_header"]})
    return _dataset(rows)


def route_results(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return two scores: the fraction of steps that precede the first error, and whether the whole route is correct."""
    expected, found = _lines(document["answer"]), _lines(results[0])
    return {"leading_steps": common_prefix(expected, found) / len(expected), "exact": float(expected == found)}


def page_results(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the F1 score over complete table rows. The header does not count."""
    expected, found = (Counter(_rows(text)) for text in (document["answer"], results[0]))
    expected -= Counter(_rows(document["header"]))
    found -= Counter(_rows(document["header"]))
    return {"f1": 2 * (expected & found).total() / max(1, expected.total() + found.total())}


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def _rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(" ".join(cell.lower().split()) for cell in line.split("\t")) for line in _lines(text)]
