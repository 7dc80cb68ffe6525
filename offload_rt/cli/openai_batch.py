"""Process a batch file in the format of OpenAI's Batch API.

Each line contains an endpoint of the server and a request body.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..utils.config_fields import check
from ..utils.extras import install_command

if TYPE_CHECKING:
    from ..llm import LLM

FIELDS: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {},
    "/v1/completions": {},
    "/v1/responses": {"max_tokens": "max_output_tokens"},
}
"""For each endpoint, the fields of `SamplingParams` that have another name in request bodies."""

NO_LIMIT = 1 << 30
"""Value for server limits that do not apply here: the timeout in seconds and the body size in bytes."""


@dataclass(frozen=True)
class ServerRequest:
    """One line of a batch file for OpenAI's Batch API."""

    id: str  # the line's `custom_id`
    path: str  # the endpoint, such as "/v1/completions"
    body: Mapping[str, Any]

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> ServerRequest:
        id, path, body = line.get("custom_id"), line.get("url"), line.get("body")
        check(isinstance(id, str) and bool(id), "its custom_id must be a non-empty string")
        check(line.get("method", "POST") == "POST", "its method must be POST")
        check(path in FIELDS, f"its url must be one of {', '.join(FIELDS)}")
        check(isinstance(body, dict), "its body must be a JSON object")
        check(not body.get("stream"), "its body must not set stream")  # type: ignore[union-attr]
        return cls(str(id), str(path), body)  # type: ignore[arg-type]

    @property
    def beginning(self) -> str:
        names = ("instructions", "messages", "prompt", "input")
        return json.dumps([self.path, *(self.body.get(name) for name in names)])

    def with_defaults(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body. `defaults` are the sampling parameters that it has if it does not set them."""
        names = FIELDS[self.path]
        return {names.get(name, name): value for name, value in defaults.items()} | dict(self.body)


def process_openai(
    llm: LLM, groups: Sequence[Sequence[ServerRequest]], defaults: Mapping[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """Process groups of requests with the server's application, running in this process.

    Yield the results group by group.

    Raises ConfigError if the server's packages are not installed.
    """
    if not importlib.util.find_spec("fastapi"):
        raise ConfigError(f"batches in OpenAI's format need the server: {install_command('serve')}")
    from ..async_llm import AsyncLLM
    from ..server.app import make_app
    from ..server.options import ServerOptions

    options = ServerOptions(accept_any_model=True, timeout=NO_LIMIT, max_body=NO_LIMIT)
    with asyncio.Runner() as runner:

        async def make() -> Any:
            return make_app(AsyncLLM(llm), options)

        async def results(group: Sequence[ServerRequest]) -> list[dict[str, Any]]:
            return await asyncio.gather(*(_result(app, request, defaults) for request in group))

        app = runner.run(make())
        try:
            for group in groups:
                yield runner.run(results(group))
        finally:
            runner.run(app.state.service.close())


async def _result(app: Any, request: ServerRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    status, answer = await _post(app, request.path, json.dumps(request.with_defaults(defaults)).encode())
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": json.loads(answer)}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.id, "response": response, "error": None}


async def _post(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    from ..server.proxy import ForwardedRequest, run_app

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    messages = [message async for message in run_app(app, ForwardedRequest(scope, body))]
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages)
