"""Test the prefix tree: matching, eviction order, and sharing through the pool."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pools import append, kv, make_pool, read
from support.sampling import examples

from offload_rt.core import BLOCK_SIZE, ranges_of
from offload_rt.kv_cache import prefix_tree
from offload_rt.kv_cache.prefix_tree import PrefixTree, block_key, pack_tokens, root_key


def token_blocks(*letters: int) -> list[int]:
    """Return the tokens of one block per letter. Each block repeats its letter."""
    return [letter for letter in letters for _ in range(BLOCK_SIZE)]


def has_one_user(block: int) -> bool:
    return True


@given(st.lists(st.integers(0, 2**40), max_size=200), st.integers(0, 220))
def test_packed_tokens_are_blocks_of_little_endian_numbers(tokens: list[int], stop: int) -> None:
    packed = pack_tokens(tokens, stop)
    assert b"".join(packed) == b"".join(token.to_bytes(8, "little") for token in tokens[:stop])
    assert all(len(data) == 8 * BLOCK_SIZE for data in packed[:-1]) and all(
        0 < len(data) <= 8 * BLOCK_SIZE for data in packed
    )


@given(st.sets(st.integers(0, 40)))
def test_ranges_are_as_few_as_possible(numbers: set[int]) -> None:
    ranges = ranges_of(sorted(numbers))
    assert [number for run in ranges for number in run] == sorted(numbers)
    assert all(run for run in ranges)
    assert all(before.stop < after.start for before, after in pairwise(ranges))


def test_match_excludes_the_last_token() -> None:
    tree = PrefixTree()
    assert tree.insert(token_blocks(1, 2, 3), [7, 8, 9], "exact", has_one_user) == ([7, 8, 9], {})
    assert tree.match([], "exact") == tree.match([1], "exact") == tree.match(token_blocks(1), "exact") == []
    assert tree.match([*token_blocks(1), 2], "exact") == [7]
    assert tree.match(token_blocks(1, 2, 3), "exact") == [7, 8]
    assert tree.match([*token_blocks(1, 2, 3), 5], "exact") == [7, 8, 9]
    assert tree.match([*token_blocks(1, 3), 5], "exact") == [7]
    assert tree.match([*token_blocks(2), 5], "exact") == []


def test_short_sequences_are_evicted_before_an_older_longer_one() -> None:
    tree = PrefixTree()
    tree.insert(token_blocks(1, 2, 3, 4, 5, 6, 7, 8), [*range(8)], "exact", has_one_user)
    tree.insert(token_blocks(9), [8], "exact", has_one_user)
    tree.insert(token_blocks(10), [9], "exact", has_one_user)
    for block in range(10):
        tree.release([block])
    assert tree.evict(4) == [8, 9, 7, 6]
    tree.check_integrity(lambda block: 1)


def test_provenance_keys_and_namespaces_never_match_each_other() -> None:
    tree = PrefixTree("model a")
    tree.insert(token_blocks(1), [7], "exact", has_one_user)
    tree.insert(token_blocks(1, 2), [7, 8], "infinigen", has_one_user)  # decoded sparsely after an exact prefill
    tokens = [*token_blocks(1, 2), 0]
    assert tree.match(tokens, "exact") == [7]
    assert tree.match(tokens, "infinigen") == []
    assert tree.match(tokens, "infinigen", "exact") == [7, 8]
    assert block_key(root_key("model a"), "exact", b"x") != block_key(root_key("model b"), "exact", b"x")
    assert block_key(b"p", "ab", b"c" * 512) != block_key(b"p", "a", b"bc" + b"c" * 510)


def test_block_keys_are_stable() -> None:
    key = block_key(root_key("model"), "exact", pack_tokens(range(64), 64)[0])
    assert key.hex() == "78758bfd1bea1c3853b645de785c4ef27f2d3d070ef38e90eaad57d161989de1", (
        "stored blocks have these keys, so keys must never change"
    )


def test_equal_digests_of_other_tokens_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "block_key", lambda parent, provenance_key, tokens: parent[:1] + tokens[:1])
    tree = PrefixTree()
    tree.insert(token_blocks(1, 5), [7, 8], "exact", has_one_user)
    twin = token_blocks(257)  # same lowest byte, so the same patched digest
    assert tree.match([*twin, 0], "exact") == []
    assert tree.insert(twin + token_blocks(6), [4, 5], "exact", has_one_user) == ([], {})
    assert tree.match([*token_blocks(1), 0], "other provenance") == []
    assert tree.match([*token_blocks(1, 5), 0], "exact") == [7, 8]


def test_least_recently_used_leaf_is_evicted_first() -> None:
    tree = PrefixTree()
    tree.insert(token_blocks(1, 2), [0, 1], "exact", has_one_user)
    tree.insert(token_blocks(1, 3), [0, 2], "exact", has_one_user)
    tree.insert(token_blocks(4), [3], "exact", has_one_user)
    assert tree.evict(9) == [], "all blocks are in use"
    tree.release([3])
    tree.release([0, 1])
    tree.release([2])
    assert tree.match([*token_blocks(4), 0], "exact") == [3]
    tree.release([3])
    assert tree.idle == 4
    assert tree.evict(1) == [1]
    assert tree.evict(2) == [2, 0], "a parent becomes a leaf; it was used before block 3"
    assert tree.evict(9) == [3]
    assert len(tree) == tree.idle == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "match", "end", "evict", "remove"]), st.integers(0, 2**20)), max_size=60
)


@settings(max_examples=examples(150), deadline=None)
@given(steps=STEPS)
def test_tree_equals_a_dictionary_of_prefixes(steps: list[tuple[str, int]]) -> None:
    tree = PrefixTree()
    known: dict[tuple[int, ...], int] = {}
    used: dict[tuple[int, ...], int] = {}
    refs: Counter[int] = Counter()
    holders: list[list[int]] = []
    next_block = 0

    def drop(blocks: list[int]) -> None:
        evicted = [key for key, block in known.items() if block in blocks]
        assert sorted(known[key] for key in evicted) == sorted(blocks)
        for key in evicted:
            refs[known.pop(key)] -= 1

    for clock, (action, number) in enumerate(steps):
        letters = tuple(number >> i & 1 for i in range(1 + number % 4))
        prefixes = [letters[: i + 1] for i in range(len(letters))]
        if action == "publish":
            new_blocks = list(range(next_block, next_block + len(letters)))
            next_block += len(letters)
            inserted, existing = tree.insert(token_blocks(*letters), new_blocks, "exact", has_one_user)
            assert inserted == [block for key, block in zip(prefixes, new_blocks, strict=True) if key not in known]
            assert existing == {i: known[key] for i, key in enumerate(prefixes) if key in known}
            for key, block in zip(prefixes, new_blocks, strict=True):
                refs[known.setdefault(key, block)] += 1 + (block in inserted)
                used[key] = clock
            holders.append([known[key] for key in prefixes])
        elif action == "match":
            found = tree.match([*token_blocks(*letters), 9], "exact")
            assert found == [known[key] for key in prefixes if key in known]
            for key, block in zip(prefixes, found, strict=False):
                refs[block] += 1
                used[key] = clock
            holders.append(found)
        elif action == "end" and holders:
            ended = holders.pop(number % len(holders))
            refs.subtract(ended)
            tree.release([block for block in ended if refs[block] == 1])
            used |= {key: clock for key, block in known.items() if block in ended and refs[block] == 1}
        elif action == "evict":
            for _ in range(number % 3):
                leaves = {
                    key: used[key]
                    for key, block in known.items()
                    if refs[block] == 1 and not any(other[:-1] == key for other in known)
                }
                evicted = tree.evict(1)
                assert len(evicted) == min(1, len(leaves))
                assert [used[key] for key, block in known.items() if block in evicted] == sorted(leaves.values())[:1]
                drop(evicted)
        elif action == "remove" and known:
            key = list(known)[number % len(known)]
            descendants = [block for other, block in known.items() if other[: len(key)] == key]
            evicted = tree.remove(known[key])
            assert sorted(evicted) == sorted(descendants)
            drop(evicted)
            holders = [[block for block in blocks if block not in evicted] for blocks in holders]
        tree.check_integrity(lambda block: refs[block])
        assert len(tree) == len(known) and all(block in tree for block in known.values())
        assert tree.idle == sum(refs[block] == 1 for block in known.values())


def test_prompt_is_stored_once_and_survives_its_sequence() -> None:
    pool = make_pool(12)
    tokens = [*token_blocks(1, 2, 3), 4, 4, 4]
    first = pool.new_block_table(0)
    append(pool, first, len(tokens))
    assert pool.publish(first, tokens, "exact") == []
    used = pool.bytes_used
    second = pool.match([*tokens, 5], "exact")
    assert second.length == 3 * BLOCK_SIZE and second.ids == first.ids[:3]
    assert pool.bytes_used == used, "shared blocks are stored once"
    append(pool, second, 10, sequence=1)
    pool.release(first)
    pool.release(second)
    assert pool.idle_blocks == 3 and pool.bytes_used == 3 * pool.block_bytes
    third = pool.match([*tokens, 5], "exact")
    for layer in (0, 1):
        assert torch.equal(read(pool.runs(third, layer, range(192)))[0], kv(range(192), layer)[0])
    pool.check_integrity()


def test_concurrently_computed_equal_prompts_share_their_blocks() -> None:
    pool = make_pool(12)
    tokens = token_blocks(1, 2)
    block_tables = [pool.new_block_table(128) for _ in range(2)]
    for i, blocks in enumerate(block_tables):
        append(pool, blocks, 128, sequence=i)
    assert pool.publish(block_tables[0], tokens, "exact") == []
    assert pool.publish(block_tables[1], tokens, "exact") == [0, 1]
    assert block_tables[0].ids == block_tables[1].ids and pool.bytes_used == 2 * pool.block_bytes
    assert pool.publish(block_tables[1], tokens, "exact") == []
    pool.check_integrity()


def test_blocks_shared_with_a_fork_are_not_replaced() -> None:
    pool = make_pool(12)
    first, second = pool.new_block_table(64), pool.new_block_table(128)
    append(pool, first, 64)
    append(pool, second, 128, sequence=1)
    twin = pool.fork(second)
    pool.publish(first, token_blocks(1), "exact")
    assert pool.publish(second, token_blocks(1, 2), "exact") == [], (
        "the fork would hold block 1 of the tree, but not block 0"
    )
    assert pool.idle_blocks == 0 and len(pool.cached) == 1
    pool.release(second)
    pool.check_integrity()
    assert pool.publish(twin, token_blocks(1, 2), "exact") == [0]
    assert len(pool.cached) == 2
    pool.check_integrity()


def test_writing_to_a_truncated_published_block_copies_it() -> None:
    pool = make_pool(12)
    blocks = pool.new_block_table(0)
    append(pool, blocks, BLOCK_SIZE)
    pool.publish(blocks, token_blocks(1), "exact")
    pool.truncate(blocks, 10)
    append(pool, blocks, 1, sequence=1)
    assert pool.idle_blocks == 1, "the block is copied, and the original is released"
    assert torch.equal(read(pool.runs(blocks, 1, range(10)))[0], kv(range(10), 1)[0])
    kept = pool.match([*token_blocks(1), 0], "exact")
    assert torch.equal(read(pool.runs(kept, 1, range(BLOCK_SIZE)))[0], kv(range(BLOCK_SIZE), 1)[0])
    pool.check_integrity()


def test_overwritten_block_is_removed_from_the_tree() -> None:
    pool = make_pool(12)
    tokens = [*token_blocks(1, 2, 3), 0]
    blocks = pool.new_block_table(0)
    append(pool, blocks, 3 * BLOCK_SIZE)
    pool.publish(blocks, tokens, "exact")
    other = pool.match(tokens, "exact")
    assert not pool.make_exclusive(blocks, 1), "another sequence reads it"
    assert len(pool.cached) == 3, "and the tree still contains it"
    pool.release(other)
    assert pool.make_exclusive(blocks, 1)
    assert pool.match(tokens, "exact").length == BLOCK_SIZE, "its descendants were removed too"
    pool.publish(blocks, tokens, "exact")
    assert pool.match(tokens, "exact").length == BLOCK_SIZE
    pool.check_integrity()
    pool.release(blocks)
    assert not pool._exclusive, "the next holder of the slot may publish it"
