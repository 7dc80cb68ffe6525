"""Write a long document as the turns of a session, so that an interrupted run can be repeated exactly.

A turn ends when the number of tokens is one more than a multiple of the block size. The tokens of an interrupted turn
are discarded, and the next run generates the same tokens again, because random numbers depend only on the seed and the
position.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from ..core import BLOCK_SIZE
from ..engine.detokenizer import TextStream
from ..errors import InputError
from ..llm import LLM
from ..outputs import FinishReason
from ..sampling_params import SamplingParams
from ..sessions.session import Session
from ..sessions.truncate import SINKS, tokens_after
from ..sessions.turn import check_turn
from .draft import Draft, saved_sampling
from .files import TextFile, Written
from .progress import Document, WritingProgress

SESSION = "document"

LONGER_TURNS = 16_384
"""A turn is one block longer for every `LONGER_TURNS` tokens of context.

Turns are longer in long contexts, because the first token of each turn attends to the whole context exactly.
"""

SEPARATOR = "\n\n"

RATE_TOKENS = 64
"""Number of latest tokens over which the displayed speed is measured."""


def write_document(
    llm: LLM,
    path: str | Path,
    prompt: str = "",
    sampling_params: SamplingParams | None = None,
    *,
    max_tokens: int = 1000,
    beginning: str = "",
    outline: Sequence[str] = (),
    chapters: int = 0,
    chapter_tokens: int = 0,
    system: str = "",
    folder: str | Path | None = None,
    on_progress: Callable[[WritingProgress], None] = lambda progress: None,
) -> Document:
    """Write a long document to a file, or continue one.

    The file grows token by token. The folder `path` + ".session" keeps the KV cache, so that a later call with the same
    arguments continues without computing the text again. An interruption does not change the text.

    Args:
        llm: The model.
        path: Text file. If it exists but has no session folder, its text becomes the beginning of a new document.
        prompt: Instruction for the model. It is not part of the document. If the model has a chat template, the prompt
            is rendered with it. Otherwise, the prompt precedes the text in the context.
        sampling_params: Sampling parameters. None uses the parameters that the document was begun with, or the model's
            defaults if the document is new. A document keeps its seed.
        max_tokens: Total number of tokens to generate if the document has no chapters.
        beginning: Text that a new document begins with.
        outline: Headings of the chapters.
        chapters: Number of chapters. 0 means one chapter per heading.
        chapter_tokens: Length of a chapter in tokens. 0 means 1000. A chapter ends at the end of a KV block, so it can
            be up to 64 tokens longer than this.
        system: System message, for models with a chat template.
        folder: Session folder. None means `path` + ".session".
        on_progress: Called after each layer of the first prefill and after each token.

    Raises:
        InputError: The document was begun with other settings, or its text was edited.
        ConfigError: The policy's KV cannot be restored.
        StoreError: Another process is writing the document, or the disk is full.
        PoolFullError: The KV cache does not fit.
    """
    given = {} if sampling_params is None else saved_sampling(sampling_params, 0) | {"seed": sampling_params.seed}
    draft = Draft(
        path, folder, sampling=given, prompt=prompt, system=system, beginning=beginning,
        headings=tuple(outline), chapter_tokens=chapter_tokens,
    )  # fmt: skip
    return write_draft(llm, draft, max_tokens=max_tokens, chapters=chapters, on_progress=on_progress)


def write_draft(
    llm: LLM,
    draft: Draft,
    *,
    max_tokens: int,
    chapters: int = 0,
    on_progress: Callable[[WritingProgress], None] = lambda progress: None,
) -> Document:
    """Write a document whose settings `Draft` has checked. See `write_document`."""
    fingerprint = _fingerprint(llm)
    if draft.new:
        params = llm.get_default_sampling_params(**draft.sampling)
        seed = random.SystemRandom().getrandbits(32) if params.seed is None else params.seed
        sampling = saved_sampling(params, seed)
        draft.settings = replace(draft.settings, model=llm.name, fingerprint=fingerprint, sampling=sampling)
    elif fingerprint != draft.settings.fingerprint:
        raise InputError(
            f"{str(draft.path)!r} was begun with {draft.settings.model}, with other weights or another number format "
            f"or policy than now: use the same model and options, or delete the folder {str(draft.folder.path)!r} to "
            "continue its text"
        )
    writer = _Writer(llm, draft, max_tokens, draft.chapter_count(chapters), on_progress)
    with closing(writer), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"session '{SESSION}' would outgrow")  # see `Document.removed_tokens`
        return writer.run()


def _fingerprint(llm: LLM) -> str:
    runner = llm.runner
    return f"{runner.model.fingerprint} {runner.adapter.dtype} {runner.pool.format.name} {runner.provenance_key}"


class _Writer:
    def __init__(
        self, llm: LLM, draft: Draft, max_tokens: int, chapters: int, on_progress: Callable[[WritingProgress], None]
    ) -> None:
        self._llm, self._draft, self._settings = llm, draft, draft.settings
        self._max_tokens, self._chapters, self._on_progress = max_tokens, chapters, on_progress
        self._params = draft.params()
        eos = frozenset() if self._params.ignore_eos else llm.runner.model.eos_token_ids
        self._ends = eos.union(self._params.stop_token_ids)
        self._positions = llm.runner.max_positions
        self._times: deque[float] = deque(maxlen=RATE_TOKENS)
        self._unfinished: list[int] = []  # generated tokens of the current turn
        self._added = 0  # number of tokens that the current turn appends before them
        self._headings: dict[int, list[int]] = {}
        self._written = draft.written
        if draft.new:  # settings that cannot be used must not be stored, because they cannot be changed later
            check_turn(self._params, llm.runner.model)
            self._check_fits()
        self._session: Session = llm.session(SESSION, draft.folder.kv)
        self._file = TextFile(draft.path, draft.folder.path)
        try:
            draft.folder.create(draft.settings)
            self._written = self._restore()
        except BaseException:
            self._session.close()
            raise

    def close(self) -> None:
        with ExitStack() as ends:
            ends.callback(self._session.close)
            ends.callback(self._file.close)
            self._save()

    def _save(self) -> None:
        self._written.new_tokens = self._new_tokens
        self._draft.folder.save_progress(self._written)

    def run(self) -> Document:
        self._check_fits()
        reason: FinishReason | None = None
        while reason is None and (turn := self._next_turn()) is not None:
            reason = self._write_turn(*turn)
        if reason is None:
            reason = "stop" if self._text_complete else "length"
        if self._text.stopped is None:
            # If the document is continued, later bytes can complete the last character.
            self._file.append(self._text.flush() if reason == "stop" else self._text.held_back)
        if self._text.stopped is not None:
            self._file.remove_partial_end(self._text.stopped)
        self._written.complete = reason
        history = self._session.history
        return Document(
            path=self._draft.path,
            new_tokens=self._new_tokens,
            chapters=len(self._written.chapters),
            finish_reason=reason,
            context_tokens=len(history.tokens) + self._added + len(self._unfinished),
            removed_tokens=history.removed + self._written.unread,
            stats=self._session.last_stats,
        )

    # ------------------------------------------------------------------------------------------------------ resuming

    def _restore(self) -> Written:
        written = self._draft.written
        written.tokens = self._all_tokens(written.tokens)
        # The heading of an interrupted turn is written again.
        written.chapters = [place for place in written.chapters if _has_heading(written.tokens, place, self._ends)]
        written.complete = ""
        self._text = TextStream(self._llm.tokenizer, self._params.stop, prompt=written.tokens[: written.given])
        text = "".join(self._decode(token) for token in written.tokens[written.given :])
        self._file.restore(self._settings.beginning + text)
        return written

    def _all_tokens(self, saved: list[int]) -> list[int]:
        """Return all tokens of the document. The oldest tokens are taken from `saved`, and the others from the session.

        If the session was truncated, it no longer has the oldest tokens. Raises InputError if `saved` belongs to
        another document.
        """
        history = self._session.history
        since = history.removed + SINKS if history.removed else 0
        # Session and progress are saved one after the other, so one of them may be a turn ahead. The next turn may
        # replace the last token.
        common = min(len(saved), history.removed + len(history.tokens)) - 1
        tail = history.tokens[SINKS:] if history.removed else history.tokens
        if saved[since : max(since, common)] != tail[: max(0, common - since)]:
            raise InputError(
                f"the progress and the session in {str(self._draft.folder.path)!r} do not belong together: delete this "
                "folder to continue the document from its text"
            )
        return [*saved[:since], *tail]

    def _decode(self, token: int) -> str:
        return "" if token in self._ends else self._text.push(token)

    # ------------------------------------------------------------------------------------------------------- progress

    @property
    def _new_tokens(self) -> int:
        written = self._written
        lengths = [len(self._heading(number)) for number in range(1, len(written.chapters) + 1)]
        each = zip(written.chapters, lengths, strict=True)
        headings = sum(length for place, length in each if _has_heading(written.tokens, place, self._ends))
        return max(0, len(written.tokens) - written.given - headings) + len(self._unfinished)

    @property
    def _total_tokens(self) -> int:
        return self._chapters * self._settings.chapter_tokens if self._chapters else self._max_tokens

    @property
    def _text_complete(self) -> bool:
        tokens = self._written.tokens
        return self._text.stopped is not None or (bool(tokens) and tokens[-1] in self._ends)

    def _report(self, new_tokens: int, prefilled: float = 1.0) -> None:
        rate = 0.0
        if prefilled == 1.0:
            self._times.append(time.monotonic())
            if len(self._times) > 1:
                rate = (len(self._times) - 1) / max(1e-9, self._times[-1] - self._times[0])
        chapter = len(self._written.chapters)
        self._on_progress(WritingProgress(new_tokens, self._total_tokens, chapter, rate, self._file.ahead, prefilled))

    def _check_fits(self) -> None:
        length = len(self._written.tokens) or len(self._context())
        longest = length + max(0, self._total_tokens - self._new_tokens) + BLOCK_SIZE
        self._llm.runner.check_fits(longest if self._llm.geometry.absolute_positions else min(longest, self._positions))

    # ------------------------------------------------------------------------------------------------------- writing

    def _next_turn(self) -> tuple[list[int], list[int]] | None:
        """Return the tokens at the start of the next turn: those that have no KV yet, and a new heading.

        Return None at the end.

        In the first turn, no token of the context has KV. In later turns, only the last token has none; it is left out
        if it is an end-of-text token. Progress is saved before a turn that begins the document or a chapter.
        """
        written = self._written
        heading: list[int] = []
        if self._text.stopped is not None:
            return None
        if self._chapters and self._chapter_over():
            if len(written.chapters) >= self._chapters:
                return None
            heading = self._heading(len(written.chapters) + 1)
        elif not self._chapters and (self._text_complete or self._new_tokens >= self._max_tokens):
            return None
        if written.tokens:
            kept = written.tokens[-1:] if written.tokens[-1] not in self._ends else []
            place = len(written.tokens) - 1 + len(kept)
        else:
            kept = self._context()
            place = written.given = len(kept)
        if heading:
            written.chapters.append(place)
        if heading or not written.tokens:
            self._save()
        return kept, heading

    def _chapter_over(self) -> bool:
        written = self._written
        if not written.chapters or self._text_complete:
            return True
        length = len(written.tokens) - written.chapters[-1] - len(self._heading(len(written.chapters)))
        return length >= self._settings.chapter_tokens

    def _write_turn(self, kept: list[int], heading: list[int]) -> FinishReason | None:
        """Write one turn that begins with `kept` and `heading`. Return the finish reason if it is the last turn."""
        written, new, added = self._written, self._new_tokens, [*kept, *heading]
        before, replaced = written.tokens[:-1], int(bool(written.tokens))
        self._added = len(added) - replaced
        self._file.append("".join(self._decode(token) for token in heading))
        params = replace(self._params, max_tokens=self._turn_length(len(added), replaced), min_tokens=0, stop=())
        layers = self._llm.geometry.layers

        def on_prefill(done: int) -> None:
            if new == 0:
                self._report(0, min(0.99, done / layers))

        reason: FinishReason | None = None
        with closing(self._session.extend(added, params, replaced=replaced, on_prefill=on_prefill)) as events:
            for event in events:
                self._unfinished.append(event.token_id)
                self._file.append(self._decode(event.token_id))
                self._report(new + len(self._unfinished))
                if self._text.stopped is not None:
                    reason = "stop"
                elif not self._chapters and new + len(self._unfinished) >= self._max_tokens:
                    reason = "length"
                if event.finish_reason is not None:
                    written.tokens, self._unfinished = [*before, *added, *self._unfinished], []
                    self._added = 0
                elif reason is not None:
                    return reason
        self._file.sync()
        self._save()
        return "stop" if reason == "length" and self._text_complete else reason

    def _turn_length(self, added: int, replaced: int) -> int:
        """Return how many tokens the next turn generates after it has removed `replaced` tokens and appended `added`
        tokens.
        """
        kv = self._session.kv
        held = len(kv.history.tokens)
        room = _to_boundary(held - replaced + added)
        left = tokens_after(kv, added + room - replaced)
        return room if left == held else _to_boundary(left - replaced + added)

    # --------------------------------------------------------------------------------------------------------- tokens

    def _heading(self, number: int) -> list[int]:
        if number not in self._headings:
            outline = self._settings.headings
            title = outline[number - 1] if number <= len(outline) else f"CHAPTER {number}"
            first = number == 1 and not self._settings.beginning
            text = f"{'' if first else SEPARATOR}{title}{SEPARATOR}"
            self._headings[number] = self._llm.encode(text, special_tokens=first and not self._settings.prompt)
        return self._headings[number]

    def _context(self) -> list[int]:
        """Return the tokens of the prompt and the beginning.

        If the beginning is too long, its oldest tokens are left out.
        """
        llm, settings = self._llm, self._settings
        prompt = self._prompt()
        beginning = llm.encode(settings.beginning, special_tokens=not prompt) if settings.beginning else []
        if len(prompt) + len(beginning) + 2 * BLOCK_SIZE > self._positions:
            room = self._positions // 2 - len(prompt)
            if room < 1 or not beginning:
                raise InputError(
                    f"the prompt has {len(prompt):,} tokens, and {llm.name} has {self._positions:,} positions: shorten "
                    "the prompt"
                )
            self._written.unread = len(beginning) - room
            beginning = beginning[-room:]
        return [*prompt, *beginning]

    def _prompt(self) -> list[int]:
        llm, settings = self._llm, self._settings
        if not settings.prompt:
            return []
        if getattr(llm.tokenizer, "chat_template", None) is None:
            return llm.encode(settings.prompt + SEPARATOR)
        outline = "".join(f"\n- {title}" for title in settings.headings)
        text = f"{settings.prompt}\n\nOutline:{outline}" if outline else settings.prompt
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        return llm.chat_prompt([*system, {"role": "user", "content": text}])[1]


def _has_heading(tokens: Sequence[int], place: int, ends: frozenset[int]) -> bool:
    """Return whether `tokens` contain the heading of the chapter that begins at index `place`."""
    return place < len(tokens) - (bool(tokens) and tokens[-1] in ends)


def _to_boundary(length: int) -> int:
    # A turn ends when the number of tokens is one more than a multiple of the block size.
    more = BLOCK_SIZE * (length // LONGER_TURNS)
    return ((1 - length) % BLOCK_SIZE or BLOCK_SIZE) + more
