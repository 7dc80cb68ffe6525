"""The files of a long document: its text, its settings, and the tokens written so far."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import InputError, StoreError
from ..sampling_params import SamplingParams
from ..utils.atomic_files import write_all, write_synced
from ..utils.private_files import make_private_folder
from ..utils.small_files import read_json, read_small

FORMAT = 1

_ADDED = {"more", "goal"}
"""Fields that files of earlier versions do not have."""


def replace_file(path: Path, data: bytes, *, private: bool = True) -> None:
    """Replace a file atomically, even if the machine stops during the write. Raise InputError if this fails."""
    temporary = path.with_name(f"{path.name}.part")
    try:
        # The name of the temporary file is fixed, so that the next write replaces the file of a killed process.
        write_synced(temporary, data, private=private)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error


class TextFile:
    """The text file of a document.

    Text and tokens are saved separately. After a restart, the file may therefore have less or more text than the saved
    tokens. `restore` appends missing text. `append` compares new text with the text that the file already has.

    Args:
        session: Folder of the document's session, used in messages.
    """

    def __init__(self, path: Path, session: Path) -> None:
        self.path, self._session = path, session
        self._ahead = b""
        self._handle: int | None = None

    def restore(self, saved: str) -> None:
        """Open the file. Append the end of `saved`, the text of the saved tokens, if the file lacks it.

        Raises InputError if the file was edited, or cannot be read or written.
        """
        expected = saved.encode()
        try:
            found = read_small(self.path) if self.path.exists() else b""
        except OSError as error:
            raise InputError(f"cannot read {str(self.path)!r}: {error.strerror}") from error
        if not (found.startswith(expected) or expected.startswith(found)):
            raise InputError(
                f"{str(self.path)!r} was edited after it was written: to continue it as it is now, delete the folder "
                f"{str(self._session)!r}; the text is then read again"
            )
        if len(found) < len(expected):
            replace_file(self.path, expected, private=False)
        self._ahead = found[len(expected) :]
        self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.lseek(self._handle, len(expected), os.SEEK_SET)

    @property
    def ahead(self) -> bool:
        return bool(self._ahead)

    def append(self, text: str) -> None:
        """Append text. If the file already has text at this position, compare it instead."""
        data = text.encode()
        known = min(len(data), len(self._ahead))
        if data[:known] != self._ahead[:known]:
            self._replace_rest()
            known = 0
        self._ahead = self._ahead[known:]
        assert self._handle is not None
        at = os.lseek(self._handle, known, os.SEEK_CUR)
        try:
            write_all(self._handle, at, memoryview(data[known:]))
        except OSError as error:
            os.ftruncate(self._handle, at)  # an error must not leave part of the text in the file
            raise StoreError(
                f"cannot write {str(self.path)!r}: {error.strerror}. Free some space; the same command then continues"
            ) from error
        os.lseek(self._handle, at + len(data) - known, os.SEEK_SET)

    def _replace_rest(self) -> None:
        assert self._handle is not None
        copy = self.path.with_name(f"{self.path.name}.before")
        replace_file(copy, self.path.read_bytes(), private=False)
        os.ftruncate(self._handle, os.lseek(self._handle, 0, os.SEEK_CUR))
        self._ahead = b""
        warnings.warn(
            f"the end of {str(self.path)!r} differs from the text of the model: it was edited, or written on "
            f"another machine. It is replaced; the old text is in {str(copy)!r}",
            stacklevel=4,
        )

    def remove_partial_end(self, stop: str) -> None:
        """Remove the beginning of the stop string `stop` if an earlier run has ended with it."""
        if self._ahead and self._handle is not None and stop.encode().startswith(self._ahead):
            os.ftruncate(self._handle, os.lseek(self._handle, 0, os.SEEK_CUR))
            self._ahead = b""

    def sync(self) -> None:
        if self._handle is not None:
            os.fsync(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None


@dataclass(frozen=True)
class Settings:
    """The settings that, together with the model's weights, determine a document's text.

    Their file is written only once.
    """

    model: str = ""  # for messages
    fingerprint: str = ""  # model, number format and policy
    prompt: str = ""  # instruction for the model; not part of the text
    system: str = ""  # system message
    beginning: str = ""  # text that the document begins with
    headings: tuple[str, ...] = ()  # chapters (an outline)
    chapter_tokens: int = 0  # length of each chapter
    # Fields of `SamplingParams` that differ from the defaults, and the seed.
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass
class Written:
    # The tokens of the prompt and the beginning, followed by headings and generated tokens.
    tokens: list[int] = field(default_factory=list)
    given: int = 0  # number of tokens in the prompt and the beginning
    chapters: list[int] = field(default_factory=list)  # index in `tokens` of the first token of each heading
    unread: int = 0  # number of tokens at the start of the beginning that do not fit in the model's context
    new_tokens: int = 0  # generated tokens, including tokens that are only in the text file
    complete: str = ""  # finish reason if the document is complete
    more: int = 0  # the last `--more`
    goal: int = 0  # number of generated tokens that the document has after it


class DocumentFolder:
    """The folder `NAME.session`, which contains the settings, the progress and the KV cache of the document `NAME`."""

    def __init__(self, document: Path, folder: Path | None = None) -> None:
        self.document = document
        self.path = document.with_name(f"{document.name}.session") if folder is None else folder
        self.kv = self.path / "kv"

    @property
    def exists(self) -> bool:
        return (self.path / "settings.json").exists()

    def read_settings(self) -> Settings:
        found: Settings = self._read("settings.json", Settings)
        return found

    def read_progress(self) -> Written:
        """Read the progress. For a new document, it is empty. Raise InputError if the stored progress is damaged."""
        if not (self.path / "progress.json").exists():
            return Written()
        found: Written = self._read("progress.json", Written)
        return found

    def create(self, settings: Settings) -> None:
        try:
            make_private_folder(self.path)
        except OSError as error:
            raise InputError(f"cannot create the folder {str(self.path)!r}: {error.strerror}") from error
        self._write("settings.json", settings)

    def save_progress(self, written: Written) -> None:
        self._write("progress.json", written)

    def _write(self, name: str, value: Settings | Written) -> None:
        replace_file(self.path / name, json.dumps({"format": FORMAT, **asdict(value)}).encode())

    def _read(self, name: str, kind: Any) -> Any:
        path = self.path / name
        try:
            content = read_json(path)
            names = {one.name for one in fields(kind)}
            if content.pop("format") != FORMAT or not names - _ADDED <= set(content) <= names:
                raise ValueError
            found = kind(**content)
            _check_fields(found)
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise InputError(
                f"{str(path)!r} is damaged or of another version: delete the folder {str(self.path)!r} to continue "
                "the document from its text, which is then read again"
            ) from error
        return found


def _check_fields(value: Settings | Written) -> None:
    for one in fields(value):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        found = getattr(value, one.name)
        if isinstance(default, tuple):
            found = tuple(found)
            object.__setattr__(value, one.name, found)
        parts = found if isinstance(found, (list, tuple)) else ()
        kind = str if isinstance(default, tuple) else int
        if type(found) is not type(default) or not all(type(part) is kind for part in parts):
            raise ValueError(f"{one.name} has another type")
    if isinstance(value, Settings):
        SamplingParams(**value.sampling)
