"""Copies of recurrent state, to return a hybrid model's sequence to the state before rejected tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from ..models.adapter import ModelAdapter
from ..models.recurrent import StateMark, StateSlots
from .sequence import Sequence


class StateMarks:
    """Copies (*marks*) of the recurrent state of sequences, made before tokens that may be rejected.

    To accept only some tokens of a verification pass, the state returns to the mark, and the recurrent layers compute
    the accepted tokens again from the inputs that the pass recorded. A sequence therefore needs two states, however
    many tokens are drafted.
    """

    def __init__(self, states: StateSlots, adapter: ModelAdapter) -> None:
        self._states, self._adapter = states, adapter
        # Slots of their own, so that the states of a batch stay adjacent.
        self._marks = StateSlots(adapter.geometry, adapter.dtype, adapter.device)

    @torch.inference_mode()
    def set(self, sequence: Sequence, *, record: bool) -> None:
        """Copy the state of a sequence.

        With `record`, the next verification pass records the inputs of recurrent layers.
        """
        if sequence.mark is None:
            sequence.mark = StateMark(self._marks.take())
        mark = sequence.mark
        self._marks.copy(mark.slot, self._states, sequence.state_slot)
        mark.tokens, mark.inputs = sequence.position, {} if record else None

    @torch.inference_mode()
    def restore(self, sequence: Sequence) -> None:
        assert sequence.mark is not None
        self._states.copy(sequence.state_slot, self._marks, sequence.mark.slot)

    @torch.inference_mode()
    def replay(self, sequences: Seq[Sequence]) -> None:
        """Compute the states after the tokens up to `position`, from the marks and recorded inputs."""
        ordered = sorted(sequences, key=_replayed)
        for sequence in ordered:
            self.restore(sequence)
        counts = [_replayed(one) for one in ordered]
        state = self._states.view([one.state_slot for one in ordered], counts=counts)
        adapter = self._adapter.with_state(state)
        inputs = [_recorded(one) for one in ordered]
        for layer in inputs[0]:
            adapter.replay_mixer(layer, torch.cat([own[layer][:n] for own, n in zip(inputs, counts, strict=True)]))

    def release(self, sequence: Sequence) -> None:
        if sequence.mark is not None:
            self._marks.release(sequence.mark.slot)
            sequence.mark = None

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        self._marks.check_integrity()
        marks = [one.mark for one in sequences if one.mark is not None]
        assert self._marks.used == len(marks) == len({mark.slot for mark in marks})
        for mark in marks:
            self._marks.check(mark.slot, mark.tokens)


def _replayed(sequence: Sequence) -> int:
    assert sequence.mark is not None and sequence.position > sequence.mark.tokens
    return sequence.position - sequence.mark.tokens


def _recorded(sequence: Sequence) -> dict[int, torch.Tensor]:
    assert sequence.mark is not None and sequence.mark.inputs
    return sequence.mark.inputs
