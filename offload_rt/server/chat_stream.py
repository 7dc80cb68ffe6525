"""Generate chat responses for all API protocols, as a stream of text, reasoning and tool calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ..outputs import Logprobs, RequestOutput, StopReason
from ..sampling_params import SamplingParams
from .connection import run_for_client
from .conversation import Conversation, forced_call
from .metrics import Usage
from .parsers import answer_parser, needs_special_tokens
from .parsers.json_calls import ForcedCalls
from .parsers.pieces import FirstCall, Parser, Piece, Plain, ToolCall, joined
from .parsers.reasoning import ends_within_thinking
from .service import EngineArguments, Service


@dataclass(frozen=True)
class ChatJob:
    text: str
    ids: list[int]
    params: SamplingParams
    make_parser: Callable[[], Parser]


async def prepare(
    service: Service,
    request: Request,
    conversation: Conversation,
    max_tokens: int | None,
    sampling: Mapping[str, Any],
    structured: Mapping[str, Any] | None = None,
) -> ChatJob:
    """Render and tokenize a conversation, and check that it is within the token limits.

    Args:
        max_tokens: Maximum number of new tokens that the client requested.
        sampling: Fields of `SamplingParams` that the request sets.
        structured: Required format of the response. A required tool call takes precedence over it.
    """
    text, ids = await run_for_client(request, service.prompts.render(conversation))
    forced = forced_call(conversation)
    tokens = service.limits.max_new_tokens(len(ids), max_tokens)
    guided = forced or structured or {}
    fields = {**sampling, **guided}
    if not guided and needs_special_tokens(service.tools, service.reasoning, offered=conversation.offered is not None):
        fields["skip_special_tokens"] = False
    params = service.params(max_tokens=tokens, **fields)

    def make_parser() -> Parser:
        # Guided decoding starts with the first token, so the response cannot begin with reasoning.
        if guided:
            return ForcedCalls(conversation.offered or {}) if forced else Plain()
        thinking = ends_within_thinking(text, conversation.prefill)
        parser = answer_parser(service.tools, service.reasoning, conversation.offered, thinking=thinking)
        return parser if conversation.parallel else FirstCall(parser)

    return ChatJob(text, ids, params, make_parser)


@dataclass(frozen=True)
class Step:
    """New output of one completion, for any API protocol.

    Attributes:
        logprobs: Log-probabilities of the new tokens, or None if they were not requested. If the prompt is echoed, the
            tokens of the prompt come first, and the first of them has None.
        finish_reason: "stop", "length" or "tool_calls" in the last step, otherwise None.
        stop_reason: Stop string or token that ended the completion, or None.
        usage: Token counts of the whole request so far.
        traced: Output with trace data, or None. A step with trace data has no other output.
        text_offsets: Positions of the tokens in the text of the completion, or None if they were not requested.
    """

    index: int
    pieces: list[Piece]
    token_ids: list[int]
    logprobs: list[Logprobs | None] | None
    finish_reason: str | None
    stop_reason: StopReason
    usage: Usage
    traced: RequestOutput | None = None
    text_offsets: list[int] | None = None


class ChatStream:
    """Converts the outputs of a request, which contain all text so far, to steps that contain only the new tokens.

    Args:
        make_parser: Creates a parser for each completion. By default, all text is content.
    """

    def __init__(self, make_parser: Callable[[], Parser] = Plain) -> None:
        self._parsers: defaultdict[int, Parser] = defaultdict(make_parser)
        self._seen: dict[int, tuple[int, int, bool]] = {}
        """For each completion index: how many characters and tokens were returned, and whether it has finished."""
        self._called: set[int] = set()

    def steps(self, output: RequestOutput) -> list[Step]:
        """Return one step for each completion with new output, and one for the trace data if `output` has any."""
        usage, found = Usage.from_output(output), []
        for each in output.outputs:
            characters, tokens, ended = self._seen.get(each.index, (0, 0, False))
            text, token_ids = each.text[characters:], each.token_ids[tokens:]
            ends = each.finish_reason is not None and not ended
            if not (text or token_ids or ends):
                continue
            self._seen[each.index] = len(each.text), len(each.token_ids), ended or ends
            logprobs: list[Logprobs | None] | None = None if each.logprobs is None else [*each.logprobs[tokens:]]
            pieces, reason = self._parsed(each.index, text, each.finish_reason if ends else None)
            stop = each.stop_reason if ends else None
            found.append(Step(each.index, pieces, token_ids, logprobs, reason, stop, usage))
        if output.trace is not None:
            found.append(Step(0, [], [], None, None, None, usage, output))
        return found

    def _parsed(self, index: int, text: str, reason: str | None) -> tuple[list[Piece], str | None]:
        parser = self._parsers[index]
        pieces = parser.push(text)
        if reason is not None:
            pieces += parser.finish()
        if any(isinstance(piece, ToolCall) for piece in pieces):
            self._called.add(index)
        return pieces, "tool_calls" if reason == "stop" and index in self._called else reason


async def generate_steps(
    service: Service, request: Request, job: ChatJob, arguments: EngineArguments
) -> AsyncGenerator[Step, None]:
    stream = ChatStream(job.make_parser)
    async with aclosing(service.outputs(request, job.ids, job.params, arguments)) as outputs:
        async for output in outputs:
            for step in stream.steps(output):
                yield step


async def collect_steps(steps: AsyncGenerator[Step, None]) -> list[Step]:
    """Wait until all completions have ended, and merge the steps of each completion into one."""
    by_index: dict[int, list[Step]] = defaultdict(list)
    async with aclosing(steps):
        async for step in steps:
            by_index[step.index].append(step)
    return [_merge_steps(index, by_index[index], step.usage) for index in sorted(by_index)]


def _merge_steps(index: int, steps: list[Step], usage: Usage) -> Step:
    pieces = joined(piece for step in steps for piece in step.pieces)
    token_ids = [token for step in steps for token in step.token_ids]
    logprobs = [one for step in steps for one in step.logprobs or ()]
    offsets = [one for step in steps for one in step.text_offsets or ()]
    last = steps[-1]
    ended = last.finish_reason, last.stop_reason
    return Step(index, pieces, token_ids, logprobs or None, *ended, usage, text_offsets=offsets or None)
