"""Generate the tables in `docs/pages/models.md` from the architectures that the tests run.

`python docs/models.py` writes the tables between the marks on the page. A test checks that they are up to date.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "pages" / "models.md"
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests")]

from support.architectures import LATENT, REFUSED, RUNS, architecture, default_skeleton  # noqa: E402
from tables import fill, table  # noqa: E402

from offload_rt.core import ModelGeometry  # noqa: E402
from offload_rt.models.registry import adapter_for  # noqa: E402
from offload_rt.utils.units import format_size  # noqa: E402


def _layer_types(**counts: int) -> list[str]:
    return [kind for kind, count in counts.items() for _ in range(count)]


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_hybrid": (
        "Granite 4.0-H-Small",
        {
            "num_hidden_layers": 40,
            "layer_types": _layer_types(linear_attention=36, full_attention=4),
            "mamba_d_state": 128,
        },
    ),
    "lfm2": (
        "LFM2-1.2B",
        {"hidden_size": 2048, "num_hidden_layers": 16, "layer_types": _layer_types(conv=10, full_attention=6)},
    ),
    "lfm2_moe": (
        "LFM2-8B-A1B",
        {"num_hidden_layers": 24, "layer_types": _layer_types(conv=18, full_attention=6)},
    ),
    "nemotron_h": (
        "Nemotron 3 Nano 30B-A3B",
        {
            "layers_block_type": _layer_types(linear_attention=23, moe=23, full_attention=6),
            "mamba_num_heads": 64,
        },
    ),
    "bamba": ("Bamba-9B", {"attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}),
}
"""Published models of classes whose default configuration has no attention, no recurrent layers or only four layers.

The options give the size of the state and the number of layers of each kind, but not their order.
"""


def _classes(hybrid: bool) -> dict[tuple[str, ...], list[str]]:
    """Return the classes of the tiny models that the tests run, by the other columns of their table."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in RUNS:
        model = architecture(name)
        geometry = adapter_for(model).geometry
        if bool(geometry.states) != hybrid:
            continue
        layers = _layers(name, geometry)
        classes = found.setdefault(_size(name, layers) if hybrid else (layers,), [])
        if (shown := f"`{type(model).__name__}`") not in classes:
            classes.append(shown)
    return found


def runs() -> str:
    """One row for each combination of layers, without hybrid models."""
    return table(("layers", "classes"), [[*kinds, ", ".join(classes)] for kinds, classes in _classes(False).items()])


def hybrids() -> str:
    """One row for each number of layers and size of the state of hybrid models."""
    rows = [[", ".join(classes), *cells] for cells, classes in _classes(True).items()]
    models = ", ".join(sorted(model for model, _ in PUBLISHED.values()))
    source = (
        "In the first row, 12 of 48 layers have attention. The numbers are for the first class of each row "
        f"in transformers' default configuration, or for a published model: {models}."
    )
    return f"{table(('classes', 'attention layers', 'state per sequence'), rows)}\n\n{textwrap.fill(source, 140)}"


def _size(name: str, layers: str) -> tuple[str, str]:
    """Return the columns for a hybrid model of real size: share of attention layers, and bytes of recurrent state."""
    _, options = PUBLISHED.get(name, ("", {}))
    geometry = adapter_for(default_skeleton(name, **options)).geometry
    share = f"{geometry.layers}/{geometry.depth or geometry.layers}"
    kinds = "" if layers == "full" else f" ({layers})"
    return share + kinds, format_size(geometry.state_bytes(torch.bfloat16))


def _layers(name: str, geometry: ModelGeometry) -> str:
    """Name the kinds of attention layers."""
    windows = len(geometry.sliding)
    kinds = []
    if windows < geometry.layers:
        full = "full, absolute positions" if geometry.absolute_positions else "full"
        kinds.append("latent" if name in LATENT else full)
    if windows:
        kinds.append("chunked" if geometry.chunked else "sliding")
    return " and ".join(kinds)


def refused() -> str:
    """One row for each kind of model that must be refused, according to the tests."""
    rows = [[f"`{kind.config}Config`", f"`{reason}`", why] for kind, reason, why in REFUSED.values()]
    return table(("configuration", "`ModelError.reason`", "reason"), rows)


def page() -> str:
    return fill(PAGE.read_text(encoding="utf-8"), {"runs": runs(), "hybrids": hybrids(), "refused": refused()})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
