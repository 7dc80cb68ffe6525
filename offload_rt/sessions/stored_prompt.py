"""Requests without a session name. Their KV is kept in host memory and on disk as a prefix cache.

Such a request acts as a session for one turn but has no history on disk. The names of its blocks depend only on the
text, so later prompts with the same prefix find them. Only exact KV is reused, so no response depends on earlier
requests.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from ..core import BLOCK_SIZE, BlockTable, Prompt
from ..engine.cache_manager import salt_provenance
from ..engine.runner import Runner
from ..errors import PoolFullError
from ..model_runner.prefill import Prefill
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Recorder
from ..sampling_params import SamplingParams
from ..storage.naming import NamedBlock
from .context import SessionContext
from .history import History
from .host_tier import HostTier
from .session_kv import SessionKV
from .stored_request import StoredRequest

T = TypeVar("T")


class PromptKV(SessionKV):
    """KV cache of one request without a session name. The KV stays in host memory until it is on disk."""

    for_prompt = True
    keeps_decoded = False

    def __init__(self, context: SessionContext, cache_salt: str) -> None:
        super().__init__(context, History("", context.runner.model.name, salt=salt_provenance(cache_salt)))
        self._windows: BlockTable | None = None

    def ready(self, capacity: int) -> Sequence:
        self.mark_blocks()
        return super().ready(capacity)

    def _match(self) -> BlockTable:
        return self.runner.match(self.history.tokens, self.history.provenance, exact_only=True)

    def mark_blocks(self) -> None:
        """Mark all stored blocks of the prompt as used. The deletion of a session then keeps them."""
        names = self.blocks.names(len(self.history.tokens) // BLOCK_SIZE * BLOCK_SIZE)
        groups = self.runner.pool.groups.groups
        windows = (name.window(group) for name in names for group in groups if group)
        states = (name.state() for name in names if self.context.states is not None)
        keys, storage = [name.key for name in (*names, *windows, *states)], self.context.storage
        # Do this on the saver's thread, because it opens one file per block.
        self.context.saver.notify(lambda: storage.mark_for_prompts(keys))

    def keep(self, computed: int) -> None:
        """Queue the full blocks of the first `computed` tokens for writing. Their KV must be exact."""
        assert self.sequence is not None
        self.history.tokens, self.history.computed = list(self.sequence.tokens), computed // BLOCK_SIZE * BLOCK_SIZE
        self.history.starts = [self.sequence.trace.prompt_tokens - 1]  # the same prompt computes its last token again
        self.write_rest()

    def keep_windows(self) -> None:
        """At the end of a block, queue for writing the sliding-window blocks that the next token needs.

        They stay in memory until `drop` or `release_windows`.
        """
        pool, sequence = self.runner.pool, self.sequence
        if self._stores_windows and sequence is not None and self._windows is None:
            self._windows = pool.fork(sequence.blocks)
            pool.shrink(self._windows, 0)
            shown = self.unsaved(self.blocks.window_names(sequence.position))
            self.mark_enqueued(shown[: self.context.saver.save(self._windows, shown, for_prompt=True)])

    @property
    def _stores_windows(self) -> bool:
        # Only the blocks of full-attention layers tell how long a stored prefix is.
        return self.runner.pool.groups.full and self.runner.pool.groups.sliding > 0

    def release_windows(self) -> bool:
        """Free the blocks of `keep_windows` once they are written. Return False if there are none."""
        if self._windows is None:
            return False
        self.context.saver.wait_for(self._windows)
        self.runner.pool.release(self._windows)
        self._windows = None
        return True

    def drop(self) -> None:
        super().drop()
        self.release_windows()

    def write_rest(self) -> bool:
        """Queue the blocks that did not fit in the write buffer before. Return False if there are none."""
        before = len(self._enqueued)
        waiting = self.enqueue(self.all_names())
        return waiting or len(self._enqueued) > before

    def all_names(self) -> list[NamedBlock]:
        windows = self.sequence.blocks.windows if self._stores_windows and self.sequence is not None else ()
        return [name for name in super().all_names() if name.group <= 0 or name.index in windows]

    def enqueue_decoded(self, tokens: Seq[int], start: int, stop: int) -> None:
        if not self.runner.approximates:  # otherwise, only the KV of the prompt is exact
            super().enqueue_decoded(tokens, start, stop)

    def write_out(self) -> list[NamedBlock]:
        super().write_out()
        return []  # no history refers to these blocks, so a failed write does not prevent an eviction

    def persist(self) -> None:
        """Update the time of last use of the prompt's blocks on disk, which determines the order of eviction."""
        self.mark_blocks()  # this includes blocks that a session has written since this request started
        self.context.storage.touch([name.key for name in self.blocks.names(self.history.computed)])


