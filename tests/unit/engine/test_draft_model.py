"""Test speculative decoding with a draft model (`exact={"model": ...}`): the text equals that of full attention."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.architectures import architecture
from support.outputs import completed
from support.sampling import examples
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, SamplingParams
from offload_rt.engine.speculative.draft_model import CATCH_UP, DraftModel
from offload_rt.errors import PoolFullError

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
PROMPTS = [tiny_prompt(150), tiny_prompt(70, seed=1), tiny_prompt(90, seed=2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drafts")
    for name in ("llama", "mistral"):
        tiny_model(name).save_pretrained(root / name)
    tiny_model("llama", seed=7, num_hidden_layers=2, hidden_size=32).save_pretrained(root / "other")
    tiny_model("llama", vocab_size=150).save_pretrained(root / "small")  # a smaller vocabulary
    return root


def llm_with_draft_model(model: str, draft: str | None, folder: Path, **fields: Any) -> LLM:
    exact = None if draft is None else {"model": str(folder / draft), "adaptive": False, "tokens": 4} | fields
    return LLM(tiny_model(model), policy="full", host_memory="16MiB", exact=exact)


def texts(llm: LLM, params: Any) -> list[list[int]]:
    found = [completion.token_ids for completion in completed(llm.generate(PROMPTS, params))]
    llm.runner.check_integrity()
    draft = llm.runner.draft
    assert draft is None or draft.pool.sequence_bytes == 0, "the draft sequence is freed with its request"
    return found


SAMPLED = [SamplingParams(max_tokens=n, temperature=0.8, seed=n, ignore_eos=True) for n in (16, 9, 1)]


@functools.cache
def texts_without_drafts(model: str) -> tuple[list[list[int]], list[list[int]]]:
    plain = llm_with_draft_model(model, None, Path())
    return texts(plain, GREEDY), texts(plain, SAMPLED)


@pytest.mark.parametrize(
    ("model", "draft", "fields"),
    [
        ("llama", "other", {}),
        ("llama", "mistral", {"method": "lookup+model"}),
        ("mistral", "mistral", {"tokens": 8}),
    ],
)
def test_texts_equal_those_of_full_attention(model: str, draft: str, fields: dict[str, Any], folder: Path) -> None:
    llm = llm_with_draft_model(model, draft, folder, **fields)
    # The texts can be compared because the logits of tiny float32 models have no near ties.
    assert (texts(llm, GREEDY), texts(llm, SAMPLED)) == texts_without_drafts(model)


def test_drafts_of_the_same_model_are_always_accepted(folder: Path) -> None:
    same, other, plain = (
        completed(llm_with_draft_model("llama", draft, folder).generate(PROMPTS[0], GREEDY))[0].stats
        for draft in ("llama", "other", None)
    )
    # Each of the three passes accepts four drafts and adds one token.
    assert same.acceptance_rate == 1 and same.verifications == 3 and same.accepted_tokens == 12
    assert other.acceptance_rate is not None and other.acceptance_rate < 0.2
    assert same.exact_fraction == pytest.approx(3 / 15), "three passes for the 15 tokens after the first"
    assert plain.weight_bytes * 2 == same.weight_bytes and plain.kv_bytes_host < same.kv_bytes_host
    assert same.h2d_bytes > 0.9 * plain.h2d_bytes, "drafting and verification also read all KV entries"


def test_the_model_drafts_if_lookup_finds_no_match(folder: Path) -> None:
    # With three allowed tokens, n-grams recur, so that lookup finds matches. Some of its drafts are wrong.
    few = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, allowed_token_ids=[3, 50, 101])
    combined, model_only, plain = (
        completed(llm.generate(PROMPTS[0], few))[0]
        for llm in (
            llm_with_draft_model("llama", "llama", folder, method="lookup+model", ngram=2),
            llm_with_draft_model("llama", "llama", folder),
            llm_with_draft_model("llama", None, folder),
        )
    )
    assert combined.token_ids == model_only.token_ids == plain.token_ids
    assert model_only.stats.acceptance_rate == 1
    assert combined.stats.drafted_tokens > combined.stats.accepted_tokens > 0


def test_a_draft_model_with_sliding_windows_catches_up_after_many_tokens() -> None:
    options: dict[str, Any] = {"policy": "full", "host_memory": "4MiB", "enable_prefix_caching": False}
    drafting, target = (LLM(tiny_model(name), **options) for name in ("mistral", "llama"))
    drafts, tokens = DraftModel(drafting.runner, 199), tiny_prompt(260)
    sequence = target.runner.new_sequence(tokens[:125], 125)
    sequence.position = 124
    assert drafts.prepare(sequence, 8)
    for token in tokens[125:133]:  # the drafts cross the end of a block, and all are accepted
        drafts.step([sequence])
        sequence.tokens.append(token)
    sequence.tokens, sequence.position = list(tokens), len(tokens) - 1  # without the draft model
    assert drafts.prepare(sequence, 4)
    [logits] = drafts.step([sequence])
    expected = tiny_model("mistral")(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)  # sums of other lengths round differently


def test_sessions_and_forks_continue_exactly(folder: Path, tmp_path: Path) -> None:
    answers_by_draft = []
    for draft in ("other", None):
        answers, llm = [], llm_with_draft_model("llama", draft, folder)
        for turn in range(3):
            session = llm.session("talk", tmp_path / str(draft))
            answers.append([event.token_id for event in session.send(tiny_prompt(30 + turn, seed=turn), GREEDY)])
            if turn == 2:
                fork = session.fork("other")
                answers.append([event.token_id for event in fork.send(tiny_prompt(9, seed=7), GREEDY)])
                fork.close()
            session.close()
        llm.runner.check_integrity()
        answers_by_draft.append(answers)
    assert answers_by_draft[0] == answers_by_draft[1]


def test_a_sequence_without_room_in_the_draft_pool_gets_no_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_with_draft_model("llama", "llama", folder)
    assert llm.runner.draft is not None
    pool = llm.runner.draft.pool
    real = pool.reserve

    def reserve(blocks: Any, tokens: int) -> None:
        if tokens > 140:
            raise PoolFullError("no room")
        real(blocks, tokens)

    monkeypatch.setattr(pool, "reserve", reserve)
    done = completed(llm.generate(PROMPTS, GREEDY))
    assert [one.stats.drafted_tokens for one in done] == [0, 12, 12]
    assert [one.token_ids for one in done] == texts(llm_with_draft_model("llama", None, folder), GREEDY)


_SLIDING_MODEL = tiny_model("mistral", num_hidden_layers=2)
"""A model with sliding windows. KV that drafts pushed out of the window must still exist after they are truncated."""


@pytest.fixture(scope="module")
def draft_and_target() -> tuple[LLM, LLM]:
    """Return the runtime of a draft model, and a runtime whose sequences it continues."""
    draft, target = (
        LLM(model, policy="full", host_memory="16MiB", enable_prefix_caching=False)
        for model in (_SLIDING_MODEL, tiny_model("llama", num_hidden_layers=1))
    )
    return draft, target


@contextmanager
def drafted_sequence(llms: tuple[LLM, LLM], length: int) -> Iterator[tuple[DraftModel, Any]]:
    """Yield a draft model and a sequence of `length` tokens. Free its memory at the end."""
    draft, target = llms
    drafter, sequence = DraftModel(draft.runner, 199), target.runner.new_sequence(tiny_prompt(length), 400)
    try:
        yield drafter, sequence
    finally:
        if sequence.drafter is not None:
            draft.runner.free(sequence.drafter)
        sequence.drafter, sequence.position = None, 0
        target.runner.free(sequence)
    assert draft.runner.pool.sequence_bytes == target.runner.pool.sequence_bytes == 0


def assert_draft_logits(drafter: DraftModel, sequence: Any) -> None:
    [logits] = drafter.step([sequence])
    expected = _SLIDING_MODEL(torch.tensor([sequence.tokens])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@given(data=st.data())
@settings(max_examples=examples(6), deadline=None)
def test_draft_logits_are_exact_after_any_drafts_and_truncations(
    draft_and_target: tuple[LLM, LLM], data: st.DataObject
) -> None:
    tokens = st.integers(0, 198)
    with drafted_sequence(draft_and_target, data.draw(st.integers(1, 100))) as (drafter, sequence):
        for _ in range(data.draw(st.integers(1, 5))):
            verified = len(sequence.tokens)
            sequence.position = verified - 1
            assert drafter.prepare(sequence, 6)
            for _ in range(data.draw(st.integers(1, 5))):
                assert_draft_logits(drafter, sequence)
                sequence.tokens.append(data.draw(tokens))
            kept = data.draw(st.integers(verified, len(sequence.tokens)))
            sequence.tokens[kept:] = data.draw(st.lists(tokens, min_size=1, max_size=CATCH_UP + 20))
            draft_and_target[0].runner.check_integrity()


def test_a_draft_model_catches_up_after_lookup_drafts(draft_and_target: tuple[LLM, LLM]) -> None:
    """When lookup has drafted tokens, the draft model still has to compute their KV."""
    with drafted_sequence(draft_and_target, 100) as (drafter, sequence):
        for more in ([], tiny_prompt(CATCH_UP - 1)):
            sequence.tokens += more
            sequence.position = len(sequence.tokens) - 1
            assert drafter.prepare(sequence, 6)
            assert_draft_logits(drafter, sequence)


def test_vocabularies_may_be_padded_but_tokens_must_be_the_same(tmp_path: Path) -> None:
    """Models of the same family may pad their vocabulary to different sizes."""
    wide, narrow, other = (tiny_checkpoint(tmp_path / name, "llama") for name in ("wide", "narrow", "other"))
    tiny_model("llama", vocab_size=2112).save_pretrained(wide)
    text, asked = "It was a dark and stormy night", SamplingParams(max_tokens=8, temperature=0.7, seed=3)
    for model, draft in ((wide, narrow), (narrow, wide)):
        plain, llm = (LLM(model, policy="full", host_memory="16MiB", exact=e) for e in (None, {"model": draft}))
        assert completed(llm.generate(text, asked))[0].token_ids == completed(plain.generate(text, asked))[0].token_ids
    path = Path(other) / "tokenizer.json"
    written = json.loads(path.read_text())
    ids = written["model"]["vocab"]
    ids["Ġthe"], ids["Ġand"] = ids["Ġand"], ids["Ġthe"]
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"another tokenizer than .*wide: 'Ġ(the|and)'"):
        LLM(wide, policy="full", host_memory="16MiB", exact={"model": other})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exact": "model"}, "needs a draft model"),
        ({"exact": {"model": "x", "method": "both"}}, "'lookup\\+model'"),
        ({"exact": {"model": "x"}, "device_memory": "1GiB"}, "remove one of them"),
        ({"exact": {"model": 3}}, "must be a string"),
    ],
)
def test_invalid_draft_options_are_refused(fields: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model("llama"), host_memory="8MiB", **fields)
    with pytest.raises(ConfigError, match=r"150 tokens, and .* has 199"):
        llm_with_draft_model("llama", "small", folder)
    with pytest.raises(ConfigError, match="create an LLM with it"):
        llm_with_draft_model("llama", "llama", folder).under("full", exact={"model": str(folder / "other")})


def test_snapshots_of_a_hybrid_draft_model_use_its_memory(tmp_path: Path) -> None:
    hybrid = architecture("qwen3_next")
    hybrid.save_pretrained(tmp_path / "hybrid")
    model = tiny_model("llama", vocab_size=hybrid.config.vocab_size)
    exact = {"model": str(tmp_path / "hybrid")}
    llm = LLM(model, policy="full", host_memory="1MiB", snapshot_memory="512KiB", exact=exact)
    assert llm.runner.draft is not None
    pool, draft = llm.runner.pool, llm.runner.draft.pool
    # Snapshots take half of the draft model's memory, so its KV cache holds only half of the tokens.
    assert pool.block_count // 2 - 1 <= draft.block_count <= pool.block_count // 2
