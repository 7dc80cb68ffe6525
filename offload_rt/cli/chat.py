"""`offload-rt chat`: a conversation in the terminal, with slash commands. The session is stored on disk."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError, OffloadError
from ..sampling_params import SamplingParams
from ..sessions.names import check_name
from ..utils.texts import read_text
from ..utils.units import format_size
from .common import add_command, check_store, load_llm, recorded_interrupts, stderr_console
from .flags import (
    add_engine_flags,
    add_sampling_flags,
    add_store_flags,
    engine_config,
    sampling_for,
    sampling_given,
    store_options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..llm import LLM
    from ..sessions.session import Session

HELP = """a line that ends with \\ is continued in the next one
/read FILE [words]  send a text file (followed by words) as one message
/regenerate         answer the last message again, with other random numbers
/undo               remove the last message and its answer
/history            show the conversation
/save               wait until everything is on disk
/fork NAME          copy this session to a new one
/truncate N         keep the first few and the last N tokens, remove the others
/stats              statistics of the last response and of the store
/quit               save and leave (Ctrl-D too); Ctrl-C stops a response"""

PROMPT = "> "


def run(args: argparse.Namespace) -> int:
    """Chat with a model in the terminal. The session and its KV cache are stored and can be resumed."""
    sampling = sampling_given(args)
    if args.session is not None and args.store is None:
        raise InputError(
            "--session needs a store, so that the session can continue later: add --store DIR, or remove --session"
        )
    if args.store is not None and args.no_store:
        raise InputError("--store and --no-store cannot be combined: remove one of them")
    config, store = engine_config(args, progress=True), store_options(args)
    name = time.strftime("chat-%Y%m%d-%H%M%S") if args.session is None else args.session
    check_name(name)
    saved = None if args.store is None else check_store(args.store)
    console = stderr_console(quiet=False)
    llm = load_llm(args.model, config, console)
    with ExitStack() as ends:
        folder = saved or ends.enter_context(tempfile.TemporaryDirectory(prefix="offload-rt-chat-"))
        session = llm.session(name, folder, store, system=args.system)
        params = llm.get_default_sampling_params(**sampling_for(llm, sampling))
        Chat(llm, session, params, console, saved=saved is not None).run()
    return 0


def add(commands: Any) -> None:
    parser = add_command(commands, "chat", run)
    parser.add_argument("--session", metavar="NAME", help="name of a new or existing session (default: date and time)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of a new session")
    add_sampling_flags(parser, several=False)
    add_store_flags(parser, "none; the chat is not saved")
    add_engine_flags(parser)


class Chat:
    """A conversation in the terminal. It ends with /quit or at the end of the input.

    Responses are written to stdout, and all other text to `console` (stderr). A user error prints one line and leaves
    the session unchanged. The session is deleted at the end, unless `saved` is set.
    """

    def __init__(
        self, llm: LLM, session: Session, params: SamplingParams, console: Console, *, saved: bool = True
    ) -> None:
        self._llm, self._session, self._params, self._console = llm, session, params, console
        self._saved = saved
        self._unanswered = ""  # message whose answer was removed, and whose new answer failed
        self._commands: dict[str, Callable[[str], None]] = {
            "/read": self._read, "/history": self._history, "/save": self._save, "/fork": self._fork,
            "/truncate": self._truncate, "/stats": self._stats, "/help": self._help, "/undo": self._undo,
            "/regenerate": self._regenerate,
        }  # fmt: skip

    def run(self) -> None:
        with closing(self._session):
            self._greet()
            for line in self._lines():
                if line == "/quit":
                    break
                try:
                    self._handle(line)
                except OffloadError as error:
                    self._print(f"offload-rt: {' '.join(str(error).split())}")
                except KeyboardInterrupt:
                    self._print("\n(ended)")
            if not self._saved or not self._session.turns:
                self._session.discard()
                self._print(
                    "not saved: add --store DIR to save conversations" if not self._saved else "not saved: no messages"
                )
                return
            self._print("saving …")
        self._print(f"session {self._session.name!r} is saved")

    def _lines(self) -> Iterator[str]:
        """Yield the non-empty input lines. If a line ends with a backslash, it is joined with the next line.

        Ctrl-C discards the line that the user is typing.
        """
        parts: list[str] = []
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (enables line editing and multi-line paste in input())
        while True:
            try:
                line = input(PROMPT) if sys.stdin.isatty() else sys.stdin.readline()
                if not line and not sys.stdin.isatty():
                    return
            except KeyboardInterrupt:
                parts.clear()
                self._print("")
                continue
            except EOFError:
                return
            parts.append(line.rstrip("\n").removesuffix("\\"))
            if line.rstrip("\n").endswith("\\"):
                continue
            whole, parts = "\n".join(parts).strip(), []
            if whole:
                yield whole

    def _handle(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if not name.startswith("/"):
            self._respond(line)
        elif name in self._commands:
            self._commands[name](rest.strip())
        else:
            raise InputError(f"unknown command {name!r}: /help lists the commands")

    def _respond(self, text: str, params: SamplingParams | None = None) -> None:
        gone = self._session.history.removed
        from ..utils.progress import Progress

        reason = None
        with ExitStack() as ends:
            on_prefill = ends.enter_context(Progress(enabled=True).bar("prefill", self._llm.geometry.layers))
            check = ends.enter_context(recorded_interrupts())
            events = self._session.send(text, params or self._params, on_prefill=on_prefill)
            self._unanswered = ""
            for event in ends.enter_context(closing(events)):  # type: ignore[type-var]
                sys.stdout.write(event.text)
                sys.stdout.flush()
                reason = event.finish_reason
                check()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if (forgotten := self._session.history.removed - gone) > 0:
            self._print(f"(the conversation exceeded the context length: its oldest {forgotten:,} tokens were removed)")
        if reason == "length":
            self._print("(stopped at --max-new-tokens: ask to continue, or raise it)")

    def _greet(self) -> None:
        session, turns = self._session, self._session.turns
        if not turns:
            self._print(f"new session {session.name!r} with {self._llm.name}; /help lists commands")
            return
        self._print(
            f"session {session.name!r}: {len(turns) // 2} turns, {len(session.tokens):,} tokens; /help lists commands"
        )
        for role, text in turns[-2:]:
            self._show(role, text[-400:])
        session.prefetch()

    def _show(self, role: str, text: str) -> None:
        self._console.print(f"{role}: {text}", style="dim", markup=False, soft_wrap=True)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    # ------------------------------------------------------------------------------------------------------- commands

    def _read(self, rest: str) -> None:
        """Send the content of a file as a message. If the file name contains spaces, it must be in double quotes."""
        path, _, words = rest[1:].partition('"') if rest.startswith('"') else rest.partition(" ")
        if not path:
            raise InputError("/read needs a file: write /read FILE [words]")
        text = read_text(path)
        self._respond(f"{text}\n{words.strip()}" if words.strip() else text)

    def _undo(self, rest: str) -> None:
        self._unanswered = ""
        text = self._session.undo()
        self._print(f"removed: {text[:80]}{'…' if len(text) > 80 else ''}")

    def _regenerate(self, rest: str) -> None:
        text = self._unanswered or self._session.undo()
        turns = len(self._session.turns)
        try:
            self._respond(text, replace(self._params, seed=None))
        except (OffloadError, KeyboardInterrupt):
            if len(self._session.turns) == turns:
                self._unanswered = text
                self._print("(the message and its answer were removed: /regenerate sends the message again)")
            raise

    def _history(self, rest: str) -> None:
        for role, text in self._session.turns:
            self._show(role, text)

    def _check_saved(self, command: str) -> None:
        if not self._saved:
            raise InputError(f"{command} needs a store, and this chat has none: start it with --store DIR")

    def _save(self, rest: str) -> None:
        self._check_saved("/save")
        self._session.save()
        self._print("saved")

    def _fork(self, rest: str) -> None:
        if not rest:
            raise InputError("/fork needs a name: write /fork NAME")
        self._check_saved("/fork")
        self._session.fork(rest).close()
        self._print(f"session {rest!r} is a copy of this one; open it with --session {rest}")

    def _truncate(self, rest: str) -> None:
        if not rest.isdecimal():
            raise InputError("/truncate needs the number of tokens to keep: write /truncate N")
        self._print(f"{self._session.truncate(keep_last=int(rest)):,} tokens were removed")

    def _stats(self, rest: str) -> None:
        from .tables import stats_table

        session = self._session
        if session.last_stats is not None:
            self._console.print(stats_table(session.last_stats))
        self._print(
            f"{len(session.tokens):,} tokens in the session, {session.loaded_tokens:,} came from disk; the store uses "
            f"{format_size(session.store_bytes)}"
        )

    def _help(self, rest: str) -> None:
        self._print(HELP)
