"""One pass over all rows for the next few tokens of several sequences: a small prefill of each, with the weights read
once for all of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from ..core import KVPart
from ..kernels.causal import attend_causal
from ..models.adapter import ModelAdapter
from ..transfer.link import KVStorage
from .sequence import Sequence


class WholePass:
    """The next `counts[b]` tokens of sequence b, which has slots for them, each attending to all rows before it of its
    own sequence. Rows, scoring keys and windows are written; nothing is committed."""

    def __init__(self, sequences: Seq[Sequence], counts: Seq[int], adapter: ModelAdapter, storage: KVStorage) -> None:
        self._sequences, self._counts = list(sequences), list(counts)
        self._adapter, self._storage = adapter, storage

    def run(self) -> list[torch.Tensor]:
        """float32 logits `[counts[b], V]` of what follows each of the tokens."""
        adapter = self._adapter
        spans = [
            (one, range(one.position, one.position + n)) for one, n in zip(self._sequences, self._counts, strict=True)
        ]
        tokens = torch.tensor([one.tokens[t] for one, span in spans for t in span], device=adapter.device)
        positions = torch.tensor([t + one.shift for one, span in spans for t in span], device=adapter.device)
        hidden = adapter.embed(tokens, positions)
        for layer in range(adapter.geometry.layers):
            rows = adapter.qkv(layer, adapter.attention_input(layer, hidden), positions)
            each = zip(self._sequences, *(x.split(self._counts, dim=1) for x in rows), strict=True)
            attended = [self._attend(layer, one, q, KVPart(k, v)) for one, q, k, v in each]
            hidden = adapter.mlp(layer, adapter.after_attention(layer, hidden, torch.cat(attended)))
        return list(adapter.logits(hidden).split(self._counts))

    def _attend(self, layer: int, sequence: Sequence, q: torch.Tensor, new: KVPart) -> torch.Tensor:
        """Attention `[m, H * d]` of one sequence's m tokens, with queries q `[H, m, d]` and rows `new` `[Hkv, m, d]`,
        which are stored. The policy hears nothing of sliding layers, which select nothing."""
        geometry, state, start = self._adapter.geometry, sequence.state, sequence.position
        stored = self._storage.prefill_layer(sequence.blocks, layer, start, [new])
        sequence.trace.bytes_requested += stored.bytes_to_device
        sequence.trace.bytes_to_host += stored.bytes_to_host
        k, v, window = stored.kv.k, stored.kv.v, geometry.windows[layer]
        if window is None:
            learned = sequence.learned if sequence.unlearned else start
            state.on_queries(layer, q, k, start)
            state.on_keys(layer, k[:, learned:], learned)
            state.on_values(layer, v[:, learned:], learned)
        sinks = self._adapter.sinks(layer)
        attended = attend_causal(q, k, v, geometry.scales[layer], window, geometry.softcap, sinks)
        return attended.transpose(0, 1).flatten(1)
