"""`POST /v1/completions`: continue one or more prompts without a chat template."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from ...engine.detokenizer import token_bytes
from ...outputs import Logprob, Logprobs
from ...sampling_params import SamplingParams
from ..chat_stream import ChatStream, Step, collect_steps
from ..connection import event, json_response, run_for_client, stream_response
from ..errors import bad_request
from ..metrics import Usage
from ..parsers.pieces import Content, text_of
from ..prompts import Prompts
from ..service import CurrentService, EngineArguments, Service
from .requests import CompletionRequest, sampling_fields, structured_outputs
from .text_offsets import TextOffsets, prompt_offsets

router = APIRouter()

DEFAULT_TOKENS = 16
"""Default value of `max_tokens`, as in OpenAI's API."""

MAX_PROMPTS = 128
"""Maximum number of prompts per request."""


@dataclass(frozen=True)
class _Prompt:
    """A prompt of a completion request.

    Attributes:
        ends: Token ids that end the completion, in addition to the model's own.
        echo: Text to return before the completion, or "".
        first: Text of the first prompt token, or "". If the prompt is echoed, this token has no log-probability.
    """

    ids: list[int]
    ends: list[int]
    echo: str
    first: str


Choice = Callable[[Step], dict[str, Any]]
"""Function that converts a step to an entry of the response's `choices`."""


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request, service: CurrentService) -> Response:
    """Continue one or more prompts. With `stream`, the response is an event stream."""
    service.check_request(body, request)
    n = body.n or 1
    if (body.best_of or n) != n:
        raise bad_request("best_of must equal n, because ranking is not supported", "best_of")
    prompts = await run_for_client(request, _prompts(service, body))
    fields = sampling_fields(body) | structured_outputs(body.response_format, body.structured_outputs)
    if body.logprobs is not None:
        fields |= {"logprobs": body.logprobs} | ({"prompt_logprobs": body.logprobs} if body.echo else {})
    params = []
    for one in prompts:
        limit = service.limits.max_new_tokens(len(one.ids), body.max_tokens, DEFAULT_TOKENS)
        ends = {"stop_token_ids": [*fields.get("stop_token_ids", ()), *one.ends]} if one.ends else {}
        params.append(service.params(max_tokens=limit, **(fields | ends)))
    arguments = service.arguments(body, request)
    if arguments.session is not None and len(prompts) > 1:
        raise bad_request("a request with a session must have one prompt", "session")

    def choice(step: Step) -> dict[str, Any]:
        first = prompts[step.index // n].first
        return {
            "index": step.index,
            "text": text_of(step.pieces, Content),
            "logprobs": None if body.logprobs is None else completion_logprobs(step, body.logprobs, first),
            "finish_reason": step.finish_reason,
            "stop_reason": step.stop_reason,
        }

    steps = _merge_streams(
        [_prompt_steps(service, request, *each, arguments) for each in zip(prompts, params, strict=True)], n
    )
    head = response_head(service, request, "cmpl", "text_completion")
    if body.stream:
        return await stream_response(request, _events(steps, head, choice, body.include_usage))
    whole = await run_for_client(request, collect_steps(steps))
    choices = [choice(step) for step in whole]
    return json_response(head | {"choices": choices, "usage": usage_json(whole[-1].usage)})


async def _prompts(service: Service, body: CompletionRequest) -> list[_Prompt]:
    given: Any = body.prompt
    several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 1 <= len(several) <= MAX_PROMPTS:
        raise bad_request(f"prompt must contain 1 to {MAX_PROMPTS} prompts, not {len(several)}", "prompt")
    limit = max(1, service.options.max_waiting)
    if len(several) > limit:  # retrying after status 429 would never succeed
        raise bad_request(
            f"prompt contains {len(several)} prompts, but the queue of this server accepts at most {limit} at once: "
            "send fewer prompts per request, or raise --max-waiting",
            "prompt",
        )
    found = []
    for one in several:
        ends: list[int] = []
        if body.suffix:
            if not isinstance(one, str):
                raise bad_request("suffix needs a prompt that is text", "suffix")
            ids, ends = await fill_in_middle(service.prompts, one, body.suffix)
        else:
            ids = await service.prompts.encode(one) if isinstance(one, str) else one
        echo = "" if not body.echo else one if isinstance(one, str) else await service.prompts.decode(one)
        first = await service.prompts.decode(ids[:1]) if body.echo and body.logprobs is not None else ""
        found.append(_Prompt(ids, ends, echo, first))
    return found


Part = Literal["prefix", "suffix", ""]

FIM_MARKS: Sequence[Sequence[tuple[str, Part]]] = (
    (("<|fim_prefix|>", "prefix"), ("<|fim_suffix|>", "suffix"), ("<|fim_middle|>", "")),  # Qwen2.5-Coder, CodeGemma
    (("<fim_prefix>", "prefix"), ("<fim_suffix>", "suffix"), ("<fim_middle>", "")),  # StarCoder
    (("<｜fim▁begin｜>", "prefix"), ("<｜fim▁hole｜>", "suffix"), ("<｜fim▁end｜>", "")),  # DeepSeek-Coder
    (("▁<PRE>", "prefix"), ("▁<SUF>", "suffix"), ("▁<MID>", "")),  # Code Llama
    (("[SUFFIX]", "suffix"), ("[PREFIX]", "prefix")),  # Codestral
)
"""Fill-in-the-middle tokens of each model family, in their order in the prompt.

Each token is paired with the part of the text that follows it: "prefix", "suffix", or "" for no text.
"""

FIM_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "<file_sep>", "▁<EOT>",
)  # fmt: skip
"""Tokens that end a fill-in-the-middle completion, in addition to those in `FIM_MARKS`."""


