"""A terminal chat with a session: lines in, answers out as they come, commands that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from ..errors import InputError, OffloadError
from ..sampling_params import SamplingParams
from ..utils.units import format_size
from .interrupts import watched

if TYPE_CHECKING:
    from rich.console import Console

    from ..llm import LLM
    from ..sessions.session import Session

HELP = """a line that ends with \\ goes on in the next one
/read FILE [words]  send a text file (and words behind it) as one message
/history            what was said
/save               wait until everything is on disk
/fork NAME          a second session that goes on from here; this one stays as it is
/truncate N         keep the first few and the last N tokens, forget the others
/stats              what the last answer cost, and what is stored
/quit               save and leave (Ctrl-D too); Ctrl-C ends an answer"""

PROMPT = "> "


class Chat:
    """Reads lines until /quit or the end of input. Answers go to stdout, all else to `console` (stderr). A mistake is
    one line and changes nothing."""

    def __init__(
        self,
        llm: LLM,
        session: Session,
        params: SamplingParams,
        read_text: Callable[[str], str],
        console: Console,
    ) -> None:
        self._llm, self._session, self._params = llm, session, params
        self._read_text, self._console = read_text, console
        self._commands: dict[str, Callable[[str], None]] = {
            "/read": self._read, "/history": self._history, "/save": self._save, "/fork": self._fork,
            "/truncate": self._truncate, "/stats": self._stats, "/help": self._help,
        }  # fmt: skip

    def run(self) -> None:
        """The whole chat; the session is closed at the end, however it comes."""
        with closing(self._session):
            self._greet()
            for line in self._lines():
                if line == "/quit":
                    break
                try:
                    self._take(line)
                except OffloadError as error:
                    self._say(f"offload-rt: {' '.join(str(error).split())}")
                except KeyboardInterrupt:
                    self._say("\n(ended)")
            self._say("saving …")
        self._say(f"session {self._session.name!r} is saved")

    def _lines(self) -> Iterator[str]:
        """What is typed or piped in, without empty lines; a line that ends with a backslash goes on in the next one.
        Ctrl-C at the prompt drops what was typed."""
        held: list[str] = []
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (input() then edits lines and takes pasted ones whole)
        while True:
            try:
                line = input(PROMPT) if sys.stdin.isatty() else sys.stdin.readline()
                if not line and not sys.stdin.isatty():
                    return
            except KeyboardInterrupt:
                held.clear()
                self._say("")
                continue
            except EOFError:
                return
            held.append(line.rstrip("\n").removesuffix("\\"))
            if line.rstrip("\n").endswith("\\"):
                continue
            whole, held = "\n".join(held).strip(), []
            if whole:
                yield whole

    def _take(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if not name.startswith("/"):
            self._answer(line)
        elif name in self._commands:
            self._commands[name](rest.strip())
        else:
            raise InputError(f"there is no command {name!r}; /help lists them")

    def _answer(self, text: str) -> None:
        gone = self._session.history.shift
        events, reason = self._session.send(text, self._params), None
        with watched() as interrupts, closing(events):  # type: ignore[type-var]
            for event in events:
                sys.stdout.write(event.text)
                sys.stdout.flush()
                reason = event.finish_reason
                interrupts.check()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if (forgotten := self._session.history.shift - gone) > 0:
            self._say(f"(the conversation had outgrown the model: its oldest {forgotten:,} tokens were forgotten)")
        if reason == "length":
            self._say("(cut at --max-new-tokens; say 'go on', or give more of them)")

    def _greet(self) -> None:
        session, turns = self._session, self._session.turns
        if not turns:
            self._say(f"new session {session.name!r} with {self._llm.name}; /help lists commands")
            return
        self._say(
            f"session {session.name!r}: {len(turns) // 2} turns, {len(session.tokens):,} tokens; /help lists commands"
        )
        for role, text in turns[-2:]:
            self._show(role, text[-400:])
        session.prefetch()

    def _show(self, role: str, text: str) -> None:
        self._console.print(f"{role}: {text}", style="dim", markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    # ------------------------------------------------------------------------------------------------------- commands

    def _read(self, rest: str) -> None:
        """The file's name ends at the first space, or is in double quotes."""
        path, _, words = rest[1:].partition('"') if rest.startswith('"') else rest.partition(" ")
        if not path:
            raise InputError("write /read FILE, and words to go behind it if you like")
        text = self._read_text(path)
        self._answer(f"{text}\n{words.strip()}" if words.strip() else text)

    def _history(self, rest: str) -> None:
        for role, text in self._session.turns:
            self._show(role, text)

    def _save(self, rest: str) -> None:
        self._session.save()
        self._say("saved")

    def _fork(self, rest: str) -> None:
        if not rest:
            raise InputError("write /fork NAME")
        self._session.fork(rest).close()
        self._say(f"session {rest!r} goes on from here; open it with --session {rest}")

    def _truncate(self, rest: str) -> None:
        if not rest.isdecimal():
            raise InputError("write /truncate N, the number of tokens to keep")
        self._say(f"{self._session.truncate(keep_last=int(rest)):,} tokens were forgotten")

    def _stats(self, rest: str) -> None:
        from .tables import stats_table

        session = self._session
        if session.last_stats is not None:
            self._console.print(stats_table(session.last_stats))
        self._say(
            f"{len(session.tokens):,} tokens in the session, {session.loaded_tokens:,} came from disk; the store has "
            f"{format_size(session.store_bytes)} of files"
        )

    def _help(self, rest: str) -> None:
        self._say(HELP)
