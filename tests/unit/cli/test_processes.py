"""Test the installed command in a process: a chat in a terminal, and a document that is continued after SIGKILL.

Both run in one process, because the start of a process takes seconds.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import Cli
from support.tiny_models import tiny_checkpoint


class Terminal:
    """A command that runs in a pseudo-terminal. It is killed at the end of the `with` block."""

    def __init__(self, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self._seen = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def write(self, text: bytes) -> None:
        os.write(self._master, text)

    def read_until(self, pattern: bytes, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while (found := re.search(pattern, re.sub(rb"\x1b\[[?0-9;]*[A-Za-z]", b"", self._seen))) is None:
            assert time.monotonic() < end, self._seen
            if select.select([self._master], [], [], 0.5)[0]:
                self._seen += os.read(self._master, 4096)
        self._seen = re.sub(rb"\x1b\[[?0-9;]*[A-Za-z]", b"", self._seen)[found.end() :]


CHAT_AND_WRITE = """
import itertools, os, runpy, signal, sys
end = sys.argv.index("then")
script, chat, write = sys.argv[1], sys.argv[1:end], sys.argv[end + 1:]
sys.argv = chat
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as leave:
    print("the chat has ended with", leave.code)
from offload_rt.cli import main
from offload_rt.writing.files import TextFile
append, calls = TextFile.append, itertools.count()
def kill(file, text):
    append(file, text)
    if next(calls) == 40:
        os.kill(os.getpid(), signal.SIGKILL)
TextFile.append = kill
main(write)
"""


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="needs a process: make stress PART=sessions")
def test_ctrl_c_ends_an_answer_ctrl_d_a_chat_and_a_document_is_continued_after_sigkill(
    tmp_path: Path, cli: Cli
) -> None:
    model, script = tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2), Path(sys.executable).parent
    chat = ["chat", model, "--session", "s", "--store", str(tmp_path / "store"), "--policy", "full"]
    chat += ["--max-new-tokens", "4000", "--temperature", "0", "--ignore-eos", "--overflow", "truncate"]
    (tmp_path / "begin.txt").write_text("It was a dark night, and nobody was on the road.")
    flags = ("--beginning", str(tmp_path / "begin.txt"), "--max-new-tokens", "90", "--seed", "5", "--policy", "full")
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    assert cli("write", model, str(whole), *flags).code == 0
    command = [sys.executable, "-P", "-c", CHAT_AND_WRITE, str(script / "offload-rt"), *chat]
    with Terminal([*command, "then", "write", model, str(parts), *flags, "--quiet"]) as terminal:
        terminal.read_until(rb"> ")
        terminal.write(b"It was a dark night\n")
        terminal.read_until(rb"night\r?\n[^a-z]*[a-z]+")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(rb"\(ended\)")
        terminal.read_until(rb"> ")
        terminal.write(b"\x04")
        terminal.read_until(rb"is saved")
        terminal.read_until(rb"the chat has ended with 0")
        assert terminal.process.wait(120) == -signal.SIGKILL
    assert whole.read_bytes().startswith(parts.read_bytes()) and parts.read_bytes() != whole.read_bytes()
    run = cli("write", model, str(parts), *flags)
    assert run.code == 0 and "90 new tokens" in run.err
    assert parts.read_bytes() == whole.read_bytes()
