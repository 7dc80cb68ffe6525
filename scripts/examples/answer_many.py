"""Answer a file of questions about one long document, which is computed only once.

    python scripts/examples/answer_many.py --document book.txt --questions questions.txt --out answers.jsonl
    python scripts/examples/answer_many.py --document book.txt --questions - --model Qwen/Qwen3-8B --policy full

Questions are lines of a text file; blank lines are skipped. Instruct models are prompted with their chat template.
Answers are written as JSON lines in the order of the questions after each batch, so Ctrl-C loses at most one batch.
If started again with the same arguments, the script continues after the existing answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offload_rt import LLM, InputError, OffloadError, SamplingParams
from offload_rt.engine.prompts import shortened
from offload_rt.utils.quiet import quiet_transformers
from offload_rt.utils.small_files import parse_json, read_small
from offload_rt.utils.texts import read_prompts, read_text

TEMPLATE = "\n\nQuestion: {question}\nAnswer:"
"""Prompt template for models without a chat template."""

DOCUMENT, QUESTION = "<<document>>", "<<question>>"
"""Placeholders for rendering the chat template."""


@dataclass(frozen=True)
class Frame:
    """Prompt parts around document and question.

    Attributes:
        before: Text before the document.
        special_tokens: Whether the tokenizer adds its special tokens before the document.
        behind: Text after the document, including the placeholder of the question.
        stop: Strings that end an answer.
    """

    before: str
    special_tokens: bool
    behind: str
    stop: str | tuple[str, ...]

    @classmethod
    def of(cls, llm: LLM) -> Frame:
        """Create the frame from the chat template of the model, or from `TEMPLATE` if there is none."""
        if getattr(llm.tokenizer, "chat_template", None) is None:
            return cls("", True, TEMPLATE.format(question=QUESTION), "\n")
        text, _ = llm.chat_prompt([{"role": "user", "content": f"{DOCUMENT}\n\n{QUESTION}"}])
        before, _, behind = text.partition(DOCUMENT)
        return cls(before, False, behind, ())


def document_tokens(
    llm: LLM,
    text: str,
    room: int,
    wanted: int | None,
    truncate: str | None = None,
    *,
    special_tokens: bool = True,
) -> list[int]:
    """Tokenize the document.

    Args:
        llm: Model.
        text: Text of the document.
        room: Number of positions reserved for question and answer.
        wanted: Number of tokens to take from the start. None takes all, shortened by `truncate` to fit.
        truncate: Part of a longer document to drop ("head", "tail" or "middle").
        special_tokens: Whether to add special tokens.

    Raises:
        InputError: If the document has fewer tokens, or if they do not fit into the context length of the model.
    """
    ids = llm.encode(text, special_tokens=special_tokens)
    most = llm.geometry.max_positions - room
    if wanted is None:
        if most < 1:
            raise InputError(f"question and answer need {room} positions and {llm.name} has {room + most}")
        return shortened(ids, most, truncate, "the document")
    if not 1 <= wanted <= min(len(ids), most):
        raise InputError(
            f"--document-tokens {wanted} must be between 1 and {min(len(ids), most)}: the document has {len(ids)} "
            f"tokens, and beside question and answer {llm.name} holds {most}"
        )
    return ids[:wanted]


def answers(
    llm: LLM, document: Sequence[int], questions: Sequence[Sequence[int]], params: SamplingParams, batch: int
) -> Iterator[list[str]]:
    """Yield the answers to tokenized questions, one batch at a time."""
    # All prompts start with the document, so prefix caching computes it only once.
    for start in range(0, len(questions), batch):
        prompts = [[*document, *question] for question in questions[start : start + batch]]
        began = time.perf_counter()
        done = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        computed = sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in done)
        total = sum(len(output.prompt_token_ids) for output in done)
        print(
            f"[questions {start + 1}-{start + len(done)}: {seconds:.1f} s, {computed:,} of {total:,} prompt tokens "
            f"computed, the others shared]",
            file=sys.stderr,
        )
        yield [output.outputs[0].text.strip() for output in done]


def answered(path: Path, questions: Sequence[str]) -> int:
    """Count the leading questions answered in the file. Raises InputError if it answers other questions."""
    if not path.exists():
        return 0
    try:
        known = [parse_json(line)["question"] for line in read_small(path).decode("utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{str(path)!r} is no file of answers: give another --out") from None
    if known != list(questions[: len(known)]):
        raise InputError(f"{str(path)!r} answers other questions: give another --out")
    return len(known)


def answer_file(
    llm: LLM,
    document: str,
    questions: Sequence[str],
    out: Path,
    params: SamplingParams,
    *,
    batch: int,
    document_limit: int | None = None,
    truncate: str | None = None,
) -> None:
    """Append a JSON line to `out` for every question without an answer."""
    frame = Frame.of(llm)
    before = llm.encode(frame.before, special_tokens=False) if frame.before else []
    encoded = [llm.encode(frame.behind.replace(QUESTION, question), special_tokens=False) for question in questions]
    room = len(before) + max(map(len, encoded)) + params.max_tokens
    own = {"special_tokens": frame.special_tokens}
    ids = [*before, *document_tokens(llm, document, room, document_limit, truncate, **own)]
    params = replace(params, stop=frame.stop)
    start = answered(out, questions)
    with out.open("a", encoding="utf-8") as file:
        for found in answers(llm, ids, encoded[start:], params, batch):
            for answer in found:
                file.write(json.dumps({"question": questions[start], "answer": answer}, ensure_ascii=False) + "\n")
                start += 1
            file.flush()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--document", required=True, metavar="FILE", help="the text that all questions are about")
    parser.add_argument("--questions", required=True, metavar="FILE", help="a question a line; '-' is stdin")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="answers as JSON lines; continued")
    parser.add_argument("--document-tokens", type=int, metavar="N", help="only the document's first N tokens")
    parser.add_argument("--truncate", metavar="head|tail|middle", help="what of a longer document is left out")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="longest answer (default: 32)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="questions answered together (default: 32)")
    parser.add_argument("--model", default="reference", help="'reference', a local folder or a hub id")
    parser.add_argument("--policy", default="infinigen")
    parser.add_argument("--host-memory", help="limit of KV in host memory, such as 64GiB")
    parser.add_argument("--swap", metavar="DIR", help="where rows go when host memory is full (default: nowhere)")
    return parser.parse_args()


def main() -> None:
    """Answer the remaining questions."""
    args = arguments()
    quiet_transformers()
    try:
        if args.batch < 1:
            raise InputError(f"--batch {args.batch} must be at least 1")
        document = read_text(args.document)
        questions = read_prompts(args.questions)
        params = SamplingParams(max_tokens=args.max_new_tokens, temperature=0)
        llm = LLM(
            args.model,
            policy=args.policy,
            host_memory=args.host_memory,
            swap=args.swap,
            progress=sys.stderr.isatty(),
        )
        limits = {"document_limit": args.document_tokens, "truncate": args.truncate}
        answer_file(llm, document, questions, args.out, params, batch=args.batch, **limits)
    except OffloadError as error:
        sys.exit(f"answer_many: {error}")
    except OSError as error:
        sys.exit(f"answer_many: cannot write {args.out}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; run the same command to continue {args.out}")


if __name__ == "__main__":
    main()
