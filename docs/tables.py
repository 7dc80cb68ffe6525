"""Generated tables of documentation pages, each between the comments `<!-- NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join((lines[0], "|---" * len(head) + "|", *lines[1:]))


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Return `text` with each table replaced by its current content."""
    for name, content in tables.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, mark, after = rest.partition(f"<!-- end of {name} -->")
        if not mark:
            raise ValueError(f"the page has no place for the table {name!r}")
        text = f"{before}<!-- {name} -->\n{content}\n{mark}{after}"
    return text
