"""Test that names, options and documentation use the terms of docs/pages/glossary.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_rt.cli import _parser

ROOT = Path(__file__).parents[3]
CODE = [ROOT / folder for folder in ("offload_rt", "kernels", "skewing", "eval")]

WORDS = {
    "chunk": "block",
    "tail": "approximate KV",
    "lineage": "KV provenance key",
    "link": "host-to-device transfer, h2d_bytes, d2h_bytes",
    "missed": "missed attention mass",
    "homes": "extents",
}
"""Words that must not be part of an identifier, with the terms to use."""

NAMES = {
    "truncation_id": "cache salt", "suit_cpu": "CPU weight layout", "max_batch": "max_num_seqs",
    "prefill_tokens": "max_num_batched_tokens", "prefill_slice": "prefill_chunk_size", "max_context": "max_model_len",
    "prefix_sharing": "enable_prefix_caching", "whole_pass": "verification pass", "exact_layer": "full-attention layer",
    "join_tail": "merge_approximate", "text_part": "language model", "own_device": "device guard",
    "proof": "load-time verification", "growth": "attention temperature scaling", "reach": "RoPE scaling",
    "figures": "metrics", "deltas": "chat stream", "answers": "responses",
    "affinity": "prefix-aware router", "Room": "cache manager", "Ticket": "handle", "Arriving": "pending fetch",
    "Returning": "pending write-back", "Strategy": "a telling name", "Visible": "a telling name",
    "Span": "a telling name", "Holder": "a telling name", "Asked": "a telling name",
    "Neighbours": "interleaved rotary embedding", "Halves": "half-split rotary embedding",
    "Documents": "a telling name", "HostShares": "memory budget", "Piece": "a telling name",
    "Place": "a telling name", "Door": "proxy", "Behind": "upstream", "Where": "routing",
}  # fmt: skip
"""Names that no module, class or function may have, with the terms to use."""

WORD_ALLOWED = {
    "chunk": (5, "chunked prefill, chunks of a streamed response, and the decoding chunks of the paper's Figure 12"),
    "tail": (3, "fields of stored session histories: the partly filled last block"),
    "missed": (15, "the option `max_missed_mass` and its statistics"),
}
"""How many identifiers may still contain a word, with the reason. These numbers may only go down."""

NAME_ALLOWED = {"truncation_id", "answers"}
"""Names that are still allowed: a field in stored session histories, and the positions of answer tokens in `eval`."""


def identifiers() -> Iterator[tuple[Path, str]]:
    """Yield the file and the name of each module, class, function, parameter and field."""
    for path in (path for folder in CODE for path in sorted(folder.rglob("*.py"))):
        yield path, path.stem
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node.name
            elif isinstance(node, ast.arg):
                yield path, node.arg
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield path, node.target.id


def split_identifier(name: str) -> set[str]:
    """Split an identifier into its words, in lower case and in the singular."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}


def test_identifiers_use_the_terms_of_the_glossary() -> None:
    found: dict[str, set[str]] = {}
    for path, name in identifiers():
        for word in {*split_identifier(name)} & WORDS.keys() | {name.strip("_")} & NAMES.keys():
            found.setdefault(word, set()).add(f"{path.relative_to(ROOT)}: {name}")
    for word, uses in found.items():
        most, _ = WORD_ALLOWED.get(word, (0, ""))
        if word not in NAME_ALLOWED and len(uses) > most:
            raise AssertionError(f"use {WORDS.get(word) or NAMES[word]} instead of {word}:\n" + "\n".join(sorted(uses)))


def test_options_use_the_terms_of_the_glossary() -> None:
    help_text = _parser().format_help() + "".join(
        command.format_help()
        for action in _parser()._actions
        for command in (action.choices or {}).values()
        if hasattr(command, "format_help")
    )
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]+)", help_text)}
    assert "max_model_len" in flags and not flags & NAMES.keys()


PHRASES = re.compile(
    r"\b(?:token rows?|rows of (?:a|the|all) tokens?|(?:over|across|crosses|cross) the link|link bytes|link fraction"
    r"|attended fraction|missed mass|provenance_key|low[- ]bit rows?|scoring rows|rooms?|mended"
    + "".join(f"|{name}" for name in NAMES if "_" in name)
    + r")\b",
    re.IGNORECASE,
)
"""Terms that the documentation must not use."""


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs" / "pages").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"],
    ids=lambda page: page.name,
)
def test_pages_use_the_terms_of_the_glossary(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- gpu: begin.*?gpu: end -->|\n\|[^\n]*missed mass[^\n]*", "", text, flags=re.DOTALL)
    found = [match.group() for match in PHRASES.finditer(text)]
    assert not found, f"{page.name}: {found}"
