"""Counters of one sequence, from which `engine.stats` computes the statistics of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ..core import VisibleTokens
from ..kv_cache.disk.requests import DiskUse
from ..transfer.base import Savings
from ..transfer.weights.host_weights import NOTHING_USED, WeightUse

# Number of counts that may stay on the device before they are read, enough for about a hundred steps of a large model.
MAX_PENDING = 4096


class Recorder(Protocol):
    """Receives the tokens that one sequence selects."""

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        """Record that the token at `position` selected the tokens at positions `tokens`, int64 `[Hkv, n]`.

        For each position, this is called in ascending order of layers.
        """
        ...


@dataclass(frozen=True)
class TransferUse:
    heads: int  # KV heads
    entry_bytes: int  # size in bytes of a KV entry (K and V of one token and KV head)
    # Number of transferred entries and number of entries found on the device, int64 `[2]` on the device. None if all
    # selected entries are transferred.
    tally: torch.Tensor | None = None


@dataclass(frozen=True)
class _PendingCount:
    """Number of tokens per KV head that a layer has selected in a step. The number is still on the device."""

    step: int
    layer: int
    resident: int
    context: int
    count: torch.Tensor
    transfer_use: TransferUse | None = None


@dataclass
class Trace:
    """Counters of one sequence. A step is a decode step or a verification pass.

    Fractions are relative to the number of tokens that are visible in a layer, including the newest token.
    """

    layers: int
    missed_every: int
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    bytes_requested: int = 0
    prefill_bytes: int = 0  # the part of `bytes_requested` that the prefill has requested
    bytes_to_host: int = 0
    prefill_weights: WeightUse = NOTHING_USED
    # Weights transferred for decode steps. Only the first sequence of a batch counts them.
    step_weights: WeightUse = NOTHING_USED
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0  # see `Stats`
    diverged_at: int | None = None  # first prompt token that was not cached; None if there was no cache look-up
    attended: list[list[float]] = field(default_factory=list)  # exact attention fraction, `[steps][layers]`
    fetched: list[list[float]] = field(default_factory=list)  # fetched fraction, `[steps][layers]`
    # Sampled steps, as pairs (step, missed attention mass of each layer). The mass is the mean over query heads, and is
    # 0 for layers that attend to all tokens.
    missed: list[tuple[int, list[float]]] = field(default_factory=list)
    # float64 `[4, layers]` on the device. Row 0: how many of `bytes_requested` were not transferred. Row 1: number of
    # entries found on the device. Row 2: entries found per KV head, divided by the context length and summed over
    # steps. Row 3: number of entries looked up. None if there is neither a working set nor a shared block.
    savings: torch.Tensor | None = None
    # For each layer, the fraction of the context that full attention has read from copies of KV blocks on the device,
    # summed over steps.
    copied_shares: dict[int, float] = field(default_factory=dict)
    copied_entries: int = 0  # number of KV entries that full attention has read from these copies
    read_entries: int = 0  # number of all non-resident KV entries that full attention has read, if there are copies
    pending: list[_PendingCount] = field(default_factory=list)  # counts that are still on the device (`flush_pending`)
    disk_before: DiskUse | None = None  # disk-use counters at the time when the sequence began
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0  # number of decode steps that computed draft tokens
    # Estimated time in seconds for decoding the generated tokens without drafts. Infinite if unknown.
    seconds_without_drafts: float = 0.0
    recorder: Recorder | None = None
    measures_missed: bool = False

    @property
    def draft_speedup(self) -> float | None:
        """Estimated decode time without drafts divided by the measured decode time, or None if unknown."""
        is_known = self.decode_seconds and 0 < self.seconds_without_drafts < math.inf
        return self.seconds_without_drafts / self.decode_seconds if is_known else None

    @property
    def decoded_tokens(self) -> int:
        """Number of tokens that were computed by decode steps and verification passes."""
        return len(self.attended) - self.draft_steps + self.accepted

    @property
    def bytes_to_device(self) -> int:
        """Number of bytes of KV that were transferred to the device. Reading it may wait for the device."""
        self.flush_pending()
        return self.bytes_requested - (0 if self.savings is None else int(self.savings[0].sum()))

    @property
    def hit_rate(self) -> float:
        """Fraction of the looked-up entries that were found in the working set or in copies of blocks on the device."""
        self.flush_pending()
        hits, read = float(self.copied_entries), float(self.read_entries)
        if self.savings is not None:
            hits, read = hits + float(self.savings[1].sum()), read + float(self.savings[3].sum())
        return hits / max(1.0, read)

    def hit_shares(self) -> list[float]:
        """Return, for each layer, which fraction of the context was found on the device, averaged over steps."""
        self.flush_pending()
        if not self.fetched:
            return [0.0] * self.layers
        hits = [0.0] * self.layers if self.savings is None else self.savings[2].tolist()
        return [(own + self.copied_shares.get(layer, 0.0)) / len(self.fetched) for layer, own in enumerate(hits)]

    @property
    def measures_missed_next(self) -> bool:
        return self.missed_every > 0 and len(self.attended) % self.missed_every == 0

    def flush_pending(self) -> None:
        """Add the counts that are still on the device to the counters. The host waits for the device."""
        if not self.pending:
            return
        counts = torch.stack([pending.count for pending in self.pending]).tolist()
        for pending, count in zip(self.pending, counts, strict=True):
            self._add_fractions(pending.step, pending.layer, pending.resident, pending.context, count)
            if pending.transfer_use is not None and pending.transfer_use.tally is None:
                self.bytes_requested += count * pending.transfer_use.heads * pending.transfer_use.entry_bytes
        self._flush_savings(counts)
        self.pending.clear()

    def _flush_savings(self, counts: list[int]) -> None:
        uses = [(item, use, n) for item, n in zip(self.pending, counts, strict=True) if (use := item.transfer_use)]
        tallied = [(item, use, n) for item, use, n in uses if use.tally is not None]
        if not tallied:
            return
        tallies = torch.stack([use.tally for _, use, _ in tallied if use.tally is not None])
        sums = torch.zeros(4, self.layers, dtype=torch.float64)
        for (pending, use, count), (rows, hits) in zip(tallied, tallies.tolist(), strict=True):
            self.bytes_requested += rows * use.entry_bytes
            shares = [hits, hits / use.heads / pending.context, count * use.heads]
            sums[1:, pending.layer] += torch.tensor(shares, dtype=torch.float64)
        sums = sums.to(tallies.device)
        self.savings = sums if self.savings is None else self.savings + sums

    def absorb_transferred_bytes(self, other: Trace) -> None:
        """Move the counts of transferred bytes from `other` to this trace.

        `other` is the trace of a sequence that has computed tokens for this sequence.
        """
        self.bytes_requested, other.bytes_requested = self.bytes_requested + other.bytes_requested, 0
        self.prefill_bytes, other.prefill_bytes = self.prefill_bytes + other.prefill_bytes, 0
        self.bytes_to_host, other.bytes_to_host = self.bytes_to_host + other.bytes_to_host, 0

    def copy(self) -> Trace:
        self.flush_pending()
        rows = {"attended": [*self.attended], "fetched": [*self.fetched], "missed": [*self.missed]}
        savings = None if self.savings is None else self.savings.clone()
        return replace(self, **rows, savings=savings, copied_shares={**self.copied_shares})  # type: ignore[arg-type]

    def restart(self, reused: int) -> Trace:
        """Return a new trace for a sequence that starts with the first `reused` tokens of this sequence."""
        before = self.disk_before
        return Trace(
            self.layers, self.missed_every, prompt_tokens=self.prompt_tokens, reused_tokens=reused, disk_before=before
        )

    def begin_step(self) -> None:
        if len(self.pending) >= MAX_PENDING:
            self.flush_pending()
        self.measures_missed = self.measures_missed_next
        self.attended.append([0.0] * self.layers)
        self.fetched.append([0.0] * self.layers)
        if self.measures_missed:
            self.missed.append((len(self.attended) - 1, [0.0] * self.layers))

    def record_verification(self, windows: Sequence[int | None], fetched: float) -> None:
        """Record a verification pass that fetched the fraction `fetched` of the tokens in full-attention layers."""
        self.attended.append([1.0] * self.layers)
        self.fetched.append([fetched if window is None else 0.0 for window in windows])

    def record_fetch(
        self,
        layer: int,
        visible: VisibleTokens,
        fetched: int | torch.Tensor,
        transfer_use: TransferUse | None = None,
    ) -> None:
        """Record that `layer` attended to `fetched` tokens per KV head in addition to the resident tokens.

        Args:
            visible: Tokens that the layer could attend to.
            fetched: Number of tokens. If it is a tensor, it stays on the device until `flush_pending`.
            transfer_use: Numbers for computing the transferred bytes if `fetched` is a tensor. None if the caller
                counts these bytes.
        """
        step, resident, context = len(self.fetched) - 1, visible.resident, len(visible.all)
        if isinstance(fetched, torch.Tensor):
            self.pending.append(_PendingCount(step, layer, resident, context, fetched, transfer_use))
        else:
            self._add_fractions(step, layer, resident, context, fetched)

    def _add_fractions(self, step: int, layer: int, resident: int, context: int, fetched: int) -> None:
        self.fetched[step][layer] += fetched / context
        self.attended[step][layer] = resident / context + self.fetched[step][layer]

    def record_copies(self, layer: int, visible: VisibleTokens, copied: int, tokens: int, heads: int) -> None:
        """Record how many of the `tokens` that full attention has read were in copies of blocks on the device."""
        self.copied_shares[layer] = self.copied_shares.get(layer, 0.0) + copied / len(visible.all)
        self.copied_entries += copied * heads
        self.read_entries += tokens * heads

    def record_savings(self, layer: int, visible: VisibleTokens, rows: int, savings: Savings, size: int) -> None:
        """Record how much of a fetch with `rows` tokens per KV head and `size` bytes did not need a transfer."""
        if not rows:
            return
        if self.savings is None:
            self.savings = torch.zeros(4, self.layers, dtype=torch.float64, device=savings.hits.device)
        self.savings[0, layer] += savings.not_transferred * (size // savings.requested)
        self.savings[1, layer] += savings.hits
        self.savings[2, layer] += savings.hits.double() * (rows / savings.requested / len(visible.all))
        self.savings[3, layer] += savings.selected

    def record_missed_mass(self, layer: int, attended_lse: torch.Tensor, full_lse: torch.Tensor) -> None:
        """Record the missed attention mass of a layer: 1 - exp(attended_lse - full_lse), averaged over heads.

        The arguments are the log-sum-exps `[H]` over the attended tokens and over all visible tokens.
        """
        mass = 1.0 - (attended_lse.to(full_lse) - full_lse).exp()
        self.missed[-1][1][layer] = max(0.0, float(mass.mean()))
