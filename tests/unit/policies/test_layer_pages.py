"""Test pages that forks share: compare them with lists after random writes, copies, truncations, forks and releases."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples

from offload_rt.kernels.pages import BLOCK, PAGE_BLOCKS, PAGE_TOKENS
from offload_rt.policies.infinigen.approximate_kv import LayerPages

LAYERS, HEADS = (3, 5), 2
PAGE_BYTES = len(LAYERS) * HEADS * PAGE_BLOCKS * BLOCK
"""Size in bytes of a page that stores one byte per token, layer and head."""

Owner = tuple[LayerPages, dict[int, list[int]]]

OPERATIONS = st.tuples(
    st.sampled_from(["append", "append", "rewrite", "move", "fork", "truncate", "release"]),
    st.integers(0, 9), st.sampled_from(LAYERS), st.integers(0, 1200), st.integers(1, 700),
)  # fmt: skip
"""Each operation with its owner, layer, first token (modulo the length) and number of tokens."""


def token_values(pages: LayerPages, layer: int) -> list[int]:
    """Return the values of a layer's tokens. All heads must have the same values."""
    layer_pages = pages.pages(layer)
    parts = [blocks.flatten(1)[:, slots] for blocks, slots, _ in layer_pages.parts(range(pages.lengths[layer]))]
    rows = torch.cat(parts, 1) if parts else torch.empty(HEADS, 0)
    assert all(row.equal(rows[0]) for row in rows)
    return [int(x) for x in rows[0]]


def write(owner: Owner, layer: int, start: int, stamps: list[int]) -> None:
    pages, expected = owner
    layer_pages = pages.reserve(layer, range(start, start + len(stamps)))
    for blocks, slots, at in layer_pages.parts(range(start, start + len(stamps))):
        blocks.view(HEADS, -1)[:, slots] = torch.tensor(stamps[at], dtype=torch.uint8)
    expected[layer][start : start + len(stamps)] = stamps


@settings(max_examples=examples(80), deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=14))
def test_pages_contain_the_writes_of_each_owner(operations: list[tuple[str, int, int, int, int]]) -> None:
    owners: list[Owner] = [(LayerPages(LAYERS, HEADS, BLOCK, torch.device("cpu")), {layer: [] for layer in LAYERS})]
    for stamp, (operation, owner, layer, at, count) in enumerate(operations, 1):
        pages, expected = owners[owner % len(owners)]
        length = len(expected[layer])
        if operation == "append":
            write((pages, expected), layer, length, [stamp] * count)
        elif operation == "rewrite" and length:
            write((pages, expected), layer, at % length, [stamp] * count)
        elif operation == "move" and length:
            write((pages, expected), layer, at % length, [token_values(pages, layer)[count % length]])
        elif operation in ("fork", "truncate"):
            tokens = at if operation == "truncate" else None
            owners.append((pages.fork(tokens), {key: list(rows[:tokens]) for key, rows in expected.items()}))
        elif operation == "release" and len(owners) > 1:
            del owners[owner % len(owners)], pages
    unique_pages = {id(page) for pages, _ in owners for page in pages._pages}
    sizes = [pages.nbytes for pages, _ in owners]
    assert abs(sum(sizes) - len(unique_pages) * PAGE_BYTES) <= len(owners), "a shared page counts once"
    for pages, expected in owners:
        pages.check_integrity()
        for layer, rows in expected.items():
            assert pages.lengths[layer] == len(rows) and token_values(pages, layer) == rows


def test_fork_copies_the_page_that_it_writes_to() -> None:
    first = LayerPages(LAYERS, HEADS, BLOCK, torch.device("cpu"))
    owner = first, {layer: [] for layer in LAYERS}
    for layer in LAYERS:
        write(owner, layer, 0, [7] * (2 * PAGE_TOKENS + 70))
    before, fork = first.pages(3), first.fork()
    assert first.nbytes == fork.nbytes == 1.5 * PAGE_BYTES
    fork.reserve(3, range(2 * PAGE_TOKENS + 70, 2 * PAGE_TOKENS + 71))
    fork_tensors, first_tensors = fork.pages(3).tensors, first.pages(3).tensors
    assert [a is b for a, b in zip(fork_tensors, first_tensors, strict=True)] == [True, True, False]
    assert first.pages(3) is before, "the first owner's pages are not copied"
    assert first.nbytes == fork.nbytes == 2 * PAGE_BYTES
    assert token_values(fork, 5) == token_values(first, 5)
    fork.reserve(5, range(1))
    assert fork.pages(3).tensors[0] is not first_tensors[0] and fork.pages(3).tensors[1] is first_tensors[1]
    del fork
    assert first.nbytes == 3 * PAGE_BYTES and len(first._pages[1].users) == 1
    last = first_tensors[2]
    first.reserve(3, range(2 * PAGE_TOKENS + 70))
    assert first.pages(3).tensors[2] is last, "an unshared page is not copied"


def test_truncated_fork_shares_the_pages_of_its_tokens() -> None:
    first = LayerPages(LAYERS, HEADS, BLOCK, torch.device("cpu"))
    owner = first, {layer: [] for layer in LAYERS}
    for layer in LAYERS:
        write(owner, layer, 0, [7] * (3 * PAGE_TOKENS))
    whole, part, none = (first.fork(tokens) for tokens in (2 * PAGE_TOKENS, PAGE_TOKENS + 1, 0))
    assert [len(pages.pages(3).tensors) for pages in (whole, part)] == [2, 2]
    assert [pages.lengths[5] for pages in (whole, part, none)] == [2 * PAGE_TOKENS, PAGE_TOKENS + 1, 0]
    assert first.lengths[5] == 3 * PAGE_TOKENS and none.nbytes == 0
    part.reserve(5, range(PAGE_TOKENS + 1, PAGE_TOKENS + 2))
    assert part.pages(3).tensors[1] is not whole.pages(3).tensors[1]
    for pages in (first, whole, part, none):
        pages.check_integrity()