class StoredPrompt(StoredRequest):
    """A request without a session name. Its KV is loaded from a store and saved there."""

    def __init__(
        self,
        context: SessionContext,
        host: HostTier,
        number: int,
        prompt: Seq[int],
        params: SamplingParams,
        recorder: Recorder | None,
        cache_salt: str,
    ) -> None:
        kv = PromptKV(context, cache_salt)
        super().__init__(kv, host, Prompt(number, tuple(prompt), cache_salt), params, recorder)
        self.kv: PromptKV = kv

    def _prepare(self, runner: Runner) -> None:
        runner.check_fits(self.expected_tokens)

    def _undo_prepare(self) -> None: ...

    def _diverged_at(self, tokens: Seq[int], position: int) -> int | None:
        diverged_at = self.kv.runner.cache_manager.first_uncached(tokens, self.kv.history.provenance)
        return None if diverged_at is None else max(diverged_at, position)

    def _segment_stop(self, start: int) -> int:
        # A later prompt continues after the last full block and needs complete sliding windows at that point, so a
        # segment ends there.
        stop, full = super()._segment_stop(start), self._stop // BLOCK_SIZE * BLOCK_SIZE
        return min(stop, full) if self.kv.runner.pool.groups.sliding and start < full else stop

    def next_prefill(self, runner: Runner) -> Prefill | None:
        assert self.sequence is not None
        if self.sequence.position == self._stop // BLOCK_SIZE * BLOCK_SIZE:
            self.kv.keep_windows()
        return super().next_prefill(runner)

    def resume(self, sequence: Sequence) -> None:
        super().resume(sequence)
        self.kv.set_sequence(sequence)

    def _after_reclaim(self, action: Callable[[], T]) -> T:
        try:
            return self.kv.runner.retry_after_reclaim(action)
        except PoolFullError:
            if not self.kv.release_windows():
                raise
        return self.kv.runner.retry_after_reclaim(action)

    def _after_drop(self, *, untouched: bool) -> None:
        self.kv.drop()
        self.kv.blocks.unpin_all()

    def _store_kv(self, runner: Runner) -> None:
        sequence = self.sequence
        if sequence is None:
            return
        if self.kv.loader is not None:  # no layer has been computed yet
            self.drop(runner)
            return
        self._give_up_prefill()
        self.sequence = None
        self.kv.keep(sequence.exact if runner.approximates else sequence.position)
        self._host.park(self.kv)

    def release(self) -> bool:
        """Free the memory of an ended request if its blocks are on disk. The caller must hold the lock of the pool.

        Return True if blocks had to be queued for writing. `release` must then be called again.
        """
        if self.kv.sequence is not None and self.kv.write_rest():
            return True
        self.free_memory(write=False)
        return False

    def free_memory(self, *, write: bool) -> None:
        """Free the memory of an ended request after pending writes. With `write=True`, first write all other blocks."""
        self._host.unpark(self.kv)
        if write:
            self.kv.evict()
        self.kv.drop()
        self.kv.blocks.unpin_all()
