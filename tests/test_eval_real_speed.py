"""A trained model's speed beside transformers': everybody gets the same prompts; prompt and tokens are timed apart."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from offload_rt import LLM, SamplingParams
from offload_rt.cli import main
from offload_rt.errors import ConfigError, InputError
from offload_rt.eval.speed import real_speed
from offload_rt.eval.speed.real_speed import COMPETITORS, FIRST, SpeedConfig, run_real_speed

BOOK = (Path(__file__).parents[1] / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8")[:4000]


def test_all_are_timed_on_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: dict[str, list[list[int]]] = {}
    real, clock = dict(real_speed.COMPETITORS), iter(range(10**6))

    def told(name: str) -> Any:
        def make(model: str, config: SpeedConfig) -> Any:
            turn = real[name](model, config)

            def timed(prompt: list[int]) -> Any:
                prompts.setdefault(name, []).append(list(prompt))
                return turn(prompt)

            return timed

        return make

    monkeypatch.setattr(real_speed, "COMPETITORS", {name: told(name) for name in real})
    monkeypatch.setattr(real_speed.time, "process_time", lambda: float(next(clock)))
    config = SpeedConfig((40, 64), 3, 2, "float32", 1, ("transformers, StaticCache", "full"))
    report = run_real_speed("reference", BOOK, config, tmp_path, lambda line: None)
    assert len(set(map(str, prompts.values()))) == 1, "in whatever order"
    assert sorted({len(prompt) for prompt in prompts[FIRST]}) == [40, 64] and len(prompts[FIRST]) == 4
    assert [(row["context"], row["who"]) for row in report.rows] == [
        (context, who) for context in (40, 64) for who in (FIRST, *config.who)
    ]
    assert {len(row["samples"]["steps"]) for row in report.rows} == {6}
    assert {(row["prefill"], row["step"]) for row in report.rows} == {(1.0, 1000.0)}, "a tick of this clock each"
    assert (tmp_path / "real_speed.md").is_file()


def test_everybody_computes_what_is_timed() -> None:
    config = SpeedConfig((), 6, 1, "float32")
    ids = LLM("reference", policy="full").encode(BOOK)[:50]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    ours = [event.token_id for event in LLM("reference", policy="full").stream(ids, params)]
    for name in (FIRST, "transformers, StaticCache", "full"):
        assert list(islice(COMPETITORS[name]("reference", config)(ids), 6)) == ours


def test_its_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="competitor='vllm' is unknown"):
        SpeedConfig(who=("vllm",))
    with pytest.raises(InputError, match="the text has"):
        run_real_speed("reference", "short", SpeedConfig((64,), 2, 1, "float32"), tmp_path, print)
    assert main(["eval", "real-speed", "reference", "--text", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err
