"""Test the terminal chat, and the commands for stored sessions."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offload_rt import SamplingParams
from offload_rt.cli import main
from offload_rt.cli.chat import Chat
from offload_rt.errors import InputError
from offload_rt.outputs import TokenOutput
from offload_rt.sessions.chat_template import TurnTokens, turn_tokens
from offload_rt.sessions.history import History
from offload_rt.sessions.session import Session
from offload_rt.utils.progress import observed


def talk(store: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    arguments = ["chat", "reference", "--session", "book", "--store", str(store), "--policy", "full"]
    arguments += ["--max-new-tokens", "8", "--temperature", "0", "--host-memory", "64MiB"]
    assert main([*arguments, *more]) == 0


def test_a_chat_continues_with_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, paste = tmp_path / "store", tmp_path / "two lines.txt"
    paste.write_text("First line.\nSecond line.\n")
    talk(store, f'Once upon a time\n\n/nonsense\n/read "{paste}" and what then?\n/read /none\n/save\n', monkeypatch)
    out, err = capsys.readouterr()
    assert "new session 'book'" in err and "unknown command '/nonsense'" in err and "cannot read '/none'" in err
    assert "saved" in err and len(out.strip()) > 10
    assert err.count("stopped at --max-new-tokens") == 2, "both answers end at the limit"
    talk(store, "/history\n/stats\nGo on\n/stats\n/fork other\n/truncate 40\n/quit\nnever read\n", monkeypatch)
    again = capsys.readouterr()
    assert "2 turns" in again.err and "Once upon a time" in again.err and "Second line." in again.err
    assert "came from disk" in again.err and "were removed" in again.err and "reused" in again.err
    assert "session 'other' is a copy of this one" in again.err

    assert main(["sessions", "list", "--store", str(store)]) == 0
    listed = capsys.readouterr().out
    assert "book" in listed and "other" in listed and "reference" in listed
    assert main(["sessions", "export", "other", "--store", str(store), "--out", str(tmp_path / "o.txt")]) == 0
    text = (tmp_path / "o.txt").read_text()
    assert "### user\nFirst line.\nSecond line.\n\nand what then?" in text and text.count("### assistant") == 3
    assert main(["sessions", "show", "book", "--model", "reference", "--store", str(store)]) == 0
    assert "tokens were cut" in capsys.readouterr().err
    files = len(list(store.rglob("*.kv")))
    assert main(["sessions", "delete", "other", "--store", str(store)]) == 0
    assert "deleted other" in capsys.readouterr().err and 0 < len(list(store.rglob("*.kv"))) < files
    talk(store, "Still there?\n", monkeypatch)
    assert "3 turns" in capsys.readouterr().err


def test_turns_are_undone_and_answered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    (tmp_path / "page.txt").write_text("It was a dark night, and nobody was on the road. " * 8)
    with observed(lambda *progress: seen.append(progress)):
        talk(tmp_path / "store", f"/read {tmp_path}/page.txt\nGo on\n/undo\nGo on\n/regenerate\n", monkeypatch)
    first, *others = capsys.readouterr().out.splitlines()
    assert len(set(others)) == 1 and len(others) == 3 and first != others[0]
    assert seen.count(("prefill", 8, 8)) == 4, "the prefill of every answer is shown"
    talk(tmp_path / "store", "/undo\n/history\n/undo\n/undo\n", monkeypatch)
    err = capsys.readouterr().err
    assert "2 turns" in err and "removed: Go on" in err and "has no turn that can be undone" in err
    assert "not saved: no messages" in err, "a chat without turns is not stored"


def test_a_message_is_kept_if_it_cannot_be_answered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, sent = Session.send, list[Any]()

    def send(self: Session, prompt: Any, *arguments: Any, **named: Any) -> Any:
        sent.append(prompt)
        if len(sent) == 2:
            raise KeyboardInterrupt
        return real(self, prompt, *arguments, **named)

    monkeypatch.setattr(Session, "send", send)
    talk(tmp_path, "Go on\n/regenerate\n/regenerate\n/regenerate\n", monkeypatch)
    assert sent == ["Go on"] * 4 and "sends the message again" in capsys.readouterr().err
    talk(tmp_path, "/quit\n", monkeypatch)
    assert "1 turns" in capsys.readouterr().err


def test_characters_outside_the_character_set_end_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nGo on\n"), encoding="utf-8"))
        patch.setattr(sys, "stdout", answers)
        assert main(["chat", "reference", "--policy", "full", "--max-new-tokens", "3"]) == 0
        print("“Madam,” said Dick")
    assert "unpaired surrogate" in capsys.readouterr().err
    answers.seek(0)
    assert r"\u201cMadam,\u201d said Dick" in answers.read()


def test_a_program_that_has_read_from_stdin_can_call_main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n"), encoding="utf-8"))
    assert sys.stdin.readline() == "one\n"
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])


def test_only_kv_is_deleted_after_its_time_to_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Once upon a time there was a king, and his name was Richard. " * 8
    talk(tmp_path, f"{text}\n", monkeypatch, "--store-policy", "lru", "--store-ttl", "2w")
    for path in tmp_path.rglob("*.*"):
        if path.is_file():
            os.utime(path, (time.time() - 3 * 86400,) * 2)

    def list_session(ttl: str) -> list[str]:
        capsys.readouterr()
        assert main(["sessions", "list", "--store", str(tmp_path), "--store-ttl", ttl]) == 0
        head, line = (line.strip() for line in capsys.readouterr().out.splitlines())
        assert head.endswith("expires") and line.startswith("book") and "3 d ago" in line
        return line.split()

    kept, gone = list_session("7d"), list_session("48h")
    assert kept[-2:] == ["0", "B"] and gone[-2] != "0" and gone[-2:] == gone[4:6]
    files = len(list(tmp_path.rglob("*.kv")))
    talk(tmp_path, "", monkeypatch, "--store-ttl", "7d")
    assert files > 1 and len(list(tmp_path.rglob("*.kv"))) == files
    for path in tmp_path.rglob("*.kv"):
        os.utime(path, (time.time() - 3 * 86400,) * 2)
    talk(tmp_path, "/history\n", monkeypatch, "--store-ttl", "48h")
    assert "1 turns" in (err := capsys.readouterr().err) and "Richard" in err
    assert not list(tmp_path.rglob("*.kv"))


def test_an_interrupt_in_a_destructor_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python ignores a KeyboardInterrupt raised in a destructor, but the chat must still stop at the next token."""

    class InterruptingDestructor:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    class LongSession:
        name, turns, tokens, closed, history = "s", (), (), 0, types.SimpleNamespace(removed=0)

        def send(self, text: str, params: object, on_prefill: object) -> Any:
            self.turns = (("user", text),)
            try:
                for i in range(100):
                    yield TokenOutput(0, f"{i} ", i, i, None)
                    if i == 3:
                        InterruptingDestructor()
            finally:
                self.closed += 1

        def close(self) -> None:
            self.closed += 1

    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    session, before = LongSession(), signal.getsignal(signal.SIGINT)
    console = Console(stderr=True)
    model = types.SimpleNamespace(name="m", geometry=types.SimpleNamespace(layers=2))
    Chat(model, session, SamplingParams(), console).run()  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert len(dropped) == 1, "Python has ignored the interrupt"
    assert out == "0 1 2 3 4 " and "(ended)" in err and session.closed == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_chats_without_a_store_or_messages_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n/save\n/fork other\n"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    flags = ["--policy", "full", "--max-new-tokens", "3", "--host-memory", "64MiB"]
    assert main(["chat", "reference", *flags]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and "not saved: add --store DIR to save conversations" in err
    assert "/save needs a store" in err and "/fork needs a store" in err and "is a copy" not in err
    assert not list((tmp_path / "temporary").iterdir())
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n"))
    assert main(["chat", "reference", "--store", str(tmp_path / "store"), *flags]) == 0
    assert "not saved: no messages" in capsys.readouterr().err
    assert main(["sessions", "--store", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out == "no sessions\n"


# ----------------------------------------------------------------------------------------------------- turns to tokens


class CharacterTokenizer:
    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in ("^" if add_special_tokens else "") + text]}


def test_without_a_template_text_is_appended_unchanged() -> None:
    tokenizer: Any = CharacterTokenizer()
    history = History("s", "m")
    assert turn_tokens(tokenizer, history, "a") == TurnTokens(0, 0, (ord("^"), ord("a")))
    history.tokens = [1]
    assert turn_tokens(tokenizer, history, "c", {1}) == TurnTokens(1, 0, (ord("c"),))
    with pytest.raises(InputError, match="empty"):
        turn_tokens(tokenizer, history, "")
