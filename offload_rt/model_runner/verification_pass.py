"""Verification pass, which computes several tokens of several sequences at once, so that weights are read only once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch

from ..core import KVPart
from ..kernels.causal_blocks import BlockedAttention
from ..models.adapter import ModelAdapter
from ..models.full_attention import attend_layer
from ..models.recurrent import RecurrentState, RollbackState
from ..policies.base import Policy
from ..transfer.base import KVStorage, PrefilledLayer
from .prefill import attend_past_kv, pass_to_policy
from .sequence import Sequence


class VerificationPass:
    """Computes the next `counts[b]` tokens of each sequence b with full attention, but does not commit them.

    Slots for these tokens must be reserved. Recurrent layers compute adjacent sequences that have equal counts
    together.
    """

    def __init__(
        self, sequences: Seq[Sequence], counts: Seq[int], adapter: ModelAdapter, policy: Policy, storage: KVStorage
    ) -> None:
        self._sequences, self._token_counts = list(sequences), list(counts)
        self._policy, self._storage = policy, storage
        self._state = self._recurrent_state()
        self._adapter = adapter.with_state(self._state)
        self._shared: dict[tuple[int, int], PrefilledLayer] = {}
        """KV that later layers use again, by layer and sequence id."""

    def run(self) -> list[torch.Tensor]:
        adapter = self._adapter
        spans = [
            (sequence, range(sequence.position, sequence.position + n))
            for sequence, n in zip(self._sequences, self._token_counts, strict=True)
        ]
        tokens = torch.tensor([sequence.tokens[t] for sequence, span in spans for t in span], device=adapter.device)
        positions = torch.tensor([t + sequence.shift for sequence, span in spans for t in span], device=adapter.device)
        hidden = adapter.embed(tokens, positions)
        adapter.run_stages(-1, hidden, [slice(None)])
        for layer in range(adapter.geometry.layers):
            q, new = self._project(layer, adapter.attention_input(layer, hidden), positions)
            per_sequence = zip(self._sequences, q.split(self._token_counts, dim=1), new, strict=True)
            attended = [self._attend(layer, *inputs) for inputs in per_sequence]
            hidden = adapter.mlp(layer, adapter.after_attention(layer, hidden, torch.cat(attended)), tokens)
            adapter.run_stages(layer, hidden, [slice(None)])
        self._divide_recorded_inputs()
        return list(adapter.logits(hidden).split(self._token_counts))

    def _project(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Seq[KVPart | None]]:
        """Return q `[H, T, d]` for all tokens, and the new KV of each sequence (None if the layer stores no KV)."""
        adapter = self._adapter
        if adapter.geometry.kv_layer(layer) != layer:
            return adapter.lone_query(layer, attention_input, positions), [None] * len(self._sequences)
        q, k, v = adapter.qkv(layer, attention_input, positions)
        stops, rows = accumulate(self._token_counts), KVPart(k, v)
        return q, [rows.between(stop - n, stop) for n, stop in zip(self._token_counts, stops, strict=True)]

    def _recurrent_state(self) -> RecurrentState | None:
        slots = self._sequences[0].state_slots
        if slots is None:
            return None
        state = slots.view([sequence.state_slot for sequence in self._sequences], counts=self._token_counts)
        if any(self._recording_rollback(sequence) for sequence in self._sequences):
            state.inputs = {}  # The recurrent layers will record their inputs here.
        return state

    def _recording_rollback(self, sequence: Sequence) -> RollbackState | None:
        """Return the sequence's rollback state if this pass must record inputs for it, and None otherwise."""
        rollback = sequence.rollback
        return None if rollback is None or rollback.inputs is None or rollback.tokens != sequence.position else rollback

    def _divide_recorded_inputs(self) -> None:
        if self._state is None or self._state.inputs is None:
            return
        parts = {layer: inputs.split(self._token_counts) for layer, inputs in self._state.inputs.items()}
        for b, sequence in enumerate(self._sequences):
            if (rollback := self._recording_rollback(sequence)) is not None:
                # Clone, because a view would keep the inputs of the whole batch in memory.
                rollback.inputs = {layer: part[b].clone() for layer, part in parts.items()}

    def _layer_kv(self, layer: int, sequence: Sequence, new: KVPart | None) -> PrefilledLayer:
        """Store the new KV `[Hkv, m, d]` unless it is None. Return the KV that the layer attends to."""
        geometry = self._adapter.geometry
        if new is None:
            return self._shared[geometry.kv_layer(layer), sequence.id]
        rows = self._storage.extend_layer(sequence.blocks, layer, sequence.position, new)
        sequence.trace.bytes_requested += rows.bytes_to_device
        sequence.trace.bytes_to_host += rows.bytes_to_host
        if layer in geometry.shared_kv:
            self._shared[layer, sequence.id] = rows
        return rows

    def _attend(self, layer: int, sequence: Sequence, q: torch.Tensor, new: KVPart | None) -> torch.Tensor:
        """Return the attention output `[m, H * d]` of q `[H, m, d]`, after storing the new KV unless it is None."""
        rows, start = self._layer_kv(layer, sequence, new), sequence.position
        # The policy selects no tokens in sliding-window layers.
        learns = new is not None and self._adapter.geometry.windows[layer] is None
        if learns and self._policy.wants_queries:
            rows = rows.joined()
            sequence.state.on_queries(layer, q, rows.kv.k, start)
        observed = sequence.observed if sequence.unobserved else start
        observed = observed if learns else rows.first
        if rows.past:
            attended = self._attend_past(layer, sequence, q, rows, observed)
        else:
            attended = attend_layer(self._adapter, layer, q, rows.kv, start + sequence.shift)
        if learns:
            pass_to_policy(sequence.state, layer, rows.kv, rows.first, observed)
        return attended.transpose(0, 1).flatten(1)

    def _attend_past(
        self, layer: int, sequence: Sequence, q: torch.Tensor, rows: PrefilledLayer, observed: int
    ) -> torch.Tensor:
        """Return the attention output `[H, m, d]` of q over earlier KV and over `rows.kv`.

        The policy's state already includes the first `observed` tokens.
        """
        geometry = self._adapter.geometry
        attention = BlockedAttention(q, geometry.rows(layer).kv_heads, geometry.scales[layer], geometry.softcap)
        attend_past_kv(rows.past, [attention], sequence.state, layer, observed)
        attention.add_causal(rows.kv.k, rows.kv.v)
        return attention.result(self._adapter.sinks[layer])
