"""Beam search. Beams are forks of one sequence and share its full blocks.

`Beams` runs the search on token ids and gives the same scores and tokens as transformers' `generate(num_beams=...)`.
`BeamSearchRequest` forks and frees the sequences of the beams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from functools import partial

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from ..core import Prompt
from ..errors import InputError
from ..model_runner.prefill import Prefill
from ..model_runner.sequence import Sequence
from ..outputs import CompletionOutput, FinishReason, StopReason, TokenOutput
from ..sampling_params import SamplingParams
from .detokenizer import added_text, decode, decoding_context, known_texts
from .logits_processors import apply_processors, check_any_allowed, check_logits, logits_processors
from .request import Request
from .runner import Runner

_NEVER = -1.0e9  # score of beams that do not exist; transformers' value, because ties depend on it

Ended = Callable[[list[int]], tuple[FinishReason | None, StopReason]]
"""Function that takes the generated tokens of a beam.

Returns the finish reason and the stop reason, or (None, None) if the beam continues.
"""


class Beams:
    """The best running beams and the best finished beams, up to `num_beams` of each, as token ids.

    A score is a sum of log-probabilities in float32. For finished beams, it is divided by `length ** length_penalty`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: tuple[int, ...],
        ends: Collection[int],
        ended: Ended,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        width = params.num_beams
        self._params, self._prompt, self._ended = params, prompt, ended
        self._candidates = max(2, 1 + len(ends)) * width  # each beam may contribute every end token
        self._make_processors = partial(logits_processors, params, len(prompt), ends, tokenizer)
        self._processors: LogitsProcessorList | None = None
        self.running: list[list[int]] = [[]] * width
        self._scores = torch.full((width,), _NEVER)
        self._scores[0] = 0  # all beams start as copies of the prompt, so only one of them counts
        self.finished: list[list[int]] = [[]] * width
        self._finished_scores = torch.full((width,), _NEVER)
        self._is_finished = torch.zeros(width, dtype=torch.bool)
        self._improvable = True
        self.done = False

    def advance(self, logits: torch.Tensor) -> list[tuple[int, int]]:
        """Extend the running beams by one token, using logits `[num_beams, V]`.

        Set `done` if the finished beams can no longer change.

        Returns:
            The new running beams as pairs (index of the parent beam, token), best first.

        Raises:
            InputError: The constraints allow no token.
            LogitsError: The logits contain NaN.
        """
        params, width = self._params, self._params.num_beams
        check_logits(logits)
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        if self._processors is None:
            self._processors = self._make_processors(logits.device)
        if self._processors:
            history = torch.tensor([[*self._prompt, *tokens] for tokens in self.running], device=logits.device)
            log_probs = apply_processors(self._processors, history, log_probs)
            check_any_allowed(log_probs.flatten(0))  # a single beam may have no continuation
        total = (log_probs.cpu() + self._scores[:, None]).flatten()
        scores, flat = torch.topk(total, self._candidates)
        parents, tokens = (flat // logits.shape[1]).tolist(), (flat % logits.shape[1]).tolist()
        grown = [[*self.running[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        ends = torch.tensor([self._ended(candidate)[0] is not None for candidate in grown])
        self._finish(grown, scores, ends)
        continuing = scores + ends.float() * _NEVER
        best = torch.topk(continuing, width).indices.tolist()
        self.running, self._scores = [grown[i] for i in best], continuing[best]
        self._improvable &= self._could_improve(len(grown[0]))
        full = params.early_stopping is True and bool(self._is_finished.all())
        self.done = not self._improvable or full or bool(ends.all())
        if self.done and not bool(self._is_finished[: params.n].all()):
            raise InputError(
                f"the constraints leave fewer than n={params.n} completions of num_beams={width} beams: lower n, or "
                "allow more tokens (allowed_token_ids, bad_words, logit_bias, min_tokens, logits_processors)"
            )
        return [(parents[i], tokens[i]) for i in best]

    def _finish(self, grown: list[list[int]], scores: torch.Tensor, ends: torch.Tensor) -> None:
        """Merge the candidates that end with the finished beams, and keep the best `num_beams`.

        `grown` lists the candidates, best first, and `ends` marks those that end. Only the first `num_beams` candidates
        can finish.
        """
        params, width = self._params, self._params.num_beams
        ending = ends & (torch.arange(len(grown)) < width) & (scores > -torch.inf)  # -inf marks forbidden tokens
        penalised = scores / len(grown[0]) ** params.length_penalty
        closed = not self._improvable or (params.early_stopping is True and bool(self._is_finished.all()))
        penalised = penalised + closed * _NEVER + (~ending).float() * _NEVER
        merged = torch.cat((self._finished_scores, penalised))
        best = torch.topk(merged, width).indices
        every = self.finished + grown
        self.finished = [every[i] for i in best.tolist()]
        self._finished_scores = merged[best]
        self._is_finished = torch.cat((self._is_finished, ending))[best]

    def _could_improve(self, length: int) -> bool:
        params = self._params
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        best = self._scores[0] / length**params.length_penalty
        worst = torch.where(self._is_finished, self._finished_scores.min(), _NEVER)
        return bool((best > worst).any())


class BeamSearchRequest(Request):
    """A request that runs beam search. After a preemption, the search restarts from the prompt."""

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        super().__init__(prompt, params, tokenizer, eos_token_ids)
        self._context = decoding_context(tokenizer, prompt.token_ids)
        self._h2d_bytes = 0  # copied by beams that were freed
        self._h2d_bytes_before: dict[int, int] = {}  # copied before a beam was forked, by sequence id
        self._beams = self._new_beams()

    @property
    def width(self) -> int:
        return self.params.num_beams

    def start(self, runner: Runner) -> Prefill:
        assert not self.sequences
        if runner.config.eviction is not None:
            raise InputError("beam search cannot be combined with eviction: remove eviction, or set num_beams=1")
        prompt = self.prompt.token_ids
        sequence = self._new_sequence(runner, prompt, len(prompt))
        self.sequences = [sequence]
        runner.retry_after_reclaim(lambda: runner.pool.check_spare(self.width - 1))
        self.cached_tokens = self.cached_tokens or sequence.trace.reused_tokens
        self.recomputed_tokens = self.recomputed_tokens or sequence.trace.recomputed_tokens
        return self._begin_prefill(runner, len(prompt))

    def reserve(self, runner: Runner) -> None:
        super().reserve(runner)
        # Every beam may be forked in this step.
        runner.retry_after_reclaim(lambda: runner.pool.check_spare(self.width))

    def accept(self, runner: Runner, logits: torch.Tensor, best: Seq[int]) -> list[TokenOutput]:
        # After the prefill, all beams have the same logits.
        chosen = self._beams.advance(logits.expand(self.width, -1))
        if self._beams.done:
            self.finish_reason = self._ended(self._beams.finished[0])[0] or "length"
            return self._events()
        self._continue_with(runner, [(parent % len(self.sequences), token) for parent, token in chosen])
        return []  # clients get outputs at the end of the search

    def _continue_with(self, runner: Runner, chosen: list[tuple[int, int]]) -> None:
        before, parents = list(self.sequences), {parent for parent, _ in chosen}
        # Free blocks before the forks need them.
        self._free(runner, [sequence for i, sequence in enumerate(before) if i not in parents])
        moved: list[Sequence] = []
        for parent, _ in chosen:
            sequence = before[parent]
            if sequence in moved:
                sequence = self._fork(runner, sequence)
                self.sequences.append(sequence)  # add it now: if the next fork fails, `drop` must free this one
            moved.append(sequence)
        for sequence, (_, token) in zip(moved, chosen, strict=True):
            sequence.tokens.append(token)
        self.sequences = moved

    def _fork(self, runner: Runner, beam: Sequence) -> Sequence:
        fork = runner.retry_after_reclaim(lambda: runner.fork(beam, beam.position + 1, same_trace=True))
        self._h2d_bytes_before[fork.id] = fork.trace.bytes_to_device
        return fork

    def _free(self, runner: Runner, beams: Seq[Sequence]) -> None:
        for beam in beams:
            loaded = runner.transfer.loaded_bytes(beam.blocks)
            runner.free(beam)
            self.sequences.remove(beam)
            self._h2d_bytes += loaded + beam.trace.bytes_to_device - self._h2d_bytes_before.pop(beam.id, 0)

    @property
    def h2d_bytes(self) -> int:
        return self._h2d_bytes

    def drop(self, runner: Runner) -> None:
        self._free(runner, self.sequences[::-1])
        if self.finish_reason is None:
            self._beams = self._new_beams()  # if the request restarts, so does the search

    def completions(self) -> list[CompletionOutput]:
        best = self._beams.finished[: self.params.n]
        return [self._completion(i, tokens) for i, tokens in enumerate(best)]

    def _completion(self, index: int, tokens: list[int]) -> CompletionOutput:
        if not self._beams.done:
            return CompletionOutput(index, "", [], None, None, self.finish_reason, None, self._final)
        reason, stopped = self._ended(tokens)
        return CompletionOutput(index, self._text(tokens), tokens, None, None, reason or "length", stopped, self._final)

    def _new_beams(self) -> Beams:
        return Beams(self.params, self.prompt.token_ids, self._ends, self._ended, self._tokenizer)

    def _ended(self, tokens: list[int]) -> tuple[FinishReason | None, StopReason]:
        if tokens and tokens[-1] in self._ends:
            return "stop", None if tokens[-1] in self._eos else tokens[-1]
        if found := self._stops(tokens) if self.params.stop else []:
            return "stop", min(found)[1]
        return ("length" if len(tokens) >= self.params.max_tokens else None), None

    def _events(self) -> list[TokenOutput]:
        done = self.completions()
        return [
            TokenOutput(
                self.prompt.id, c.text, c.token_ids[-1], len(c.token_ids) - 1, c.finish_reason, c.index, c.stop_reason
            )
            for c in done
        ]

    def _decode(self, tokens: list[int]) -> str:
        special = not self.params.skip_special_tokens
        both = decode(self._tokenizer, [*self._context, *tokens], special=special)
        return added_text(known_texts(self._tokenizer, self._context, special=special), both)

    def _text(self, tokens: list[int]) -> str:
        keep = self.params.include_stop_str_in_output
        text = self._decode(tokens[:-1] if tokens and tokens[-1] in self._ends and not keep else tokens)
        at, stop = min(self._stops(tokens), default=(len(text), ""))
        return text[: at + len(stop) * keep]

    def _stops(self, tokens: list[int]) -> list[tuple[int, str]]:
        text, least = self._decode(tokens), self.params.min_tokens
        early = len(self._decode(tokens[:least])) if least else 0
        return [(at, stop) for stop in self.params.stop if (at := text.find(stop, early)) >= 0]
