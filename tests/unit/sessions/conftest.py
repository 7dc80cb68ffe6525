"""Fixtures for tests of sessions."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync. Tests that use this fixture do not simulate a power failure."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
