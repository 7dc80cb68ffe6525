"""One decode step of a batch: the layer loop of DESIGN section 3, top to bottom.

While layer l computes, the rows of layer l + 1 are on the link. What they are is speculated from what layer l knows
(InfiniGen §4.3): its attention input, or the residual after its attention. A dense layer needs no speculation and is
requested first of all. How layers select is another's: `apart.py`, `together.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.dispatch import attend_runs
from ..kernels.segments import Run
from ..transfer.link import Ticket
from .batch import Fetched, Step, Strategy
from .per_sequence import Fetch, PerSequenceFetch, count
from .sequence import Sequence
from .shared_prefix import Segment


class DecodeStep:
    """Computes the next token of each sequence of a batch: token `tokens[position]` of each goes in, logits come out.
    `slots.begin_step` must have made room for it; the caller commits it afterwards. Sequences never see each other:
    each gets what it would get alone, though what several have in common is fetched once for all, and in dense layers
    read once."""

    def __init__(self, step: Step, selecting: Strategy) -> None:
        self.step, self.selecting = step, selecting
        self.batch, self.adapter, self.link = step.batch, step.adapter, step.link
        self.tokens, self.positions = selecting.inputs()

    def run(self) -> torch.Tensor:
        """float32 logits `[B, V]`."""
        self.begin()
        logits = self.compute()
        self.selecting.finish()
        return logits

    def begin(self) -> None:
        """What comes before the first launch."""
        for sequence in self.batch:
            sequence.trace.begin_step()
            self._evict(sequence)

    def compute(self) -> torch.Tensor:
        """The layers: logits."""
        adapter, selecting = self.adapter, self.selecting
        x = adapter.embed(self.tokens, self.positions)
        fetched = self._fetch_dense(0)
        for layer in range(self.step.geometry.layers):
            attention_input = adapter.attention_input(layer, x)
            q, k, v = adapter.qkv(layer, attention_input, self.positions)
            selecting.append(layer, k, v)
            fetched = fetched or selecting.fetch(layer, q)

            upcoming = self._fetch_dense(layer + 1)
            if self._speculates(layer + 1, "attention_input"):
                upcoming = self._fetch_speculated(layer + 1, attention_input)
            if self._speculates(layer + 1, "normed_input"):
                upcoming = self._fetch_speculated(layer + 1, adapter.attention_input(layer + 1, x))

            attended = fetched.attend(q)
            residual = adapter.after_attention(layer, x, attended)
            if self._speculates(layer + 1, "residual"):
                upcoming = self._fetch_speculated(layer + 1, adapter.attention_input(layer + 1, residual))
            x = adapter.mlp(layer, residual)
            fetched = upcoming
        return adapter.logits(x)

    def _evict(self, sequence: Sequence) -> None:
        """In a full pool the token that leaves the window moves to its victim's slot, in every layer, before any layer
        selects or fetches."""
        for layer in range(self.step.geometry.layers):
            if (moved := sequence.slots.displaced(layer)) is not None:
                self.link.storage.move(sequence.blocks, layer, *moved)
                if self.step.selects(layer):
                    sequence.state.on_moved(layer, *moved)

    def _speculates(self, layer: int, query_source: str) -> bool:
        return self.step.selects(layer) and self.step.policy.query_source == query_source

    def _fetch_speculated(self, layer: int, attention_input: torch.Tensor) -> Fetched:
        """`attention_input` `[B, D]`: the guess of what layer `layer` will project."""
        guess = self.step.policy.correct_guess(layer, attention_input)
        return self.selecting.fetch(layer, self.adapter.query(layer, guess, self.positions))

    def _fetch_dense(self, layer: int) -> Fetched | None:
        """Requests everything, if `layer` exists and is dense: first what is shared, then what each has for itself."""
        step = self.step
        if layer not in step.policy.dense_layers:
            return None
        if (everything := self.selecting.fetch_all(layer)) is not None:
            return everything
        seen, segments, block_tables = step.see(layer), step.sharing.segments, [s.blocks for s in self.batch]
        if any(visible.all.start for visible in seen):
            segments = ()  # a sliding window, which begins elsewhere for each
        shared = [
            (segment, self.link.rows.fetch_range(block_tables[segment.first], layer, segment.tokens))
            for segment in segments
        ]
        for segment, ticket in shared:
            self.batch[segment.first].trace.bytes_asked += ticket.bytes
        own = [step.sharing.own(b, visible) for b, visible in enumerate(seen)] if shared else seen
        tickets = [
            self.link.rows.fetch(blocks, layer, visible, None)
            for blocks, visible in zip(block_tables, own, strict=True)
        ]
        fetches = count(step, layer, tickets, [None] * len(tickets))
        return (
            SharedPrefixFetch(step.geometry.scales[layer], shared, fetches)
            if shared
            else PerSequenceFetch(step, layer, fetches)
        )


@dataclass(frozen=True)
class SharedPrefixFetch:
    """Rows of segments that several sequences share, and what each has for itself."""

    scale: float
    segments: list[tuple[Segment, Ticket]]
    own: list[Fetch]

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """See `Fetched.attend`: each shared row is read once."""
        tickets = [(segment.first, segment.stop, ticket) for segment, ticket in self.segments]
        tickets += [(b, b + 1, fetch.ticket) for b, fetch in enumerate(self.own)]
        runs = [Run(first, stop, part.k, part.v) for first, stop, ticket in tickets for part in ticket.wait()]
        out, _ = attend_runs(q, runs, self.scale)
        return out.to(q.dtype).transpose(0, 1).flatten(1)
