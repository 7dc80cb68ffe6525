"""`POST /v1/completions`: continue one or more prompts without a chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...outputs import Logprob, Logprobs
from ...sampling_params import SamplingParams
from ..chat_stream import ChatStream, Delta, Usage, usage_of
from ..connection import event, json_answer, streamed, until_gone
from ..errors import refused
from ..sampling import sampling_fields, structured_outputs
from ..service import EngineArguments, Service
from .requests import CompletionRequest

DEFAULT_TOKENS = 16
"""Default of `max_tokens`, as in OpenAI's API."""

MOST_PROMPTS = 128
"""Maximum number of prompts per request."""


@dataclass(frozen=True)
class _Prompt:
    """A prompt of a request.

    Attributes:
        number: Position of the prompt in the request.
        ids: Token ids.
        echo: Text to echo before the completion.
        first: Text of the first token if the prompt is echoed with log-probabilities. Other tokens get their text from
            their log-probabilities, which the first token does not have.
    """

    number: int
    ids: list[int]
    echo: str
    first: str


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Handle a completion request. The response is an event stream if `stream` is true."""
    service.check_model(body.model)
    n = body.n or 1
    if body.suffix:
        raise refused("suffix is not supported: remove it", "suffix")
    if (body.best_of or n) != n:
        raise refused("best_of must equal n, because ranking is not supported", "best_of")
    prompts = await until_gone(request, _prompts(service, body))
    logprobs: dict[str, Any] = {} if body.logprobs is None else {"logprobs": body.logprobs}
    logprobs |= {"prompt_logprobs": body.logprobs} if logprobs and body.echo else {}
    logprobs |= structured_outputs(body.response_format, body.structured_outputs)
    fields = sampling_fields(body) | logprobs
    params = [
        service.params(max_tokens=service.limits.tokens(len(one.ids), body.max_tokens, DEFAULT_TOKENS), **fields)
        for one in prompts
    ]
    where = service.where(body, request)
    if where.session is not None and len(prompts) > 1:
        raise refused("a request with a session must have one prompt", "session")
    head = {
        "id": f"cmpl-{request.scope['state']['request_id']}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.name,
    }
    steps = _merged(
        [_one(service, request, one, each, body.logprobs, where) for one, each in zip(prompts, params, strict=True)]
    )
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return await streamed(request, _events(steps, head, usage))
    return json_answer(await until_gone(request, _whole(steps, head, n * len(prompts))))


async def _prompts(service: Service, body: CompletionRequest) -> list[_Prompt]:
    given: Any = body.prompt
    several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 1 <= len(several) <= MOST_PROMPTS:
        raise refused(f"prompt must contain 1 to {MOST_PROMPTS} prompts, not {len(several)}", "prompt")
    found = []
    for i, one in enumerate(several):
        ids = await service.prompts.of_text(one) if isinstance(one, str) else one
        echo = "" if not body.echo else one if isinstance(one, str) else await service.prompts.text_of(one)
        first = await service.prompts.text_of(ids[:1]) if body.echo and body.logprobs is not None else ""
        found.append(_Prompt(i, ids, echo, first))
    return found


Step = tuple[list[dict[str, Any]], int, Usage]
"""New parts of choices, the position of their prompt, and the token counts of the prompt so far."""


async def _one(
    service: Service, request: Request, prompt: _Prompt, params: SamplingParams, top: int | None, where: EngineArguments
) -> AsyncGenerator[Step, None]:
    """Yield the new parts of the completions of one prompt."""
    deltas, offsets = ChatStream(), dict.fromkeys(range(params.n), len(prompt.echo))
    echoed: set[int] = set()
    with service.answering(where.session):
        async with aclosing(service.outputs(request, prompt.ids, params, where)) as outputs:
            async for output in outputs:
                choices = []
                for delta in deltas.of(output):
                    echo = "" if delta.index in echoed else prompt.echo
                    echoed.add(delta.index)
                    choice = _choice(prompt.number * params.n + delta.index, echo, delta, top, offsets)
                    if echo and top is not None and output.prompt_logprobs is not None:
                        before = completion_logprobs(prompt.ids, output.prompt_logprobs, top, 0, prompt.first)
                        choice["logprobs"] = _with(before, choice["logprobs"])
                    choices.append(choice)
                yield choices, prompt.number, usage_of(output)


def _choice(index: int, echo: str, delta: Delta, top: int | None, offsets: dict[int, int]) -> dict[str, Any]:
    logprobs = None
    if top is not None and delta.logprobs is not None:
        logprobs = completion_logprobs(delta.token_ids, delta.logprobs, top, offsets[delta.index])
        offsets[delta.index] += sum(map(len, logprobs["tokens"]))
    return {
        "index": index,
        "text": echo + delta.text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }


async def _merged(streams: Sequence[AsyncGenerator[Step, None]]) -> AsyncGenerator[Step, None]:
    """Yield the steps of several streams as they arrive. An error in one stream ends all streams."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for step in only:
                yield step
        return
    queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Step, None]) -> None:
        try:
            async with aclosing(stream) as steps:
                async for step in steps:
                    queue.put_nowait(step)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            step_or_end = await queue.get()
            if isinstance(step_or_end, Exception):
                raise step_or_end
            if step_or_end is None:
                running -= 1
            else:
                yield step_or_end
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(
    steps: AsyncGenerator[Step, None], head: dict[str, Any], with_usage: bool
) -> AsyncGenerator[bytes, None]:
    usages: dict[int, Usage] = {}
    async with aclosing(steps):
        async for choices, number, usage in steps:
            usages[number] = usage
            for choice in choices:
                yield event(head | {"choices": [choice]} | ({"usage": None} if with_usage else {}))
    if with_usage:
        yield event(head | {"choices": [], "usage": usage_json(sum(usages.values(), Usage()))})
    yield event("[DONE]")


