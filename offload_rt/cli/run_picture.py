"""Plots of the statistics of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..outputs import Stats
from .tables import dense_layers

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

BAR, LINE, WORST = "#4c78a8", "#222222", "#e45756"


def _title(stats: Stats) -> str:
    tokens = f"{stats.prompt_tokens:,} + {stats.new_tokens:,} tokens"
    return f"{stats.model} · {stats.policy} · {tokens} · dense layers: {dense_layers(stats)}"


def _attended_panel(figure: Figure, axes: Axes, stats: Stats) -> None:
    """Draw a heat map of the exact attention fraction by layer and decode step, with a logarithmic colour scale."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_title("Exact attention fraction", loc="left", fontsize=10)
    axes.set(xlabel="decode step", ylabel="layer")
    if not stats.attended_by_step:
        axes.text(0.5, 0.5, "no decode steps", ha="center", va="center", transform=axes.transAxes)
        return
    attended = np.asarray(stats.attended_by_step).T
    lowest = max(1e-4, min(0.1, float(attended.min())))
    image = axes.imshow(
        attended.clip(min=lowest), aspect="auto", interpolation="nearest", cmap="viridis", norm=LogNorm(lowest, 1.0)
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    steps = [f for f in (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0) if lowest <= f]
    bar = figure.colorbar(image, ax=axes, ticks=steps, format=PercentFormatter(1.0), pad=0.015)
    bar.minorticks_off()
    bar.set_label("fraction of KV entries")


def _missed_by_layer_panel(axes: Axes, missed: NDArray[np.float64], dense: tuple[int, ...]) -> None:
    """Draw mean and range of `missed` `[sampled steps, layers]` per layer, and the mean of the sparse layers."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    layers = np.arange(missed.shape[1])
    selecting = np.setdiff1d(layers, dense)
    mean = missed.mean(axis=0)
    spread = np.abs(np.stack((mean - missed.min(axis=0), missed.max(axis=0) - mean)))
    axes.bar(layers[selecting], mean[selecting], color=BAR, label="mean over sampled steps")
    axes.errorbar(
        layers[selecting], mean[selecting], spread[:, selecting], fmt="none", ecolor=LINE, capsize=3, label="range"
    )
    axes.axhline(float(mean[selecting].mean()), color=WORST, linestyle="--", linewidth=1.2, label="mean of the layers")
    for layer in dense:
        axes.annotate("dense", (layer, 0), ha="center", va="bottom", fontsize=8, rotation=90, color="grey")
    axes.set_xlim(-0.6, missed.shape[1] - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))


def _missed_by_step_panel(axes: Axes, steps: list[int], missed: NDArray[np.float64], dense: tuple[int, ...]) -> None:
    """Draw mean and maximum over the sparse layers at each sampled step."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    chosen = np.delete(missed, list(dense), axis=1)
    axes.plot(steps, chosen.max(axis=1), color=WORST, marker=".", label="worst layer")
    axes.plot(steps, chosen.mean(axis=1), color=BAR, marker=".", label="mean of the layers")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _missed_panels(by_layer: Axes, by_step: Axes, stats: Stats) -> None:
    """Draw both panels of the missed attention mass, or a note that it was not measured."""
    import numpy as np
    from matplotlib.ticker import PercentFormatter

    by_layer.set_title("Missed attention mass per layer", loc="left", fontsize=10)
    by_layer.set(xlabel="layer", ylabel="share of the softmax")
    by_step.set_title("Missed attention mass over time", loc="left", fontsize=10)
    by_step.set(xlabel="decode step", ylabel="share of the softmax")
    if not stats.missed_by_step or len(stats.dense_layers) >= stats.layers:
        for axes in (by_layer, by_step):
            axes.text(
                0.5, 0.5, "missed attention mass is zero or was not measured", ha="center", transform=axes.transAxes
            )
            axes.set(xticks=[], yticks=[])
        return
    missed = np.asarray([masses for _, masses in stats.missed_by_step])
    _missed_by_layer_panel(by_layer, missed, stats.dense_layers)
    _missed_by_step_panel(by_step, [step for step, _ in stats.missed_by_step], missed, stats.dense_layers)
    for axes in (by_layer, by_step):
        axes.set_ylim(0.0, max(0.01, float(missed.max()) * 1.35))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
        axes.spines[["top", "right"]].set_visible(False)


def plot_run(stats: Stats, path: Path | str) -> None:
    """Plot the exact attention fraction and the missed attention mass by layer and step to the PNG file `path`.

    Raises InputError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(stats), fontsize=11, wrap=True)
    grid = figure.add_gridspec(2, 2)
    _attended_panel(figure, figure.add_subplot(grid[0, :]), stats)
    _missed_panels(figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1]), stats)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise InputError(f"cannot write the plot {str(path)!r}: {error.strerror}") from error
