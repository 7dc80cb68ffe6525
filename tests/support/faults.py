"""Make a call inside the engine raise an error, as a bug or a lack of device memory would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from offload_rt import LLM
from offload_rt.engine.engine import Engine
from offload_rt.engine.request import SampledRequest
from offload_rt.engine.sampler import Sampler

ERRORS: list[Callable[[], Exception]] = [
    lambda: AssertionError("an invariant is broken"),
    lambda: RuntimeError("a shape is wrong"),
    lambda: torch.OutOfMemoryError("CUDA out of memory"),
]

PLACES: dict[str, Callable[[LLM], tuple[Any, str]]] = {
    "start": lambda llm: (llm.runner, "new_sequence"),
    "open": lambda llm: (llm.runner.transfer.storage, "open"),
    "begin prefill": lambda llm: (llm.runner, "begin_prefill"),
    "prefill layer": lambda llm: (llm.runner.transfer.storage, "prefill_layer"),
    "end of prefill": lambda llm: (llm.runner.pool, "commit"),
    "fork": lambda llm: (llm.runner.pool, "fork"),
    "reserve": lambda llm: (llm.runner, "reserve"),
    "decode": lambda llm: (llm.runner, "decode"),
    "layer of a decode step": lambda llm: (llm.runner.transfer.storage, "append"),
    "select": lambda llm: (type(llm.runner.policy), "correct_prediction"),
    "sample": lambda llm: (Sampler, "pick"),
    "publish": lambda llm: (llm.runner.pool, "publish"),
    "close": lambda llm: (llm.runner.transfer.storage, "close"),
    "release": lambda llm: (llm.runner.pool, "release"),
    "stats": lambda llm: (SampledRequest, "stats"),
    "finish": lambda llm: (SampledRequest, "finish"),
    "persist": lambda llm: (SampledRequest, "persist"),
}
"""Calls that can be made to fail, as (object or class, method name)."""


@contextmanager
def fault(llm: LLM, place: str, call: int, error: Exception) -> Iterator[list[int]]:
    """Raise `error` in call number `call` (from 0) of `place`. Yield a list whose only item is the number of calls."""
    owner, name = PLACES[place](llm)
    method, calls = getattr(owner, name), [0]

    def fails(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call + 1:
            raise error
        return method(*args, **named)

    with patch.object(owner, name, fails):
        yield calls


def drain(engine: Engine, steps: int = 2000) -> None:
    for _ in range(steps):
        if engine.idle:
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError(f"not idle after {steps} steps")
