"""Run commands of the command line interface in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from offload_rt.cli import main


@dataclass(frozen=True)
class CommandRun:
    code: int
    out: str
    err: str

    def fails_with(self, *words: str) -> None:
        """Check that the exit code is 2, stdout is empty, and stderr is one line that contains all `words`."""
        assert self.code == 2, self
        assert self.out == ""
        assert self.err.startswith("offload-rt")
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        assert "Traceback" not in self.err
        missing = [word for word in words if word not in self.err]
        assert not missing, f"{missing} not in {self.err!r}"


Cli = Callable[..., CommandRun]

SHORT = ("--prompt-tokens", "96", "--max-new-tokens", "6", "--temperature", "0")
"""Flags of a short generation."""


def command_line(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: str) -> CommandRun:
        capsys.readouterr()
        try:
            code: Any = main(argv)
        except SystemExit as leave:
            code = leave.code
        captured = capsys.readouterr()
        return CommandRun(code, captured.out, captured.err)

    return run
