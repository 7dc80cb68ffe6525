"""Helpers that several subcommands of `offload-rt` use."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import ModelError
from ..kv_cache.machine import memory_limit
from ..models.source import find_source, hub_of
from ..models.stored_tensors import check_weights

if TYPE_CHECKING:
    from rich.console import Console

    from ..llm import LLM


def default_store() -> Path:
    """Return the default store's folder: `offload-rt/store` in `$XDG_DATA_HOME` or `~/.local/share`."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "offload-rt" / "store"


INTERRUPTED = 130
"""Exit code after Ctrl-C."""


PIPED = 500
"""Table width in characters if stdout is not a terminal. It is large enough to avoid line breaks."""


def printable(text: str) -> str:
    """Escape the control characters of `text`, such as line feeds and terminal escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, model: bool = True
) -> argparse.ArgumentParser:
    """Add a subcommand. The docstring of `run` becomes its description in `--help`.

    If `model` is true, the subcommand gets the argument MODEL and the flag `--dtype`.
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
    """Raise an error if the model does not exist, or if the machine has less memory than `host_memory`.

    This is fast, because it imports neither torch nor transformers. `text` tells whether the command needs a tokenizer.
    """
    memory_limit(config.host_memory, at_most=1 << 62)
    hub = hub_of(config)
    source = find_source(model, hub)
    source.check_files()
    check_weights(source)
    source.check_reachable()
    tokenizer = source if config.tokenizer is None else find_source(config.tokenizer, replace(hub, revision=None))
    if text and not tokenizer.has_tokenizer:
        raise ModelError(f"{tokenizer} has no tokenizer: --tokenizer DIR or --tokenizer ID gives one")


def load_llm(model: str, config: EngineConfig, console: Console, *, text: bool = True) -> LLM:
    """Call `check_before_loading` and load a model. If `console` is a terminal, show the current loading task."""
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

    return Console(stderr=True, quiet=quiet, highlight=False)


@contextmanager
def recorded_interrupts() -> Iterator[Callable[[], None]]:
    """Record Ctrl-C while the body of the `with` statement runs, instead of raising KeyboardInterrupt immediately.

    Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed. The body must call it often. The reason is
    that Python loses a KeyboardInterrupt that is raised in a destructor or in a weak reference callback. Outside the
    main thread this has no effect, because only the main thread receives signals.
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