async def fill_in_middle(prompts: Prompts, prefix: str, suffix: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a fill-in-the-middle prompt, and the token ids that end its completion.

    Special tokens mark `prefix`, `suffix` and the gap that the completion fills. Raises RefusedError if the model has
    no such tokens.
    """
    vocabulary = prompts.tokenizer.get_vocab()
    marks = next((marks for marks in FIM_MARKS if all(token in vocabulary for token, _ in marks)), None)
    if marks is None:
        raise bad_request(
            "suffix needs a model with fill-in-the-middle tokens: remove it, or use such a model", "suffix"
        )
    start = prompts.tokenizer.bos_token_id
    ids = [start] if start in await prompts.encode("") else []
    for token, part in marks:
        ids.append(vocabulary[token])
        if part:
            ids += await prompts.encode(prefix if part == "prefix" else suffix, special_tokens=False)
    ends = [vocabulary[token] for token in (*FIM_ENDS, *(token for token, _ in marks)) if token in vocabulary]
    return ids, ends


async def _prompt_steps(
    service: Service, request: Request, prompt: _Prompt, params: SamplingParams, arguments: EngineArguments
) -> AsyncGenerator[Step, None]:
    stream, echoed, tokenizer = ChatStream(), set[int](), service.engine.llm.tokenizer
    special, first = not params.skip_special_tokens, len(prompt.echo)
    offsets = defaultdict[int, TextOffsets](lambda: TextOffsets(tokenizer, prompt.ids, first, special=special))
    with service.locked(arguments.session):
        async with aclosing(service.outputs(request, prompt.ids, params, arguments)) as outputs:
            async for output in outputs:
                for step in stream.steps(output):
                    if step.logprobs is not None:
                        step = replace(step, text_offsets=[offsets[step.index].add(token) for token in step.token_ids])
                    if not prompt.echo or step.index in echoed:
                        yield step
                        continue
                    echoed.add(step.index)
                    step = replace(step, pieces=[Content(prompt.echo), *step.pieces])
                    if output.prompt_logprobs is not None:
                        before, logprobs = output.prompt_logprobs, [*output.prompt_logprobs, *(step.logprobs or ())]
                        known = (service.prompts.tokenizer, prompt.ids, before, prompt.echo)
                        found = await asyncio.to_thread(prompt_offsets, *known)  # slow for long prompts
                        step = replace(step, token_ids=[*prompt.ids, *step.token_ids], logprobs=logprobs)
                        step = replace(step, text_offsets=[*found, *(step.text_offsets or ())])
                    yield step


async def _merge_streams(streams: Sequence[AsyncGenerator[Step, None]], n: int) -> AsyncGenerator[Step, None]:
    """Merge the streams of several prompts, each with `n` completions. An error in one stream ends all streams."""
    # Queue at most one step, so that steps do not accumulate if the client does not read.
    queue: asyncio.Queue[tuple[int, Step] | Exception | None] = asyncio.Queue(maxsize=1)
    usages: dict[int, Usage] = {}

    async def pump(number: int, stream: AsyncGenerator[Step, None]) -> None:
        try:
            async with aclosing(stream) as steps:
                async for step in steps:
                    await queue.put((number, step))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            step_or_end = await queue.get()
            if isinstance(step_or_end, Exception):
                raise step_or_end
            if step_or_end is None:
                running -= 1
            else:
                number, step = step_or_end
                usages[number] = step.usage
                yield replace(step, index=number * n + step.index, usage=sum(usages.values(), Usage()))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(
    steps: AsyncGenerator[Step, None], head: dict[str, Any], choice: Choice, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    usage = Usage()
    async with aclosing(steps):
        async for step in steps:
            usage = step.usage
            yield event(head | {"choices": [choice(step)]} | ({"usage": None} if with_usage else {}))
    if with_usage:
        yield event(head | {"choices": [], "usage": usage_json(usage)})
    yield event("[DONE]")


def response_head(service: Service, request: Request, prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields that chat and text completions have in common.

    The id begins with `prefix`, and `kind` is the object type.
    """
    name = f"{prefix}-{request.state.request_id}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.state.model}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the usage object of a response. `recomputed_tokens` (hybrid models) is an extension of OpenAI's API."""
    recomputed = {"recomputed_tokens": usage.recomputed} if usage.recomputed else {}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached} | recomputed,
    }


