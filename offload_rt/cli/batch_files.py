"""Batch processing of a JSON-lines file. Requests with an existing result are skipped."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, OffloadError
from ..sampling_params import SamplingParams
from ..utils.config_fields import check
from ..utils.small_files import parse_json


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input file. Either `prompt` or `messages` is set.

    Attributes:
        id: Id of the request. Default: the line number, from 1.
        prompt: Text or token ids.
        messages: Conversation.
        sampling: Fields of `SamplingParams` that the request sets.
    """

    id: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    sampling: Mapping[str, Any]

    @property
    def beginning(self) -> str:
        """Sort key that groups requests with a common prefix."""
        return json.dumps(self.messages if self.prompt is None else self.prompt)


def read_requests(path: Path, defaults: Mapping[str, Any]) -> list[BatchRequest]:
    """Read the requests of a file.

    Args:
        path: JSON-lines file.
        defaults: Fields of `SamplingParams` for requests that do not set them.

    Raises:
        InputError: A line is invalid, or an id occurs twice.
    """
    try:
        # Not splitlines(): JSON strings may contain other line separators.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {str(path)!r}: {error}") from error
    requests = [_request(line, number, path, defaults) for number, line in enumerate(lines, start=1) if line.strip()]
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise InputError(f"{str(path)!r} has the id {request.id!r} twice: ids must be unique")
        seen.add(request.id)
    return requests


def _request(line: str, number: int, path: Path, defaults: Mapping[str, Any]) -> BatchRequest:
    try:
        found = parse_json(line)
        check(isinstance(found, dict), "it must be a JSON object")
        rest = dict(found)
        id, prompt, messages = rest.pop("id", number), rest.pop("prompt", None), rest.pop("messages", None)
        check(isinstance(id, (str, int)) and not isinstance(id, bool), "its id must be a string or a number")
        check((prompt is None) != (messages is None), "it must have either 'prompt' or 'messages'")
        check(prompt is None or isinstance(prompt, (str, list)), "its prompt must be a string or a list of token ids")
        SamplingParams(**{**defaults, **rest})
    except (ValueError, TypeError) as error:
        raise InputError(f"line {number} of {str(path)!r} is not a valid request: {error}") from error
    return BatchRequest(str(id), prompt, messages, rest)


class Answers:
    """Append-only result file of one process. `done` contains the ids of the existing results.

    Opening the file removes an incomplete last line, which a killed process may leave. Raises InputError if the file
    cannot be written, is locked by another process, or contains other data.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InputError(
                f"another process is writing to {str(path)!r}: wait for it, or choose another file"
            ) from None
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        try:
            self.done = {str(parse_json(line)["id"]) for line in data[:whole].splitlines()}
        except (ValueError, KeyError, TypeError):
            self._file.close()
            raise InputError(
                f"{str(path)!r} contains lines that are not results of a batch: choose another file"
            ) from None
        self._file.truncate(whole)

    def add(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Append results and flush them to disk."""
        lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
        # "backslashreplace" escapes lone surrogates of a request as JSON does.
        self._file.write("".join(lines).encode(errors="backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def answer_all(
    llm: Any,
    requests: Sequence[BatchRequest],
    defaults: Mapping[str, Any],
    answers: Answers,
    at_once: int,
    show: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Process `requests` in groups of at most `at_once` and report the progress. Return the number of failed requests.

    Failed requests get a result with the error.
    """
    done = failed = 0
    for group in in_groups(requests, at_once):
        results = answered(llm, group, defaults)
        answers.add(results)
        done, failed = done + len(group), failed + sum("error" in each for each in results)
        show(done, len(requests))
    return failed


def in_groups(requests: Sequence[BatchRequest], at_once: int) -> list[list[BatchRequest]]:
    """Group requests with common prefixes, at most `at_once` per group."""
    left = sorted(requests, key=lambda one: one.beginning)
    return [left[first : first + at_once] for first in range(0, len(left), at_once)]


def answered(llm: Any, group: Sequence[BatchRequest], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the result or the error of each request of a group."""
    try:
        return _answered(llm, group, defaults)
    except OffloadError:
        return [_alone(llm, one, defaults) for one in group]


def _alone(llm: Any, request: BatchRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return _answered(llm, [request], defaults)[0]
    except OffloadError as error:
        return {"id": request.id, "error": str(error)}


def _answered(llm: Any, requests: Sequence[BatchRequest], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    prompts = [llm.chat_prompt(one.messages)[1] if one.prompt is None else one.prompt for one in requests]
    params = [llm.get_default_sampling_params(**{**defaults, **one.sampling}) for one in requests]
    outputs = llm.generate(prompts, params)
    return [
        {
            "id": request.id,
            "outputs": [{"text": one.text, "finish_reason": one.finish_reason} for one in output.outputs],
            "prompt_tokens": len(output.prompt_token_ids),
            "new_tokens": sum(len(one.token_ids) for one in output.outputs),
        }
        for request, output in zip(requests, outputs, strict=True)
    ]
