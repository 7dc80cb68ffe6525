"""A fixture for evaluations whose figures are not tested."""

from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write empty figures, because drawing one takes 0.2 s. Tests of each evaluation's figures draw them."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **options: None)
