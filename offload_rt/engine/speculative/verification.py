"""One pass over all rows for several tokens of sequences, which are then committed one by one or taken back."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from ...kernels.team import engine_threads
from ...model_runner.sequence import Sequence
from ...model_runner.whole_pass import WholePass
from ...transfer.streams import on_device
from ..runner import Runner


def verify(runner: Runner, batch: Seq[tuple[Sequence, int]]) -> list[torch.Tensor]:
    """Computes the next so many tokens of each sequence, which has slots for them, with all rows attended to and one
    read of the weights for all: in place of what drafts have left there. float32 logits `[count, V]` of what follows
    each. None of them is committed: `accept` commits one after the other."""
    used, storage = runner.weight_use, runner.link.storage
    device = runner.adapter.device
    with on_device(device), engine_threads(device), torch.inference_mode():
        for sequence, count in batch:
            runner.room.slide(sequence, storage, sequence.position + count)
            sequence.interrupted = True
            share = sequence.position / (sequence.position + count)
            sequence.trace.enter_whole_pass(runner.adapter.geometry.windows, share)
        sequences, counts = zip(*batch, strict=True)
        logits = WholePass(sequences, counts, runner.adapter, runner.policy, storage).run()
        for sequence in sequences:
            storage.settle(sequence.blocks)
            sequence.interrupted = False
    sequences[0].trace.step_weights += runner.weight_use.since(used)
    return logits


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
