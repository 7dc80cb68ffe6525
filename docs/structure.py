"""Draw the package's folders in the order of their imports. The size of a box depends on the lines of code.

    python docs/structure.py docs/pages/structure.svg

The order is defined in `tests/unit/project/test_layering.py`. The script also prints the number of lines in each
folder.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "project"))

from test_layering import EVAL_ORDER, ORDER, imported_modules, python_files  # noqa: E402

EVAL = [[f"eval/{folder}" for folder in rank.split()] for rank in EVAL_ORDER]
"""Layers of the folders of `eval`."""

WIDTH, LAYER, GAP, MARGIN = 1080, 74, 14, 24
"""In pixels: the width of the picture, the height of a layer, the gap between boxes, and the margin."""


def layers() -> list[list[str]]:
    """Return the folders of each layer, starting with the lowest layer."""
    found: list[list[str]] = []
    for rank in ORDER:
        names = rank.split()
        beside = [name for name in names if name != "eval"]
        found += [*EVAL[:-1], [*EVAL[-1], *beside]] if "eval" in names else [names]
    return found


def folder_of(parts: tuple[str, ...]) -> str:
    """Return the folder of a module. `parts` is the module's dotted name below `offload_rt`, split at the dots."""
    return "/".join(parts[:2]) if parts[0] == "eval" and len(parts) > 1 else parts[0]


def folders() -> tuple[Counter[str], dict[str, set[str]]]:
    """Return the number of lines of every folder, and the folders that each folder imports."""
    lines: Counter[str] = Counter()
    uses: dict[str, set[str]] = defaultdict(set)
    for path in python_files():
        if path.parts[0] != "offload_rt":
            continue
        folder, text = folder_of(path.with_suffix("").parts[1:]), (ROOT / path).read_text(encoding="utf-8")
        lines[folder] += text.count("\n")
        for parts in imported_modules(text, path.parent.parts):
            if parts[0] == "offload_rt" and len(parts) > 1 and (other := folder_of(parts[1:])) != folder:
                uses[folder].add(other)
    return lines, uses


def places(lines: Counter[str]) -> dict[str, tuple[float, float, float]]:
    """Return the left edge, the top and the width of each box. The highest layer is at the top."""
    found, top = {}, float(MARGIN)
    for layer in reversed([[folder for folder in names if lines[folder]] for names in layers()]):
        if not layer:
            continue
        space = WIDTH - 2 * MARGIN - GAP * (len(layer) - 1)
        weights = [max(lines[folder] ** 0.5, 14.0) for folder in layer]
        scale = min(space / sum(weights), 7.0)
        left = (WIDTH - scale * sum(weights) - GAP * (len(layer) - 1)) / 2
        for folder, weight in zip(layer, weights, strict=True):
            found[folder] = left, top, scale * weight
            left += scale * weight + GAP
        top += LAYER
    return found


def draw(lines: Counter[str], uses: dict[str, set[str]]) -> str:
    where = places(lines)
    height = max(top for _, top, _ in where.values()) + LAYER
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">',
        "<title>Folders of offload_rt. Each imports only from the layers below it.</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fbfaf7"/>',
    ]
    box = LAYER - 34
    for folder, (left, top, width) in where.items():
        for other in sorted(uses[folder] & where.keys()):
            x, y, wide = where[other]
            start, end = (left + width / 2, top + box), (x + wide / 2, y)
            bend = (end[1] - start[1]) / 2
            out.append(
                f'<path d="M{start[0]:.0f} {start[1]:.0f} C{start[0]:.0f} {start[1] + bend:.0f} {end[0]:.0f} '
                f'{end[1] - bend:.0f} {end[0]:.0f} {end[1]:.0f}" fill="none" stroke="#8a9bb0" stroke-opacity="0.35"/>'
            )
    for folder, (left, top, width) in where.items():
        centre = left + width / 2
        out.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{box}" rx="5" fill="#e3ebf5" '
            f'stroke="#47658a"/><text x="{centre:.0f}" y="{top + 17:.0f}" text-anchor="middle" font-size="13" '
            f'fill="#1d2b3a">{folder}</text><text x="{centre:.0f}" y="{top + 32:.0f}" text-anchor="middle" '
            f'font-size="10" fill="#5a6b7d">{lines[folder]:,} lines</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    lines, uses = folders()
    Path(sys.argv[1]).write_text(draw(lines, uses), encoding="utf-8")
    total = sum(lines.values())
    for folder, count in lines.most_common():
        print(f"{folder:12} {count:6,} {count / total:6.1%}")


if __name__ == "__main__":
    main()
