"""Test the server with Anthropic's client and with OpenAI's Responses API.

The tests cover streams, continued conversations, tool calls and reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from support.serving import claude_client

if TYPE_CHECKING:
    import anthropic

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "Dick"}}\n</tool_call>'
ANSWER = f"<think>\nWell…\n</think>\n\nLook, café: {CALL}\n{CALL}"
TOOL: Any = {"name": "find", "description": "Finds.", "input_schema": {"type": "object"}}
FUNCTION: Any = {"type": "function", "name": "find", "parameters": {"type": "object"}}


SERVER_OPTIONS = {"api_keys": ("one", "two")}


def say(prompt: str) -> str:
    return ANSWER if "Who" in prompt else f"<{prompt}>"


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with claude_client(url, "one") as made:
        yield made


def without_ids(block: Any) -> Any:
    return {name: value for name, value in block.model_dump().items() if name not in ("id", "call_id", "parsed_output")}


def test_a_streamed_message_equals_a_complete_one(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": "scripted",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Who?"}],
        "tools": [TOOL],
    }
    whole = claude.messages.create(**asked)
    thinking, text, *calls = whole.content
    assert (thinking.type, text.type, whole.stop_reason) == ("thinking", "text", "tool_use")
    assert thinking.type == "thinking" and thinking.thinking == "Well…"
    assert text.type == "text" and text.text == "Look, café:"
    assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == [("find", {"q": "Dick"})] * 2
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [without_ids(block) for block in final.content] == [without_ids(block) for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    usage = whole.usage
    counted = claude.messages.count_tokens(model="scripted", messages=asked["messages"], tools=[TOOL])
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_tool_results_are_part_of_the_prompt(claude: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hm?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "…", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "find", "input": {"q": "Joan"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "Joan Sedley"}]},
    ]
    answer = claude.messages.create(model="scripted", max_tokens=300, system="Be brief.", messages=messages)
    assert answer.content[0].type == "text"
    assert answer.content[0].text == (
        "<system: Be brief.\nuser: Hm?\nassistant: <tool_call>Joan</tool_call>\ntool: Joan Sedley\nassistant: >"
    )
    assert answer.stop_reason == "end_turn"
    short = claude.messages.create(model="scripted", max_tokens=2, messages=messages)
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 2


def test_errors_have_the_format_of_anthropic(claude: anthropic.Anthropic, url: str) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        claude.post("/v1/messages", body={"messages": [{"role": "user", "content": "x"}]}, cast_to=object)
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "max_tokens: Field required"},
    }
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        claude.messages.create(model="scripted", max_tokens=5, messages=image)
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        claude.messages.create(model="claude", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.AuthenticationError):
        claude_client(url, "three").models.list()


def test_a_streamed_response_equals_a_complete_one(client: openai.OpenAI) -> None:
    asked: Any = {"model": "scripted", "input": "Who?", "tools": [FUNCTION]}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "Look, café:" and whole.status == "completed"
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final: Any = events[-1]
    assert final.type == "response.completed"
    assert [without_ids(item) for item in final.response.output] == [without_ids(item) for item in whole.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert (text, thought) == ("Look, café:", "Well…")
    done = [without_ids(event.item) for event in events if event.type == "response.output_item.done"]
    assert done == [without_ids(item) for item in whole.output]
    assert final.response.usage == whole.usage


def test_a_conversation_continues_only_for_its_owner(client: openai.OpenAI, url: str) -> None:
    first = client.responses.create(model="scripted", input="A", instructions="Be brief.")
    assert first.output_text == "<system: Be brief.\nuser: A\nassistant: >"
    second = client.responses.create(model="scripted", input="B", previous_response_id=first.id)
    assert second.output_text == f"<user: A\nassistant: {first.output_text}\nuser: B\nassistant: >"
    assert client.responses.retrieve(second.id).output_text == second.output_text
    other = openai.OpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0)
    for request in (
        lambda: other.responses.retrieve(first.id),
        lambda: other.responses.delete(first.id),
        lambda: other.responses.create(model="scripted", input="C", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            request()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    unkept = client.responses.create(model="scripted", input="A", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    streamed = list(client.responses.create(model="scripted", input="D", stream=True))[-1]
    assert streamed.type == "response.completed"
    assert client.responses.retrieve(streamed.response.id).output_text == streamed.response.output_text


def test_items_of_a_response_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="Who?", tools=[FUNCTION], store=False)
    call = next(item for item in first.output if item.type == "function_call")
    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Dick Shelton"}]
    history: Any = [{"role": "user", "content": "Q"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    answer = client.responses.create(model="scripted", input=[*history, *outputs])
    assert answer.output_text == (
        "<user: Q\nassistant: Look, café:<tool_call>Dick</tool_call><tool_call>Dick</tool_call>\n"
        "tool: Dick Shelton\nassistant: >"
    )
    cut = client.responses.create(model="scripted", input="Long", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    unpaired_name: Any = {"input": "x", "tools": [{"type": "function", "name": "\ud800"}]}
    unpaired_argument: Any = {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "\ud800"}]}
    for unpaired in (unpaired_name, unpaired_argument):
        with pytest.raises(openai.BadRequestError):
            client.post("/responses", content=json.dumps(unpaired).encode(), cast_to=object)
    for bad in ([], [{"type": "item_reference", "id": "x"}], [{"role": "user"}], [{"type": "function_call"}]):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="scripted", input=bad)  # type: ignore[arg-type]
