"""Sessions that survive: conversations whose KV cache comes back from host memory or disk (CachedAttention)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from ..config import SamplingParams
from ..core import CHUNK, Lease, Request
from ..errors import InputError
from ..pool.disk import StoredChunk
from .conversation import turn_tokens
from .generation import Event, Generation
from .history import History
from .metrics import Stats
from .preload import DamagedChunkError, Preload
from .saving import NamedChunk, layer_bytes
from .sequence import Sequence
from .truncation import check_truncatable, copy_rows, kept_tokens, read_sinks, turn_sinks

if TYPE_CHECKING:
    from .session_store import SessionStore

SINKS = 4
"""First tokens that a truncation keeps unless told otherwise."""


class Session:
    """One conversation. `send` takes a turn; in between its rows stay in the pool until `close`. It is saved at the end
    of every turn, while the caller goes on. Not thread-safe; one session computes at a time."""

    def __init__(self, store: SessionStore, history: History) -> None:
        self._store, self._runner, self._history = store, store.runner, history
        self._sequence: Sequence | None = None
        self._preload: Preload | None = None
        self._host_tokens = 0
        self._pinned: set[bytes] = set()
        self._offered: set[bytes] = set()
        self._broken: set[bytes] = set()
        self._ids = itertools.count()
        self._closed = self._busy = False
        self.last_stats: Stats | None = None
        self.loaded_tokens = 0

    @property
    def name(self) -> str:
        """The session's name."""
        return self._history.name

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation that have not been cut."""
        return list(self._history.tokens)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """(role, text) of every turn, also of those whose tokens were cut."""
        return list(self._history.turns)

    @property
    def store_bytes(self) -> int:
        """Bytes of all files of the store, this session's and the others'."""
        return self._store.disk.bytes_used

    # ----------------------------------------------------------------------------------------------------------- turns

    def send(self, prompt: str | Seq[int], params: SamplingParams | None = None) -> Iterator[Event]:
        """One turn: events of the answer as it comes. A string goes through the tokenizer's chat template, if it has
        one; token ids are taken as they are. Closing the iterator ends the answer where it stands.

        Raises InputError, ModelError and PoolFullError as `LLM.stream`.
        """
        self._check_open()
        params = params or SamplingParams()
        if params.n > 1 or params.num_beams > 1:
            raise InputError("a session has one answer to a turn: n and num_beams must be 1")
        added = self._encode(prompt)
        self._runner.check_fits(len(self._history.tokens) + len(added) + params.max_new_tokens)
        return self._turn(prompt if isinstance(prompt, str) else "", added, params)

    def _encode(self, prompt: str | Seq[int]) -> list[int]:
        model, vocab = self._runner.model, self._runner.adapter.geometry.vocab
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise InputError(f"{model.name} has no tokenizer: give token ids, or pass tokenizer=")
            return turn_tokens(model.tokenizer, self._history.turns, self._history.tokens, prompt)
        added = [int(token) for token in prompt]
        if not added or any(not 0 <= token < vocab for token in added):
            raise InputError(f"a turn needs at least one token id, each from 0 to {vocab - 1}")
        return added

    def _turn(self, text: str, added: list[int], params: SamplingParams) -> Iterator[Event]:
        self._check_open()
        history, model = self._history, self._runner.model
        self._busy = True
        try:
            self._close_gap(len(history.tokens) + len(added) + params.max_new_tokens)
            sequence, logits = self._take_in(added, params.max_new_tokens)
            request = Request(next(self._ids), tuple(sequence.tokens))
            generation = Generation(request, params, model.tokenizer, model.eos_token_ids)
            generation.sequence = sequence
            try:
                yield from self._answer(generation, logits)
            finally:
                generation.sequence = None
                self.last_stats = self._runner.stats(sequence)
                history.tokens, history.computed = list(sequence.tokens), sequence.position
                history.mark_decoded(len(request.prompt), sequence.position)
                history.turns += [("user", text), ("assistant", generation.text)]
                self._save(wait=False)
        finally:
            self._busy = False

    def _answer(self, generation: Generation, logits: torch.Tensor) -> Iterator[Event]:
        sequence = generation.sequence
        assert sequence is not None
        yield from generation.accept(self._runner, logits.unsqueeze(0))
        while generation.finish_reason is None:
            logits = self._runner.decode([sequence])
            if sequence.position % CHUNK == 0:
                self._history.tokens, self._history.computed = sequence.tokens, sequence.position
                self._offer(self._names(sequence.position, decoded_from=len(generation.request.prompt)))
            yield from generation.accept(self._runner, logits)

    def _take_in(self, added: list[int], new_tokens: int) -> tuple[Sequence, torch.Tensor]:
        """Prefills what is not computed; rows that are on disk come in layer by layer meanwhile. A chunk that turns out
        to be damaged is computed anew, with all behind it."""
        history = self._history
        before = list(history.tokens)
        history.tokens = before + added
        try:
            while True:
                sequence = self._ready(len(history.tokens) + new_tokens)
                try:
                    if self._store.private:
                        self._load_all()
                        self._runner.relearn(sequence)  # with or without a restart: what the pool's rounded rows say
                    return sequence, self._prefill(sequence)
                except DamagedChunkError as damage:
                    self._broken.add(damage.key)
                    self._drop()
        except BaseException:
            history.tokens = before
            if self._sequence is not None:
                self._sequence.tokens = list(before)
            raise

    def _prefill(self, sequence: Sequence) -> torch.Tensor:
        runner, store, preload = self._runner, self._store, self._preload
        stop, start = len(sequence.tokens), sequence.position
        names = self._fresh(self._names(stop // CHUNK * CHUNK))
        saving = store.saver.begin(sequence.lease, names)
        try:
            wait: Callable[[int], None] = preload.wait if preload is not None else lambda layer: None
            prefill = runner.begin_prefill(sequence, stop, want_logits=True, before_layer=wait)
            while not prefill.done:
                runner.advance_prefill(prefill)
                if saving is not None:
                    store.saver.layer_done(saving, prefill.layer - 1)
        except BaseException:
            if saving is not None:
                store.saver.abort(saving)
            if preload is not None:
                self._drop()
            raise
        self._offered.update(name.key for name in (saving.chunks if saving is not None else ()))
        self._offered -= store.saver.recheck()
        seconds = sequence.trace.prefill_seconds
        if preload is not None:
            self._end_preload()
            runner.reload(sequence)
            seconds -= preload.stall_seconds
        store.compute_rate = seconds / (stop - start)
        assert prefill.logits is not None
        return prefill.logits

    # ---------------------------------------------------------------------------------------------------- coming back

    def prefetch(self) -> None:
        """Begins to bring the session's rows into host memory, as many layers as the read buffer has, before its next
        turn is known. Raises PoolFullError."""
        self._check_open()
        if self._sequence is None and self._history.computed:
            self._begin_restoring()

    def _begin_restoring(self) -> None:
        self._sequence = self._restore(len(self._history.tokens) + 1)

    def _ready(self, capacity: int) -> Sequence:
        """The session's sequence with all tokens of its history and room for `capacity`."""
        history = self._history
        if self._sequence is None:
            self._sequence = self._restore(capacity)
            return self._sequence
        sequence = self._sequence
        self._runner.pool.reserve(sequence.lease, capacity)
        self._offered -= self._store.saver.recheck()
        sequence.tokens = list(history.tokens)
        sequence.trace = sequence.trace.restart(reused=sequence.position)
        sequence.trace.prompt_tokens = 0
        return sequence

    def _restore(self, capacity: int) -> Sequence:
        """What host memory and disk have of the tokens; reading the latter begins."""
        history, runner, pool = self._history, self._runner, self._runner.pool
        lease = runner.match(history.tokens, history.cut)
        self._host_tokens = known = lease.length
        found = self._find(known)
        if found:
            index, chunk = found[-1]
            known = index * CHUNK + chunk.header.name.count
        if known < history.computed:
            self._lose_from(known)
        sequence = runner.adopt(
            history.tokens, lease, capacity=capacity, known=known, exact=min(history.exact, known),
            shift=history.shift, cut=history.cut,
        )  # fmt: skip
        self.loaded_tokens = known - self._host_tokens
        if found:
            size = sum(chunk.header.layer_bytes for _, chunk in found) * self._store.disk.layers
            ahead = self._store.read_buffer(size, len(history.tokens) - known)
            self._preload = Preload(pool, self._store.disk, lease, found, ahead)
        return sequence

    def _lose_from(self, known: int) -> None:
        """Rows from token `known` on are gone and will be computed anew. Where one chunk is damaged others may be: what
        lies on disk behind it is read through, so that it can be stored anew too."""
        history, stop = self._history, len(self._history.tokens) // CHUNK * CHUNK
        history.forget_from(known)
        if history.cut and not known:
            history.uncut()
        for name in self._names(stop)[known // CHUNK :]:
            self._store.disk.verify(name.parent, name.lineage, name.tokens)

    def _find(self, known: int) -> list[tuple[int, StoredChunk]]:
        """Stored chunks from token `known` on without a gap: full ones, and the tail where they end. One token at least
        is left to compute."""
        history, disk = self._history, self._store.disk
        names = self._names((len(history.tokens) - 1) // CHUNK * CHUNK)
        tail = self._names(history.computed)[history.computed // CHUNK :]
        found: list[tuple[int, StoredChunk]] = []
        for name in [*names[known // CHUNK :], *tail]:
            if name.index != known // CHUNK or name.key in self._broken or name.index * CHUNK + name.count == known:
                continue
            chunk = disk.find(name.parent, name.lineage, name.tokens)
            if chunk is None or chunk.header.layer_bytes != layer_bytes(self._runner.pool, name.count):
                continue
            found.append((name.index, chunk))
            known = name.index * CHUNK + name.count
            if name.count < CHUNK:
                break
        self._pin(chunk.key for _, chunk in found)
        return found

    def _end_preload(self) -> None:
        if self._preload is not None:
            self._preload.close()
            loaded = layer_bytes(self._runner.pool, self.loaded_tokens) * self._store.disk.layers
            self._store.load_rate = self._preload.load_seconds / max(1, loaded)
            self._preload = None

    def _drop(self) -> None:
        """Gives the sequence back; rows that were still to come are forgotten, not published."""
        if self._sequence is None:
            return
        self._store.saver.flush()
        if self._preload is not None:
            self._end_preload()
            self._runner.pool.truncate(self._sequence.lease, min(self._host_tokens, self._sequence.lease.length))
        self._runner.free(self._sequence)
        self._sequence = None

    # ---------------------------------------------------------------------------------------------------------- saving

    def save(self) -> None:
        """Returns when the whole session is on disk. Raises StoreError where it cannot be written."""
        self._check_open()
        self._save(wait=True)

    def _save(self, *, wait: bool) -> None:
        history, disk, saver = self._history, self._store.disk, self._store.saver
        names = self._names(history.computed)
        if self._sequence is not None and self._preload is None:
            self._offer(names)
            while wait:
                saver.flush()
                self._offered.clear()
                if not self._offer(names) or disk.failures:
                    break
            saver.flush() if wait else None
        tail = names[-1].key.hex() if history.computed % CHUNK else ""
        if history.tail and history.tail != tail and not history.tail_shared:
            disk.remove([bytes.fromhex(history.tail)])
        history.tail_shared = history.tail_shared and history.tail == tail
        history.tail, history.keys = tail, [name.key.hex() for name in names]
        self._pin(name.key for name in names)
        self._store.put(history)
        disk.touch(name.key for name in names)
        if wait and any(name.key not in disk for name in names):
            warnings.warn(
                f"session {self.name!r} is not saved whole ({disk.last_error or 'the store is full'}): what is missing "
                "will be computed again",
                stacklevel=3,
            )

    def _offer(self, names: Seq[NamedChunk]) -> bool:
        """Hands chunks that are not on disk to the saver; whether some had to wait and there is room to try again."""
        fresh = self._fresh(names)
        if not fresh or self._sequence is None:
            return False
        taken = self._store.saver.save(self._sequence.lease, fresh)
        self._offered.update(name.key for name in fresh[:taken])
        return taken < len(fresh)

    def _fresh(self, names: Seq[NamedChunk]) -> list[NamedChunk]:
        return [name for name in names if name.key not in self._store.disk and name.key not in self._offered]

    def _names(self, stop: int, *, decoded_from: int | None = None) -> list[NamedChunk]:
        history = self._history
        if decoded_from is not None:
            history.mark_decoded(decoded_from, history.computed)
        names = history.names(self._store.disk.root, self._runner.policy.lineage, stop, private=self._store.private)
        if decoded_from is not None:
            history.decoded.pop()
        return names

    def _pin(self, keys: Iterable[bytes]) -> None:
        fresh = set(keys) - self._pinned
        self._store.disk.pin(fresh)
        self._pinned |= fresh

    # ------------------------------------------------------------------------------------------------ forks, cuts, end

    def fork(self, name: str) -> Session:
        """A second session that goes on from here; rows are shared until one of the two writes. Raises InputError where
        the name is taken."""
        self._check_open()
        if self._store.exists(name):
            raise InputError(f"there is a session {name!r} already: choose another name")
        twin = self._store.enter(self._history.fork(name))
        if self._sequence is not None and self._preload is None:
            twin._sequence = self._runner.fork(self._sequence, len(self._history.tokens))
        twin._save(wait=False)
        return twin

    def truncate(self, *, keep_last: int | None = None, sinks: int = SINKS, drop: Seq[int] | None = None) -> int:
        """Cuts tokens out, with nothing computed again: all but the first `sinks` and the last `keep_last`, or those
        whose places in `tokens` are in `drop`. What is left keeps its positions, and new tokens' go on growing. Returns
        how many were cut. Raises InputError, ModelError for models that cannot, PoolFullError."""
        self._check_open()
        check_truncatable(self._runner.adapter.geometry, self._runner.model.name)
        if not 0 <= sinks < CHUNK:
            raise InputError(f"sinks={sinks} must be from 0 to {CHUNK - 1}")
        history = self._history
        kept = kept_tokens(history.computed, sinks, keep_last, drop)
        if len(kept) == history.computed:
            return 0
        if drop is not None or (history.cut and history.sinks > sinks):
            sinks = 0
        computed = history.computed
        sequence = self._materialise()
        if history.computed < computed:  # a damaged chunk was lost: less than was asked for is left to choose from
            raise InputError(
                "a part of the session was damaged and is computed again with the next turn: truncate then"
            )
        lease = self._runner.pool.new_lease(len(history.tokens) - history.computed + len(kept))
        self._keep_sinks(sequence, sinks)
        gone = history.computed - len(kept)
        history.keep(kept, sinks)
        self._rebuild(sequence, kept, lease)
        self._save(wait=False)
        return gone

    def _keep_sinks(self, sequence: Sequence, sinks: int) -> None:
        """Keeps the originals of the first tokens' keys, before the first cut."""
        if sinks and not self._history.cut:
            originals = read_sinks(self._runner.pool, sequence.lease, sinks)
            self._history.sinks = sinks
            self._store.disk.put(self._history.sinks_document, originals.view(torch.uint8).numpy().tobytes())

    def _close_gap(self, length: int) -> None:
        """Turns the sinks' keys across the gap if a context of `length` tokens would see them from farther away than
        the model was trained for."""
        history, geometry = self._history, self._runner.adapter.geometry
        distance = length + history.shift - history.sink_shift
        if not history.sinks or history.sink_shift == history.shift or distance <= geometry.max_positions:
            return
        data = self._store.disk.get(history.sinks_document)
        sequence = self._materialise()
        pool = self._runner.pool
        if data is None or history.sinks == 0:
            return
        shape = (geometry.layers, geometry.kv_heads, -1, pool.format.width)
        originals = torch.frombuffer(bytearray(data), dtype=pool.format.storage).view(shape)[:, :, : history.sinks]
        lease = pool.new_lease(len(history.tokens))
        history.turn_sinks()
        turned = self._rebuild(sequence, range(history.computed), lease)
        turn_sinks(pool, self._runner.adapter, turned.lease, originals, history.sink_shift)
        self._runner.reload(turned)

    def _materialise(self) -> Sequence:
        """The sequence with all its rows in the pool."""
        while True:
            if self._sequence is None:
                self._begin_restoring()
            assert self._sequence is not None
            try:
                self._load_all()
            except DamagedChunkError as damage:
                self._broken.add(damage.key)
                self._drop()
                continue
            self._store.saver.flush()
            return self._sequence

    def _load_all(self) -> None:
        """Waits for all layers of what is being loaded. Raises DamagedChunkError."""
        if self._preload is not None and self._sequence is not None:
            for layer in range(self._store.disk.layers):
                self._preload.wait(layer)
            self._end_preload()
            self._runner.reload(self._sequence)

    def _rebuild(self, sequence: Sequence, kept: Seq[int], lease: Lease) -> Sequence:
        """A sequence with copies of the rows `kept`, in `lease`, takes the place of the session's."""
        history, runner = self._history, self._runner
        runner.link.settle(sequence.lease)
        copy_rows(runner.pool, sequence.lease, lease, kept)
        self._sequence = None
        runner.free(sequence)
        self._offered.clear()
        self._sequence = runner.adopt(
            history.tokens, lease, capacity=len(history.tokens), known=len(kept),
            exact=min(history.exact, len(kept)), shift=history.shift, cut=history.cut,
        )  # fmt: skip
        return self._sequence

    def close(self) -> None:
        """Saves the session and gives its memory back; it can be opened again. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._save(wait=True)
        finally:
            self._drop()
            self._store.disk.unpin(self._pinned)
            self._store.left(self)

    def discard(self) -> None:
        """Closes the session without saving it, and deletes what is stored of it; chunks that others may have stay
        until they are evicted. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._drop()
        self._store.disk.unpin(self._pinned)
        self._store.forget(self._history)
        self._store.left(self)

    def check_integrity(self) -> None:
        """Asserts that history and sequence agree."""
        if self._sequence is not None:
            assert self._sequence.position == self._history.computed or self._preload is not None
            assert self._sequence.tokens == self._history.tokens

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"session {self.name!r} is closed: open it again with llm.session")
        if self._busy:
            raise InputError(f"session {self.name!r} is answering: take all events first, or close their iterator")
