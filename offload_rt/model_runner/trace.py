"""What a run did, counted where it happens: a `Trace` per sequence, which `engine.stats` sums up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ..core import Visible
from ..kv_cache.disk.disk_use import DiskUse
from ..transfer.link import Ticket
from ..transfer.weights.host_weights import NOTHING_USED, WeightUse

MOST_PENDING = 4096
"""Counts left on the device before they are read: a wait in more than a hundred steps of a large model."""


class Recorder(Protocol):
    """Is told what one sequence attends to. The decode loop calls a trace's recorder where there is one."""

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        """The token at `position`, in a layer that selects, attends to those at positions `tokens` `[Hkv, n]` besides
        the resident ones; layers come in rising order."""
        ...


@dataclass(frozen=True)
class LinkUse:
    """What of a selection crosses the link: its rows of each of `heads` KV heads, K and V of one row `pair_bytes`
    bytes. Where some rows do not cross, `tally` int64 `[2]` on the device says how many do, and how many the working
    set had."""

    heads: int
    pair_bytes: int
    tally: torch.Tensor | None = None


@dataclass(frozen=True)
class _PendingCount:
    """Rows of a KV head that a layer attended to in a step, besides the `resident` ones, of `context` in all: `count`,
    an integer without axes, is still on the device."""

    step: int
    layer: int
    resident: int
    context: int
    count: torch.Tensor
    link_use: LinkUse | None = None


