"""Verify several tokens per sequence in one pass of full attention, then commit or discard them one by one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from ...kernels.team import engine_threads
from ...model_runner.sequence import Sequence
from ...model_runner.verification_pass import VerificationPass
from ...transfer.streams import on_device
from ..runner import Runner


def verify(runner: Runner, batch: Seq[tuple[Sequence, int]]) -> list[torch.Tensor]:
    """Compute the next tokens of several sequences in one pass of full attention.

    `batch` has pairs (sequence, number of tokens). The slots of these tokens must be reserved, and may contain the KV
    of draft tokens. Afterwards, the caller commits tokens one by one with `accept`. The recurrent state of a hybrid
    model includes all computed tokens until `replay` removes the rejected ones.

    Returns:
        For each sequence, float32 logits `[tokens, V]`.
    """
    used, storage = runner.weight_use, runner.transfer.storage
    device = runner.adapter.device
    # Recurrent layers compute adjacent sequences together if these have equal counts.
    order = sorted(range(len(batch)), key=lambda b: batch[b][1])
    with on_device(device), engine_threads(device), torch.inference_mode():
        for sequence, count in batch:
            runner.check_state_known(sequence)
            runner.cache_manager.slide(sequence, storage, sequence.position + count)
            sequence.interrupted = True
            share = sequence.position / (sequence.position + count)
            sequence.trace.record_verification(runner.adapter.geometry.windows, share)
        sequences, counts = zip(*(batch[b] for b in order), strict=True)
        rows = VerificationPass(sequences, counts, runner.adapter, runner.policy, storage).run()
        for sequence in sequences:
            storage.settle(sequence.blocks)
            sequence.interrupted = False
    batch[0][0].trace.step_weights += runner.weight_use.since(used)
    logits = dict(zip(order, rows, strict=True))
    return [logits[b] for b in range(len(batch))]


def accept(runner: Runner, sequence: Sequence) -> None:
    """Commit the next token, whose KV `verify` has computed."""
    sequence.position += 1
    sequence.exact = sequence.position if sequence.exact == sequence.position - 1 else sequence.exact
    runner.pool.commit(sequence.blocks, sequence.position)


def rewind(runner: Runner, sequence: Sequence, position: int) -> None:
    """Discard the decoded tokens of `sequence` from `position` on. Their slots stay reserved.

    The recurrent state of a hybrid model is restored from its copy at `position` (see `RollbackStates.set`).
    """
    runner.transfer.storage.settle(sequence.blocks)
    if runner.rollbacks is not None:
        assert sequence.rollback is not None and sequence.rollback.tokens == position
        runner.rollbacks.restore(sequence)
    sequence.position = position
    runner.pool.rewind(sequence.blocks, position)


def replay(runner: Runner, sequences: Seq[Sequence]) -> None:
    """After a verification pass, remove rejected tokens from the recurrent states of `sequences`.

    The tokens from `position` on are the rejected ones.
    """
    assert runner.rollbacks is not None
    used, device = runner.weight_use, runner.adapter.device
    with on_device(device), engine_threads(device), torch.inference_mode():
        runner.rollbacks.replay(sequences)
    for sequence in sequences:
        sequence.interrupted = False
        sequence.check_state()
    sequences[0].trace.step_weights += runner.weight_use.since(used)
