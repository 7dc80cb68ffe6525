"""Measure the time to first token for a client that sends complete conversations and no session name.

The script starts `offload-rt serve` with the default store in a temporary folder and prints the table of
`eval/results/smollm2/stateless_client.md`. It takes about two minutes with SmolLM2-135M on two cores.

    python scripts/stateless_client.py HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import openai

QUESTIONS = (
    "Who is the main character?",
    "Where does the story take place?",
    "What happens at the end of the text?",
    "Who is the enemy?",
)
TITLE = "Write a title of at most five words for the conversation that begins with this text:\n\n"
TITLE_CHARACTERS = 1500
STEP = 40_000
"""Number of characters in the book between the beginnings of two texts."""
NEW_TOKENS = 24
START_SECONDS = 300.0

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """Measurements for one request.

    Attributes:
        prompt: Number of prompt tokens.
        cached: Number of prompt tokens that the server found in its cache.
        seconds: Time to the first token.
    """

    text: str
    prompt: int
    cached: int
    seconds: float


class Client:
    def __init__(self, port: int) -> None:
        self._openai = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        self._model = self._openai.models.list().data[0].id

    def ask(self, messages: list[Message], timeout: float = 600.0) -> Answer:
        """Return the answer to a conversation.

        Raises openai.APITimeoutError if the server sends no data for `timeout` seconds at a time.
        """
        begun, first, text, usage = time.perf_counter(), 0.0, "", None
        stream = self._openai.chat.completions.create(
            model=self._model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=NEW_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            timeout=timeout,
        )
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content or choice.finish_reason:
                    first = first or time.perf_counter() - begun
                    text += choice.delta.content or ""
        assert usage is not None and usage.prompt_tokens_details is not None
        return Answer(text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, first)


@contextmanager
def serving(model: str, data: Path, *flags: str) -> Iterator[Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "offload_rt", "serve", model, "--port", str(port), *flags]
    data.mkdir(exist_ok=True)
    with (data / "log.txt").open("a") as log:
        server = subprocess.Popen(command, env=os.environ | {"XDG_DATA_HOME": str(data)}, stderr=log)
    try:
        wait_until_ready(server, port, data / "log.txt")
        yield Client(port)
    finally:
        server.send_signal(signal.SIGTERM)  # before it exits, the server writes its KV to the store
        server.wait(60)


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):  # also status 503 while the model is loaded
            time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


class Measurements:
    def __init__(self, model: str, folder: Path, characters: int, patience: float, host_memory: str) -> None:
        self._model, self._folder, self._patience, self._host_memory = model, folder, patience, host_memory
        book = files("offload_rt").joinpath("data/black_arrow.txt").read_text(encoding="utf-8")
        self._texts = [book[at : at + characters] for at in range(0, len(book) - characters, STEP)]

    def first_turn(self, text: int) -> list[Message]:
        return [{"role": "user", "content": f"{self._texts[text]}\n\n{QUESTIONS[0]}"}]

    def row(self, name: str, client: Client, messages: list[Message]) -> str:
        answer = client.ask(messages)
        print(f"| {name} | {answer.prompt:,} | {answer.cached:,} | {answer.seconds:.2f} |", flush=True)
        return answer.text

    def conversation(self) -> None:
        """Measure the turns of a conversation, including the first turn after a restart of the server."""
        store, messages = self._folder / "conversation", self.first_turn(0)

        def turn(name: str, question: str | None = None) -> None:
            if question is not None:
                messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": self.row(name, client, messages)})

        with serving(self._model, store) as client:
            turn("first turn")
            turn("second turn", QUESTIONS[1])
            title = f"{TITLE}{self._texts[0][:TITLE_CHARACTERS]}"
            name = f"title request with {TITLE_CHARACTERS:,} characters of the text"
            self.row(name, client, [{"role": "user", "content": title}])
            turn("third turn", QUESTIONS[2])
        with serving(self._model, store) as client:
            turn("fourth turn, after a restart", QUESTIONS[3])
            self.row("first turn again, after a restart", client, self.first_turn(0))
            self.cancelled(client)

    def cancelled(self, client: Client) -> None:
        try:
            client.ask(self.first_turn(1), timeout=self._patience)
            print("| another text, answered before the client gives up | | | |")
        except openai.APITimeoutError:
            print(f"| another text, the client gives up after {self._patience:g} s | | | |", flush=True)
        self.row("the same prompt again", client, self.first_turn(1))

    def documents(self) -> None:
        """Ask about two documents in turn, with host memory for only one of them.

        Then measure a second server that reads the same store.
        """
        store, flags = self._folder / "documents", ("--host-memory", self._host_memory)
        with serving(self._model, store, *flags) as client:
            for again in ("", " again"):
                for text, name in enumerate("AB", 2):
                    title = f"`--host-memory {self._host_memory}`: document {name}{again}"
                    self.row(title, client, self.first_turn(text))
            with serving(self._model, store, *flags) as second:
                self.row("document A, a second server that reads the store of the first", second, self.first_turn(2))
        with serving(self._model, store, *flags) as client:
            self.row("document A, the first server after a restart", client, self.first_turn(2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the first token times of a client without sessions.")
    parser.add_argument("model", help="local folder or hub id of an instruct model")
    parser.add_argument("--characters", type=int, default=23_000, help="length of each text (default: 23,000)")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds until a client gives up (default: 5)")
    parser.add_argument("--host-memory", default="200MiB", help="memory for the KV of one document (default: 200MiB)")
    args: Any = parser.parse_args()
    print(f"{args.model}, openai {openai.__version__}\n")
    print("| request | prompt tokens | cached | first token, s |\n| --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        measured = Measurements(args.model, Path(folder), args.characters, args.patience, args.host_memory)
        measured.conversation()
        measured.documents()


if __name__ == "__main__":
    main()