@dataclass
class Trace:
    """Counts of one sequence. Fractions are over the token rows that the model itself would attend to in the layer
    (a sliding window's rows where there is one), the newest token included.

    attended, fetched: `[steps][layers]` fractions of each decode step, and of each pass that verified drafts.
    drafted, accepted: tokens that were drafted, and of these the ones that verification left; draft_steps: decode steps
        that drafted, which gave no token by themselves; alone_seconds: what its tokens would have taken one by one, by
        the shortest pass of the request without drafts, infinite where there was none.
    diverged_at: the first token of the prompt of which no KV was known; None where nobody looked for it.
    missed: (step, `[layers]` missed attention mass, mean over query heads; 0 in dense layers) of each sampled step.
    savings: float64 `[4, layers]` on the device: bytes of `bytes_requested` that did not cross the link, token rows
        that the working set had, the sum over steps of their share of the context, and rows that were looked for; None
        where nothing could be saved.
    disk_before: of a pool on disk, what had been read and written when the sequence began.
    pending: what is not in `attended` and `fetched` yet, because only the device knows the counts: `settle`.
    prefill_weights, step_weights: what crossed of weights; what a batch shares is its first sequence's.
    recorder: is told what every decode step selects.
    """

    layers: int
    missed_every: int
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    bytes_requested: int = 0
    bytes_to_host: int = 0
    prefill_weights: WeightUse = NOTHING_USED
    step_weights: WeightUse = NOTHING_USED
    prompt_tokens: int = 0
    reused_tokens: int = 0
    diverged_at: int | None = None
    attended: list[list[float]] = field(default_factory=list)
    fetched: list[list[float]] = field(default_factory=list)
    missed: list[tuple[int, list[float]]] = field(default_factory=list)
    savings: torch.Tensor | None = None
    pending: list[_PendingCount] = field(default_factory=list)
    disk_before: DiskUse | None = None
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    alone_seconds: float = 0.0
    recorder: Recorder | None = None

    @property
    def draft_speedup(self) -> float | None:
        """Seconds that the decoded tokens would have taken one by one over those they took; None where no pass without
        drafts says."""
        known = self.decode_seconds and 0 < self.alone_seconds < math.inf
        return self.alone_seconds / self.decode_seconds if known else None

    @property
    def decoded_tokens(self) -> int:
        """Tokens that steps and verifying passes gave."""
        return len(self.attended) - self.draft_steps + self.accepted

    @property
    def bytes_to_device(self) -> int:
        """Bytes of rows that crossed the link. Waits for the device where only it knows."""
        self.settle()
        return self.bytes_requested - (0 if self.savings is None else int(self.savings[0].sum()))

    @property
    def hit_rate(self) -> float:
        """Share of the rows looked for that the working set had."""
        self.settle()
        if self.savings is None:
            return 0.0
        return float(self.savings[1].sum()) / max(1.0, float(self.savings[3].sum()))

    def hit_shares(self) -> list[float]:
        """`[layers]`: rows that the working set had over rows in context, mean over steps."""
        self.settle()
        if self.savings is None or not self.fetched:
            return [0.0] * self.layers
        shares: list[float] = (self.savings[2] / len(self.fetched)).tolist()
        return shares

    @property
    def measures_missed(self) -> bool:
        """Whether the current step measures the missed mass."""
        return self.missed_every > 0 and (len(self.attended) - 1) % self.missed_every == 0

    @property
    def measures_missed_next(self) -> bool:
        """Whether the next step will measure the missed mass."""
        return self.missed_every > 0 and len(self.attended) % self.missed_every == 0

    def settle(self) -> None:
        """Enters what only the device knew, and waits for it."""
        if not self.pending:
            return
        counts = torch.stack([one.count for one in self.pending]).tolist()
        for one, count in zip(self.pending, counts, strict=True):
            self._enter(one.step, one.layer, one.resident, one.context, count)
            if one.link_use is not None and one.link_use.tally is None:
                self.bytes_requested += count * one.link_use.heads * one.link_use.pair_bytes
        self._settle_savings(counts)
        self.pending.clear()

    def _settle_savings(self, counts: list[int]) -> None:
        """Enters the selections that did not cross the link as a whole."""
        uses = [(one, use, n) for one, n in zip(self.pending, counts, strict=True) if (use := one.link_use)]
        partial = [(one, use, n) for one, use, n in uses if use.tally is not None]
        if not partial:
            return
        tallies = torch.stack([use.tally for _, use, _ in partial if use.tally is not None])
        sums = torch.zeros(4, self.layers, dtype=torch.float64)
        for (one, use, count), (rows, hits) in zip(partial, tallies.tolist(), strict=True):
            self.bytes_requested += rows * use.pair_bytes
            shares = [hits, hits / use.heads / one.context, count * use.heads]
            sums[1:, one.layer] += torch.tensor(shares, dtype=torch.float64)
        sums = sums.to(tallies.device)
        self.savings = sums if self.savings is None else self.savings + sums

    def take_link_bytes(self, other: Trace) -> None:
        """Moves the bytes of rows that `other` counts, of a text that was read for this one, to these."""
        self.bytes_requested, other.bytes_requested = self.bytes_requested + other.bytes_requested, 0
        self.bytes_to_host, other.bytes_to_host = self.bytes_to_host + other.bytes_to_host, 0

    def copy(self) -> Trace:
        """An independent copy."""
        self.settle()
        rows = {"attended": [*self.attended], "fetched": [*self.fetched], "missed": [*self.missed]}
        savings = None if self.savings is None else self.savings.clone()
        return replace(self, **rows, savings=savings)  # type: ignore[arg-type]

    def restart(self, reused: int) -> Trace:
        """Of a sequence that begins with `reused` computed tokens of this one's: nothing has been spent on it."""
        before = self.disk_before
        return Trace(
            self.layers, self.missed_every, prompt_tokens=self.prompt_tokens, reused_tokens=reused, disk_before=before
        )

    def begin_step(self) -> None:
        """A decode step starts."""
        if len(self.pending) >= MOST_PENDING:
            self.settle()
        self.attended.append([0.0] * self.layers)
        self.fetched.append([0.0] * self.layers)
        if self.measures_missed:
            self.missed.append((len(self.attended) - 1, [0.0] * self.layers))

    def enter_whole_pass(self, windows: Sequence[int | None], fetched: float) -> None:
        """Enters a pass over all rows, of which the share `fetched` crossed the link but in layers with `windows`,
        which are resident."""
        self.attended.append([1.0] * self.layers)
        self.fetched.append([fetched if window is None else 0.0 for window in windows])

    def enter_rows(self, layer: int, visible: Visible, fetched: int | torch.Tensor) -> None:
        """Enters that `fetched` rows per KV head, besides the resident ones, are attended to in `layer`; adds up over
        repairs. A tensor is the counts of a `Selection`, which are read when they are needed."""
        step, resident, context = len(self.fetched) - 1, visible.resident, len(visible.all)
        if isinstance(fetched, torch.Tensor):
            self.pending.append(_PendingCount(step, layer, resident, context, fetched[0]))
        else:
            self._enter(step, layer, resident, context, fetched)

    def enter_selection(self, layer: int, visible: Visible, count: torch.Tensor, link_use: LinkUse) -> None:
        """Enters a selection of `count` tokens per KV head, and the bytes of it on the link; `count` is read when it is
        needed."""
        step, resident, context = len(self.fetched) - 1, visible.resident, len(visible.all)
        self.pending.append(_PendingCount(step, layer, resident, context, count, link_use))

    def _enter(self, step: int, layer: int, resident: int, context: int, fetched: int) -> None:
        self.fetched[step][layer] += fetched / context
        self.attended[step][layer] = resident / context + self.fetched[step][layer]

    def enter_savings(self, layer: int, visible: Visible, rows: int, ticket: Ticket) -> None:
        """Enters what of a ticket for `rows` rows per KV head did not cross the link, without asking the device."""
        if ticket.savings is None or not rows:
            return
        rows_of_all, hits = ticket.savings.rows, ticket.savings.hits
        if self.savings is None:
            self.savings = torch.zeros(4, self.layers, dtype=torch.float64, device=hits.device)
        asked = ticket.savings.asked
        self.savings[0, layer] += rows_of_all * (ticket.bytes // asked)
        self.savings[1, layer] += hits
        self.savings[2, layer] += hits.double() * (rows / asked / len(visible.all))
        self.savings[3, layer] += ticket.savings.selected

    def enter_missed_mass(self, layer: int, attended_lse: torch.Tensor, full_lse: torch.Tensor) -> None:
        """Enters 1 - exp(lse of the attended rows - lse of all rows), both `[H]`, averaged over heads."""
        mass = 1.0 - (attended_lse.to(full_lse) - full_lse).exp()
        self.missed[-1][1][layer] = max(0.0, float(mass.mean()))
