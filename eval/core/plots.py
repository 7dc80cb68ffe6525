"""Plots. Each figure is written as a PNG file, together with a JSON file that contains the plotted data."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from .report import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#72b7b2", "#9d755d", "#222222", "#ff9da6")
MARKERS = "osD^vPX*p"
MOST_INSIDE = 7
"""The legend of an axis with more lines is to the right of it."""


@contextmanager
def picture(path: Path, title: str, data: Any, *, panels: tuple[int, int] = (1, 1)) -> Iterator[list[Axes]]:
    """Yield the axes of a new figure, row by row.

    At the end of the `with` block, write the figure to `path` and `data` to a JSON file next to it.

    `panels` is (rows, columns). Axes without data are hidden.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = panels
    figure = Figure(figsize=(0.6 + 5.4 * columns, 0.6 + 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, wrap=True)
    axes = [axis for line in figure.subplots(rows, columns, squeeze=False) for axis in line]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    yield axes
    for axis in axes:
        axis.set_visible(axis.has_data())
        if series := len(axis.get_legend_handles_labels()[0]):
            place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if series > MOST_INSIDE else {}
            axis.legend(fontsize=8, frameon=False, **place)
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.getvalue())
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error
    write_text(path.with_suffix(".json"), json.dumps({"title": title, "data": data}, indent=1) + "\n")


def lines(
    axis: Axes,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    percent: str = "",
    errors: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Plot one line per name in `series`.

    Args:
        series: Points (x, y) by name.
        percent: The axes to label in percent: "x", "y" or "xy".
        errors: By name, the lengths of each point's error bar as (below, above).
    """
    from matplotlib.ticker import PercentFormatter

    for i, (name, points) in enumerate(series.items()):
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        style |= {"markersize": 4, "linewidth": 1.3, "label": name}
        if errors is not None and name in errors:
            bars = list(zip(*errors[name], strict=True))
            axis.errorbar(xs, ys, yerr=bars, capsize=2, elinewidth=0.8, **style)
        else:
            axis.plot(xs, ys, **style)
    axis.set(xlabel=x, ylabel=y)
    for name in percent:
        getattr(axis, f"{name}axis").set_major_formatter(PercentFormatter(1.0, decimals=None))
