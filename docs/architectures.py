"""The tables of `docs/pages/architectures.md`, made from what the tests run: `python docs/architectures.py` writes them
between the page's marks. A test holds the page to them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pages" / "architectures.md"
sys.path.insert(0, str(ROOT / "tests"))

from support.architectures import REFUSED, RUNS, architecture  # noqa: E402

from offload_rt.models.registry import adapter_for  # noqa: E402


def runs() -> str:
    """One row for each tiny model that the tests run, with what its adapter says of it."""
    columns = "what sets it apart | layers | logits, greedy, batch | policies | sessions | evicted | truncated"
    rows = [f"| transformers' class | {columns} |", "|---|---|---|---|---|---|---|---|"]
    for name, kind in RUNS.items():
        model = architecture(name)
        geometry = adapter_for(model).geometry
        sliding = len(geometry.sliding)
        shown = "chunked" if geometry.chunked else "sliding"
        layers = "full" if not sliding else shown if sliding == geometry.layers else f"full and {shown}"
        past = "yes" if not sliding else "past the window"
        evicted = "yes" if sliding < geometry.layers else "its window alone"
        truncated = "no" if geometry.absolute_positions else "yes"
        cells = f"{kind.traits} | {layers} | {past} | all | yes | {evicted} | {truncated}"
        rows.append(f"| `{type(model).__name__}` | {cells} |")
    return "\n".join(rows)


def refused() -> str:
    """One row for each kind of model that the tests see refused."""
    rows = ["| configuration | `ModelError.reason` | why |", "|---|---|---|"]
    rows += [f"| `{kind.config}Config` | `{reason}` | {why} |" for kind, reason, why in REFUSED.values()]
    return "\n".join(rows)


def page(text: str) -> str:
    """`text` with the tables between its marks as they are now."""
    for name, table in (("runs", runs()), ("refused", refused())):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, mark, after = rest.partition(f"<!-- end of {name} -->")
        assert mark, f"the page has no marks of {name}"
        text = f"{before}<!-- {name} -->\n{table}\n{mark}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
