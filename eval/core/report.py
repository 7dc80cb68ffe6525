"""Store results on disk.

Each measured row is stored in its own file, so a rerun measures only the missing rows. A `Report` collects the rows and
writes them as JSON, CSV and a Markdown table.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...utils import atomic_files
from ...utils.extras import installed_version
from ...utils.native_code import processor_name
from ...utils.native_libraries import native_status
from ...utils.small_files import read_json

Row = dict[str, Any]
"""A result row. The value in each column is a number, a text, a list or None."""

Say = Callable[[str], None]
"""A function that shows a line about progress."""

FORMAT = 3
"""Version of the row files. Increase it when a measurement changes, so that old rows are measured again."""

PACKAGES = ("offload-rt", "torch", "transformers", "tokenizers", "safetensors", "numpy", "lm-eval")


def say_nothing(line: str) -> None: ...


def write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_atomic(path, text.encode(), private=False)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error


class RowStore:
    """Stores result rows in `out`/rows, by key.

    A key contains every input that affects the row, as plain JSON values.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        try:
            (out / "rows").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot use {str(out)!r} for results: {error.strerror}") from error

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
        return self.out / "rows" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def get(self, key: Mapping[str, Any]) -> Row | None:
        """Return the row stored under `key`, or None if it is missing or its file is damaged."""
        try:
            found = read_json(self._path(key))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("key") != json.loads(json.dumps(key)):
            return None
        row = found.get("row")
        return row if isinstance(row, dict) else None

    def once(self, key: Mapping[str, Any], measure: Callable[[], Row]) -> Row:
        """Return the row stored under `key`.

        If there is none, call `measure`, and store the result and its duration, `seconds`.
        """
        row = self.get(key)
        if row is None:
            began = time.monotonic()
            row = {**measure(), "seconds": round(time.monotonic() - began, 1)}
            self.put(key, row)
        return row

    def put(self, key: Mapping[str, Any], row: Row) -> None:
        write_text(self._path(key), json.dumps({"key": key, "row": row, "at": now()}, indent=1) + "\n")


@dataclass(frozen=True)
class Column:
    heading: str
    key: str
    form: str = ""

    def show(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None:
            return "–"
        if isinstance(value, (list, tuple)):
            return ", ".join(map(str, value)) or "none"
        return format(value, self.form) if self.form and not isinstance(value, str) else str(value)


@dataclass(frozen=True)
class Report:
    name: str  # file name without suffix
    title: str
    about: dict[str, Any]  # settings that all rows have in common, such as model, text and seeds
    columns: tuple[Column, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        about = [f"- {key.replace('_', ' ')}: {value}" for key, value in self.about.items()]
        head = "| " + " | ".join(column.heading for column in self.columns) + " |"
        rule = "|" + "---|" * len(self.columns)
        body = ["| " + " | ".join(column.show(row) for column in self.columns) + " |" for row in self.rows]
        return "\n".join([f"# {self.title}", "", *about, "", head, rule, *body, "", *self.notes]).rstrip() + "\n"

    def write(self, out: Path) -> list[Path]:
        """Write `out`/name.json, .csv and .md, and return their paths."""
        record = {
            "title": self.title,
            "about": self.about,
            "notes": list(self.notes),
            "environment": environment(),
            "rows": self.rows,
        }
        keys = list(dict.fromkeys(k for row in self.rows for k in row if k != "samples"))  # too long for a table
        texts = {
            "json": json.dumps(record, indent=1) + "\n",
            "csv": _csv(keys, self.rows),
            "md": self.markdown(),
        }
        paths = []
        for suffix, text in texts.items():
            paths.append(out / f"{self.name}.{suffix}")
            write_text(paths[-1], text)
        return paths


def _csv(keys: Sequence[str], rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in row.items()})
    return file.getvalue()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment() -> dict[str, Any]:
    """Return the package versions, the commit, the machine and the command line of this process.

    OFFLOAD_RT_COMMIT overrides the commit. This is useful for copies of the source that are not in a repository.
    """
    import torch

    # Absolute paths are shortened to file names, because the folders exist only on this machine.
    program, *rest = sys.argv
    return {
        "command": " ".join(
            [Path(program).name, *(Path(one).name if Path(one).is_absolute() else one for one in rest)]
        ),
        "finished": now(),
        "commit": os.environ.get("OFFLOAD_RT_COMMIT") or _commit(),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in PACKAGES},
        "machine": platform.machine(),
        "processor": processor_name(),
        "native_code": str(native_status()),
        "cpu_threads": torch.get_num_threads(),
    }


def _commit() -> str:
    here = str(Path(__file__).resolve().parent)
    try:
        found = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "not from a repository"
