"""Restores the recurrent state of hybrid models after draft tokens are rejected."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from ..models.adapter import ModelAdapter
from ..models.recurrent import RollbackState, StateSlots
from .sequence import Sequence


class RollbackStates:
    """Copies of the recurrent states of sequences, made before the computation of draft tokens that may be rejected.

    If draft tokens are rejected, the state is restored from the copy. The recurrent layers then compute the accepted
    tokens again, from the inputs that the verification pass has recorded.
    """

    def __init__(self, states: StateSlots, adapter: ModelAdapter) -> None:
        self._states, self._adapter = states, adapter
        # The copies have separate slots, so that the states of a batch stay adjacent in the main slots.
        self._copies = StateSlots(adapter.geometry, adapter.dtype, adapter.device)

    @torch.inference_mode()
    def set(self, sequence: Sequence, *, record: bool) -> None:
        """Copy a sequence's state. If `record`, the next verification pass also records inputs of recurrent layers."""
        if sequence.rollback is None:
            sequence.rollback = RollbackState(self._copies.allocate())
        rollback = sequence.rollback
        self._copies.copy(rollback.slot, self._states, sequence.state_slot)
        rollback.tokens, rollback.inputs = sequence.position, {} if record else None

    @torch.inference_mode()
    def restore(self, sequence: Sequence) -> None:
        assert sequence.rollback is not None
        self._states.copy(sequence.state_slot, self._copies, sequence.rollback.slot)

    @torch.inference_mode()
    def replay(self, sequences: Seq[Sequence]) -> None:
        """Restore the states, and compute each sequence's tokens up to `position` again from the recorded inputs."""
        ordered = sorted(sequences, key=_tokens_to_replay)
        for sequence in ordered:
            self.restore(sequence)
        counts = [_tokens_to_replay(sequence) for sequence in ordered]
        state = self._states.view([sequence.state_slot for sequence in ordered], counts=counts)
        adapter = self._adapter.with_state(state)
        inputs = [_recorded_inputs(sequence) for sequence in ordered]
        for layer in inputs[0]:
            adapter.replay_mixer(
                layer, torch.cat([recorded[layer][:n] for recorded, n in zip(inputs, counts, strict=True)])
            )

    def release(self, sequence: Sequence) -> None:
        if sequence.rollback is not None:
            self._copies.release(sequence.rollback.slot)
            sequence.rollback = None

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        self._copies.check_integrity()
        rollbacks = [sequence.rollback for sequence in sequences if sequence.rollback is not None]
        assert self._copies.used == len(rollbacks) == len({rollback.slot for rollback in rollbacks})
        for rollback in rollbacks:
            self._copies.check(rollback.slot, rollback.tokens)


def _tokens_to_replay(sequence: Sequence) -> int:
    assert sequence.rollback is not None and sequence.position > sequence.rollback.tokens
    return sequence.position - sequence.rollback.tokens


def _recorded_inputs(sequence: Sequence) -> dict[int, torch.Tensor]:
    assert sequence.rollback is not None and sequence.rollback.inputs
    return sequence.rollback.inputs
