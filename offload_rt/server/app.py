"""The FastAPI application: error handlers, the web page, and routes outside the OpenAI and Anthropic protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ..async_llm import AsyncLLM
from ..errors import OffloadError
from ..policies.registry import policy_names
from . import anthropic
from .connection import ClientGoneError, json_response, run_for_client
from .conversation import conversation_of
from .documents import session_of
from .errors import RefusedError, as_http_error, bad_request, error_response
from .log import logger
from .middleware import GONE, REQUEST_ID, RequestMiddleware
from .openai import chat, completions, responses
from .openai.requests import DetokenizeRequest, SessionUpdate, TokenizeRequest
from .options import ServerOptions
from .page import PAGE_PATHS, page_file
from .service import CurrentService, Service

router = APIRouter()

OPEN_PATHS = ("/health", "/favicon.ico", *PAGE_PATHS)
"""Paths that can be used without an API key: the health check, and the web page, which asks the user for the key."""


def make_app(engine: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """Return the ASGI application that serves `engine`. When the application shuts down, it closes the engine."""
    options = options or ServerOptions()
    service = Service(engine, options)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    # FastAPI's documentation pages are disabled, because they load scripts from other hosts. The schema is available at
    # /openapi.json.
    app = FastAPI(title="offload-rt", lifespan=life, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_errors(app)
    for routes in (router, chat.router, completions.router, responses.router, anthropic.router):
        app.include_router(routes)
    for path in PAGE_PATHS:
        app.add_api_route(path, partial(page_file, path), include_in_schema=False)
    app.add_middleware(RequestMiddleware, options=options, open_paths=OPEN_PATHS)
    if options.cors_origins:  # outside `RequestMiddleware`, so that browsers can read why a request was refused
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    return app


def _add_errors(app: FastAPI) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        failure = as_http_error(error)
        if isinstance(error, HTTPException) and failure.status == 404:
            failure = RefusedError(404, _path_hint(app, request.url.path), code="not_found")
        if failure.status >= 500:
            logger.error("a request failed", exc_info=error)
        request.state.notes["error"] = failure.message
        return error_response(failure, request.url.path)

    async def gone(request: Request, error: Exception) -> Response:
        request.state.notes["client"] = "gone"
        return Response(status_code=GONE)  # the client has disconnected

    for kind in (RefusedError, OffloadError, RequestValidationError, ValidationError, HTTPException, TimeoutError):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(ClientGoneError, gone)


def _path_hint(app: FastAPI, path: str) -> str:
    if path.startswith("/v1/v1/"):
        return f"the path {path} does not exist: remove /v1 from the end of the client's base URL"
    if f"/v1{path}" in app.openapi()["paths"]:
        return f"the path {path} does not exist, /v1{path} does: add /v1 to the end of the client's base URL"
    return f"the path {path} does not exist: the protocols of OpenAI and Anthropic are under /v1 (see /openapi.json)"


def _model(service: Service, name: str) -> dict[str, Any]:
    policy = service.engine.llm.runner.policy.name
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "offload-rt",
        "max_model_len": service.limits.capacity,
        "policy": policy,
        "policies": [policy] if service.options.max_engines == 1 else policy_names(),
    }


@router.get("/v1/models")
async def models(service: CurrentService) -> dict[str, Any]:
    return {"object": "list", "data": [_model(service, name) for name in service.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: CurrentService) -> dict[str, Any]:
    return _model(service, service.check_model(name))


@router.post("/v1/embeddings")
async def embeddings() -> Response:
    raise bad_request("embeddings are not supported: use a server with an embedding model")


SearchText = Annotated[str, Query(max_length=200)]
"""Search words. All of them must occur in the title or in the messages."""


@router.get("/v1/sessions")
async def sessions(request: Request, service: CurrentService, query: SearchText = "") -> Response:
    # `store` tells the page whether sessions are stored. If they are not, requests with `session` are refused.
    conversations, owner = service.conversations, request.state.owner
    found = conversations.list_heads(owner)
    if words := query.lower().split():
        found = await asyncio.to_thread(conversations.search, owner, found, words)
    return json_response({"object": "list", "store": service.stores_sessions, "data": found})


@router.get("/v1/sessions/{name}")
async def session(name: str, request: Request, service: CurrentService) -> Response:
    messages = service.conversations.messages(request.state.owner, name)
    return json_response({"id": name, "object": "session", "messages": messages})


@router.post("/v1/sessions/{name}")
async def update_session(name: str, body: SessionUpdate, request: Request, service: CurrentService) -> Response:
    """Change the title or the messages of a conversation, or both. Messages for a new name create a conversation."""
    owner, conversations = request.state.owner, service.conversations
    with service.locked(session_of(owner, name)):
        if body.messages is None:
            messages = conversations.messages(owner, name)
        else:
            messages = [message.model_dump(exclude_none=True) for message in body.messages]
        service.delete_in_background(conversations.store(owner, name, messages, body.title))
    return json_response({"id": name, "object": "session"})


@router.delete("/v1/sessions/{name}")
async def delete_session(name: str, request: Request, service: CurrentService) -> dict[str, Any]:
    await service.delete_session(request.state.owner, name)
    return {"id": name, "object": "session", "deleted": True}


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, service: CurrentService) -> dict[str, Any]:
    service.check_request(body, request)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either prompt (a string) or messages", "prompt")
    if body.messages is None:
        work = service.prompts.encode(body.prompt or "", special_tokens=body.add_special_tokens)
        ids = await run_for_client(request, work)
    else:
        conversation = conversation_of(body, body.messages)
        rendered = service.prompts.render(conversation, answer=body.add_generation_prompt)
        _, ids = await run_for_client(request, rendered)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.limits.capacity}
    if body.return_tokens:
        found["tokens"] = ids
    if body.return_token_strs:
        found["token_strs"] = await run_for_client(request, service.prompts.token_strings(ids))
    return found


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, service: CurrentService) -> dict[str, Any]:
    service.check_request(body, request)
    return {"prompt": await run_for_client(request, service.prompts.decode(body.tokens))}


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(service: CurrentService) -> Response:
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/load")
async def load(service: CurrentService) -> Response:
    return json_response(service.metrics.load())
