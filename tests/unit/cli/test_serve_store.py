"""Test the session store of `offload-rt serve`, and errors that are reported before the port is bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload_rt.cli import main
from offload_rt.server import run

FLAGS = ("--policy", "full", "--verify", "off", "--host-memory", "16MiB", "--port", "0")


@pytest.fixture
def start_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    found: list[Any] = []
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(run, "serve", lambda make_app, options, listener: found.append((make_app(), listener.close())))

    def service(*flags: str) -> Any:
        assert main(["serve", "reference", *FLAGS, *flags]) == 0
        return found[-1][0].state.service

    return service


def test_only_the_first_server_writes_the_default_store(
    start_service: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "offload_rt.server")
    first = start_service()
    assert first.stores_sessions and (tmp_path / "offload-rt" / "store" / "lock").exists()
    second = start_service()
    assert not second.stores_sessions and "read-only" in caplog.text
    assert second._salt_key != first._salt_key
    without = start_service("--no-store")
    assert not without.stores_sessions and without.engine._sessions is None
    asyncio.run(first.close())
    again = start_service("--store-limit", "1GiB")
    assert again._salt_key == first._salt_key, "salted prompts are found after a restart"
    assert again.engine._sessions.store.context.options.limit == 1 << 30
    for service in (second, without, again):
        asyncio.run(service.close())
    other = start_service("--eviction", "lru")
    assert not other.stores_sessions and "nothing is stored on disk" in caplog.text
    asyncio.run(other.close())


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("reference", ("--no-store", "--store", "x"), "cannot be combined"),
        ("reference", ("--max-engines", "2", "--device-memory", "1GiB"), "--max-engines 2 and --device-memory"),
        ("/nowhere/model", (), "does not exist"),
        (".", (), "no config.json"),
    ],
)
def test_errors_are_reported_before_the_port_is_bound(
    model: str,
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "bind_socket", lambda options: pytest.fail("the port was bound"))
    assert main(["serve", model, *flags]) == 2
    assert message in capsys.readouterr().err
