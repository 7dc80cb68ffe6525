"""A fixture that runs commands."""

from __future__ import annotations

import pytest
from support.commands import Cli, command_line


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return command_line(capsys)
