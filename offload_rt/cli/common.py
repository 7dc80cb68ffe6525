"""Helpers that several subcommands of `offload-rt` use."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import InputError, ModelError, StoreError
from ..kv_cache.system_memory import memory_limit
from ..models.plain_shape import check_shapes
from ..models.source import find_source, hub_of
from ..models.stored_tensors import check_weights
from ..utils.home import expand_user
from ..utils.private_files import make_private_folder

if TYPE_CHECKING:
    from rich.console import Console

    from ..llm import LLM


INTERRUPTED = 130


def default_store() -> Path:
    """Return the folder of the default store: `offload-rt/store` under `$XDG_DATA_HOME` or `~/.local/share`."""
    return expand_user(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "offload-rt" / "store"


def printable(text: str) -> str:
    """Escape the control characters of `text`, such as line feeds and terminal escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_list(headings: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """Print a table on stdout, or `empty` if it has no rows. The first two columns are left-aligned."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    # If stdout is not a terminal, do not wrap lines, so that other programs can parse them.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 500)
    console.print(table if rows else empty, markup=False)


def write_file(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path!r}: {error.strerror}") from error


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, model: bool = True
) -> argparse.ArgumentParser:
    """Add a subcommand. The docstring of `run` becomes its description in `--help`.

    If `model` is set, the subcommand gets the argument MODEL and the flag `--dtype`.
    """
    summary = " ".join((run.__doc__ or "").split())
    head = summary.split(". ")[0].split(";")[0].rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(name, help=head, description=summary)
    if model:
        parser.add_argument("model", metavar="MODEL", help="'reference', a local folder, a GGUF file or a hub id")
        choices = "auto|float32|bfloat16|float16|float64"
        parser.add_argument("--dtype", default="auto", metavar=choices, help="compute dtype (default: auto)")
    parser.set_defaults(run=run, parser=parser)
    return parser


def token_count(text: str) -> int:
    """Parse a number of tokens: "50000", "50,000" or "128k" (k is 1024)."""
    number, unit = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    try:
        return int(number.replace(",", "")) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens: write for example 50000 or 128k"
        ) from None


def check_before_loading(model: str, config: EngineConfig, *, text: bool = True) -> None:
    """Raise an error if the model does not exist, or if `host_memory` exceeds the available memory.

    If `text` is set, also raise an error if there is no tokenizer. The checks are fast because they import neither
    torch nor transformers.
    """
    memory_limit(config.host_memory, at_most=1 << 62)
    hub = hub_of(config)
    source = find_source(model, hub)
    source.check_files()
    check_weights(source)
    check_shapes(source)
    source.check_reachable()
    tokenizer = source if config.tokenizer is None else find_source(config.tokenizer, replace(hub, revision=None))
    if text and not tokenizer.has_tokenizer:
        raise ModelError(f"{tokenizer} has no tokenizer: --tokenizer DIR or --tokenizer ID gives one")
    tokenizer.check_tokenizer()


def check_store(folder: str | Path) -> Path:
    path = expand_user(folder)
    try:
        make_private_folder(path)
    except OSError as error:
        reason = f"cannot use the store {str(path)!r}: {error.strerror}"
    else:
        if os.access(path, os.W_OK | os.X_OK):
            return path
        reason = f"the store {str(path)!r} is not writable"
    raise StoreError(f"{reason}; --store DIR chooses another folder")


def load_llm(model: str, config: EngineConfig, console: Console, *, text: bool = True) -> LLM:
    """Call `check_before_loading`, then load a model.

    If `console` is a terminal, show which loading task is running.
    """
    check_before_loading(model, config, text=text)

    from ..llm import LLM
    from ..utils.progress import observed

    with console.status(f"loading {model}") as status:

        def show(task: str, done: int, total: int | None) -> None:
            status.update(task if total is None else f"{task}: {done} of {total}")

        with observed(show):
            return LLM(model, config)


def stderr_console(quiet: bool) -> Console:
    from rich.console import Console

    return Console(stderr=True, quiet=quiet, highlight=False, markup=False)


@contextmanager
def recorded_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed.

    Call this function often. It is needed because Python loses a KeyboardInterrupt that occurs in a destructor or a
    weak reference callback. Outside the main thread, the function does nothing.
    """
    pressed = False

    def press(signal_number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
