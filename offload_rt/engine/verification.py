"""One pass over all rows for several tokens of a sequence, which are then committed one by one or taken back."""

from __future__ import annotations

import torch

from ..forward.prefill import Prefill
from ..forward.sequence import Sequence
from ..transfer.streams import on_device
from .runner import Runner


def verify(runner: Runner, sequence: Sequence, count: int) -> torch.Tensor:
    """Computes the next `count` tokens of a sequence, which has slots for them, with all rows attended to: in place of
    what drafts have left there. float32 logits `[count, V]` of what follows each. None of them is committed: `accept`
    commits one after the other."""
    crossed, stop, storage = runner.weights_crossed, sequence.position + count, runner.link.storage
    with on_device(runner.adapter.device), torch.inference_mode():
        runner.room.slide(sequence, storage, stop)
        sequence.interrupted = True
        sequence.trace.enter_whole_pass(runner.adapter.geometry.windows, sequence.position / stop)
        verification = Prefill(sequence, stop, runner.adapter, storage, slice_tokens=count, logits_of=count)
        while not verification.done:
            verification.run_layer()
        storage.settle(sequence.blocks)
    sequence.interrupted = False
    sequence.trace.weight_bytes += runner.weights_crossed - crossed
    assert verification.logits is not None
    return verification.logits


def accept(runner: Runner, sequence: Sequence) -> None:
    """Commits the next of the tokens that `verify` has computed."""
    sequence.position += 1
    sequence.exact = sequence.position if sequence.exact == sequence.position - 1 else sequence.exact
    runner.pool.commit(sequence.blocks, sequence.position)


def rewind(runner: Runner, sequence: Sequence, position: int) -> None:
    """Takes back what decode steps have computed from `position` on. Slots and memory stay; rows and scoring keys there
    mean nothing until they are written again."""
    runner.link.storage.settle(sequence.blocks)
    sequence.position = position
    runner.pool.rewind(sequence.blocks, position)
