"""Generate draft tokens with a small model that has its own KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from ...errors import ConfigError, InputError, PoolFullError
from ...model_runner.sequence import Sequence
from ...models.loading import LoadedModel
from ..runner import Runner
from .verification import accept, rewind, verify

CATCH_UP = 64  # maximum number of missing tokens that one draft step computes; if more are missing, prefill first


def check_same_tokens(model: LoadedModel, draft: LoadedModel) -> None:
    """Raise ConfigError if the two models have different vocabularies. Added tokens may differ.

    If one of the models has no tokenizer, only the vocabulary sizes are compared.
    """
    mine, theirs = model.tokenizer, draft.tokenizer
    sizes = model.adapter.geometry.vocab, draft.adapter.geometry.vocab
    if mine is None or theirs is None:
        same, problem = sizes[0] == sizes[1], f"{sizes[1]:,} tokens, and {model.name} has {sizes[0]:,}"
    else:
        ids, added = theirs.get_vocab(), mine.get_added_vocab()
        wrong = next((t for t, i in mine.get_vocab().items() if t not in added and ids.get(t) != i), None)
        same, problem = wrong is None, f"another tokenizer than {model.name}: {wrong!r} is missing or has another id"
    if not same:
        raise ConfigError(f"the draft model {draft.name} has {problem}; choose a smaller model of the same family")


class DraftModel:
    """Proposes draft tokens for the sequences of the target model's runner.

    Each sequence has a draft sequence with the same tokens (`Sequence.drafter`), and both are freed together. The KV of
    accepted tokens is kept between rounds. If a draft token is rejected, a hybrid draft model must compute the accepted
    tokens of that round again.

    Args:
        runner: Runner for the draft model, with the policy "full".
        vocab: Vocabulary size of the target model.
    """

    def __init__(self, runner: Runner, vocab: int) -> None:
        self._runner, self._vocab = runner, vocab

    def prepare(self, sequence: Sequence, drafts: int) -> bool:
        """Prefill the tokens that the draft sequence lacks, and reserve slots for `drafts` tokens.

        Return False if the draft model's pool is full or its vocabulary lacks one of the tokens.
        """
        began = time.perf_counter()
        try:
            drafter = self._caught_up(sequence)
            drafter.draft_start = min(drafter.position, sequence.position)
            if self._runner.rollbacks is not None:
                self._runner.rollbacks.set(drafter, record=False)
            ahead = len(sequence.tokens) + drafts - drafter.position
            self._runner.retry_after_reclaim(lambda: self._runner.reserve(drafter, ahead))
        except (PoolFullError, InputError):
            return False
        finally:
            sequence.trace.decode_seconds += time.perf_counter() - began
        return True

    def step(self, sequences: Seq[Sequence]) -> list[torch.Tensor]:
        """Run a decode step for the draft sequences.

        Return float32 logits `[V]` for each, in the target model's vocabulary.
        """
        began, runner = time.perf_counter(), self._runner
        batch = [(drafter, len(drafter.tokens) - drafter.position) for drafter in map(self._same_tokens, sequences)]
        logits = [self._fit_to_target_vocab(rows[-1]) for rows in verify(runner, batch)]
        for drafter, count in batch:
            for _ in range(count):
                accept(runner, drafter)
        seconds = time.perf_counter() - began
        for sequence, (drafter, _) in zip(sequences, batch, strict=True):
            sequence.trace.decode_seconds += seconds
            sequence.trace.absorb_transferred_bytes(drafter.trace)
        return logits

    def _caught_up(self, sequence: Sequence) -> Sequence:
        if sequence.drafter is None:
            tokens, provenance = sequence.tokens, sequence.provenance
            sequence.drafter = self._runner.retry_after_reclaim(
                lambda: self._runner.new_sequence(tokens, len(tokens), reuse=len(tokens), provenance=provenance)
            )
        drafter = self._same_tokens(sequence)
        newest = len(drafter.tokens) - 1
        if newest - drafter.position > CATCH_UP:
            drafter.draft_start = None  # The prefill needs the sliding windows at `position`; no draft tokens remain.
            self._runner.retry_after_reclaim(lambda: self._runner.pool.reserve(drafter.blocks, newest))
            self._runner.prefill(drafter, newest)
            sequence.trace.absorb_transferred_bytes(drafter.trace)
        return drafter

    def _same_tokens(self, sequence: Sequence) -> Sequence:
        """Set the tokens of the draft sequence to those of `sequence`, and return the draft sequence.

        KV is discarded from the first token that differs. The newest token's KV is always discarded.
        """
        drafter = sequence.drafter
        assert drafter is not None
        known = min(drafter.position, len(sequence.tokens) - 1)
        if drafter.tokens[:known] != sequence.tokens[:known]:
            pairs = enumerate(zip(drafter.tokens, sequence.tokens, strict=False))
            known = next(i for i, (mine, theirs) in pairs if mine != theirs)
        if known < drafter.position:
            if drafter.rollback is not None:  # recurrent state can only return to the state that was copied
                assert drafter.rollback.tokens <= known
                known = drafter.rollback.tokens
            rewind(self._runner, drafter, known)
            self._runner.reload(drafter)
        drafter.tokens[known:] = sequence.tokens[known:]
        return drafter

    def _fit_to_target_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        if len(logits) >= self._vocab:
            return logits[: self._vocab]
        return torch.nn.functional.pad(logits, (0, self._vocab - len(logits)), value=-torch.inf)
