"""Write a long document chapter by chapter, each chapter with all previous text as its context.

    python scripts/examples/generate_document.py novel.txt --chapters 12 --chapter-tokens 1500
    python scripts/examples/generate_document.py novel.txt --model meta-llama/Llama-3.1-8B --host-memory 64GiB

After an interruption, the same command continues the document. `offload-rt write` has more options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offload_rt import LLM, OffloadError, SamplingParams, write_document
from offload_rt.utils.quiet import quiet_transformers
from offload_rt.utils.texts import read_text

OPENING = "THE BOOK OF THE ROAD\n\nBeing a true account of a journey on foot, as the traveller told it."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("document", type=Path, help="text file; continued if it exists")
    parser.add_argument("--start", metavar="FILE", help="a text file that a new document begins with")
    parser.add_argument("--chapters", type=int, default=5)
    parser.add_argument("--chapter-tokens", type=int, default=500)
    parser.add_argument("--model", default="reference", help="'reference', a local folder or a hub id")
    parser.add_argument("--policy", default="infinigen")
    parser.add_argument("--host-memory", help="limit of KV in host memory, such as 64GiB")
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    if min(args.chapters, args.chapter_tokens) < 1:
        parser.error("--chapters and --chapter-tokens must be at least 1")
    return args


def main() -> None:
    args = arguments()
    quiet_transformers()
    # Ignore the end-of-text token, so that only the number of tokens ends a chapter.
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=args.seed, ignore_eos=True)
    new = not args.document.exists()
    try:
        beginning = (read_text(args.start).rstrip() if args.start else OPENING) if new else ""
        llm = LLM(args.model, policy=args.policy, host_memory=args.host_memory, progress=sys.stderr.isatty())
        document = write_document(
            llm, args.document, "", params, beginning=beginning, chapters=args.chapters,
            chapter_tokens=args.chapter_tokens,
        )  # fmt: skip
    except OffloadError as error:
        sys.exit(f"generate_document: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; run the same command to continue {args.document}")
    print(f"{document.path}: {document.chapters} chapters, {document.new_tokens:,} new tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
