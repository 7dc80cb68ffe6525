"""Tables of `docs/pages/models.md`, generated from the architectures that the tests run.

`python docs/models.py` writes them between the marks of the page. A test checks that they are up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "pages" / "models.md"
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests")]

from support.architectures import REFUSED, RUNS, architecture  # noqa: E402
from tables import fill, table  # noqa: E402

from offload_rt.models.registry import adapter_for  # noqa: E402


def runs() -> str:
    """One row for each tiny model that the tests run, with the properties that its adapter reports."""
    rows = []
    for name, kind in RUNS.items():
        model = architecture(name)
        geometry = adapter_for(model).geometry
        windows = len(geometry.sliding)
        shown = "chunked" if geometry.chunked else "sliding"
        layers = "full" if not windows else shown if windows == geometry.layers else f"full and {shown}"
        if geometry.states:
            layers = f"{geometry.layers} of {geometry.depth or geometry.layers} with attention ({layers})"
        limits = [
            "eviction only within the window" if windows == geometry.layers else "",
            "no truncation" if geometry.absolute_positions else "",
            "no truncation" if geometry.states else "",
        ]
        rows.append([f"`{type(model).__name__}`", kind.traits, layers, "; ".join(filter(None, limits))])
    return table(("transformers' class", "properties", "layers", "limits"), rows)


def refused() -> str:
    """One row for each kind of model that the tests see refused."""
    rows = [[f"`{kind.config}Config`", f"`{reason}`", why] for kind, reason, why in REFUSED.values()]
    return table(("configuration", "`ModelError.reason`", "reason"), rows)


def page() -> str:
    """Return the current text of the page."""
    return fill(PAGE.read_text(encoding="utf-8"), {"runs": runs(), "refused": refused()})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
