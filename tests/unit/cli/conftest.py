"""Fixtures that run commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import SHORT, Cli, command_line


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return command_line(capsys)


@pytest.fixture
def generate(cli: Cli, short_book: Path) -> Cli:
    """Run `offload-rt generate` with default flags, followed by the given flags, which take precedence."""
    given = ("generate", "reference", "--prompt-file", str(short_book), *SHORT, "--policy", "full")
    return lambda *flags: cli(*given, *flags)