MIN_LOGPROB = -9999.0
"""Sent in place of a log-probability of minus infinity, which JSON cannot represent."""


def chat_logprobs(step: Step, top: int, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any] | None:
    """Return the log-probabilities of new tokens and of their `top` alternatives, in the format of chat completions."""
    if step.logprobs is None or not step.token_ids:
        return None
    content = []
    for token, there in zip(step.token_ids, step.logprobs, strict=True):
        assert there is not None, "chat responses echo no prompt"
        best = [_entry(i, one, tokenizer) for i, one in _most_likely(there, top)]
        content.append(_entry(token, there[token], tokenizer) | {"top_logprobs": best})
    return {"content": content, "refusal": None}


def completion_logprobs(step: Step, top: int, first: str) -> dict[str, Any] | None:
    """Return the log-probabilities of the new tokens in the format of text completions.

    Args:
        top: Number of alternatives per token. If the token is not among them, it is added.
        first: Text of the first token of an echoed prompt. This token has no log-probabilities.
    """
    if step.logprobs is None:
        return None
    known = list(zip(step.token_ids, step.logprobs, strict=True))
    return {
        "tokens": [_text(token, there[token]) if there else first for token, there in known],
        "token_logprobs": [_finite(there[token].logprob) if there else None for token, there in known],
        "top_logprobs": [
            {_text(i, one): _finite(one.logprob) for i, one in (*_most_likely(there, top), (token, there[token]))}
            if there
            else None
            for token, there in known
        ],
        "text_offset": step.text_offsets,
    }


def _most_likely(logprobs: Logprobs, top: int) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda item: item[1].rank)[:top]


def _entry(token: int, logprob: Logprob, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    text = logprob.decoded_token
    data = None if text is None else token_bytes(tokenizer, token, text)
    known = None if data is None else list(data)
    return {"token": _text(token, logprob), "logprob": _finite(logprob.logprob), "bytes": known}


def _text(token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
