"""Compare the settings of a document with the user's settings, before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..sampling_params import SamplingParams
from ..utils.home import expand_user
from ..utils.texts import check_writable
from .files import DocumentFolder, Settings, Written

NAMES = {"chapter_tokens": "chapter length"}

NOT_SUPPORTED = (
    "n",
    "num_beams",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
    "logits_processors",
    "min_tokens",
)

DEFAULT_CHAPTER_TOKENS = 1000


class Draft:
    """The settings of a document that is begun or continued.

    Args:
        path: Text file of the document. If the file exists but has no session folder, its text becomes the beginning of
            the document.
        folder: Folder for settings and KV. None means `path` with ".session" appended.
        sampling: Sampling parameters. They must equal the parameters that the document was begun with.
        **given: Fields of `Settings`. If a field is empty, its stored value is used.

    Raises:
        InputError: The document was begun with other settings, or a file cannot be read or written.
    """

    def __init__(
        self,
        path: str | Path,
        folder: str | Path | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        self.path = expand_user(path)
        check_writable(str(self.path))
        self.folder = DocumentFolder(self.path, None if folder is None else expand_user(folder))
        self.new = not self.folder.exists
        self._given = {name: value for name, value in given.items() if value}
        self.sampling = dict(sampling or {})
        _check_supported(self.sampling)
        self.settings = self._new_settings() if self.new else self._stored_settings()
        self.written = Written() if self.new else self.folder.read_progress()

    def _new_settings(self) -> Settings:
        given = dict(self._given)
        if self.path.exists() and self.path.stat().st_size:
            if given.get("beginning"):
                raise InputError(
                    f"{str(self.path)!r} exists already and is continued: leave the beginning out, or choose another "
                    "file"
                )
            given["beginning"] = read_verbatim(self.path)
        given.setdefault("chapter_tokens", DEFAULT_CHAPTER_TOKENS)
        if not any(given.get(name) for name in ("prompt", "beginning", "headings")):
            raise InputError("the document has no start: pass a prompt, a beginning or an outline")
        return Settings(**given)

    def _stored_settings(self) -> Settings:
        known = self.folder.read_settings()
        for name, value in self._given.items():
            before = getattr(known, name)
            longer_outline = name == "headings" and tuple(value)[: len(before)] == before
            if before != value and not longer_outline:
                raise self._difference(NAMES.get(name, name), before, value)
        for name, value in json.loads(json.dumps(self.sampling)).items():  # convert tuples to lists, as in the file
            if name not in ("max_tokens", "seed") and value != known.sampling.get(name, _default(name)):
                raise self._difference(name, known.sampling.get(name, _default(name)), value)
        if self.sampling.get("seed") not in (None, known.sampling["seed"]):
            raise self._difference("seed", known.sampling["seed"], self.sampling["seed"])
        return replace(known, headings=tuple(self._given.get("headings", known.headings)))

    def _difference(self, name: str, before: object, now: object) -> InputError:
        return InputError(
            f"{str(self.path)!r} was begun with {name} {before!r:.60}, not {now!r:.60}: leave it out to continue the "
            f"document, choose another file, or delete the folder {str(self.folder.path)!r} to continue its text with "
            "other settings"
        )

    def chapter_count(self, wanted: int = 0) -> int:
        """Return `wanted` if it is not 0.

        Otherwise, return the number of headings or of begun chapters, whichever is larger.
        """
        return wanted or max(len(self.settings.headings), len(self.written.chapters))

    def is_complete(self, max_tokens: int, chapters: int = 0) -> bool:
        """Return whether the document is already complete. If it is, no model needs to be loaded."""
        total = self.chapter_count(chapters)
        enough = len(self.written.chapters) >= total if total else self.written.new_tokens >= max_tokens
        return bool(self.written.complete) and (enough or (not total and self.written.complete == "stop"))

    def goal_of_more(self, tokens: int) -> int:
        """Return how many new tokens the document has after `tokens` more, including those of an interrupted run."""
        written = self.written
        if written.complete or written.more != tokens or written.goal < written.new_tokens:
            written.more, written.goal = tokens, written.new_tokens + tokens
        return written.goal

    def params(self) -> SamplingParams:
        return SamplingParams(**self.settings.sampling)


def saved_sampling(params: SamplingParams, seed: int) -> dict[str, Any]:
    values = asdict(params) | {"max_tokens": _default("max_tokens")}
    found = {name: value for name, value in values.items() if value != _default(name)}
    _check_supported(found)
    return found | {"seed": seed}


def _check_supported(sampling: Mapping[str, Any]) -> None:
    for name in NOT_SUPPORTED:
        if name in sampling:
            raise InputError(f"{name} is not supported for documents: leave it out")


def _default(name: str) -> Any:
    return getattr(SamplingParams(), name)


def read_verbatim(path: Path) -> str:
    """Return the text of a file without changing its line endings. Raise InputError if it cannot be read."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not text in UTF-8: byte {error.start} is not valid") from error
