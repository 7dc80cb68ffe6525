"""Fixtures for tests of sessions."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync. Tests with this fixture simulate no power failure."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
