"""Draws the house: the package's rooms on the floors of their order, sized by lines, with the imports between them.

    python docs/house.py docs/pages/house.svg

The order is that of `tests/unit/project/test_layering.py`. Imports and lines are read from the code at each call. Print
a table of folders, their lines and their share, for the architecture page.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "project"))

from test_layering import EVAL_ORDER, ORDER, files, imported  # noqa: E402

EVAL = [[f"eval/{folder}" for folder in floor.split()] for floor in EVAL_ORDER]
"""The floors of the evaluation's own rooms, which stand where the order says `eval`."""

WIDTH, FLOOR, GAP, MARGIN = 1080, 74, 14, 24
"""Of the picture, in pixels: its width, the height of a floor, between rooms, around everything."""


def floors() -> list[list[str]]:
    """Rooms floor by floor, from the ground up."""
    found: list[list[str]] = []
    for rank in ORDER:
        names = rank.split()
        beside = [name for name in names if name != "eval"]
        found += [*EVAL[:-1], [*EVAL[-1], *beside]] if "eval" in names else [names]
    return found


def room_of(parts: tuple[str, ...]) -> str:
    """The room that a module's name lies in, given what follows `offload_rt`."""
    return "/".join(parts[:2]) if parts[0] == "eval" and len(parts) > 1 else parts[0]


def rooms() -> tuple[Counter[str], dict[str, set[str]]]:
    """Lines of every room, and which rooms it imports."""
    lines: Counter[str] = Counter()
    uses: dict[str, set[str]] = defaultdict(set)
    for path in files():
        if path.parts[0] != "offload_rt":
            continue
        room, text = room_of(path.with_suffix("").parts[1:]), (ROOT / path).read_text(encoding="utf-8")
        lines[room] += text.count("\n")
        for name in imported(ast.parse(text), path.parent.parts):
            parts = [part for part in name if part]
            if parts[0] == "offload_rt" and len(parts) > 1 and (other := room_of(tuple(parts[1:]))) != room:
                uses[room].add(other)
    return lines, uses


def places(lines: Counter[str]) -> dict[str, tuple[float, float, float]]:
    """Left edge, top and width of each room: the top floor is what nothing imports; widths go by lines."""
    found, top = {}, float(MARGIN)
    for floor in reversed([[room for room in names if lines[room]] for names in floors()]):
        if not floor:
            continue
        room_for = WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)
        weights = [max(lines[room] ** 0.5, 14.0) for room in floor]
        scale = min(room_for / sum(weights), 7.0)
        left = (WIDTH - scale * sum(weights) - GAP * (len(floor) - 1)) / 2
        for room, weight in zip(floor, weights, strict=True):
            found[room] = left, top, scale * weight
            left += scale * weight + GAP
        top += FLOOR
    return found


def draw(lines: Counter[str], uses: dict[str, set[str]]) -> str:
    """The picture as SVG."""
    where = places(lines)
    height = max(top for _, top, _ in where.values()) + FLOOR
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">',
        "<title>The rooms of offload_rt; each imports only from the floors below it</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fbfaf7"/>',
    ]
    box = FLOOR - 34
    for room, (left, top, width) in where.items():
        for other in sorted(uses[room] & where.keys()):
            x, y, wide = where[other]
            start, end = (left + width / 2, top + box), (x + wide / 2, y)
            bend = (end[1] - start[1]) / 2
            out.append(
                f'<path d="M{start[0]:.0f} {start[1]:.0f} C{start[0]:.0f} {start[1] + bend:.0f} {end[0]:.0f} '
                f'{end[1] - bend:.0f} {end[0]:.0f} {end[1]:.0f}" fill="none" stroke="#8a9bb0" stroke-opacity="0.35"/>'
            )
    for room, (left, top, width) in where.items():
        centre = left + width / 2
        out.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{box}" rx="5" fill="#e3ebf5" '
            f'stroke="#47658a"/><text x="{centre:.0f}" y="{top + 17:.0f}" text-anchor="middle" font-size="13" '
            f'fill="#1d2b3a">{room}</text><text x="{centre:.0f}" y="{top + 32:.0f}" text-anchor="middle" '
            f'font-size="10" fill="#5a6b7d">{lines[room]:,} lines</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    """Writes the picture that the one argument names, and prints the table."""
    lines, uses = rooms()
    Path(sys.argv[1]).write_text(draw(lines, uses), encoding="utf-8")
    total = sum(lines.values())
    for room, count in lines.most_common():
        print(f"{room:12} {count:6,} {count / total:6.1%}")


if __name__ == "__main__":
    main()
