"""Check that prose is plain technical English: `python scripts/prose.py`, part of `make lint`.

The check counts constructions that are rare in technical English, in docstrings, comments, messages and Markdown files.
It fails if a folder exceeds its budget of matches per 1,000 words. Budgets may only fall. Text without matches can
still be unclear.

    python scripts/prose.py --show server    print every match in folders whose name contains "server"
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

BUDGETS = {
    "scripts": 2,
    "tests/adversary": 2,
    "tests/unit": 2,
}
"""Number of matches per 1,000 words that each folder or page may have. For all others, the budget is 1."""

LEAST_WORDS = 200
"""Folders with fewer words are not checked."""

IS = "is|are|was|were|has|have|can|does"
CONSTRUCTIONS = (
    # A sentence opens with a relative pronoun: "What a layer selected is copied." Name the thing instead.
    r"(?:^|[.:;]\s+)(?:What|Who|Whose|Whom|That of|Those (?:who|of)|Of (?:a|an|the|its|each|all))\b",
    # A relative clause replaces a noun: "what lies on the disk", "who waits".
    rf"\bwhat (?:{IS}|do|had|it|they|one|a|an|the|each|[a-z]+s)\b",
    r"\b(?:who|whoever) (?:has|is|[a-z]+s|[a-z]+ed)\b",
    r"\bof (?:whose|whom|which)\b",
    r"\b(?:in|on|by|to|for|from|with) which (?:it|they|a|the|there|each)\b",
    # Pronouns for persons that do not exist: "nobody reads the block".
    r"\b(?:nobody|somebody|everybody)\b|\bnothing\b(?! (?:else )?(?:to do|changes|happens|is))",
    # "where" in place of "if".
    rf"\bwhere (?:there|it|they|none|one|a \w+|that) (?:{IS})\b|\bwhere (?:none|no)\b",
    # Passive voice of saying and giving: "is meant", "is given back".
    r"\b(?:is|are|was|were) (?:meant|said|told|asked (?:of|for)|given (?:up|back)|taken (?:back|for))\b",
    # Words of another century.
    r"\b(?:anew|besides|thereby|meanwhile|so many|but for|go(?:es)? on)\b",
    r"\bfor itself\b|\bof (?:its|one's) own\b|\bbehind (?:it|them|a|an|the|what)\b",
)
PATTERN = re.compile("|".join(f"(?:{one})" for one in CONSTRUCTIONS), re.IGNORECASE | re.MULTILINE)
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """For each docstring, comment and message of at least five words, yield its line and its text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(WORD.findall(node.value)) >= 5:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """For each paragraph outside code blocks, yield its line and its text."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    line = 1
    for paragraph in text.split("\n\n"):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def part_of(path: Path) -> str:
    """Return the folder or page whose budget applies to `path`, such as `offload_rt/engine`, `docs` or `README.md`."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 2 if parts[0] in ("offload_rt", "eval", "tests") and len(parts) > 2 else 1])


def files() -> Iterator[Path]:
    """Yield the project's Python and Markdown files. Files in linked folders appear only once."""
    for top in ("offload_rt", "kernels", "skewing", "eval", "scripts", "tests", "docs"):
        for path in sorted((ROOT / top).rglob("*")):
            generated = path.name == "commands.md" or "results" in path.parts
            if path.suffix in (".py", ".md") and not generated and path != Path(__file__).resolve():
                yield path
    yield from sorted(ROOT.glob("*.md"))


def count() -> tuple[Counter[str], dict[str, list[str]]]:
    """Return the number of words, and the matches, for each folder or page."""
    words: Counter[str] = Counter()
    found: dict[str, list[str]] = {}
    for path in files():
        part, source = part_of(path), path.read_text(encoding="utf-8")
        for line, text in (python_prose if path.suffix == ".py" else markdown_prose)(source):
            words[part] += len(WORD.findall(text))
            for match in PATTERN.finditer(text):
                at = line + text.count("\n", 0, match.start())
                found.setdefault(part, []).append(f"{path.relative_to(ROOT)}:{at}: {' '.join(match.group().split())}")
    return words, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="PART", help="print the matches of parts whose name contains PART")
    shown = parser.parse_args().show
    words, found = count()
    failed = False
    for part in sorted(part for part in words if words[part] >= LEAST_WORDS):
        rate = 1000 * len(found.get(part, ())) / max(words[part], 1)
        over = rate > BUDGETS.get(part, 1)
        failed |= over
        if over or shown is not None:
            print(f"{part}: {rate:.1f} per 1,000 words, budget {BUDGETS.get(part, 1)}{': too many' if over else ''}")
        if shown is not None and shown in part:
            print("\n".join(found.get(part, ())))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
