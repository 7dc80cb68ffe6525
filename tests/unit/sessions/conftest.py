"""Fixtures of session tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync, for tests that do not simulate a machine failure."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
