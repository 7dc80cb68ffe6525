"""`offload-rt write`: write a long document to a file. An interrupted command can be resumed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, InputError
from ..utils.texts import read_text
from ..utils.units import format_duration, format_size
from .common import INTERRUPTED, add_command, load_llm, recorded_interrupts, stderr_console
from .flags import add_engine_flags, add_sampling_flags, engine_config, sampling_for, sampling_given

if TYPE_CHECKING:
    from rich.console import Console

    from ..llm import LLM
    from ..writing.draft import Draft
    from ..writing.progress import Document, WritingProgress

MAX_TOKENS = 1000


def run(args: argparse.Namespace) -> int:
    """Write a long document to a file. The same command continues an interrupted one."""
    sampling, config = sampling_given(args), engine_config(args)
    _check_flags(args)

    from ..writing.draft import Draft

    draft = Draft(
        args.file, args.store, sampling=sampling, prompt=_prompt(args), system=args.system or "",
        beginning=read_text(args.beginning) if args.beginning else "",
        headings=_headings(args.outline), chapter_tokens=args.chapter_tokens,
    )  # fmt: skip
    console = stderr_console(args.quiet)
    most = draft.goal_of_more(args.more) if args.more else sampling.get("max_tokens", MAX_TOKENS)
    if draft.is_complete(most, args.chapters or 0):
        console.print(_complete(draft), soft_wrap=True, markup=False)
        return 0

    llm = load_llm(args.model, config, console)
    if draft.new:
        draft.sampling = sampling_for(llm, sampling)
    try:
        with recorded_interrupts() as check:
            document = _write(llm, draft, most, args.chapters or 0, console, check)
    except KeyboardInterrupt:
        count = f"{draft.written.new_tokens:,} new tokens in {args.file}"
        console.print(f"interrupted: {count}; the same command continues", soft_wrap=True)
        return INTERRUPTED
    _report(llm, document, console)
    return 0


def add(commands: Any) -> None:
    parser = add_command(commands, "write", run)
    parser.add_argument("file", metavar="FILE", help="text file to write; if it exists, it is continued")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="instruction, such as 'Write a novel about ...'")
    parser.add_argument("--prompt-file", metavar="FILE", help="file with the instruction; '-' is stdin")
    parser.add_argument("--beginning", metavar="FILE", help="text that a new document begins with")
    parser.add_argument("--outline", metavar="FILE", help="headings of the chapters, one per line")
    parser.add_argument("--chapters", type=int, metavar="N", help="number of chapters (default: lines of the outline)")
    parser.add_argument("--chapter-tokens", type=int, metavar="N", help="length of a chapter (default: 1000)")
    parser.add_argument("--more", type=int, metavar="N", help="write N more tokens than the document has")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of an instruct model")
    parser.add_argument("--store", metavar="DIR", help="folder of KV cache and settings (default: FILE.session)")
    parser.add_argument("--quiet", action="store_true", help="print only notes and errors on stderr")
    add_sampling_flags(parser, several=False, max_tokens=f"total number of new tokens (default: {MAX_TOKENS})")
    add_engine_flags(parser)


def _check_flags(args: argparse.Namespace) -> None:
    if args.prompt is not None and args.prompt_file is not None:
        raise InputError("give either PROMPT or --prompt-file, not both")
    for flag, value in (("chapters", args.chapters), ("chapter-tokens", args.chapter_tokens), ("more", args.more)):
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} {value} must be at least 1")
    chapters = args.chapters or args.outline
    if chapters and (args.more or args.sampling_max_tokens):
        raise InputError(
            "chapters cannot be combined with --more or --max-new-tokens: set --chapters and --chapter-tokens"
        )


def _prompt(args: argparse.Namespace) -> str:
    return read_text(args.prompt_file) if args.prompt_file else args.prompt or ""


def _headings(outline: str | None) -> tuple[str, ...]:
    lines = read_text(outline).splitlines() if outline else []
    return tuple(line.strip() for line in lines if line.strip())


def _complete(draft: Draft) -> str:
    message = f"{draft.path} is complete: {draft.written.new_tokens:,} new tokens"
    if chapters := draft.chapter_count():
        return f"{message} in {chapters} chapters; --chapters N continues it up to chapter N"
    if draft.written.complete == "stop":
        return f"{message}, and the model ended the text; to continue the text, delete {str(draft.folder.path)!r}"
    return f"{message}; --more N continues it"


def _write(
    llm: LLM, draft: Draft, max_tokens: int, chapters: int, console: Console, check: Callable[[], None]
) -> Document:
    from ..writing.writer import write_draft

    state = "new document" if draft.new else f"continued after {draft.written.new_tokens:,} tokens"
    console.print(f"{llm.name} writes {draft.path} ({state}); Ctrl-C stops, the same command continues", soft_wrap=True)
    with _bar(console) as show:

        def on_progress(progress: WritingProgress) -> None:
            show(progress)
            check()

        return write_draft(llm, draft, max_tokens=max_tokens, chapters=chapters, on_progress=on_progress)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[WritingProgress], None]]:
    import psutil
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    process = psutil.Process()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=1.0, state="")

        def show(progress: WritingProgress) -> None:
            if progress.prefilled < 1:
                bar.update(task, completed=progress.prefilled, state="")
                return
            what = "repeating" if progress.repeated else "writing"
            chapter = f" chapter {progress.chapter}" if progress.chapter else ""
            left = "" if (seconds := progress.seconds_left) is None else f", {format_duration(seconds)} left"
            state = f"{progress.new_tokens:,} of {progress.total_tokens:,} tokens"
            speed = f", {progress.tokens_per_second:.1f} tokens/s"
            memory = f", memory {format_size(process.memory_info().rss)}"
            bar.update(
                task, description=what + chapter, completed=progress.new_tokens, total=progress.total_tokens,
                state=state + speed + left + memory,
            )  # fmt: skip

        yield show


def _report(llm: LLM, document: Document, console: Console) -> None:
    chapters = f" in {document.chapters} chapters" if document.chapters else ""
    why = "the model ended the text" if document.finish_reason == "stop" else "complete"
    lines = [f"{document.path}: {document.new_tokens:,} new tokens{chapters}, {why}"]
    context = f"context: the newest {document.context_tokens:,} tokens"
    if document.removed_tokens:
        context += (
            f"; the oldest {document.removed_tokens:,} but the first were removed, because the limit is "
            f"{llm.runner.position_limit}"
        )
    lines.append(context)
    if document.stats is not None:
        stats = document.stats
        memory = stats.kv_bytes_host + stats.weight_bytes
        lines.append(
            f"{stats.tokens_per_second:.1f} tokens/s at the end; KV {format_size(stats.kv_bytes_host)}, with weights "
            f"{format_size(memory)}"
        )
    console.print("\n".join(lines), soft_wrap=True, markup=False)
    sys.stderr.flush()
