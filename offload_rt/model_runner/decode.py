"""One decode step of a batch: the layer loop, from top to bottom.

While layer l computes, the KV of layer l + 1 is fetched. The tokens to fetch are selected with a query that is
predicted from layer l's attention input, or from the residual after its attention (InfiniGen §4.3). In hybrid models,
the query may be predicted later, between the decoder layers before layer l + 1. If layer l + 1 is dense, its fetch
needs no prediction. `per_sequence.py` and `batched.py` implement the selection.
"""

from __future__ import annotations

import torch

from .batch import Attend, DecodeBatch
from .per_sequence import PerSequenceMode


class DecodeStep:
    """Computes the token `tokens[position]` of each sequence in a batch, and returns the logits for the next token.

    Before the step, `slots.begin_step` must have reserved a slot for the token. After the step, the caller commits the
    token. The result of a sequence does not depend on other sequences in the batch.
    """

    def __init__(self, batch: DecodeBatch, mode: PerSequenceMode) -> None:
        self.batch, self.mode = batch, mode
        self.adapter = batch.adapter.with_state(mode.state())
        self.tokens, self.positions = mode.inputs()

    def run(self) -> torch.Tensor:
        self.begin()
        logits = self.compute()
        self.mode.finish()
        return logits

    def begin(self) -> None:
        """Record the start of the step in the traces, and free the slots of the newest tokens if tokens are evicted."""
        batch = self.batch
        for sequence in batch.sequences:
            sequence.trace.begin_step()
            # Free the slot of the newest token before the first layer selects tokens.
            for layer, (slot, victim) in sequence.slots.moves.items():
                batch.transfer.storage.displace(sequence.blocks, layer, slot, victim)
                if layer in batch.policy_layers:
                    sequence.state.on_moved(layer, slot, victim)

    def compute(self) -> torch.Tensor:
        """Run all layers and return float32 logits `[B, V]`."""
        adapter, mode, batch = self.adapter, self.mode, self.batch
        last = batch.geometry.layers - 1
        x = adapter.embed(self.tokens, self.positions)
        for stage in adapter.stages(-1):
            x = stage.run(x)
        attend = None if 0 in batch.selecting else mode.fetch_all(0)
        for layer in range(last + 1):
            attention_input = adapter.attention_input(layer, x)
            q = self._project(layer, attention_input)
            attend = attend or mode.fetch(layer, q)

            upcoming: Attend | None = None
            source = batch.query_source(layer + 1)
            if source is None and layer < last:
                upcoming = mode.fetch_all(layer + 1)
            elif source == "attention_input":
                upcoming = self._fetch_predicted(layer + 1, attention_input)
            elif source == "normed_input":
                upcoming = self._fetch_predicted(layer + 1, adapter.attention_input(layer + 1, x))

            residual = adapter.after_attention(layer, x, attend(q))
            if source == "residual":
                upcoming = self._fetch_predicted(layer + 1, adapter.attention_input(layer + 1, residual))
            x = adapter.mlp(layer, residual, self.tokens)
            for stage in adapter.stages(layer):  # decoder layers without attention
                if isinstance(source, int) and stage.layer + source == batch.geometry.decoder_layer(layer + 1):
                    upcoming = self._fetch_predicted(layer + 1, adapter.attention_input(layer + 1, x))
                x = stage.run(x)
            attend = upcoming
        return adapter.logits(x)

    def _project(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """Return the queries `[H, B, d]`, and store the newest KV unless the layer uses the KV of an earlier layer."""
        if self.batch.geometry.kv_layer(layer) != layer:
            return self.adapter.lone_query(layer, attention_input, self.positions)
        q, k, v = self.adapter.qkv(layer, attention_input, self.positions)
        self.mode.append(layer, k, v)
        return q

    def _fetch_predicted(self, layer: int, attention_input: torch.Tensor) -> Attend:
        """Start fetching the tokens that `layer` selects, based on its predicted `attention_input` `[B, D]`."""
        corrected = self.batch.policy.correct_prediction(layer, attention_input)
        return self.mode.fetch(layer, self.adapter.query(layer, corrected, self.positions))
