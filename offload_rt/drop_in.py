"""A transformers model whose `generate` runs here: `with offload(model, policy="infinigen", host_memory="64GiB"):`.

Within the block the model's forward, where `generate` calls it with a cache, is this package's: a prompt is computed
exactly, layer by layer, its rows go to the host pool, and every single token after it is a decode step under the
policy. What is around it stays transformers': generation modes, logits processors, stopping, streamers, pipelines. So
greedy tokens are those of `LLM`, and under `full` those of transformers. Other calls of the model are its own, and
after the block all are.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from .config import EngineConfig
from .engine.runner import Runner
from .engine.verification import accept, rewind, verify
from .errors import InputError
from .forward.sequence import Sequence
from .llm import LLM

_AHEAD = 1024
"""Tokens that a sequence is expected to grow by: the pool's memory for them is made ready together."""

_OTHER = ("inputs_embeds", "labels", "output_attentions", "output_hidden_states")
"""What a forward may be asked for that is not made here."""


@contextmanager
def offload(
    model: PreTrainedModel,
    config: EngineConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **fields: Any,
) -> Iterator[LLM]:
    """Within the block `model.generate(...)`, and whatever calls it, keeps its KV cache in the host pool and decodes
    under the policy. `config` and `fields` as `LLM` takes them; yields that `LLM`, of the same weights, whose
    `generate`, `stream` and sessions may be used beside it.

    A cache that shall outlive a call, for a conversation: `cache = OffloadedCache(llm)`, given to `generate` as
    `past_key_values`. Raises what `LLM` raises; InputError for a second block around the same model.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"offload() takes a loaded transformers model, not {model!r:.80}; load it first, for example with "
            "AutoModelForCausalLM.from_pretrained, or use LLM for a folder or a hub id"
        )
    if "forward" in vars(model):
        raise InputError("the model's forward is replaced already: leave the other block first")
    llm = LLM(model, config, tokenizer=tokenizer, **fields)
    caches: weakref.WeakSet[OffloadedCache] = weakref.WeakSet()
    model.forward = _replaced(model.forward, llm, caches)
    try:
        yield llm
    finally:
        del model.forward
        for cache in list(caches):
            cache.free()
        llm.close()


def _replaced(own: Any, llm: LLM, caches: weakref.WeakSet[OffloadedCache]) -> Any:
    """The forward that runs here where it is given a cache of ours, or the empty one that `generate` makes."""
    signature = inspect.signature(own)

    @wraps(own)
    def forward(*args: Any, **named: Any) -> Any:
        given = signature.bind_partial(*args, **named).arguments
        given |= given.pop("kwargs", {})
        cache = given.get("past_key_values")
        if isinstance(cache, DynamicCache) and not cache.get_seq_length():
            if getattr(cache, "_is_user_defined", False):
                raise InputError("this DynamicCache would stay empty here: give OffloadedCache(llm) as past_key_values")
            cache = OffloadedCache(llm)
        if not isinstance(cache, OffloadedCache):
            return own(*args, **named)
        caches.add(cache)
        logits = cache.compute(_checked(given), given.get("attention_mask"), int(given.get("logits_to_keep") or 0))
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    return forward


def _checked(given: dict[str, Any]) -> torch.Tensor:
    """The token ids `[B, T]`, where nothing is asked for that is not made here. Raises InputError."""
    asked = [name for name in _OTHER if given.get(name) not in (None, False)]
    ids = given.get("input_ids")
    if asked or ids is None:
        raise InputError(
            f"{', '.join(asked) or 'no input_ids'}: with an offloaded cache there are logits of token ids only"
        )
    found: torch.Tensor = ids
    return found


class OffloadedCache(Cache):
    """The sequences of a batch in an `LLM`'s pool, one a row, as transformers' generation sees a cache. Rows that were
    padded on the left have fewer tokens than columns. Freed when nobody refers to it, or with `free`."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(layers=[])
        self._runner = llm.runner
        self._rows: list[Sequence] = []
        self._columns = 0
        self._takes_back = 0
        weakref.finalize(self, _free, self._runner, self._rows)

    def __repr__(self) -> str:
        return f"OffloadedCache(rows={len(self._rows)}, tokens={self._columns})"

    def free(self) -> None:
        """Gives its rows back; it is empty then. A second call does nothing."""
        _free(self._runner, self._rows)
        self._columns = self._takes_back = 0

    # ------------------------------------------------------------------------------------- what generation asks of it

    is_compileable = False
    is_croppable = True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        """-1: it grows."""
        return -1

    def activate_past_recording(self) -> None:
        """Nothing: what is taken back is in the pool."""

    def update(self, *tensors: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Never called where its model is offloaded. Raises InputError."""
        raise InputError("an OffloadedCache is for the model of its LLM, within `with offload(model)`")

    def reset(self) -> None:
        """As `free`."""
        self.free()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` is: the first that asks for a row keeps it, others fork from it."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The rows of `indices` stay."""
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last tokens of a single row: -n takes n back, as transformers' caches do, at most those that
        were computed together in the last call. Raises InputError."""
        count = abs(int(tokens_to_remove))
        if count > self._takes_back:
            raise InputError(f"{count} tokens cannot be taken back: only the last {self._takes_back} were one call's")
        if not count:
            return
        with self._runner.pool.lock:
            for row in self._rows:
                del row.tokens[len(row.tokens) - count :]
                rewind(self._runner, row, row.position - count)
                row.exact = min(row.exact, row.position)
                self._runner.reload(row)  # the window has what was taken back
        self._columns -= count
        self._takes_back -= count

    def _select(self, wanted: Seq[int]) -> None:
        runner, old, kept = self._runner, list(self._rows), set()
        with runner.pool.lock:
            self._rows.clear()
            try:
                for index in wanted:
                    one = old[index]
                    again = partial(runner.fork, one, len(one.tokens) + 1, same_trace=True)
                    self._rows.append(runner.retry_after_reclaim(again) if index in kept else one)
                    kept.add(index)
            finally:
                _free(runner, [one for index, one in enumerate(old) if index not in kept])

    # --------------------------------------------------------------------------------------------- what is computed

    def compute(self, ids: torch.Tensor, mask: torch.Tensor | None, keep: int) -> torch.Tensor:
        """Takes ids `[B, T]`; mask: of all columns `[B, n]`, 0 is padding on the left. Returns float32 logits
        `[B, keep, V]` of what follows the last `keep` tokens (0: all T).

        One token a row is a decode step under the policy; several are attended to exactly, as a prompt is. Raises
        InputError for what does not go on from here, and changes nothing; ModelError, PoolFullError, after which the
        cache is empty.
        """
        keep = keep or ids.shape[1]
        if self._rows:
            self._check(ids, mask)
        try:
            with self._runner.pool.lock:
                if not self._rows:
                    return self._begin(ids, mask, keep)
                return self._decode(ids) if ids.shape[1] == 1 else self._extend(ids, keep)
        except BaseException:  # what was being computed is in between: none of it can be gone on with
            self.free()
            raise

    def _begin(self, ids: torch.Tensor, mask: torch.Tensor | None, keep: int) -> torch.Tensor:
        """The prompts' tokens, each row's own."""
        runner = self._runner
        for row, tokens in enumerate(ids.tolist()):
            padding = 0 if mask is None else _padding(mask[row, -len(tokens) :].tolist())
            prompt = tokens[padding:]
            runner.check_fits(len(prompt))
            begin = partial(runner.new_sequence, prompt, len(prompt) + 1, reuse=max(1, len(prompt) - keep + 1))
            self._rows.append(runner.retry_after_reclaim(begin))
        logits = [self._exactly(row, min(keep, len(row.tokens))) for row in self._rows]
        self._columns = ids.shape[1]
        return _stacked(logits, keep)

    def _extend(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Several more tokens of each row."""
        for row, tokens in zip(self._rows, ids.tolist(), strict=True):
            row.tokens += tokens
            self._runner.check_fits(len(row.tokens))
        logits = [self._exactly(row, keep) for row in self._rows]
        self._columns += ids.shape[1]
        return _stacked(logits, keep)

    def _exactly(self, row: Sequence, keep: int) -> torch.Tensor:
        """Computes what is left of a row's tokens. The last `keep` can be taken back, which what is before them, known
        to others by now, cannot. float32 logits `[keep, V]`."""
        runner, stop = self._runner, len(row.tokens) - keep
        runner.expect(row, len(row.tokens) + _AHEAD)
        runner.retry_after_reclaim(partial(runner.pool.reserve, row.blocks, len(row.tokens)))
        self._takes_back = keep if runner.policy.evictable else 0
        if keep == 1:
            last = runner.prefill(row, len(row.tokens), want_logits=True)
            assert last is not None
            return last[None]
        if row.position < stop:
            runner.prefill(row, stop)
        [logits] = verify(runner, [(row, keep)])
        for _ in range(keep):
            accept(runner, row)
        return logits

    def _decode(self, ids: torch.Tensor) -> torch.Tensor:
        """A step of every row."""
        runner = self._runner
        for row, [token] in zip(self._rows, ids.tolist(), strict=True):
            row.tokens.append(token)
            runner.check_fits(len(row.tokens))
            if len(row.tokens) > row.expected:
                runner.expect(row, len(row.tokens) + _AHEAD)
            runner.retry_after_reclaim(partial(runner.reserve, row))
        logits = runner.decode(self._rows)
        self._columns += 1
        self._takes_back = 0
        return logits[:, None].clone()  # of inference mode no more: generation may write to it

    def _check(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raises InputError for another batch, and for padding behind the prompt."""
        if len(ids) != len(self._rows):
            raise InputError(f"{len(ids)} rows for a cache of {len(self._rows)}: a batch goes on as it began")
        if mask is not None and mask.ndim == 2 and not bool(mask[:, -ids.shape[1] :].all()):
            raise InputError("a row is padded behind its prompt: pad on the left (tokenizer.padding_side='left')")


def _padding(mask: Seq[int]) -> int:
    """How many columns are padding. Raises InputError where it is not on the left, or all of them are."""
    padding = next((i for i, real in enumerate(mask) if real), len(mask))
    if not all(mask[padding:]) or padding == len(mask):
        raise InputError("a row is empty, or padded on the right: pad on the left (tokenizer.padding_side='left')")
    return padding


def _stacked(logits: Seq[torch.Tensor], keep: int) -> torch.Tensor:
    """`[B, keep, V]` of rows `[n, V]` with n <= keep; what is before a short row is 0."""
    return torch.stack([torch.nn.functional.pad(row, (0, 0, keep - len(row), 0)) for row in logits])


def _free(runner: Runner, rows: list[Sequence]) -> None:
    with runner.pool.lock:
        while rows:
            runner.free(rows.pop())
