"""Speculative decoding: generate draft tokens cheaply, and verify them in one pass of full attention.

A draft token is accepted if the request samples the same token from the logits of the verification pass. Random numbers
depend only on the position, so no resampling is needed. At any temperature, the text equals that of full attention
except for rounding, because matrix products with several rows round differently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import torch

from ...config import DraftOptions
from ...core import BLOCK_SIZE
from ...errors import InputError, ModelError, PoolFullError
from ...model_runner.sequence import Sequence
from ..request import Request
from ..runner import Runner
from ..sampler import Answer, best_tokens
from .draft_model import DraftModel
from .draft_source import Acceptance, Costs, Lookup
from .verification import accept, replay, rewind, verify


@dataclass(eq=False)
class _RequestHistory:
    """Draft statistics of a request, kept between rounds.

    Attributes:
        found: Acceptance rate of draft tokens that come from prompt lookup.
        decoded: Acceptance rate of draft tokens that the policy or the draft model decoded.
        plain_seconds: Time per sequence, in seconds, of the fastest pass without draft tokens. Infinite before the
            first such pass.
    """

    lookup: Lookup
    found: Acceptance = field(default_factory=Acceptance)
    decoded: Acceptance = field(default_factory=Acceptance)
    plain_seconds: float = math.inf


@dataclass(eq=False)
class Draft:
    """Draft tokens of a request in one round of speculative decoding.

    Attributes:
        start: Position of the newest token of the sequence.
        tokens: Draft tokens that follow the newest token.
        decoded: Number of tokens to decode with the policy or the draft model. 0 with prompt lookup.
        logits: Logits `[n + 1, V]` of the verification pass, after the newest token and after each of the n draft
            tokens. Without draft tokens, the logits `[S, V]` have one row per sequence of the request.
        best: Most likely token for each row of `logits` (see `best_tokens`).
        plain_seconds: Estimated time per token, in seconds, without draft tokens. Infinite if unknown.
    """

    request: Request
    start: int
    tokens: list[int] = field(default_factory=list)
    decoded: int = 0
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    best: list[int] = field(default_factory=list)
    plain_seconds: float = math.inf

    @property
    def sequence(self) -> Sequence:
        [sequence] = self.request.sequences
        return sequence


@dataclass(frozen=True)
class _Pass:
    tokens: int
    sequences: int
    seconds: float


class SpeculativeDecoder:
    """Generates and verifies draft tokens for the requests of an engine. One round replaces one decode step.

    Between rounds, the KV of every token except the newest one is computed and verified, just as without speculation.
    """

    def __init__(self, runner: Runner, options: DraftOptions) -> None:
        self._runner, self._options = runner, options
        # Tokens in the recent window are never selected, so no copy of a rejected draft token can remain.
        self._most = min(options.tokens, runner.policy.recent) if options.by_policy else options.tokens
        vocab = runner.adapter.geometry.vocab
        self._model = None if runner.draft is None else DraftModel(runner.draft, vocab)
        self._costs = Costs()
        self._histories: WeakKeyDictionary[Request, _RequestHistory] = WeakKeyDictionary()
        self._passed: _Pass | None = None
        self._rejected: list[Draft] = []

    def round(self, running: Seq[Request]) -> list[Draft]:
        """Generate draft tokens for all requests, and verify them in one pass. Return the drafts with their logits.

        The caller must then call `accepted` for each draft, and finally `end_round`.
        """
        drafts = [self._begin(request) for request in running]
        self._rejected.clear()
        if self._runner.rollbacks is not None:
            for draft in drafts:
                if draft.tokens or draft.decoded:
                    self._runner.rollbacks.set(draft.sequence, record=True)
        self._decode([draft for draft in drafts if draft.decoded])
        self._verify(drafts)
        return drafts

    def accepted(self, draft: Draft) -> Iterator[Answer]:
        """Commit the newest token and the accepted draft tokens one by one. Yield the logits `[1, V]` after each.

        After each yield, the request must sample a token. The iteration ends when this token differs from the draft
        token. Without draft tokens, the logits `[S, V]` of the S sequences of the request are yielded once.
        """
        request, runner, matched = draft.request, self._runner, 0
        for row in range(len(draft.tokens) + 1):
            for sequence in request.sequences:
                accept(runner, sequence)
                sequence.trace.accepted += row > 0
                sequence.trace.seconds_without_drafts += draft.plain_seconds
                if row == len(draft.tokens) and runner.snapshots is not None:
                    runner.snapshots.after_step(sequence)
            rows = slice(row, row + 1) if draft.tokens else slice(None)
            yield draft.logits[rows], draft.best[rows]
            if row == len(draft.tokens) or request.finish_reason is not None:
                break
            if draft.sequence.tokens[-1] != draft.tokens[row]:
                runner.reload(draft.sequence)  # the resident window still contains the KV of draft tokens
                if runner.rollbacks is not None:
                    draft.sequence.interrupted = True  # until `end_round` has removed the rejected tokens
                    self._rejected.append(draft)
                break
            matched += 1
        self._learn(draft, matched)

    @property
    def rejected(self) -> list[Request]:
        """Running requests whose recurrent state still contains rejected tokens. Read this before `end_round`."""
        return [draft.request for draft in self._rejected if draft.request.sequences]

    def end_round(self) -> None:
        """Remove rejected draft tokens from the recurrent state of hybrid models."""
        began, rejected = time.perf_counter(), [request.sequences[0] for request in self.rejected]
        if rejected:
            replay(self._runner, rejected)
        seconds = time.perf_counter() - began if rejected else 0.0
        for sequence in rejected:
            sequence.trace.decode_seconds += seconds
        if (passed := self._passed) is not None:
            self._costs.observe_verification(passed.tokens, passed.sequences, passed.seconds + seconds)
        self._rejected.clear()
        self._passed = None

    def _begin(self, request: Request) -> Draft:
        start = request.sequences[0].position
        most = min(self._most, request.max_draft_tokens)
        if self._runner.snapshots is not None:
            # Snapshots are taken at the ends of blocks, after verification, so a round must not go past the end of a
            # block.
            most = min(most, -(start + 1) % BLOCK_SIZE)
        if most <= 0:
            return Draft(request, start)
        draft = Draft(request, start)
        self._choose(draft, self._histories.setdefault(request, _RequestHistory(Lookup(self._options.ngram))), most)
        if not self._reserve(draft.sequence, 1 + (draft.decoded or len(draft.tokens))):
            draft.tokens, draft.decoded = [], 0  # the pool is full
        if draft.decoded and self._model is not None and not self._model.prepare(draft.sequence, draft.decoded):
            draft.decoded = 0
        return draft

    def _choose(self, draft: Draft, history: _RequestHistory, most: int) -> None:
        """Set the draft tokens from prompt lookup, or the number of tokens to decode.

        At most `most` tokens are drafted. With `adaptive`, choose the source and the number of tokens that give the
        most expected tokens per second.
        """
        options = self._options
        tokens = history.lookup.propose(draft.sequence.tokens, most) if options.looks_up else []
        decodable = most if options.decodes else 0
        if options.adaptive:
            found = history.found.best_round(len(tokens), self._costs, decoded=False)
            decoded = history.decoded.best_round(decodable, self._costs, decoded=True)
            looked_up = tokens and found.rate >= decoded.rate
            tokens, decodable = (tokens[: found.drafts], 0) if looked_up else ([], decoded.drafts)
        draft.tokens, draft.decoded = tokens, 0 if tokens else decodable

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        try:
            self._runner.retry_after_reclaim(partial(self._runner.reserve, sequence, tokens))
        except PoolFullError:
            return False
        return True

    def _decode(self, drafts: Seq[Draft]) -> None:
        if not drafts:
            return
        for draft in drafts:
            draft.sequence.draft_start = draft.start
        began = time.perf_counter()
        try:
            self._decode_steps(drafts)
            if (decoded := sum(draft.decoded for draft in drafts)) > 0:  # the constraints may allow no token
                self._costs.observe_drafts(decoded, time.perf_counter() - began)
        finally:  # also after an exception, so that draft tokens never become output
            for draft in drafts:
                sequence = draft.sequence
                sequence.draft_start = None
                del sequence.tokens[draft.start + 1 :]
                if self._model is None:
                    rewind(self._runner, sequence, draft.start)

    def _decode_steps(self, drafts: Seq[Draft]) -> None:
        samplers = {draft: draft.request.draft_sampler() for draft in drafts}
        while unfinished := [draft for draft in drafts if len(draft.tokens) < draft.decoded]:
            logits = self._draft_step([draft.sequence for draft in unfinished])
            for draft, row, best in zip(unfinished, logits, best_tokens(logits), strict=True):
                sequence = draft.sequence
                try:
                    prompt = len(draft.request.prompt.token_ids)
                    token = samplers[draft].pick(row, sequence.tokens, prompt, shift=sequence.shift, best=best)
                except (InputError, ModelError):  # no token may follow this draft, and the draft itself may be rejected
                    draft.decoded = len(draft.tokens)
                    continue
                sequence.tokens.append(token)
                draft.tokens.append(token)

    def _draft_step(self, sequences: Seq[Sequence]) -> torch.Tensor:
        if self._model is not None:
            return torch.stack(self._model.step(sequences))
        logits = self._runner.decode(sequences)
        for sequence in sequences:
            sequence.trace.draft_steps += 1
        return logits

    def _verify(self, drafts: Seq[Draft]) -> None:
        batch = [(sequence, draft) for draft in drafts for sequence in draft.request.sequences]
        began = time.perf_counter()
        for sequence, draft in batch:
            sequence.trace.drafted += len(draft.tokens)
            sequence.tokens += draft.tokens
        try:
            rows = verify(self._runner, [(sequence, len(draft.tokens) + 1) for sequence, draft in batch])
        finally:
            for sequence, draft in batch:
                del sequence.tokens[len(sequence.tokens) - len(draft.tokens) :]
        seconds = time.perf_counter() - began
        self._passed = _Pass(sum(map(len, rows)), len(batch), seconds)
        for sequence, draft in batch:
            sequence.trace.decode_seconds += seconds
            draft.plain_seconds = self._plain_seconds(draft, seconds / len(batch)) * len(batch)
        logits, start = torch.cat(rows), 0
        best = best_tokens(logits)
        for draft in drafts:
            stop = start + (len(draft.tokens) + 1) * len(draft.request.sequences)
            draft.logits, draft.best, start = logits[start:stop], best[start:stop], stop

    def _plain_seconds(self, draft: Draft, seconds: float) -> float:
        if (history := self._histories.get(draft.request)) is None:
            return math.inf
        if not draft.tokens:
            history.plain_seconds = min(history.plain_seconds, seconds)
        return history.plain_seconds

    def _learn(self, draft: Draft, matched: int) -> None:
        history = self._histories.get(draft.request)
        if history is None:
            return
        for acceptance, used in ((history.found, not draft.decoded), (history.decoded, draft.decoded > 0)):
            if draft.tokens and used:
                acceptance.observe(len(draft.tokens), matched)
            else:
                acceptance.record_unused()
