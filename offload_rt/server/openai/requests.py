"""Request bodies of OpenAI's APIs, and the sampling parameters that they set.

A known field with a value of the wrong type is an error. Unknown fields are ignored. If they are at the top level, this
is reported to the client.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...sampling_params import StructuredOutputs
from ..errors import bad_request

INT64 = 2**63 - 1
Whole = Annotated[int, Field(ge=-INT64, le=INT64)]
TokenIds = list[Annotated[int, Field(ge=0, le=INT64)]]
Count = Annotated[int, Field(ge=1, le=INT64)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Texts = Annotated[list[Stop], Field(max_length=1000)]
"""Stop strings. Their number and length are limited, so that searching for them does not delay other requests."""
CacheSalt = Annotated[str, Field(min_length=1, max_length=1000)]
"""vLLM's `cache_salt`. Requests with different salts do not share cached prefixes."""
FormatKind = Literal["text", "json_object", "json_schema"]
Choices = Annotated[int, Field(ge=1, le=128)]


class Body(BaseModel):
    """Base class for JSON objects in requests. The types of their fields are checked strictly."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


REFUSED_FIELDS = {
    "audio": "only text is supported",
    "conversation": "use previous_response_id",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "guided_json": "use response_format or structured_outputs",
    "guided_regex": "use structured_outputs",
    "mcp_servers": "run the tools in the client",
    "use_beam_search": "use n",
    "web_search_options": "run the search as a tool in the client",
}
"""Unsupported fields that would change the response, each with advice for the client.

Requests that set them are refused.
"""

UNREPORTED_FIELDS = {
    "include",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Unsupported fields that do not affect the response. They are ignored without a report."""


class RequestBody(Body):
    """Base class for request bodies. Unknown fields are reported to the client.

    Fields in `REFUSED_FIELDS` are errors. Fields in `UNREPORTED_FIELDS` are ignored without a report.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for name in (self.model_extra or {}).keys() & REFUSED_FIELDS.keys():
            if (self.model_extra or {})[name] is not None:
                raise bad_request(f"{name} is not supported: {REFUSED_FIELDS[name]}", name)
        return self

    @property
    def ignored_fields(self) -> list[str]:
        """Names of the unknown fields to report, at most ten."""
        names = [name for name in self.model_extra or {} if name not in UNREPORTED_FIELDS | REFUSED_FIELDS.keys()]
        return [name for name in names if name.isascii() and name.isidentifier() and len(name) <= MAX_FIELD][:10]


MAX_FIELD = 50
"""Maximum length of an unknown field's name in the report."""


class StreamOptions(Body):
    include_usage: bool | None = None


class StructuredBody(Body):
    """vLLM's `structured_outputs`. At most one of the fields may be set."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json", serialization_alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingBody(RequestBody):
    """Common fields of chat, text completions and responses: OpenAI's, then vLLM's extensions."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Whole | None = None
    stop: Stop | Texts | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: str | None = None


class SampledBody(SamplingBody):
    """Common fields of chat and text completions: OpenAI's, then vLLM's extensions, then this server's."""

    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    max_tokens: Count | None = None
    n: Choices | None = None
    stream_options: StreamOptions | None = None

    min_tokens: Annotated[int, Field(ge=0, le=INT64)] | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredBody | None = None

    policy: Annotated[str, Field(min_length=1)] | None = None
    policy_options: dict[str, Any] | None = None
    exact: bool | None = None
    session: Annotated[str, Field(min_length=1, max_length=100)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Message(Body):
    """A chat message. Other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionSpec(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(Body):
    type: FormatKind
    json_schema: JsonSchema | None = None

    @property
    def schema_(self) -> dict[str, Any] | None:
        return self.json_schema.schema_ if self.json_schema else None


class ChatRequest(SampledBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    trace: bool | None = None


class SessionUpdate(Body):
    """Body of `POST /v1/sessions/NAME`: a new title, new messages, or both."""

    title: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class CompletionRequest(SampledBody):
    """Body of `POST /v1/completions`."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Choices | None = None
    response_format: ResponseFormat | None = None


class FlatTool(Body):
    """A tool of the Responses API, with the fields of its function at the top level."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FlatNamed(NamedFunction):
    type: Literal["function"]


class TextFormat(JsonSchema):
    type: FormatKind


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesRequest(SamplingBody):
    """Body of `POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamed | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    background: bool | None = None


class TokenizeRequest(RequestBody):
    """Body of `POST /tokenize`: a text, or messages for the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    return_tokens: bool = True
    return_token_strs: bool = False
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody):
    """Body of `POST /detokenize`."""

    tokens: TokenIds


_SAME = (
    "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "bad_words", "allowed_token_ids",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


def sampling_fields(body: Body) -> dict[str, Any]:
    """Return those fields of `SamplingParams` that are set by a request body. The body may be of any protocol."""
    known = type(body).model_fields  # pydantic also stores unknown fields as attributes
    given = {name: value for name in _SAME if name in known and (value := getattr(body, name)) is not None}
    bias = body.logit_bias if isinstance(body, SampledBody) else None
    return given | ({"logit_bias": _bias(bias)} if bias else {})


def _bias(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise bad_request(f"logit_bias: {token!r:.80} is not a token id", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def structured_outputs(
    requested: ResponseFormat | TextFormat | None, vllm: StructuredBody | None = None
) -> dict[str, Any]:
    """Return the sampling parameter `structured_outputs`, or {} if the request sets no format.

    The format is given in OpenAI's fields (`requested`) or in vLLM's (`vllm`). Raises RefusedError or ConfigError if it
    is invalid.
    """
    if vllm is not None and (given := vllm.model_dump(exclude_none=True, by_alias=True)):
        return {"structured_outputs": StructuredOutputs(**given)}
    if requested is None or requested.type == "text":
        return {}
    schema = requested.schema_ if requested.type == "json_schema" else {"type": "object"}
    if schema is None:
        raise bad_request("response_format.json_schema.schema is missing: add the JSON schema", "response_format")
    return {"structured_outputs": StructuredOutputs(json=schema)}
