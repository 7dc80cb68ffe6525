"""Write a long document chapter by chapter, each chapter with all previous text as its context.

    python scripts/examples/generate_document.py --out novel.txt --chapters 12 --chapter-tokens 1500
    python scripts/examples/generate_document.py --out novel.txt --model meta-llama/Llama-3.1-8B --host-memory 64GiB

Text is appended as it is generated, so Ctrl-C or a crash loses no text. If started again with the same arguments, the
script continues the last chapter. The start of each chapter is recorded in a second file (novel.txt.chapters), because
a model of novels generates headings too. Without this file, or if the text was edited, headings are found by their
numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offload_rt import LLM, OffloadError, SamplingParams
from offload_rt.utils.quiet import quiet_transformers
from offload_rt.utils.small_files import read_small
from offload_rt.utils.texts import read_text

HEADING = "\n\nCHAPTER {number}\n\n"
OPENING = "THE BOOK OF THE ROAD\n\nBeing a true account of a journey on foot, as the traveller told it."


def read_document(path: Path) -> str:
    """Read the document without converting line ends, so that character positions remain valid."""
    return read_small(path).decode("utf-8")


def chapters_file(path: Path) -> Path:
    """Return the path of the file with the positions of the headings."""
    return path.with_name(f"{path.name}.chapters")


def headings(path: Path, document: str) -> list[int]:
    """Return the recorded character positions of the headings.

    A recorded heading that is not yet written is left out. If nothing is recorded, or the text was edited, headings are
    searched by consecutive numbers.
    """
    try:
        noted = [int(place) for place in read_small(chapters_file(path)).split()]
    except (OSError, ValueError):
        noted = []
    if noted[-1:] == [len(document)]:
        noted.pop()
    if noted and all(document.startswith(HEADING.format(number=n), place) for n, place in enumerate(noted, 1)):
        return noted
    found: list[int] = []
    after = 0
    while (place := document.find(heading := HEADING.format(number=len(found) + 1), after)) >= 0:
        found, after = [*found, place], place + len(heading)
    return found


def progress(llm: LLM, document: str, places: list[int]) -> tuple[int, int]:
    """Return the number of the last chapter (0 if there is none) and its length in tokens."""
    written = document[places[-1] + len(HEADING.format(number=len(places))) :] if places else ""
    return len(places), len(llm.encode(written, special_tokens=False)) if written else 0


def begin_chapter(path: Path, places: list[int]) -> None:
    """Record the position of the next heading, then write the heading."""
    # If the script is interrupted in between, the next start writes the heading.
    places.append(len(read_document(path)))
    chapters_file(path).write_text("\n".join(map(str, places)) + "\n", encoding="utf-8")
    append(path, HEADING.format(number=len(places)))


def append(path: Path, text: str) -> None:
    """Append text to the document on disk, without buffering."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def write_tokens(llm: LLM, path: Path, count: int, seed: int | None) -> None:
    """Continue the document by `count` tokens.

    The context is the whole document, or as much of its end as fits into the context length of the model.
    """
    context = llm.encode(read_document(path))[-(llm.geometry.max_positions - count) :]
    # Ignore the end-of-text token, so that only the number of tokens ends a chapter.
    params = SamplingParams(max_tokens=count, temperature=0.8, top_p=0.95, seed=seed, ignore_eos=True)
    for event in llm.stream(context, params):
        append(path, event.text)


def write_document(llm: LLM, path: Path, chapters: int, chapter_tokens: int, seed: int | None) -> None:
    """Write until the document has `chapters` chapters of about `chapter_tokens` tokens each."""
    document = read_document(path)
    places = headings(path, document)
    chapter, written = progress(llm, document, places)
    while chapter < chapters or (chapter == chapters and written < chapter_tokens):
        if chapter == 0 or written >= chapter_tokens:
            chapter, written = chapter + 1, 0
            begin_chapter(path, places)
        write_tokens(llm, path, chapter_tokens - written, None if seed is None else seed + chapter)
        written = chapter_tokens
        stats = llm.last_stats
        if stats is not None:
            speed, attended = stats.tokens_per_second, stats.exact_fraction
            print(
                f"\n[chapter {chapter}: {speed:.0f} tokens/s, {attended:.0%} of the context attended]", file=sys.stderr
            )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="the document; continued if it exists")
    parser.add_argument("--start", metavar="FILE", help="a text file that a new document begins with")
    parser.add_argument("--chapters", type=int, default=5)
    parser.add_argument("--chapter-tokens", type=int, default=500)
    parser.add_argument("--model", default="reference", help="'reference', a local folder or a hub id")
    parser.add_argument("--policy", default="infinigen")
    parser.add_argument("--host-memory", help="limit of KV in host memory, such as 64GiB")
    parser.add_argument("--seed", type=int)
    return parser.parse_args()


def main() -> None:
    """Start or continue the document."""
    args = arguments()
    quiet_transformers()
    try:
        if not args.out.exists():
            args.out.write_text(OPENING if args.start is None else read_text(args.start).rstrip(), encoding="utf-8")
        llm = LLM(args.model, policy=args.policy, host_memory=args.host_memory, progress=sys.stderr.isatty())
        write_document(llm, args.out, args.chapters, args.chapter_tokens, args.seed)
    except OffloadError as error:
        sys.exit(f"generate_document: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; run the same command to continue {args.out}")


if __name__ == "__main__":
    main()
