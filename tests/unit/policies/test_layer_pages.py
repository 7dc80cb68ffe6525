"""Test pages that forks share, with random writes, moves, truncations, forks and releases, against plain lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.kernels.pages import BLOCK, PAGE_BLOCKS, PAGE_TOKENS
from offload_rt.policies.infinigen.approximate_kv import LayerPages

LAYERS, HEADS = (3, 5), 2
PAGE_BYTES = len(LAYERS) * HEADS * PAGE_BLOCKS * BLOCK
"""Size of a page with one byte per token."""

Owner = tuple[LayerPages, dict[int, list[int]]]

OPERATIONS = st.tuples(
    st.sampled_from(["append", "append", "again", "move", "fork", "cut", "release"]),
    st.integers(0, 9), st.sampled_from(LAYERS), st.integers(0, 1200), st.integers(1, 700),
)  # fmt: skip
"""Operation, owner, layer, first token (modulo the length) and number of tokens."""


def rows_of(pages: LayerPages, layer: int) -> list[int]:
    """Return the values of a layer's tokens, which are equal in all heads."""
    shown = pages.pages(layer)
    parts = [blocks.flatten(1)[:, slots] for blocks, slots, _ in shown.parts(range(pages.lengths[layer]))]
    rows = torch.cat(parts, 1) if parts else torch.empty(HEADS, 0)
    assert all(row.equal(rows[0]) for row in rows)
    return [int(x) for x in rows[0]]


def write(owner: Owner, layer: int, start: int, stamps: list[int]) -> None:
    pages, known = owner
    shown = pages.reserve(layer, range(start, start + len(stamps)))
    for blocks, slots, at in shown.parts(range(start, start + len(stamps))):
        blocks.view(HEADS, -1)[:, slots] = torch.tensor(stamps[at], dtype=torch.uint8)
    known[layer][start : start + len(stamps)] = stamps


@settings(max_examples=80, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=14))
def test_pages_contain_the_writes_of_each_owner(operations: list[tuple[str, int, int, int, int]]) -> None:
    owners: list[Owner] = [(LayerPages(LAYERS, HEADS, BLOCK, torch.device("cpu")), {layer: [] for layer in LAYERS})]
    for stamp, (what, who, layer, at, count) in enumerate(operations, 1):
        pages, known = owners[who % len(owners)]
        there = len(known[layer])
        if what == "append":
            write((pages, known), layer, there, [stamp] * count)
        elif what == "again" and there:
            write((pages, known), layer, at % there, [stamp] * count)
        elif what == "move" and there:
            write((pages, known), layer, at % there, [rows_of(pages, layer)[count % there]])
        elif what in ("fork", "cut"):
            tokens = at if what == "cut" else None
            owners.append((pages.fork(tokens), {own: list(rows[:tokens]) for own, rows in known.items()}))
        elif what == "release" and len(owners) > 1:
            del owners[who % len(owners)], pages
    held = {id(page) for pages, _ in owners for page in pages._pages}
    parts = [pages.nbytes for pages, _ in owners]
    assert abs(sum(parts) - len(held) * PAGE_BYTES) <= len(owners), "a shared page counts once"
    for pages, known in owners:
        pages.check_integrity()
        for layer, rows in known.items():
            assert pages.lengths[layer] == len(rows) and rows_of(pages, layer) == rows


def test_a_fork_copies_the_page_that_it_writes_to() -> None:
    first = LayerPages(LAYERS, HEADS, BLOCK, torch.device("cpu"))
    owner = first, {layer: [] for layer in LAYERS}
    for layer in LAYERS:
        write(owner, layer, 0, [7] * (2 * PAGE_TOKENS + 70))
    before, twin = first.pages(3), first.fork()
    assert first.nbytes == twin.nbytes == 1.5 * PAGE_BYTES
    twin.reserve(3, range(2 * PAGE_TOKENS + 70, 2 * PAGE_TOKENS + 71))
    mine, other = twin.pages(3).tensors, first.pages(3).tensors
    assert [a is b for a, b in zip(mine, other, strict=True)] == [True, True, False]
    assert first.pages(3) is before, "the pages of the other side are not moved"
    assert first.nbytes == twin.nbytes == 2 * PAGE_BYTES
    assert rows_of(twin, 5) == rows_of(first, 5)
    twin.reserve(5, range(1))
    assert twin.pages(3).tensors[0] is not other[0] and twin.pages(3).tensors[1] is other[1]
    del twin
    assert first.nbytes == 3 * PAGE_BYTES and len(first._pages[1].users) == 1
    last = other[2]
    first.reserve(3, range(2 * PAGE_TOKENS + 70))
    assert first.pages(3).tensors[2] is last, "a page that is not shared is not copied"


def test_a_truncated_fork_keeps_the_pages_of_its_tokens() -> None:
    first = LayerPages(LAYERS, HEADS, BLOCK, torch.device("cpu"))
    owner = first, {layer: [] for layer in LAYERS}
    for layer in LAYERS:
        write(owner, layer, 0, [7] * (3 * PAGE_TOKENS))
    whole, part, none = (first.fork(tokens) for tokens in (2 * PAGE_TOKENS, PAGE_TOKENS + 1, 0))
    assert [len(own.pages(3).tensors) for own in (whole, part)] == [2, 2]
    assert [own.lengths[5] for own in (whole, part, none)] == [2 * PAGE_TOKENS, PAGE_TOKENS + 1, 0]
    assert first.lengths[5] == 3 * PAGE_TOKENS and none.nbytes == 0
    part.reserve(5, range(PAGE_TOKENS + 1, PAGE_TOKENS + 2))
    assert part.pages(3).tensors[1] is not whole.pages(3).tensors[1]
    for own in (first, whole, part, none):
        own.check_integrity()
