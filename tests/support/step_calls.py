"""Count the Python calls of one decode step on a CPU: `python tests/support/step_calls.py [POLICY]`.

Only calls of this project's functions count. A crossing is a call from one file to another. The prompt has 700 tokens,
and the results are averages over 20 steps.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from offload_rt import LLM, SamplingParams
from offload_rt.engine.engine import Engine

PROJECT = Path(__file__).resolve().parents[2]
FIRST, LAST = 10, 30
"""Range of steps that are counted. Earlier steps allocate buffers."""


class CallCounter:
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.crossings = 0
        self._names: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or (name := self._file(frame)) is None:
            return
        self.calls[name] += 1
        caller = frame.f_back
        while caller is not None and self._file(caller) is None:
            caller = caller.f_back
        self.crossings += caller is not None and self._file(caller) != name

    def _file(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        if path not in self._names:
            resolved = Path(path).resolve()
            inside = resolved.is_relative_to(PROJECT) and ".venv" not in resolved.parts and resolved != Path(__file__)
            self._names[path] = str(resolved) if inside else None
        return self._names[path]


def count_calls(policy: str) -> tuple[float, int, float]:
    """Return the calls per step, the number of files, and the crossings per step."""
    counter, steps, step = CallCounter(), 0, Engine.step

    def counted(engine: Engine, *args: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        sys.setprofile(counter if FIRST <= steps < LAST else None)
        try:
            return step(engine, *args, **options)
        finally:
            sys.setprofile(None)

    prompt = torch.randint(5, 400, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    llm = LLM("reference", policy=policy)
    Engine.step = counted  # type: ignore[method-assign]
    try:
        llm.generate([prompt], SamplingParams(max_tokens=LAST + 10, temperature=0, ignore_eos=True))
    finally:
        Engine.step = step  # type: ignore[method-assign]
    number = LAST - FIRST
    return counter.calls.total() / number, len(counter.calls), counter.crossings / number


if __name__ == "__main__":
    calls, files, crossings = count_calls(sys.argv[1] if len(sys.argv) > 1 else "infinigen")
    print(f"{calls:,.0f} calls in {files} files, {crossings:,.0f} crossings from file to file")
