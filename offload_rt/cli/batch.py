"""`offload-rt batch`: process the requests in a JSON-lines file. Requests that already have a result are skipped."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ..config import EngineConfig
from ..errors import ConfigError, InputError, OffloadError
from ..sampling_params import SamplingParams
from ..utils.config_fields import check, suggestion
from ..utils.extras import install_command
from ..utils.small_files import parse_json
from .common import add_command, load_llm, stderr_console
from .flags import add_engine_flags, add_sampling_flags, engine_config, sampling_for, sampling_given
from .openai_batch import ServerRequest, process_openai

ShowProgress = Callable[[int, int], None]
"""Called with the number of processed requests and the total number of requests."""

# Each line of results begins with an id, followed by one of `_AFTER_ID`.
_BEGINNING = b'{"id": "'
_ID = re.compile(_BEGINNING + rb'(?:[^"\\]|\\.)*"')
_AFTER_ID = (b', "outputs": ', b', "error": ', b', "custom_id": ')


def run(args: argparse.Namespace) -> int:
    """Process the requests of a file and write the results to another file. Each line of IN is a JSON object with
    "prompt" or "messages", and optionally "id", "max_tokens" and other sampling options. Lines for OpenAI's Batch API,
    with "custom_id", "url" and "body", are also supported. OUT gets a line for each request, in the same format.
    Requests with a result in OUT are skipped, so an interrupted batch can be resumed. The exit code is 1 if a request
    failed."""
    if args.at_once < 1 or (args.ray is not None and args.ray < 1):
        raise ConfigError(f"--at-once {args.at_once} and --ray must be at least 1")
    config, sampling, console = engine_config(args), sampling_given(args), stderr_console(args.quiet)
    requests = read_requests(Path(args.input), sampling)
    results = Results(Path(args.output))
    try:
        left = [request for request in requests if request.id not in results.done]
        console.print(f"{len(left):,} of {len(requests):,} requests to process", markup=False)
        if not left:
            return 0
        from ..utils.progress import Progress

        with Progress(enabled=not args.quiet).bar("requests") as show:
            if args.ray is not None:
                own = [request for request in left if isinstance(request, BatchRequest)]
                if len(own) < len(left):
                    raise ConfigError("--ray does not support OpenAI's batch format: remove --ray")
                found = process_on_ray(args.model, config, own, sampling, args.at_once, args.ray)
                failed = results.add_all(found, len(left), show)
            else:
                with load_llm(args.model, config, stderr_console(quiet=True), text=False) as llm:
                    failed = results.add_all(process(llm, left, sampling, args.at_once), len(left), show)
    finally:
        results.close()
    if failed:
        console.print(f"{failed:,} requests failed: see the field 'error' of their results", markup=False)
    return 1 if failed else 0


def add(commands: Any) -> None:
    parser = add_command(commands, "batch", run)
    parser.add_argument("input", metavar="IN.jsonl", help="requests, one per line")
    parser.add_argument("output", metavar="OUT.jsonl", help="results; existing lines are kept")
    parser.add_argument(
        "--at-once",
        type=int,
        default=64,
        metavar="N",
        help="requests per batch; results are written after each batch (default: 64)",
    )
    parser.add_argument(
        "--ray", type=int, metavar="N", help="N engines on a Ray cluster (RAY_ADDRESS, or a new local one)"
    )
    parser.add_argument("--quiet", action="store_true", help="print only notes and errors on stderr")
    add_engine_flags(parser)
    add_sampling_flags(parser, several=False)


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input file. Either `prompt` or `messages` is set."""

    id: str  # the line number by default
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    sampling: Mapping[str, Any]  # fields of `SamplingParams` that the request sets

    @property
    def beginning(self) -> str:
        """Sort key that places requests with a common prefix next to each other."""
        return json.dumps(self.messages if self.prompt is None else self.prompt)


AnyRequest = BatchRequest | ServerRequest
R = TypeVar("R", BatchRequest, ServerRequest)


def read_requests(path: Path, defaults: Mapping[str, Any]) -> list[AnyRequest]:
    """Read the requests in a JSON-lines file. Raise InputError if a line is invalid or an id occurs twice.

    `defaults` are fields of `SamplingParams` that apply to requests that do not set them.
    """
    try:
        # `splitlines()` would also split at other line separators, which JSON strings may contain.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', error)}") from error
    requests = [_request(line, number, path, defaults) for number, line in enumerate(lines, start=1) if line.strip()]
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise InputError(f"{str(path)!r} has the id {request.id!r} twice: ids must be unique")
        seen.add(request.id)
    return requests


def _request(line: str, number: int, path: Path, defaults: Mapping[str, Any]) -> AnyRequest:
    try:
        found = parse_json(line)
        check(isinstance(found, dict), "it must be a JSON object")
        if "custom_id" in found:
            return ServerRequest.from_line(found)
        rest = dict(found)
        id, prompt, messages = rest.pop("id", number), rest.pop("prompt", None), rest.pop("messages", None)
        check(isinstance(id, (str, int)) and not isinstance(id, bool), "its id must be a string or a number")
        check((prompt is None) != (messages is None), "it must have either 'prompt' or 'messages'")
        check(prompt is None or isinstance(prompt, (str, list)), "its prompt must be a string or a list of token ids")
        _check_options(rest)
        SamplingParams(**{**defaults, **rest})
    except (ValueError, TypeError) as error:
        raise InputError(f"line {number} of {str(path)!r} is not a valid request: {error}") from error
    return BatchRequest(str(id), prompt, messages, rest)


def _check_options(given: Iterable[str]) -> None:
    known = [field.name for field in fields(SamplingParams)]
    for name in given:
        check(name in known, f"{name!r} is not a sampling option{suggestion(name, known)}")


