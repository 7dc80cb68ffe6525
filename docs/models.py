"""Generate the tables in `docs/pages/models.md` from the architectures that the tests run.

`python docs/models.py` writes the tables between the marks on the page. A test checks that they are up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "pages" / "models.md"
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests")]

from support.architectures import LATENT, REFUSED, RUNS, architecture  # noqa: E402
from tables import fill, table  # noqa: E402

from offload_rt.core import ModelGeometry  # noqa: E402
from offload_rt.models.registry import adapter_for  # noqa: E402


def runs() -> str:
    """One row for each kind of layer, with the classes of the tiny models that the tests run."""
    found: dict[str, list[str]] = {}
    for name in RUNS:
        model = architecture(name)
        classes = found.setdefault(_layers(name, adapter_for(model).geometry), [])
        if (shown := f"`{type(model).__name__}`") not in classes:
            classes.append(shown)
    return table(("layers", "classes"), [[kinds, ", ".join(classes)] for kinds, classes in found.items()])


def _layers(name: str, geometry: ModelGeometry) -> str:
    windows = len(geometry.sliding)
    kinds = ["recurrent"] if geometry.states else []
    if windows < geometry.layers:
        full = "full, absolute positions" if geometry.absolute_positions else "full"
        kinds.append("latent" if name in LATENT else full)
    if windows:
        kinds.append("chunked" if geometry.chunked else "sliding")
    if geometry.kv_from:
        kinds.append("layers that use earlier KV")
    return " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def refused() -> str:
    """One row for each kind of model that must be refused, according to the tests."""
    rows = [[f"`{kind.config}Config`", f"`{reason}`", why] for kind, reason, why in REFUSED.values()]
    return table(("configuration", "`ModelError.reason`", "reason"), rows)


def page() -> str:
    return fill(PAGE.read_text(encoding="utf-8"), {"runs": runs(), "refused": refused()})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
