"""Exact decoding from drafts: tokens are drafted cheaply, and one pass over all rows says which of them full attention
would have chosen. Those stay, with the rows of that pass; the others are taken back.

A draft is right where it is the token that the request itself samples from the verified logits, with its own random
numbers. Drafts are sampled with a copy of these: where the two distributions are alike, so are the tokens. So the text
is that of full attention, token for token and also at a temperature, up to how products of several rows are rounded;
no random number is spent on drafts, and nothing has to be resampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import torch

from ...config import DraftOptions
from ...errors import InputError, ModelError, PoolFullError
from ...model_runner.sequence import Sequence
from ..request import Request
from ..runner import Runner
from .draft_model import DraftModel
from .draft_source import Acceptance, Costs, Lookup
from .verification import accept, rewind, verify


@dataclass(eq=False)
class _Known:
    """What is remembered of a request from round to round. alone: seconds of its share of a pass that had no drafts,
    the shortest so far."""

    lookup: Lookup
    found: Acceptance = field(default_factory=Acceptance)
    decoded: Acceptance = field(default_factory=Acceptance)
    alone: float = math.inf


@dataclass(eq=False)
class Draft:
    """tokens: those drafted behind the newest one of a request's sequence, token `start`; decoded: so many are to be
    decoded under the policy or by the draft model, 0 where they were found. logits `[n + 1, V]`: what full attention
    says behind the newest token and each draft; of a request that drafts nothing `[S, V]`, of each of its
    sequences. alone: seconds that a token of it would have taken without drafts, infinite where nothing says."""

    request: Request
    start: int
    tokens: list[int] = field(default_factory=list)
    decoded: int = 0
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    alone: float = math.inf

    @property
    def sequence(self) -> Sequence:
        """Of a request that drafts."""
        [sequence] = self.request.sequences
        return sequence


class Drafting:
    """Rounds of drafts and verification for the requests of one engine. Between rounds a sequence holds verified tokens
    and the newest one, as it does between the steps of any other engine."""

    def __init__(self, runner: Runner, options: DraftOptions) -> None:
        self._runner, self._options = runner, options
        # The policy's drafts stay in the window, where nothing selects them: when one is taken back no copy is left.
        self._most = min(options.tokens, runner.policy.recent) if options.by_policy else options.tokens
        vocab = runner.adapter.geometry.vocab
        self._model = None if runner.draft is None else DraftModel(runner.draft, vocab)
        self._costs = Costs()
        self._known: WeakKeyDictionary[Request, _Known] = WeakKeyDictionary()

    def round(self, running: Seq[Request]) -> list[Draft]:
        """Drafts for all of `running`, and verifies: logits for each, nothing of it accepted."""
        drafts = [self._begin(request) for request in running]
        self._decode([draft for draft in drafts if draft.decoded])
        self._verify(drafts)
        return drafts

    def accepted(self, draft: Draft) -> Iterator[torch.Tensor]:
        """Logits `[1, V]` of one token after the other (`[S, V]` of several sequences), committed before each; the
        request takes each in before it asks for the next. Ends behind the first token that was not drafted."""
        request, runner, right = draft.request, self._runner, 0
        for row in range(len(draft.tokens) + 1):
            for sequence in request.sequences:
                accept(runner, sequence)
                sequence.trace.accepted += row > 0
                sequence.trace.alone_seconds += draft.alone
            yield draft.logits[row : row + 1] if draft.tokens else draft.logits
            if row == len(draft.tokens) or request.finish_reason is not None:
                break
            if draft.sequence.tokens[-1] != draft.tokens[row]:
                runner.reload(draft.sequence)  # the window has drafts in it
                break
            right += 1
        self._learn(draft, right)

    def _begin(self, request: Request) -> Draft:
        """What is to be drafted, and slots for it; nothing where there is no room."""
        start = request.sequences[0].position
        most = min(self._most, request.draft_room)
        if most <= 0:
            return Draft(request, start)
        draft = Draft(request, start)
        self._choose(draft, self._known.setdefault(request, _Known(Lookup(self._options.ngram))), most)
        if not self._reserve(draft.sequence, 1 + (draft.decoded or len(draft.tokens))):
            draft.tokens, draft.decoded = [], 0
        if draft.decoded and self._model is not None and not self._model.prepare(draft.sequence, draft.decoded):
            draft.decoded = 0
        return draft

    def _choose(self, draft: Draft, known: _Known, most: int) -> None:
        """Up to `most` drafts: those found in the text, or so many to decode; where their number adapts, what gives
        more tokens a second."""
        options = self._options
        tokens = known.lookup.propose(draft.sequence.tokens, most) if options.looks_up else []
        decodable = most if options.decodes else 0
        if options.adaptive:
            found = known.found.best_round(len(tokens), self._costs, decoded=False)
            decoded = known.decoded.best_round(decodable, self._costs, decoded=True)
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
        """Decodes drafts, all requests together, and takes what the policy has computed back, also where it is
        interrupted: nobody may take a draft for an answer."""
        if not drafts:
            return
        for draft in drafts:
            draft.sequence.draft_start = draft.start
        began = time.perf_counter()
        try:
            self._decode_steps(drafts)
            self._costs.saw_drafts(sum(draft.decoded for draft in drafts), time.perf_counter() - began)
        finally:
            for draft in drafts:
                sequence = draft.sequence
                sequence.draft_start = None
                del sequence.tokens[draft.start + 1 :]
                rewind(self._runner, sequence, draft.start)

    def _decode_steps(self, drafts: Seq[Draft]) -> None:
        samplers = {draft: draft.request.draft_sampler() for draft in drafts}
        while going := [draft for draft in drafts if len(draft.tokens) < draft.decoded]:
            logits = self._step([draft.sequence for draft in going])
            for draft, row in zip(going, logits, strict=True):
                sequence = draft.sequence
                try:
                    token = samplers[draft].pick(row, sequence.tokens, len(draft.request.prompt.token_ids))
                except (InputError, ModelError):  # nothing may follow the draft; whether it is right is not known yet
                    draft.decoded = len(draft.tokens)
                    continue
                sequence.tokens.append(token)
                draft.tokens.append(token)

    def _step(self, sequences: Seq[Sequence]) -> Iterable[torch.Tensor]:
        """float32 logits `[V]` of what may follow each sequence: the draft model's where there is one."""
        if self._model is not None:
            return self._model.step(sequences)
        logits = self._runner.decode(sequences)
        for sequence in sequences:
            sequence.trace.draft_steps += 1
        return logits

    def _verify(self, drafts: Seq[Draft]) -> None:
        """One pass over the newest token and the drafts behind it, of all sequences of all requests together."""
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
        self._costs.saw_verification(sum(map(len, rows)), len(batch), seconds)
        for sequence, draft in batch:
            sequence.trace.decode_seconds += seconds
            draft.alone = self._alone(draft, seconds / len(batch)) * len(batch)
        of_requests = iter(rows)
        for draft in drafts:
            draft.logits = torch.cat([next(of_requests) for _ in draft.request.sequences])

    def _alone(self, draft: Draft, seconds: float) -> float:
        """Of a request's share of passes, `seconds` in this one, the shortest without drafts."""
        if (known := self._known.get(draft.request)) is None:
            return math.inf
        if not draft.tokens:
            known.alone = min(known.alone, seconds)
        return known.alone

    def _learn(self, draft: Draft, right: int) -> None:
        known = self._known.get(draft.request)
        if known is None:
            return
        for acceptance, used in ((known.found, not draft.decoded), (known.decoded, draft.decoded > 0)):
            if draft.tokens and used:
                acceptance.saw(len(draft.tokens), right)
            else:
                acceptance.rested()
