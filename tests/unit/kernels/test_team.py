"""Test the thread team of C kernels: each part of a call is computed exactly once."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples

from offload_rt.kernels import team
from offload_rt.utils import native_code

pytestmark = pytest.mark.skipif(team._library() is None, reason="there is no compiled code")

SOURCE = """
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
typedef struct { _Atomic int32_t *seen; int64_t nanoseconds; } Call;
void count(const void *given, int64_t part) {
    const Call *call = given;
    struct timespec time = {0, call->nanoseconds};
    if (call->nanoseconds) nanosleep(&time, 0);
    atomic_fetch_add(&call->seen[part], 1);
}
"""


class _Call(ctypes.Structure):
    _fields_ = [("seen", ctypes.c_void_p), ("nanoseconds", ctypes.c_int64)]


@pytest.fixture(scope="module")
def count_function(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a C function that counts how often each part is computed."""
    source = tmp_path_factory.mktemp("team") / "count.c"
    source.write_text(SOURCE, encoding="utf-8")
    library = native_code.load_library(source, ("-O1", "-std=gnu11"), "no test")
    if library is None:
        pytest.skip("no C compiler")
    return library.count


def part_counts(function: Any, parts: int, threads: int, nanoseconds: int = 0) -> list[int]:
    counters = torch.zeros(parts, dtype=torch.int32)
    team.runner()(function, ctypes.byref(_Call(counters.data_ptr(), nanoseconds)), parts, threads)
    return counters.tolist()


@settings(max_examples=examples(200), deadline=None)
@given(parts=st.integers(1, 300), threads=st.integers(1, 9), nanoseconds=st.sampled_from([0, 0, 1000]))
def test_each_part_is_computed_once(count_function: Any, parts: int, threads: int, nanoseconds: int) -> None:
    assert part_counts(count_function, parts, threads, nanoseconds) == [1] * parts


def test_concurrent_calls_compute_each_part_once(count_function: Any) -> None:
    # One caller uses the team. The others compute in their own thread.
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda i: part_counts(count_function, 1 + i % 70, 1 + i % 5), range(4000))
        assert all(set(result) == {1} for result in results)


def test_forked_process_has_its_own_team(count_function: Any) -> None:
    part_counts(count_function, 8, 4, 1000)
    child = os.fork()
    if child == 0:
        os._exit(0 if all(part_counts(count_function, 50, 4, 1000) == [1] * 50 for _ in range(20)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert part_counts(count_function, 8, 4, 1000) == [1] * 8


def test_torch_uses_one_thread_and_kernels_use_all() -> None:
    before = torch.get_num_threads()
    others: list[int] = []
    torch.set_num_threads(2)
    try:
        with team.torch_on_one_thread():
            assert torch.get_num_threads() == 1 and team.threads() == min(2, team._processors())
            other = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
            other.start()
            other.join()
            with team.torch_on_one_thread():
                assert team.threads() == min(2, team._processors())
            assert team.threads() == min(2, team._processors()), "after an inner context too"
        assert torch.get_num_threads() == 2 and others == [2], "other threads keep theirs"
    finally:
        torch.set_num_threads(before)


def test_number_of_threads_is_at_most_the_number_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    for available, limit, expected in ((8, None, 8), (8, 3, 3), (2, 16, 2)):
        team._processors.cache_clear()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=available: range(n))
        monkeypatch.setattr(team, "processor_limit", lambda n=limit: n)
        assert team.threads() == expected
    team._processors.cache_clear()


def test_threads_are_kept_for_the_next_call(count_function: Any) -> None:
    part_counts(count_function, 64, 3, 100_000)
    before = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(50):
        part_counts(count_function, 64, 3)
    assert len(list(Path("/proc/self/task").iterdir())) == before
