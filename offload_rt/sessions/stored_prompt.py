"""Prompts without a session name: the prefix cache of all requests, in host memory and on disk.

Such a prompt is a session that lasts for one request and has no history on disk. Its blocks are named by their tokens,
so any later prompt finds them, also after a restart. As in the prefix tree, only exact KV is reused, so a response does
not depend on earlier requests.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from ..core import BLOCK_SIZE, BlockTable, Prompt
from ..engine.cache_manager import salt_provenance
from ..engine.runner import Runner
from ..model_runner.prefill import Prefill
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Recorder
from ..outputs import FinishReason
from ..sampling_params import SamplingParams
from ..storage.block_store import NamedBlock
from .context import SessionContext
from .history import History
from .host_tier import HostTier
from .session_kv import SessionKV
from .stored_request import StoredRequest

T = TypeVar("T")


class PromptKV(SessionKV):
    """KV of one prompt. It stays in host memory until its blocks are written."""

    claims = True

    def __init__(self, context: SessionContext, cache_salt: str) -> None:
        super().__init__(context, History("", context.runner.model.name, salt=salt_provenance(cache_salt)))
        self._windows: BlockTable | None = None

    def _match(self) -> BlockTable:
        return self.runner.match(self.history.tokens, self.history.provenance, exact_only=True)

    @property
    def _keeps_decoded(self) -> bool:
        return False

    def claim(self) -> None:
        """Claim all stored blocks of the prompt, so that the deletion of a session with the same text keeps them."""
        names, groups = self.names(len(self.history.tokens) // BLOCK_SIZE * BLOCK_SIZE), self.runner.pool.groups.groups
        windows = (name.window(group) for name in names for group in groups if group)
        states = (name.state() for name in names if self._states is not None)
        self.context.storage.claim([name.key for name in (*names, *windows, *states)])

    def keep(self, computed: int) -> None:
        """Enqueue for writing the full blocks of the first `computed` tokens. Their KV must be exact."""
        assert self.sequence is not None
        self.history.tokens, self.history.computed = list(self.sequence.tokens), computed // BLOCK_SIZE * BLOCK_SIZE
        self.history.starts = [self.sequence.trace.prompt_tokens - 1]  # the same prompt computes its last token again
        self.write_rest()

    def keep_windows(self) -> None:
        """Enqueue for writing the sliding-window blocks that the next token sees.

        They stay in memory until `drop`, even after they leave the windows. Call at the end of a full block.
        """
        pool, sequence = self.runner.pool, self.sequence
        if self._stores_windows and sequence is not None and self._windows is None:
            self._windows = pool.fork(sequence.blocks)
            pool.shrink(self._windows, 0)
            shown = self.fresh(self._shown(sequence.position))
            self.mark_enqueued(shown[: self.context.saver.save(self._windows, shown, claim=True)])

    @property
    def _stores_windows(self) -> bool:
        # Without a full-attention layer, the length of the known prompt cannot be found.
        return self.runner.pool.groups.full and self.runner.pool.groups.sliding > 0

    def drop(self) -> None:
        super().drop()
        if self._windows is not None:
            self.context.saver.flush()
            self.runner.pool.release(self._windows)
            self._windows = None

    def write_rest(self) -> bool:
        """Enqueue blocks that did not fit in the write buffer before. Return whether there were any."""
        before = len(self._enqueued)
        self.enqueue(self.all_names())
        return len(self._enqueued) > before

    def all_names(self) -> list[NamedBlock]:
        held = self.sequence.blocks.windows if self._stores_windows and self.sequence is not None else ()
        return [name for name in super().all_names() if name.group <= 0 or name.index in held]

    def write_out(self) -> list[NamedBlock]:
        # Write nothing: a session with the same text may have been deleted since, and must stay deleted.
        self.context.saver.flush()
        return []


class StoredPrompt(StoredRequest):
    """A request without a session name.

    If it ends early, complete segments of its prefill are kept. `release` frees the memory after blocks are written.
    """

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
        """Create a request. See `WholePrompts.turn` for the arguments."""
        kv = PromptKV(context, cache_salt)
        super().__init__(kv, host, Prompt(number, tuple(prompt), cache_salt), params, recorder)
        self.kv: PromptKV = kv

    def start(self, runner: Runner) -> Prefill:
        """Start loading the cached prefix and begin the prefill. Raise PoolFullError, InputError or ModelError."""
        assert self.sequence is None
        runner.model.check_weights_unchanged()
        runner.check_fits(self.expected_tokens)
        # After a drop, tokens that were generated before are prefilled if this gives the same KV as decoding.
        tokens = self.prompt.token_ids if runner.approximates else self.tokens
        self.kv.history.tokens, self.kv.history.computed = list(tokens), 0
        self.kv.claim()
        sequence = self._after_reclaim(lambda: self.kv.ready(len(self.tokens) + 1))
        self.sequence = sequence
        sequence.tokens, sequence.trace.prompt_tokens = self.tokens, len(self.prompt.token_ids)
        diverged = runner.cache_manager.diverges(tokens, self.kv.history.provenance)
        diverged = None if diverged is None else max(diverged, sequence.position)
        parted = len(tokens) if diverged is None else diverged
        return self._begin_prefill(runner, len(tokens), in_memory=False, diverged_at=diverged, parted_at=parted)

    def _segment_stop(self, start: int) -> int:
        # A later prompt continues after a full block and needs complete windows there, so a segment ends there.
        stop, full = super()._segment_stop(start), self._stop // BLOCK_SIZE * BLOCK_SIZE
        return min(stop, full) if self.kv.runner.pool.groups.sliding and start < full else stop

    def next_prefill(self, runner: Runner) -> Prefill | None:
        assert self.sequence is not None
        if self.sequence.position == self._stop // BLOCK_SIZE * BLOCK_SIZE:
            self.kv.keep_windows()
        return super().next_prefill(runner)

    def resume(self, sequence: Sequence) -> None:
        super().resume(sequence)
        self.kv.replace(sequence)

    def _after_reclaim(self, action: Callable[[], T]) -> T:
        return self.kv.runner.retry_after_reclaim(action)

    def _save_decoded(self, stop: int) -> None:
        assert self.sequence is not None
        if not self.kv.runner.approximates:
            self.kv.enqueue_decoded(self.sequence.tokens, len(self.prompt.token_ids), stop)

    def drop(self, runner: Runner) -> None:
        """Free the sequence. The prefix tree and the store keep its full blocks."""
        if self.kv.sequence is None:
            return
        if self.sequence is not None:
            self._trace = self.sequence.trace
            self._count_arrived(self._trace)
        self._give_up_prefill()
        self._host.take(self.kv)
        self.kv.drop()
        self.kv.unpin()
        self.sequence = None

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """Enqueue the blocks for writing. The memory is kept until `release`."""
        self.finish_reason = self.finish_reason or reason
        sequence = self.sequence
        if sequence is None:
            return
        self._count_arrived(sequence.trace)
        self._final = self.stats(runner)
        if self.kv.loader is not None:  # no layer was computed yet
            self.drop(runner)
            return
        self._give_up_prefill()
        self.sequence = None
        self.kv.keep(sequence.exact if runner.approximates else sequence.position)
        self._host.park(self.kv)

    def persist(self) -> None:
        """Record the use of the blocks on disk."""
        history = self.kv.history
        self.kv.claim()  # also blocks that a session has written since the start
        self.kv.context.storage.touch([name.key for name in self.kv.names(history.computed)])

    def release(self) -> bool:
        """Free the memory after the blocks were written. The caller must hold the lock of the pool.

        Returns:
            True if blocks that did not fit in the write buffer before were enqueued now. The memory is then still in
            use.
        """
        if self.kv.sequence is None:  # evicted, or never started
            return False
        if self.kv.write_rest():
            return True
        self._host.take(self.kv)
        self.kv.leave_host()
        return False
