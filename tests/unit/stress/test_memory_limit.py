"""Test sessions in which any allocation may run out of memory (`make stress PART=faults`).

After a restart, answers are correct and previously saved data is intact.
"""

from __future__ import annotations

import os
import resource
import warnings
from pathlib import Path

import pytest
import torch
from support.tiny_models import assert_greedy, tiny_model, tiny_prompt

from offload_rt import LLM, OffloadError, SamplingParams

RUNS = 300
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, max_position_embeddings=4096)
SHORT = SamplingParams(max_tokens=3, temperature=0)
TURNS = [tiny_prompt(70, seed=1), tiny_prompt(900, seed=2)]
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "bad allocation", "std::bad_alloc")
MOST_SPARE_BYTES = 48 << 20
"""Largest memory limit above the process's current use, in bytes: enough for both turns."""


def make_llm() -> LLM:
    return LLM(MODEL, dtype="float32", host_memory="8MiB", policy="full")


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def run_turn_in_child(folder: Path, spare: int) -> int:
    """Run the second turn in a new process that can allocate `spare` more bytes of address space.

    Return 0 if the turn was answered and saved, 1 if it was refused or ran out of memory, and otherwise 2.
    """
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 2
    try:
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + spare,) * 2)
        with make_llm() as llm, llm.session("ada", folder) as session:
            list(session.send(TURNS[1], SHORT))
        code = 0
    except (MemoryError, OffloadError):
        code = 1
    except (OSError, RuntimeError) as error:
        code = 1 if any(words in str(error) for words in NO_MEMORY) else 2
        if code == 2:
            print(repr(error), flush=True)
    finally:
        os._exit(code)


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="takes minutes: make stress PART=faults")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_session_continues_after_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    codes = []
    for i in range(RUNS):
        folder = tmp_path / f"store{i}"
        with make_llm() as llm, llm.session("ada", folder) as session:
            list(session.send(TURNS[0], SHORT))
            before = session.tokens
        codes.append(run_turn_in_child(folder, MOST_SPARE_BYTES * i**2 // (RUNS - 1) ** 2))
        with make_llm() as llm, llm.session("ada", folder) as session:
            found = session.tokens
            assert found[: len(before)] == before, "earlier saved blocks are still there"
            assert len(found) == len(before) or codes[-1] != 1 or found[len(before) :][: len(TURNS[1])] == TURNS[1]
            answer_tokens = [event.token_id for event in session.send(tiny_prompt(5, seed=3), SHORT)]
            assert_greedy(MODEL, found + tiny_prompt(5, seed=3), answer_tokens)
            session.check_integrity()
    print({code: codes.count(code) for code in set(codes)})
    assert {code for code in codes if code >= 0} <= {0, 1}
    assert codes[0] == 1 and codes[-1] == 0, "the limits are those between too little and enough"
