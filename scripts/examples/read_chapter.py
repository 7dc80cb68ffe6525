"""Read a chapter with an instruct model, answer questions about it, and continue the story.

All turns form one conversation, so that the chapter is computed only once.

    python scripts/examples/read_chapter.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python scripts/examples/read_chapter.py --model Qwen/Qwen3-8B --document book.txt --chapter "CHAPTER XII"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from importlib.resources import files

from rich.console import Console

from offload_rt import LLM, InputError, OffloadError, SamplingParams
from offload_rt.cli.tables import stats_table
from offload_rt.utils.quiet import quiet_transformers
from offload_rt.utils.texts import read_text

QUESTIONS = (
    "Who is Dick Shelton speaking with in this chapter, and where?",
    "What does the man who is running from Sir Daniel look like?",
    "Sum up the chapter in two sentences.",
)
CONTINUE = "Now continue the story from where the chapter ends, in the same style."


def chapter_of(text: str, heading: str) -> str:
    """Return the part of `text` from the line that begins with `heading` up to the next line with the same first word.

    Raises InputError if there is no such line.
    """
    lines = text.splitlines(keepends=True)
    start = next((i for i, line in enumerate(lines) if line.startswith(heading)), None)
    if start is None or not heading.strip():
        raise InputError(f"no line of the document begins with {heading!r}: copy the heading exactly")
    word = heading.split()[0]
    stop = next((i for i in range(start + 1, len(lines)) if lines[i].startswith(word)), len(lines))
    return "".join(lines[start:stop])


def read_chapter(llm: LLM, chapter: str, questions: tuple[str, ...], new_tokens: int, console: Console) -> None:
    """Print each question and its streamed answer, then the statistics of the last turn.

    Raises InputError if the model has no chat template, and ModelError if the chapter exceeds the context length.
    """
    if getattr(llm.tokenizer, "chat_template", None) is None:
        raise InputError(f"{llm.name} has no chat template: give an instruct model")
    first, *others = questions
    turns = [f"Here is a chapter of a novel.\n\n{chapter}\n\n{first}", *others, CONTINUE]
    with tempfile.TemporaryDirectory() as store, closing(llm.session("chapter", store, overflow="error")) as session:
        for shown, turn in zip([*questions, CONTINUE], turns, strict=True):
            longest = 4 * new_tokens if turn == CONTINUE else new_tokens
            sampling = SamplingParams(max_tokens=longest, temperature=0, repetition_penalty=1.1)
            console.print(f"\n[bold]> {shown}[/bold]")
            for output in session.send(turn, sampling):
                sys.stdout.write(output.text)
                sys.stdout.flush()
            print()
            stats = session.last_stats
            assert stats is not None
            console.print(
                f"[dim]{stats.prompt_tokens:,} tokens before the answer, {stats.reused_tokens:,} of them computed "
                f"before; {stats.tokens_per_second:.1f} tokens/s[/dim]"
            )
        assert session.last_stats is not None
        console.print(stats_table(session.last_stats))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", required=True, help="an instruct model: a local folder, a GGUF file or a hub id")
    parser.add_argument("--document", metavar="FILE", help="a text with chapters (default: The Black Arrow)")
    parser.add_argument("--chapter", default="CHAPTER III THE FEN FERRY", metavar="HEADING", help="where it begins")
    parser.add_argument("--question", action="append", metavar="TEXT", help="may be repeated (default: three)")
    parser.add_argument("--max-new-tokens", type=int, default=60, metavar="N", help="longest answer (default: 60)")
    parser.add_argument("--policy", default="infinigen")
    parser.add_argument("--host-memory", metavar="SIZE", help="limit of KV in host memory, such as 64GiB")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    quiet_transformers()
    console = Console(stderr=True)
    book = str(files("offload_rt") / "data" / "black_arrow.txt") if args.document is None else args.document
    try:
        chapter = chapter_of(read_text(book), args.chapter)
        llm = LLM(args.model, policy=args.policy, host_memory=args.host_memory, progress=console.is_terminal)
        read_chapter(llm, chapter, tuple(args.question or QUESTIONS), args.max_new_tokens, console)
    except OffloadError as error:
        sys.exit(f"read_chapter: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")


if __name__ == "__main__":
    main()
