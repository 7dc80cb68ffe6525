"""Test that KV computed with one cache salt is never reused with another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.sharing import greedy, make_llm
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, AsyncLLM, InputError, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.cache_manager import salt_provenance
from offload_rt.engine.swap import Swap

PROMPT = tiny_prompt(3 * BLOCK_SIZE + 5)
SALTS = ("a", "b", "a" * 5000, "+cut-00", "\ud800", salt_provenance("a"))


@pytest.mark.parametrize(
    ("policy", "options"),
    [("full", {}), ("infinigen", {"approximate_kv": "int2", "recent": 16, "max_missed_mass": 0.2})],
)
def test_prompts_are_shared_only_within_one_salt(policy: str, options: dict[str, Any]) -> None:
    llm = make_llm(policy=policy, policy_options=options)
    [plain] = llm.generate([PROMPT], greedy(5))
    for salt in SALTS:
        for cached in (0, 3 * BLOCK_SIZE):
            [found] = llm.generate([PROMPT], greedy(5), cache_salt=salt)
            assert found.num_cached_tokens == cached, salt
            assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.generate([PROMPT], greedy(5))[0].num_cached_tokens == 3 * BLOCK_SIZE
    llm.runner.check_integrity()


def test_completions_and_beams_carry_the_salt() -> None:
    several = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=BLOCK_SIZE + 9)
    for params in (several, SamplingParams(num_beams=2, temperature=0, max_tokens=BLOCK_SIZE + 9)):
        llm = make_llm()
        [first] = llm.generate([PROMPT], params, cache_salt="a")
        longer = [*PROMPT, *first.outputs[0].token_ids, 1]
        assert llm.generate([longer], greedy(2))[0].num_cached_tokens == 0
        assert llm.generate([longer], greedy(2), cache_salt="b")[0].num_cached_tokens == 0
        assert llm.generate([longer], greedy(2), cache_salt="a")[0].num_cached_tokens == 4 * BLOCK_SIZE


def test_the_reported_divergence_ignores_other_salts() -> None:
    llm = make_llm()
    llm.generate([PROMPT], greedy(2), cache_salt="a")
    other = [*PROMPT[: BLOCK_SIZE + 7], 1, 2, 3]
    for salt, diverged_at in (("", 0), ("b", 0), ("a", BLOCK_SIZE + 7)):
        list(llm.stream(other, greedy(2), cache_salt=salt))
        assert llm.last_stats is not None and llm.last_stats.diverged_at == diverged_at
        llm = make_llm()
        llm.generate([PROMPT], greedy(2), cache_salt="a")


def test_preempted_sequences_share_no_file_across_salts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_llm().runner
    swap = Swap(runner, tmp_path)
    monkeypatch.setattr(swap, "_recompute_seconds", lambda sequence, batch: float("inf"))
    keys = []
    for salt in ("", "a", "b"):
        sequence = runner.new_sequence(PROMPT, len(PROMPT) + 1, provenance=salt_provenance(salt))
        runner.prefill(sequence, len(PROMPT))
        fork = runner.fork(sequence, len(PROMPT) + 1)
        swapped = swap.swap_out(fork, 1)
        assert swapped is not None
        keys.append(set(swapped.keys))
        runner.free(fork)
        runner.free(sequence)
        back = swap.swap_in(swapped, PROMPT)
        assert back is not None and back.provenance == salt_provenance(salt)
        runner.free(back)
    assert not (keys[0] & keys[1] or keys[0] & keys[2] or keys[1] & keys[2])
    swap.close()


def test_sessions_share_no_block_on_disk_across_salts(tmp_path: Path) -> None:
    def cached_tokens_of_turns(*turns: tuple[str, str]) -> list[int]:
        async def send_turns() -> list[int]:
            llm = LLM(tiny_model("llama"), policy="full", host_memory="16MiB")
            async with AsyncLLM(llm, store=tmp_path) as engine:
                found = []
                for session, salt in turns:
                    # With an empty name, there is no session.
                    steps = engine.generate(PROMPT, greedy(3), session=session or None, cache_salt=salt)
                    found.append([output async for output in steps][-1].num_cached_tokens)
            return found

        return asyncio.run(send_turns())

    assert cached_tokens_of_turns(("one", "a"), ("two", "b"), ("three", "a")) == [0, 0, 3 * BLOCK_SIZE]
    # In another process, a session reuses its own KV, whatever the request's salt is.
    turns = (("one", "other"), ("four", "b"), ("", "c"), ("five", ""), ("", "a"))
    assert cached_tokens_of_turns(*turns) == [3 * BLOCK_SIZE, 3 * BLOCK_SIZE, 0, 0, 3 * BLOCK_SIZE]


def test_a_fork_and_a_truncation_keep_the_salt(tmp_path: Path) -> None:
    llm = LLM(tiny_model("llama"), policy="full", host_memory="16MiB")
    session = llm.session("one", tmp_path)
    session.history.salt = salt_provenance("a")
    list(session.send(PROMPT, greedy(3)))
    twin = session.fork("two")
    session.truncate(keep_last=BLOCK_SIZE)
    assert session.history.provenance.startswith(salt_provenance("a") + "+cut-")
    list(session.send(PROMPT[:9], greedy(3)))
    list(twin.send(PROMPT[:9], greedy(3)))
    assert twin.history.provenance == salt_provenance("a")
    assert llm.generate([PROMPT], greedy(2))[0].num_cached_tokens == 0
    assert llm.generate([PROMPT], greedy(2), cache_salt="a")[0].num_cached_tokens == 3 * BLOCK_SIZE
    llm.close()


def test_a_draft_model_shares_no_kv_across_salts(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "draft")
    exact = {"model": str(tmp_path / "draft"), "adaptive": False, "tokens": 4}
    llm = LLM(tiny_model("llama"), policy="full", host_memory="16MiB", exact=exact)
    seen = []
    draft = llm.runner.draft
    assert draft is not None
    new_sequence = draft.new_sequence

    def record(*args: Any, **named: Any) -> Any:
        sequence = new_sequence(*args, **named)
        seen.append(sequence.trace.reused_tokens)
        return sequence

    draft.new_sequence = record  # type: ignore[method-assign]
    for salt in ("a", "b", "a"):
        llm.generate([PROMPT], greedy(8), cache_salt=salt)
    assert seen == [0, 0, 3 * BLOCK_SIZE]


def test_a_salt_that_is_no_string_is_refused() -> None:
    with pytest.raises(InputError, match="cache_salt"):
        make_llm().generate([PROMPT], greedy(1), cache_salt=5)  # type: ignore[arg-type]
