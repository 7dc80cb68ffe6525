"""Run transformers' `generate` with the KV cache in host memory: `with offload(model, host_memory="64GiB"):`.

In this context, this package computes all forward calls that use a cache. Prompts are computed with full attention, and
each following token is a decode step with the policy. All other calls run the model's original forward. Generation
modes, logits processors, stopping criteria, streamers and pipelines come from transformers. Greedy tokens equal those
of `LLM`. With the policy "full", they also equal those of transformers.
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
from .engine.speculative.verification import accept, rewind, verify
from .errors import InputError
from .llm import LLM
from .model_runner.sequence import Sequence
from .models.linear import computed_in_c

_AHEAD = 1024  # Number of tokens that a sequence is expected to grow by. The pool prepares memory for them in advance.

_UNSUPPORTED = ("inputs_embeds", "labels", "output_attentions", "output_hidden_states")


@contextmanager
def offload(
    model: PreTrainedModel,
    config: EngineConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    **fields: Any,
) -> Iterator[LLM]:
    """Context manager in which `model.generate` keeps its KV cache in host memory and decodes with the policy.

    To keep the cache between calls, pass `past_key_values=OffloadedCache(llm)` to `generate`.

    Args:
        model: A loaded transformers model.
        config: Engine options. If None, the defaults are used.
        tokenizer: See `LLM`.
        **fields: Fields of `EngineConfig` that override `config`.

    Yields:
        An `LLM` with the same weights. Its methods can be used while the context is active.

    Raises:
        InputError: `model` is not a transformers model, or is already offloaded.
        OffloadError: See `LLM`.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"offload() takes a loaded transformers model, not {model!r:.80}; load it first, for example with "
            "AutoModelForCausalLM.from_pretrained, or use LLM for a folder or a hub id"
        )
    if "forward" in vars(model):
        raise InputError("the model is offloaded already: leave the other `with offload(model)` block first")
    llm = LLM(model, config, tokenizer=tokenizer, **fields)
    caches: weakref.WeakSet[OffloadedCache] = weakref.WeakSet()
    model.forward = _offloaded_forward(model.forward, llm, caches)
    try:
        with computed_in_c(model):
            yield llm
    finally:
        del model.forward
        for cache in list(caches):
            cache.free()
        llm.close()


def _offloaded_forward(original: Any, llm: LLM, caches: weakref.WeakSet[OffloadedCache]) -> Any:
    """Return a `forward` that handles calls with an `OffloadedCache` or with the empty cache that `generate` creates.

    Other calls run the `original` forward. Every cache that is used is added to `caches`.
    """
    signature = inspect.signature(original)

    @wraps(original)
    def forward(*args: Any, **named: Any) -> Any:
        given = signature.bind_partial(*args, **named).arguments
        given |= given.pop("kwargs", {})
        cache = given.get("past_key_values")
        if isinstance(cache, DynamicCache) and not cache.get_seq_length():
            if getattr(cache, "_is_user_defined", False):
                raise InputError(
                    "a DynamicCache is not filled by an offloaded model: pass past_key_values=OffloadedCache(llm)"
                )
            cache = OffloadedCache(llm)
        if not isinstance(cache, OffloadedCache):
            return original(*args, **named)
        caches.add(cache)
        logits = cache.compute(_checked(given), given.get("attention_mask"), int(given.get("logits_to_keep") or 0))
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    return forward


def _checked(given: dict[str, Any]) -> torch.Tensor:
    unsupported = [name for name in _UNSUPPORTED if given.get(name) is not None and given[name] is not False]
    ids = given.get("input_ids")
    if unsupported or ids is None:
        problem = f"does not support {', '.join(unsupported)}" if unsupported else "needs input_ids"
        raise InputError(f"a model with an offloaded cache {problem}; it computes logits of token ids only")
    checked: torch.Tensor = ids
    return checked


