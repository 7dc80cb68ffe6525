"""Request sequences that imitate coding agents and a chat page.

They contain the typical causes of cache misses: dates in the system prompt, growing tool results, title requests
between the turns, and edits to earlier messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

RULES = "Keep to the style of the file. Change nothing that the task does not name. Explain each change in one line. "
SOURCE = "def shoot(arrow, target):\n    distance = target.distance\n    return arrow.force > distance * 2\n\n"
PROSE = "It was a dark night, and the river was high. Dick went on through the forest without a word. "


@dataclass(frozen=True)
class AgentRequest:
    """One request in a sequence.

    Attributes:
        kind: "turn" for a turn of the conversation, otherwise the kind of side request.
        body: JSON body for `POST /v1/chat/completions`.
    """

    kind: str
    body: dict[str, Any]


Sequence = Iterator[AgentRequest]


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def _tool(name: str, *parameters: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {each: {"type": "string"} for each in parameters}}
    described = {"name": name, "description": f"{name.title()} a file of the project.", "parameters": schema}
    return {"type": "function", "function": described}


TOOLS = [_tool("read", "path"), _tool("write", "path", "content"), _tool("find", "q"), _tool("run", "command")]


def _tool_call(name: str, number: int, q: str) -> dict[str, Any]:
    call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": f'{{"q": "{q}"}}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def opencode() -> Sequence:
    """Tool results grow, and a title is requested after the first message."""
    system = _message("system", f"You are a coding agent. {RULES * 4}Working directory: /src. Date: 2026-11-24.")
    messages = [system, _message("user", f"Make the archer miss at long distances.\n{PROSE * 2}")]
    yield AgentRequest("turn", {"messages": list(messages), "tools": TOOLS})
    title = [_message("system", f"Write a title of at most five words. {RULES}"), messages[1]]
    yield AgentRequest("title", {"messages": title})
    for number in range(1, 6):
        messages.append(_tool_call("read", number, f"file {number}"))
        messages.append(_message("tool", SOURCE * (2 * number), tool_call_id=f"call_{number}"))
        yield AgentRequest("turn", {"messages": list(messages), "tools": TOOLS})
    messages += [_message("assistant", "The archer misses now."), _message("user", "Add a test.")]
    yield AgentRequest("turn", {"messages": list(messages), "tools": TOOLS})


def aider() -> Sequence:
    """Each edit changes the files quoted in an early message. Every request ends with the same reminders."""
    head = [_message("system", f"Act as an expert programmer. {RULES * 5}"), _message("user", f"Map:\n{PROSE * 4}")]
    talk: list[dict[str, Any]] = []
    for number in range(1, 5):
        files = _message("user", f"Files:\n{SOURCE * 6}# edit {number - 1}\n{SOURCE * 2}")
        talk.append(_message("user", f"Change {number}: rename the arrow."))
        reminder = _message("system", f"Answer with edit blocks. {RULES}")
        messages = [
            *head,
            _message("assistant", "Ok."),
            *talk[:-1],
            files,
            _message("assistant", "Ok."),
            talk[-1],
            reminder,
        ]
        yield AgentRequest("turn", {"messages": messages})
        talk.append(_message("assistant", f"Edit {number}: {SOURCE}"))
    commit = [_message("system", "Write a commit message."), _message("user", SOURCE * 3)]
    yield AgentRequest("commit message", {"messages": commit})


def cline() -> Sequence:
    """A long system prompt describes the tools, each message contains the time, and old messages are dropped."""
    system = _message("system", f"You have tools, written as XML: <read><path>…</path></read>. {RULES * 10}")
    messages = [system]
    for number in range(1, 6):
        results = f"[read] Result:\n{SOURCE * (2 * number)}" if number > 1 else f"<task>{PROSE * 2}</task>"
        messages.append(_message("user", f"{results}\n<environment>Time: 10:{number:02d}. Open: a.py</environment>"))
        if number == 5:  # drop the oldest exchange after the task to make room
            messages = [*messages[:2], _message("assistant", "[earlier messages removed]"), *messages[5:]]
        yield AgentRequest("turn", {"messages": list(messages)})
        messages.append(_message("assistant", f"<read><path>file{number}.py</path></read>"))


def open_webui() -> Sequence:
    """The system prompt contains a date that changes. A title or tags are requested after each turn."""
    talk: list[dict[str, Any]] = []
    for number in range(1, 4):
        date = "Monday" if number < 3 else "Tuesday"
        system = _message("system", f"You are helpful. {RULES * 2}Today is {date}.")
        talk.append(_message("user", f"{PROSE * 6}Question {number}?"))
        yield AgentRequest("turn", {"messages": [system, *talk]})
        talk.append(_message("assistant", f"Answer {number}. {PROSE}"))
        history = "\n".join(f"{message['role'].upper()}: {message['content']}" for message in talk)
        for kind in ("title", "tags", "follow-ups")[: 3 if number == 1 else 1]:
            task = f"### Task:\nWrite the {kind} of the chat, as JSON.\n### Chat:\n{history}"
            yield AgentRequest(kind, {"messages": [_message("user", task)]})
    edited = [system, *talk[:2], _message("user", f"{PROSE * 6}Another question?")]  # the second message is edited
    yield AgentRequest("turn", {"messages": edited})


AGENTS: dict[str, Callable[[], Sequence]] = {
    "opencode": opencode,
    "aider": aider,
    "cline": cline,
    "open-webui": open_webui,
}
