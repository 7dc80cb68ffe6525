"""Read texts and prompts from files, or from datasets on the hub (using the package `datasets`).

A SPEC is one of:

- `-`: plain text from standard input;
- a path: `book.txt` is plain text in UTF-8; `.jsonl`, `.json`, `.csv` and `.parquet` are tables;
  `prompts.jsonl:question` selects one column (default: `text`, or the only column of strings);
- `NAME:SPLIT`, `NAME:CONFIG:SPLIT` or `NAME:CONFIG:SPLIT:COLUMN`: a dataset of the hub, such as
  `wikitext:wikitext-2-raw-v1:test`. Only the rows that are read are downloaded. With HF_HUB_OFFLINE=1 or
  HF_DATASETS_OFFLINE=1, the dataset is read from the local cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from .extras import install_command
from .small_files import read_small

TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Maps the file name extensions of tables to the names of their formats in `datasets`."""

CHARACTERS = 50_000_000  # maximum number of characters of a text that is joined from rows


def read_file(path: str) -> str:
    """Return the text of a UTF-8 file, or of stdin if `path` is "-".

    Raise InputError if it is missing, empty or not text.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else read_small(Path(path))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path!r}: {getattr(error, 'strerror', error)}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path!r} is not text: byte {error.start} is not UTF-8; use a plain text file in UTF-8"
        ) from error
    if "\0" in text:
        raise InputError(f"{path!r} is a binary file: it contains NUL bytes; use a plain text file in UTF-8")
    if not text.strip():
        raise InputError(f"{path!r} is empty: pass a file that contains text")
    return text


def read_text(spec: str) -> str:
    """Return the text of a plain file, or the first `CHARACTERS` characters of a table or dataset.

    Raises InputError if the text cannot be read, and ConfigError if the package `datasets` is needed but not installed.
    """
    rows = _rows(spec)
    if rows is None:
        return read_file(spec)
    parts, length = [], 0
    for row in rows:
        parts.append(row if row.endswith("\n") else row + "\n")
        length += len(parts[-1])
        if length >= CHARACTERS:
            break
    if length == len(parts) or not parts:
        raise InputError(f"{spec!r} contains no text")
    return "".join(parts)


def check_writable(path: str | None) -> None:
    """Raise InputError if `path` cannot be written. Call this before a long computation."""
    if path is None:
        return
    folder = Path(path).parent
    if not os.path.isdir(folder):
        raise InputError(f"cannot write {path!r}: there is no folder {str(folder)!r}")
    try:
        exists = Path(path).exists()
    except OSError as error:  # for example a name that is too long
        raise InputError(f"cannot write {path!r}: {error.strerror}") from error
    if Path(path).is_dir() or not os.access(path if exists else folder, os.W_OK):
        raise InputError(f"cannot write {path!r}: it is a folder, or writing is not permitted")


def text_name(spec: str) -> str:
    """Return a short name for a text: the file name without its folder, or the SPEC of a dataset."""
    return Path(spec).name if _path_of(spec) is not None else spec


def _path_of(spec: str) -> tuple[Path, str | None] | None:
    """Return the file and the column that a SPEC names, or None if it names a dataset.

    An existing path is never a dataset.
    """
    if spec == "-" or os.path.exists(spec):  # unlike `Path.exists`, it accepts names of any length
        return Path(spec), None
    stem, colon, column = spec.rpartition(":")
    if colon and Path(stem).suffix in TABLES:
        return Path(stem), column
    return None if colon else (Path(spec), None)


def _rows(spec: str) -> Iterator[str] | None:
    file = _path_of(spec)
    if file is None:
        return _hub_rows(spec)
    path, column = file
    if path.suffix not in TABLES:
        return None
    if not path.is_file():
        raise InputError(f"cannot read {str(path)!r}: the file does not exist")
    loaded = _load(spec, TABLES[path.suffix], data_files=str(path), split="train", streaming=True)
    return _strings(spec, loaded, column)


def _hub_rows(spec: str) -> Iterator[str]:
    parts = spec.split(":")
    if not 2 <= len(parts) <= 4 or not all((parts[0], parts[-1])):
        raise InputError(
            f"{spec!r} is neither a file nor a dataset; use a path, or NAME:SPLIT, NAME:CONFIG:SPLIT or "
            "NAME:CONFIG:SPLIT:COLUMN, such as wikitext:wikitext-2-raw-v1:test"
        )
    column = parts.pop() if len(parts) == 4 else None
    config = parts.pop(1) if len(parts) == 3 else ""
    name, split = parts
    loaded = _load(spec, name, config or None, split=split, streaming=not _offline())
    return _strings(spec, loaded, column)


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def _load(spec: str, *arguments: Any, **keywords: Any) -> Iterable[Mapping[str, Any]]:
    try:
        from datasets import disable_progress_bars, load_dataset
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{spec!r} needs the package datasets, which is not installed: {install_command('eval')}"
        ) from error
    disable_progress_bars()
    try:
        found: Iterable[Mapping[str, Any]] = load_dataset(*arguments, **keywords)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        cure = "" if "data_files" in keywords else (
            "; without network access, load it once on another machine, copy its cache (HF_HOME) and set "
            "HF_HUB_OFFLINE=1, or use a file"
        )  # fmt: skip
        raise InputError(f"cannot load {spec!r}: {reason}{cure}") from error
    return found


def _strings(spec: str, rows: Iterable[Mapping[str, Any]], column: str | None) -> Iterator[str]:
    each = iter(rows)
    first = next(each, None)
    if first is None:
        raise InputError(f"{spec!r} has no rows")
    texts = [name for name, value in first.items() if isinstance(value, str)]
    wanted = column or ("text" if "text" in texts else texts[0] if len(texts) == 1 else None)
    if wanted not in texts:
        no_default = "no column 'text', and not exactly one column of strings"
        problem = f"no column {column!r} of strings" if column else no_default
        raise InputError(f"{spec!r} has {problem}; columns of strings: {', '.join(texts) or 'none'}; choose one")
    return (str(row[wanted]) for row in chain([first], each))