class OffloadedCache(Cache):
    """A transformers cache that stores each row of a batch as a sequence in the KV cache of an `LLM`.

    Left padding is not stored. Memory is freed by `free` or when this object is deleted.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(layers=[])
        self._runner = llm.runner
        self._rows: list[Sequence] = []
        self._columns = 0
        self._croppable_tokens = 0
        weakref.finalize(self, _free, self._runner, self._rows)

    def __repr__(self) -> str:
        return f"OffloadedCache(rows={len(self._rows)}, tokens={self._columns})"

    def free(self) -> None:
        """Free all sequences. Afterwards, the cache is empty."""
        _free(self._runner, self._rows)
        self._columns = self._croppable_tokens = 0

    # --------------------------------------------------------------------------------- transformers' cache protocol

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns in the cache, including padding."""
        return self._columns

    def update(self, *tensors: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # Attention layers of an offloaded model never call this method.
        raise InputError("an OffloadedCache works only with the model of its LLM, inside `with offload(model)`")

    def reset(self) -> None:
        self.free()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `abs(tokens_to_remove)` tokens.

        Raises:
            InputError: The model has recurrent layers, or fewer tokens than this were computed in its last call.
        """
        count = abs(int(tokens_to_remove))
        if count and self._runner.states is not None:
            raise InputError(
                "tokens cannot be removed from a model with recurrent layers, which keep only the state after the last "
                "token: leave out assistant_model and prompt_lookup_num_tokens"
            )
        if count > self._croppable_tokens:
            raise InputError(
                f"{count} tokens cannot be removed: only the {self._croppable_tokens} of the last call can be"
            )
        if not count:
            return
        with self._runner.pool.lock:
            for row in self._rows:
                del row.tokens[len(row.tokens) - count :]
                rewind(self._runner, row, row.position - count)
                row.exact = min(row.exact, row.position)
                self._runner.reload(row)  # The resident KV on the device still contains the removed tokens.
        self._columns -= count
        self._croppable_tokens -= count

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

    # ------------------------------------------------------------------------------------------------- computation

    def compute(self, ids: torch.Tensor, mask: torch.Tensor | None, keep: int) -> torch.Tensor:
        """Compute the next tokens of all rows.

        If there is one token per row, this is a decode step. Several tokens are computed with full attention, like a
        prompt.

        Args:
            ids: Token ids `[B, T]`.
            mask: Attention mask of all columns `[B, n]`, where 0 marks left padding. None means that there is no
                padding.
            keep: Maximum number of tokens at the end whose logits are returned. 0 means all.

        Returns:
            float32 logits `[B, keep, V]`.

        Raises:
            InputError: `ids` or `mask` do not match this cache. The cache is unchanged.
            ModelError, PoolFullError: The sequence does not fit. The cache is empty afterwards.
        """
        keep = min(keep or ids.shape[1], ids.shape[1])
        if self._rows:
            self._check(ids, mask)
        try:
            with self._runner.pool.lock:
                if not self._rows:
                    return self._begin(ids, mask, keep)
                return self._decode(ids) if ids.shape[1] == 1 else self._extend(ids, keep)
        except BaseException:  # Rows may have different lengths now, so the cache cannot be continued.
            self.free()
            raise

    def _begin(self, ids: torch.Tensor, mask: torch.Tensor | None, keep: int) -> torch.Tensor:
        runner = self._runner
        for row, tokens in enumerate(ids.tolist()):
            padding = 0 if mask is None else _padding(mask[row, -len(tokens) :].tolist())
            prompt = tokens[padding:]
            runner.check_fits(len(prompt))
            begin = partial(runner.new_sequence, prompt, len(prompt) + 1, reuse=max(1, len(prompt) - keep + 1))
            self._rows.append(runner.retry_after_reclaim(begin))
        self._columns = 0
        return self._prefill_rows(ids.shape[1], keep)

    def _extend(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        for row, tokens in zip(self._rows, ids.tolist(), strict=True):
            row.tokens += tokens
            self._runner.check_fits(len(row.tokens))
        return self._prefill_rows(ids.shape[1], keep)

    def _prefill_rows(self, columns: int, keep: int) -> torch.Tensor:
        """Compute all tokens that have no KV yet, using full attention. Return float32 logits `[B, keep, V]`.

        `columns` is the number of new columns. `crop` can later remove up to `keep` of them.
        """
        # Earlier tokens may be shared with other sequences, so they cannot be cropped.
        kept = [min(keep, len(row.tokens)) for row in self._rows]
        logits = [self._prefill_row(row, count) for row, count in zip(self._rows, kept, strict=True)]
        self._columns += columns
        # After a prefill, KV before the sliding windows has been freed. After a verification, it is still there.
        lost = not self._runner.policy.evictable or (keep == 1 and self._runner.pool.groups.sliding > 0)
        self._croppable_tokens = 0 if lost else min(kept)
        return _stacked(logits, keep)

    def _prefill_row(self, row: Sequence, keep: int) -> torch.Tensor:
        runner, stop = self._runner, len(row.tokens) - keep
        runner.expect(row, len(row.tokens) + _AHEAD)
        runner.retry_after_reclaim(partial(runner.pool.reserve, row.blocks, len(row.tokens)))
        if keep == 1:
            last = runner.prefill(row, len(row.tokens), want_logits=True)
            assert last is not None
            return last[None]
        if runner.states is not None:
            return self._all_logits(row)[-keep:]
        if row.position < stop:
            runner.prefill(row, stop)
        [logits] = verify(runner, [(row, keep)])
        for _ in range(keep):
            accept(runner, row)
        return logits

    def _all_logits(self, row: Sequence) -> torch.Tensor:
        # float32 logits `[n, V]` of the n tokens whose KV is missing
        found: list[torch.Tensor] = []
        self._runner.prefill(row, len(row.tokens), on_logits=lambda _, logits: found.append(logits))
        return torch.cat(found)

    def _decode(self, ids: torch.Tensor) -> torch.Tensor:
        runner = self._runner
        for row, [token] in zip(self._rows, ids.tolist(), strict=True):
            row.tokens.append(token)
            runner.check_fits(len(row.tokens))
            if len(row.tokens) > row.expected:
                runner.expect(row, len(row.tokens) + _AHEAD)
            runner.retry_after_reclaim(partial(runner.reserve, row))
        logits = runner.decode(self._rows)
        self._columns += 1
        self._croppable_tokens = 0
        # Clone the logits, because generation may write to them, and inference tensors do not allow this.
        return logits[:, None].clone()

    def _check(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        if len(ids) != len(self._rows):
            raise InputError(f"the cache has {len(self._rows)} rows and the batch has {len(ids)}: they must be equal")
        if mask is not None and mask.ndim == 2 and not bool(mask[:, -ids.shape[1] :].all()):
            raise InputError("a row is padded after its prompt: pad on the left (tokenizer.padding_side='left')")


def _padding(mask: Seq[int]) -> int:
    padding = next((i for i, real in enumerate(mask) if real), len(mask))
    if not all(mask[padding:]) or padding == len(mask):
        raise InputError("a row is empty, or padded on the right: pad on the left (tokenizer.padding_side='left')")
    return padding


def _stacked(logits: Seq[torch.Tensor], keep: int) -> torch.Tensor:
    return torch.stack([torch.nn.functional.pad(row, (0, 0, keep - len(row), 0)) for row in logits])


def _free(runner: Runner, rows: list[Sequence]) -> None:
    with runner.pool.lock:
        while rows:
            runner.free(rows.pop())