async def _whole(steps: AsyncGenerator[Step, None], head: dict[str, Any], count: int) -> dict[str, Any]:
    usages: dict[int, Usage] = {}
    choices: list[dict[str, Any]] = [{"index": i, "text": "", "logprobs": None} for i in range(count)]
    async with aclosing(steps):
        async for gained, number, usage in steps:
            usages[number] = usage
            for gain in gained:
                choice = choices[gain["index"]]
                choice["text"] += gain["text"]
                choice["logprobs"] = _with(choice["logprobs"], gain["logprobs"])
                choice |= {name: gain[name] for name in ("finish_reason", "stop_reason")}
    return head | {"choices": choices, "usage": usage_json(sum(usages.values(), Usage()))}


def _with(one: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    if one is None or more is None:
        return one or more
    return {name: one[name] + more[name] for name in one}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return token counts in OpenAI's format."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


LEAST = -9999.0
"""Replacement for minus infinity, which JSON cannot represent."""


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[Logprobs], top: int) -> dict[str, Any]:
    """Return log-probabilities of tokens `[t]` in the chat format, each with the `top` most probable alternatives."""
    content = []
    for token, there in zip(token_ids, logprobs, strict=True):
        best = sorted(there.items(), key=lambda item: item[1].rank)[:top]
        content.append(_entry(token, there[token]) | {"top_logprobs": [_entry(i, one) for i, one in best]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Logprobs | None], top: int, offset: int, first: str = ""
) -> dict[str, Any]:
    """Return log-probabilities of tokens `[t]` in the completion format.

    Args:
        token_ids: Tokens.
        logprobs: Log-probabilities at each position, or None for the first token of a prompt.
        top: Number of alternatives for each token.
        offset: Character offset of the first token.
        first: Text of a token without log-probabilities.
    """
    tokens: list[str] = []
    found: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, there in zip(token_ids, logprobs, strict=True):
        text = _text(token, there[token]) if there else first
        best = sorted(there.items(), key=lambda item: item[1].rank)[:top] if there else []
        tokens.append(text)
        found.append(_finite(there[token].logprob) if there else None)
        tops.append({_text(i, one): _finite(one.logprob) for i, one in best} if there else None)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": found, "top_logprobs": tops, "text_offset": offsets}


def _entry(token: int, logprob: Logprob) -> dict[str, Any]:
    text = _text(token, logprob)
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(text.encode())}


def _text(token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def _finite(value: float) -> float:
    return max(value, LEAST)
