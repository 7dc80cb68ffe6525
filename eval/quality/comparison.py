"""Compare a policy with full attention on a generated text, in quality, speed, transfers and memory.

The same text is scored under the policy and under full attention, so every position has the same context under both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...engine.scoring import score
from ...errors import ConfigError
from ...llm import LLM
from ...outputs import Stats
from ...sampling_params import SamplingParams
from ...utils.units import format_size
from ..core.plots import picture
from .divergence import Divergence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from ...model_runner.trace import Recorder

MAX_SCORED = 256
"""Maximum number of new tokens to compare.

It is limited because log-probabilities of the whole vocabulary are kept per token.
"""

MAX_OTHERS = 17
"""Number of new tokens that the policies in `OTHERS` decode.

It is enough for two measurements of missed attention mass.
"""

BINS = 160
"""Number of position ranges (bins) in the plot of the selected positions."""

NOT_MEASURED = "The attention mass was not measured.\nSet --missed-mass-every 16."

LABELLED = 0.14
"""In the plot, bars shorter than this fraction of the axis get no label."""

OTHERS: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("infinigen", {"preset": "rows"}, "infinigen without\napproximate KV"),
    ("streaming", {}, "streaming"),
)
"""Policies that the plot shows for comparison, each as (policy, options, label)."""


class SelectionHistogram:
    """Counts how often each position of a text of `size` tokens is selected, over all layers and KV heads.

    Attributes:
        steps: For each decode step, the number of selected positions per bin, `[BINS]`.
    """

    def __init__(self, size: int) -> None:
        self.size, self._position = size, -1
        self.steps: list[NDArray[np.int64]] = []

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        """Count the positions `tokens` `[Hkv, n]` that a layer selects in the decode step for `position`."""
        if position != self._position:
            self._position = position
            self.steps.append(np.zeros(BINS, np.int64))
        self.steps[-1] += np.bincount(tokens.cpu().numpy().ravel() * BINS // self.size, minlength=BINS)


@dataclass(frozen=True)
class Comparison:
    policy: Stats  # statistics of the generation with the policy
    full: Stats  # statistics of the generation with full attention and the same seed
    full_tokens: list[int]  # tokens that full attention generated
    kl: float  # mean KL(full || policy) of the next-token distributions, in nats
    top_1: float  # fraction of positions with the same most probable token
    scored: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    llm: LLM, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, plot: Path | None = None
) -> Comparison:
    stats, full, divergence = llm.last_stats, llm.under("full"), Divergence()
    full_tokens = [event.token_id for event in full.stream(list(prompt), params)]
    assert stats is not None and full.last_stats is not None
    scored, rows = list(tokens[:MAX_SCORED]), list[torch.Tensor]()
    # If `exact` is set, one pass of full attention scores several tokens.
    _replay(llm.under("full", exact="lookup"), prompt, scored, rows.append)
    expected, selections = iter(rows), SelectionHistogram(len(prompt) + len(scored))
    recorder = None if plot is None else selections
    _replay(llm, prompt, scored, lambda row: divergence.add(next(expected), row), recorder)
    if plot is not None:
        bars = {"full": full.last_stats, llm.config.policy: stats}
        for policy, options, label in OTHERS:
            with suppress(ConfigError):  # raised if the context is too short for the policy's budget
                bars[label] = _replay(llm.under(policy, options), prompt, scored[:MAX_OTHERS])
        _draw(plot, llm, selections, bars, len(prompt))
    kl, top_1 = float(np.mean(divergence.kl)), float(np.mean(divergence.agrees))
    return Comparison(stats, full.last_stats, full_tokens, kl, top_1, len(scored))


def _replay(
    llm: LLM,
    prompt: Sequence[int],
    tokens: Sequence[int],
    on_logprobs: Callable[[torch.Tensor], None] = lambda row: None,
    recorder: Recorder | None = None,
) -> Stats:
    """Decode the given `tokens` after `prompt`, no matter which tokens the model predicts. Return the statistics.

    For each token, `on_logprobs` is called with the log-probabilities `[V]`, in float32 on the CPU.
    """
    with llm.runner.pool.lock:
        [found] = score(
            llm.runner, [prompt], [tokens], decode_from=None, batch=1, recorder=recorder,
            on_logprobs=lambda _, row: on_logprobs(row.float().cpu()),
        )  # fmt: skip
    return found.stats


def _draw(path: Path, llm: LLM, selections: SelectionHistogram, bars: Mapping[str, Stats], prompt: int) -> None:
    counts = np.stack(selections.steps) if selections.steps else np.zeros((1, BINS), np.int64)
    sizes = {name: stats.h2d_bytes_per_token for name, stats in bars.items()}
    masses = {name: _masses(stats) for name, stats in bars.items()}
    measured = {name: each for name, each in masses.items() if each is not None}
    data = {"selected": counts.tolist(), "positions": selections.size, "h2d_bytes_per_token": sizes, "mass": measured}
    title = f"{llm.name}, {prompt:,} tokens of context: policy {llm.config.policy} beside full attention"
    with picture(path, title, data, panels=(1, 3)) as axes:
        _draw_selections(axes[0], counts, selections.size, prompt, llm.runner.policy.recent)
        _draw_transfers(axes[1], sizes)
        if measured.keys() - {"full"}:
            _draw_masses(axes[2], measured)
        else:
            axes[2].axis("off")
            axes[2].text(0.5, 0.5, NOT_MEASURED, ha="center", va="center", transform=axes[2].transAxes)


def _masses(stats: Stats) -> tuple[float, float, float] | None:
    """Return which fractions of the attention mass were exact, approximate and missed, or None if this was not
    measured.
    """
    rest = 0.0 if stats.policy == "full" else stats.missed_mass
    if rest is None:
        return None
    return (1 - rest, rest, 0.0) if stats.approximate_bytes_device else (1 - rest, 0.0, rest)


def _draw_selections(axis: Axes, counts: NDArray[np.int64], size: int, prompt: int, recent: int) -> None:
    from matplotlib.colors import PowerNorm

    steps = len(counts)
    axis.imshow(
        counts, aspect="auto", cmap="Blues", norm=PowerNorm(0.5), extent=(0, size, steps, 0), interpolation="nearest"
    )
    newest = prompt + np.arange(steps + 1)
    axis.fill_betweenx(np.arange(steps + 1), newest - recent, newest, color="#f58518", alpha=0.6, linewidth=0)
    axis.set(
        title="positions with exact attention\nblue: copied (darker: more heads), orange: on the device",
        xlabel="position in the text", ylabel="new token",
    )  # fmt: skip
    axis.grid(visible=False)


def _draw_transfers(axis: Axes, sizes: Mapping[str, float]) -> None:
    names = list(sizes)
    axis.barh(names, list(sizes.values()), color="#4c78a8", height=0.6)
    for place, size in enumerate(sizes.values()):
        axis.text(size, place, f" {format_size(size)}", va="center", fontsize=8)
    axis.set(title="KV copied to the device per token", xlim=(0, 1.25 * max(1.0, *sizes.values())))
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.invert_yaxis()


def _draw_masses(axis: Axes, masses: Mapping[str, tuple[float, float, float]]) -> None:
    from matplotlib.ticker import PercentFormatter

    styles = (("exact", "#4c78a8", "white"), ("approximate KV", "#9ecae1", "black"), ("missed", "#e45756", "white"))
    start = np.zeros(len(masses))
    for (label, colour, ink), part in zip(styles, np.array(list(masses.values())).T, strict=True):
        axis.barh(list(masses), part, left=start, color=colour, height=0.6)
        for place, (left, share) in enumerate(zip(start, part, strict=True)):
            if share > LABELLED:
                axis.text(
                    left + share / 2, place, f"{share:.0%}\n{label}", color=ink, fontsize=8, ha="center", va="center"
                )
        start += part
    axis.set(title="attention: exact, approximate or missed", xlim=(0, 1))
    axis.xaxis.set_major_formatter(PercentFormatter(1.0))
    axis.grid(visible=False)
    axis.invert_yaxis()
