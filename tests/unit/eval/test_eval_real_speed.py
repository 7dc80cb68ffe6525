"""Test the benchmark that compares a trained model's speed with transformers and llama.cpp."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_rt import LLM, SamplingParams
from offload_rt.cli import main
from offload_rt.errors import ConfigError, InputError
from offload_rt.eval.speed import real_speed, worker
from offload_rt.eval.speed.competitors import COMPETITORS, FLOAT32, SpeedConfig
from offload_rt.eval.speed.real_speed import run_real_speed
from offload_rt.eval.speed.worker import Result, SubprocessCompetitor

BOOK = (Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8")[:4000]
DYNAMIC, STATIC, LLAMA = "transformers, DynamicCache", "transformers, StaticCache", "llama.cpp, 16-bit KV"


class ScriptedCompetitor:
    """Competitor that reports 1 s per prompt and 0.25 s per token, and records the prompts."""

    def __init__(self, name: str, model: str, config: SpeedConfig) -> None:
        if name == LLAMA:
            raise InputError("no llama_cpp")
        self.name, self.tokens = name, config.tokens
        self.prompts: list[list[int]] = []
        self.open = True
        CREATED[name] = self

    def ask(self, prompt: list[int]) -> Result:
        assert self.open
        self.prompts.append(list(prompt))
        tokens = [7] * (self.tokens + 1)
        if self.name == "full":
            tokens[2] = 8
        return Result(1.0, [0.25] * self.tokens, tokens, 2**20 * len(prompt))

    def close(self) -> None:
        self.open = False


CREATED: dict[str, ScriptedCompetitor] = {}


def test_all_competitors_get_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 reference runs once per prompt length. Competitors that cannot start are left out."""
    messages: list[str] = []
    config = SpeedConfig((40, 64), 3, 2, "float32", 1, (DYNAMIC, STATIC, LLAMA, "full", FLOAT32))
    monkeypatch.setattr(real_speed, "SubprocessCompetitor", ScriptedCompetitor)
    report = run_real_speed("reference", BOOK, config, tmp_path, messages.append)
    assert [line for line in messages if "left out" in line] == ["left out: no llama_cpp"]
    assert not any(one.open for one in CREATED.values())
    assert CREATED["full"].prompts == CREATED[DYNAMIC].prompts and [len(p) for p in CREATED[DYNAMIC].prompts] == [
        40,
        40,
        64,
        64,
    ]
    assert CREATED[FLOAT32].prompts == CREATED[DYNAMIC].prompts[::2]
    assert [(row["context"], row["runtime"]) for row in report.rows] == [
        (context, name) for context in (40, 64) for name in (DYNAMIC, STATIC, "full", FLOAT32)
    ]
    assert {(row["prefill"], row["step"], row["peak"]) for row in report.rows[:4]} == {(1.0, 250.0, 40.0)}
    assert [row["same"] for row in report.rows[:4]] == ["4 of 4", "4 of 4", "2 of 4", "4 of 4"]
    assert (tmp_path / "real_speed.md").is_file()


def test_times_are_relative_to_the_first_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"full": 0.5, "infinigen": 0.125}

    class TimedCompetitor(ScriptedCompetitor):
        def ask(self, prompt: list[int]) -> Result:
            return replace(super().ask(prompt), prefill=2 * times[self.name], steps=[times[self.name]] * self.tokens)

    monkeypatch.setattr(real_speed, "SubprocessCompetitor", TimedCompetitor)
    config = SpeedConfig((40,), 3, 1, "float32", 1, ("full", "infinigen"))
    rows = run_real_speed("reference", BOOK, config, tmp_path, print).rows
    assert [(row["prefill_ratio"], row["step_ratio"]) for row in rows] == [(1, 1), (4, 4)]


def test_prompt_and_tokens_are_timed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))  # advances by 1 s at each reading
    monkeypatch.setattr(worker.time, "process_time", lambda: float(next(clock)))
    result = worker.timed(COMPETITORS["full"]("reference", SpeedConfig((), 3, 1, "float32")), [5, 6, 7], 3)
    assert (result.prefill, result.steps) == (1.0, [1.0] * 3) and result.peak_bytes > 2**20


@pytest.mark.skipif(
    "OFFLOAD_RT_STRESS" not in os.environ, reason="needs a separate process: make stress PART=composition"
)
def test_competitor_runs_in_a_process() -> None:
    config = SpeedConfig((), 3, 1, "float32")
    child = SubprocessCompetitor("full", "reference", config)
    assert child.ask([5, 6, 7]).tokens == list(islice(COMPETITORS["full"]("reference", config)([5, 6, 7]), 4))
    with pytest.raises(InputError, match="token id 99999 is not"):
        child.ask([99_999])
    child.close()


class FakeLlama:
    """Replacement for llama-cpp-python's class: a model that predicts twice the last token."""

    def __init__(self, path: str, **options: Any) -> None:
        assert path == "model.gguf" and options["n_ctx"] > 64 and options["type_k"] == options["type_v"] == "q8"
        self._ctx, self.tokens_seen = self, [0]

    def reset(self) -> None:
        self.tokens_seen = []

    def eval(self, tokens: list[int]) -> None:
        self.tokens_seen += tokens

    def n_vocab(self) -> int:
        return 64

    def get_logits_ith(self, which: int) -> Any:
        import ctypes

        logits = (ctypes.c_float * 64)()
        logits[2 * self.tokens_seen[which] % 64] = 1.0
        return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_generates_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(Llama=FakeLlama, GGML_TYPE_F16="f16", GGML_TYPE_Q8_0="q8", GGML_TYPE_Q4_0="q4")
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    make = COMPETITORS["llama.cpp, 8-bit KV"]
    ask = make("reference", SpeedConfig((64,), 4, 1, "float32", gguf="model.gguf"))
    for _ in range(2):
        assert list(islice(ask([9, 3]), 4)) == [6, 12, 24, 48], "the second time as the first"
    for name in ("llama.cpp, 8-bit KV", "full, GGUF"):
        with pytest.raises(ConfigError, match="--gguf"):
            COMPETITORS[name]("reference", SpeedConfig((64,), 4, 1, "float32"))


def test_all_competitors_generate_the_same_tokens() -> None:
    config = SpeedConfig((), 6, 1, "float32")
    ids = LLM("reference", policy="full").encode(BOOK)[:50]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    ours = [event.token_id for event in LLM("reference", policy="full").stream(ids, params)]
    for name in (DYNAMIC, STATIC, FLOAT32):
        assert list(islice(COMPETITORS[name]("reference", config)(ids), 6)) == ours


def test_invalid_arguments_are_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="competitor='vllm' is unknown"):
        SpeedConfig(runtimes=("vllm",))
    with pytest.raises(InputError, match="the text has"):
        run_real_speed("reference", "short", SpeedConfig((64,), 2, 1, "float32"), tmp_path, print)
    assert main(["eval", "real-speed", "reference", "--text", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err
