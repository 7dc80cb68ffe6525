"""The terminal chat and the commands about stored sessions, as a user meets them."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from offload_rt.cli import main
from offload_rt.errors import InputError
from offload_rt.runtime.conversation import turn_tokens
from offload_rt.runtime.history import History


def talk(store: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *, name: str = "book", code: int = 0) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    arguments = ["chat", "reference", "--session", name, "--store", str(store), "--policy", "full"]
    arguments += ["--max-new-tokens", "8", "--temperature", "0", "--host-memory", "64MiB"]
    assert main(arguments) == code


def test_a_chat_comes_back_with_all_that_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, paste = tmp_path / "store", tmp_path / "two lines.txt"
    paste.write_text("First line.\nSecond line.\n")
    talk(store, f'Once upon a time\n\n/nonsense\n/read "{paste}" and what then?\n/read /none\n/save\n', monkeypatch)
    out, err = capsys.readouterr()
    assert "new session 'book'" in err and "no command '/nonsense'" in err and "cannot read '/none'" in err
    assert "saved" in err and len(out.strip()) > 10
    talk(store, "/history\n/stats\nGo on\n/stats\n/fork other\n/truncate 40\n/quit\nnever read\n", monkeypatch)
    again = capsys.readouterr()
    assert "2 turns" in again.err and "Once upon a time" in again.err and "Second line." in again.err
    assert "came from disk" in again.err and "were forgotten" in again.err and "reused" in again.err
    assert "session 'other' goes on from here" in again.err

    assert main(["sessions", "list", "--store", str(store)]) == 0
    listed = capsys.readouterr().out
    assert "book" in listed and "other" in listed and "reference" in listed
    assert main(["sessions", "export", "other", "--store", str(store), "--out", str(tmp_path / "o.txt")]) == 0
    text = (tmp_path / "o.txt").read_text()
    assert "### user\nFirst line.\nSecond line.\n\nand what then?" in text and text.count("### assistant") == 3
    assert main(["sessions", "show", "book@reference", "--store", str(store)]) == 0
    assert "tokens were cut" in capsys.readouterr().err
    files = len(list(store.rglob("*.kv")))
    assert main(["sessions", "delete", "other", "--store", str(store)]) == 0
    assert "deleted other" in capsys.readouterr().err and 0 < len(list(store.rglob("*.kv"))) < files
    talk(store, "Still there?\n", monkeypatch)
    assert "3 turns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sessions", "list", "--store", "/nowhere"], "there is no store at '/nowhere'"),
        (["sessions", "burn", "--store", "/tmp"], "action='burn' is unknown"),
        (["sessions", "show", "--store", "/tmp"], "needs the NAME"),
        (["simulate-store", "--trace", "/none"], "cannot read '/none'"),
        (["simulate-store", "--trace", "/none", "--policies", "mru"], "policy='mru' is unknown"),
        (["simulate-store", "--trace", "/none", "--host", "much"], "--host='much' is no size"),
        (["chat", "reference", "--session", "s", "--store", "/dev/null/x"], "cannot use the store"),
        (["chat", "reference", "--session", "s", "--store", "/tmp/x", "--store-limit", "-1"], "is no size"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_simulate_store_prints_a_line_for_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 512 * 3, "output_length": 1, "hash_ids": [i % 5, 100 + i % 5, i]}
        for i in range(1000, 1030)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["simulate-store", "--trace", str(trace), "--host", "1GiB,2GiB", "--disk", "0,4GiB", "--requests", "20"]
    assert main([*arguments, "--speed", "1,10", "--token-bytes", "64KiB", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("hit") >= 2 * 2 * 2 * 4
    assert (tmp_path / "out" / "store.md").exists() and (tmp_path / "out" / "store_load.png").exists()


@pytest.mark.skipif("OFFLOAD_RT_TERMINAL" not in os.environ, reason="depends on timing: run by make soak")
@pytest.mark.slow
def test_in_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(tmp_path: Path) -> None:
    """On a pseudo-terminal: a prompt, an answer that is interrupted, another one, and a session that is saved."""
    master, slave = pty.openpty()
    command = [str(Path(sys.executable).parent / "offload-rt"), "chat", "reference", "--session", "s", "--store"]
    command += [str(tmp_path), "--policy", "full", "--max-new-tokens", "2000", "--temperature", "0"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    seen = b""

    def read_until(text: bytes, seconds: float = 120) -> None:
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([master], [], [], 0.5)[0]:
                seen += os.read(master, 4096)
        seen = seen.split(text, 1)[1]

    read_until(b"> ")
    os.write(master, b"It was a dark night\n")
    read_until(b"night")
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    read_until(b"(ended)")
    read_until(b"> ")
    os.write(master, b"\x04")
    read_until(b"is saved")
    assert process.wait(30) == 0
    os.close(master)


# ----------------------------------------------------------------------------------------------------- turns to tokens


class Templated:
    """As much of a tokenizer as a chat needs: one token a character."""

    chat_template = "yes"
    eos_token, eos_token_id = "$", ord("$")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in ("^" if add_special_tokens else "") + text]}

    def apply_chat_template(self, messages: list[Any], *, tokenize: bool, add_generation_prompt: bool) -> str:
        return "^" + "".join(f"<{m['role'][0]}>{m['content']}$" for m in messages) + "<a>" * add_generation_prompt


def text_of(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_a_template_adds_what_comes_behind_the_last_answer() -> None:
    tokenizer: Any = Templated()
    assert text_of(turn_tokens(tokenizer, [], [], "hello")) == "^<u>hello$<a>"
    turns = [("user", "hello"), ("assistant", "hi")]
    cut = [ord(c) for c in "^<u>hello$<a>hi"]
    assert text_of(turn_tokens(tokenizer, turns, cut, "more")) == "$<u>more$<a>"
    ended = [*cut, ord("$")]
    assert text_of(turn_tokens(tokenizer, turns, ended, "more")) == "<u>more$<a>", "no end of turn twice"
    rewriting: Any = Templated()
    rewriting.apply_chat_template = lambda messages, **_: f"{len(messages)} messages"
    with pytest.raises(InputError, match="rewrites"):
        turn_tokens(rewriting, turns, cut, "more")


def test_without_a_template_text_is_appended_as_it_is() -> None:
    tokenizer: Any = Templated()
    tokenizer.chat_template = None
    assert text_of(turn_tokens(tokenizer, [], [], "a")) == "^a"
    assert text_of(turn_tokens(tokenizer, [("user", "a"), ("assistant", "b")], [1], "c")) == "c"
    with pytest.raises(InputError, match="empty"):
        turn_tokens(tokenizer, [], [], "")


def test_documents_of_other_formats_are_no_histories() -> None:
    good = History("n", "m", tokens=[1, 2, 3], computed=2, decoded=[(1, 2)], turns=[("user", "ä")])
    assert History.from_bytes(good.to_bytes()) == good
    for bad in (b"", b"{}", b"[]", b'{"format": 1}', good.to_bytes().replace(b'"format": 1', b'"format": 9')):
        assert History.from_bytes(bad) is None
