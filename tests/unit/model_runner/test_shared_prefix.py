"""Test shared runs in a batch: they are found from block ids, and attention equals that of single sequences."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples

from offload_rt.core import BLOCK_SIZE, BlockTable, VisibleTokens
from offload_rt.kernels.kv_runs import Run, attend_runs
from offload_rt.model_runner.batch import SharedPrefixes, SharedRun, Sharing


@st.composite
def batches(draw: st.DrawFn) -> list[BlockTable]:
    """Draw block tables that share prefixes. They come from a random trie of blocks and are in random order."""
    block_tables = [[0]]
    fresh = 1
    for _ in range(draw(st.integers(1, 9))):
        parent = draw(st.sampled_from(block_tables))
        shared = draw(st.integers(0, len(parent)))
        new = draw(st.integers(1, 4))
        block_tables.append([*parent[:shared], *range(fresh, fresh + new)])
        fresh += new
    chosen = draw(st.lists(st.sampled_from(block_tables), min_size=1, max_size=8))
    tails = range(fresh, fresh + len(chosen))  # each decoding sequence owns its last block
    return [BlockTable([*blocks, tail]) for blocks, tail in zip(chosen, tails, strict=True)]


@settings(max_examples=examples(200), deadline=None)
@given(batches(), st.integers(0, 6))
def test_runs_contain_exactly_the_shared_blocks(block_tables: list[BlockTable], min_saved_blocks: int) -> None:
    """Each shared run must save at least `min_saved_blocks` blocks.

    The runs of a sequence must be consecutive, from slot 0 to the sequence's private part.
    """
    sharing = Sharing.find(block_tables, 1, min_saved_blocks * BLOCK_SIZE)
    ordered = [block_tables[i].ids for i in sharing.order]
    assert sorted(sharing.order) == list(range(len(block_tables)))
    assert sharing.restore(torch.tensor(sharing.order)).tolist() == list(range(len(block_tables)))
    ends = [0] * len(block_tables)
    for run in sharing.runs:
        sequences = run.stop - run.first
        saved = (sequences - 1) * len(run.tokens)
        assert (saved if sequences > 3 else saved / 4) >= min_saved_blocks * BLOCK_SIZE
        blocks = slice(run.tokens.start // BLOCK_SIZE, run.tokens.stop // BLOCK_SIZE)
        assert len({tuple(ids[blocks]) for ids in ordered[run.first : run.stop]}) == 1
        for b in range(run.first, run.stop):
            assert ends[b] == run.tokens.start
            ends[b] = run.tokens.stop
    assert tuple(ends) == sharing.private
    user_counts: dict[int, int] = {}
    for ids in ordered:
        for block in ids:
            user_counts[block] = user_counts.get(block, 0) + 1
    assert sharing.overlapping == any(count > 1 for count in user_counts.values())
    if min_saved_blocks == 0:
        assert all(user_counts[block] == 1 for b, ids in enumerate(ordered) for block in ids[ends[b] // BLOCK_SIZE :])


@settings(max_examples=examples(60), deadline=None)
@given(batches(), st.integers(0, 1000), st.sampled_from([1, 3]), st.integers(0, 3))
def test_attention_over_runs_equals_attention_over_sequences(
    block_tables: list[BlockTable], seed: int, group: int, min_saved_blocks: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv_heads, d = 2, 8
    kv_of_blocks = {
        c: torch.randn(2, kv_heads, BLOCK_SIZE, d, generator=generator, dtype=torch.float64)
        for x in block_tables
        for c in x.ids
    }
    lengths = [
        int(torch.randint((len(x.ids) - 1) * BLOCK_SIZE + 1, x.capacity + 1, (), generator=generator))
        for x in block_tables
    ]
    sharing = Sharing.find(block_tables, 1, min_saved_blocks * BLOCK_SIZE)
    q = torch.randn(kv_heads * group, len(block_tables), d, generator=generator, dtype=torch.float64)
    kv_of_sequences = [
        torch.cat([kv_of_blocks[c] for c in block_tables[i].ids], dim=2)[:, :, : lengths[i]] for i in sharing.order
    ]
    visible_tokens = [VisibleTokens.of(w.shape[2], sinks=3, recent=70, window=None) for w in kv_of_sequences]
    private_tokens = [sharing.private_part(b, visible) for b, visible in enumerate(visible_tokens)]
    assert all(o.recent.start >= start for o, start in zip(private_tokens, sharing.private, strict=True))
    assert all(len(o.recent) and o.all.stop == v.all.stop for o, v in zip(private_tokens, visible_tokens, strict=True))

    def runs(first: int, stop: int, tokens: range) -> list[Run]:
        k, v = kv_of_sequences[first][:, :, tokens.start : tokens.stop]
        middle = k.shape[1] // 2
        return [Run(first, stop, k[:, :middle], v[:, :middle]), Run(first, stop, k[:, middle:], v[:, middle:])]

    shared = [run for s in sharing.runs for run in runs(s.first, s.stop, s.tokens)]
    actual, _ = attend_runs(
        q, [*shared, *(run for b, o in enumerate(private_tokens) for run in runs(b, b + 1, o.all))], 0.3
    )
    for b, (k, v) in enumerate(kv_of_sequences):
        scores = 0.3 * torch.einsum("hgd,hnd->hgn", q[:, b].view(kv_heads, group, d), k)
        expected = (scores.softmax(-1) @ v).view(-1, d)
        # float64 rounding of sums in another order
        torch.testing.assert_close(actual[:, b], expected, rtol=0, atol=1e-12)


def test_half_precision_is_merged_in_float32() -> None:
    """Each part is rounded separately, so the mean error may be twice that of a single bfloat16 product."""
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(s, generator=generator).bfloat16() for s in ((2, 256, 16), (2, 256, 16), (4, 3, 16)))
    tails = [Run(b, b + 1, k[:, 192:], v[:, 192:]) for b in range(3)]
    merged, _ = attend_runs(q, [Run(0, 3, k[:, :192], v[:, :192]), *tails], 0.25)
    single, _ = attend_runs(q, [Run(b, b + 1, k, v) for b in range(3)], 0.25)
    exact = torch.einsum(
        "hsn,hnd->hsd", (0.25 * q.double().view(2, 6, 16) @ k.double().mT).softmax(-1), v.double()
    ).view(4, 3, 16)
    assert merged.dtype == torch.float32
    assert (merged - exact).abs().mean() <= 2 * (single - exact).abs().mean()


def test_shared_runs_are_recomputed_only_if_a_block_table_changes() -> None:
    shared = SharedPrefixes(1, min_saved=BLOCK_SIZE // 2)
    block_tables = [BlockTable([0, 1, 2]), BlockTable([0, 1, 3])]
    first = shared.find(block_tables)
    assert first.runs == (SharedRun(0, 2, range(2 * BLOCK_SIZE)),)
    assert shared.find(block_tables) is first
    block_tables[0].ids.append(4)
    assert shared.find(block_tables) is not first
    assert shared.find(block_tables[:1]).runs == () and not shared.find(block_tables[:1]).overlapping
    assert shared.find([]).order == ()