class Results:
    """The output file of a batch. `done` contains the ids of the requests that have a result.

    When the file is opened, an incomplete result at its end is removed. Raises InputError if the file cannot be
    written, is locked by another process, or contains other data.
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
            self.done = {_id_of_result(line) for line in data[:whole].splitlines()}
            last = _id_of_last(data[whole:])
        except (ValueError, KeyError, TypeError):
            self._file.close()
            raise InputError(
                f"{str(path)!r} contains lines that are not results of a batch: choose another file"
            ) from None
        if last is None:
            self._file.truncate(whole)
        else:
            self.done.add(last)
            self._file.write(b"\n")

    def add(self, results: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(result, ensure_ascii=False) + "\n" for result in results]
        # Requests may contain lone surrogates. "backslashreplace" writes them as JSON escapes.
        self._file.write("".join(lines).encode(errors="backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def add_all(self, groups: Iterable[list[dict[str, Any]]], count: int, show: ShowProgress) -> int:
        """Append each group of results as soon as it is complete. Return the number of failed requests."""
        done = failed = 0
        for group in groups:
            self.add(group)
            done, failed = done + len(group), failed + sum(map(_failed, group))
            show(done, count)
        return failed

    def close(self) -> None:
        self._file.close()


def _id_of_result(line: bytes) -> str:
    """Return the id of the request to which a line of results belongs. Raise an error if it is not such a line."""
    result = parse_json(line)
    if not any(name in result for name in ("outputs", "error", "response")):
        raise KeyError("outputs")
    return str(result["custom_id"] if "custom_id" in result else result["id"])


def _id_of_last(line: bytes) -> str | None:
    """Return the id of a result without a line feed, or None for the beginning of one. Otherwise, raise an error."""
    with contextlib.suppress(ValueError):
        return _id_of_result(line)
    id = _ID.match(line)
    rest = b"" if id is None else line[id.end() :]
    if not line.startswith(_BEGINNING[: len(line)]) or not any(rest.startswith(it[: len(rest)]) for it in _AFTER_ID):
        raise ValueError("not a result")
    return None


def _failed(result: Mapping[str, Any]) -> bool:
    return bool(result.get("error")) or result.get("response", {}).get("status_code", 200) >= 400


def process(
    llm: Any, requests: Sequence[AnyRequest], defaults: Mapping[str, Any], at_once: int
) -> Iterator[list[dict[str, Any]]]:
    """Process requests in groups of at most `at_once`. Yield the results (or errors) of each group.

    `defaults` are the sampling parameters for requests that do not set them.
    """
    for group in group_requests([one for one in requests if isinstance(one, BatchRequest)], at_once):
        yield process_group(llm, group, defaults)
    if openai := group_requests([one for one in requests if isinstance(one, ServerRequest)], at_once):
        yield from process_openai(llm, openai, defaults)


def group_requests(requests: Sequence[R], at_once: int) -> list[list[R]]:
    """Divide requests into groups of at most `at_once`, sorted so that requests with a common prefix are adjacent."""
    left = sorted(requests, key=lambda one: one.beginning)
    return [left[first : first + at_once] for first in range(0, len(left), at_once)]


def process_group(llm: Any, group: Sequence[BatchRequest], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        return _generate_group(llm, group, defaults)
    except OffloadError as error:
        if len(group) == 1:
            return [{"id": group[0].id, "error": str(error)}]
        return [result for request in group for result in process_group(llm, [request], defaults)]


def _generate_group(llm: Any, requests: Sequence[BatchRequest], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    prompts = [llm.chat_prompt(one.messages)[1] if one.prompt is None else one.prompt for one in requests]
    params = [llm.get_default_sampling_params(**sampling_for(llm, {**defaults, **one.sampling})) for one in requests]
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


class Worker:
    """Ray Data actor with one engine.

    Converts rows of requests to rows of results. Each row contains one group as JSON.
    """

    def __init__(self, model: str, config: EngineConfig, defaults: Mapping[str, Any]) -> None:
        from ..llm import LLM

        self._llm, self._defaults = LLM(model, config), defaults

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        groups = [[BatchRequest(**one) for one in json.loads(group)] for group in batch["requests"]]
        return {"results": [json.dumps(process_group(self._llm, group, self._defaults)) for group in groups]}


def process_on_ray(
    model: str,
    config: EngineConfig,
    requests: Sequence[BatchRequest],
    defaults: Mapping[str, Any],
    at_once: int,
    workers: int,
) -> Iterator[list[dict[str, Any]]]:
    """Process requests with `workers` engines on a Ray cluster. Yield the results group by group.

    The address of the cluster is read from the environment variable RAY_ADDRESS. If it is not set, a local cluster is
    started. If an actor dies, Ray Data assigns its group to another actor. Raises ConfigError if Ray Data is not
    installed or the engines fail.
    """
    if not all(importlib.util.find_spec(name) for name in ("ray", "pyarrow", "pandas")):
        raise ConfigError(f"--ray needs Ray Data: {install_command('ray')}")
    import ray
    import ray.data

    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    # One row per group, so that one engine computes the common prefix of a group.
    rows = [{"requests": json.dumps([asdict(one) for one in group])} for group in group_requests(requests, at_once)]
    results = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        Worker,
        fn_constructor_args=(model, config, dict(defaults)),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows))),
        num_cpus=1,
        num_gpus=0 if config.device == "cpu" else 1,
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        for row in results.iter_rows():
            yield json.loads(row["results"])
    except ray.exceptions.RayError as error:
        raise ConfigError(f"the engines on Ray failed: {str(error).strip().splitlines()[-1]}") from error
