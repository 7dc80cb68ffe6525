"""Fixtures of the command line: an empty cache folder, and a function that runs commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.commands import Cli, command_line


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_RT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return command_line(capsys)
