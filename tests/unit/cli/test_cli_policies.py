"""Test `offload-rt generate` with every policy, its options and pool settings. Unknown policy options are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.outputs import completed

import offload_rt
from offload_rt import LLM, SamplingParams
from offload_rt.cli import main
from offload_rt.config import EngineConfig, EvictionOptions
from offload_rt.policies.registry import policy_names

BOOK = str(Path(offload_rt.__file__).parent / "data" / "black_arrow.txt")
FLAGS = ("--prompt-tokens", "300", "--max-new-tokens", "6", "--temperature", "0", "--quiet")
WINDOW: dict[str, Any] = {"budget": 0.2, "sinks": 2, "recent": 16, "dense_layers": (0, 1)}

Generate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str], pages: Path) -> Generate:
    def run(*flags: str) -> tuple[int, str, str]:
        try:
            code: Any = main(("generate", "reference", "--prompt-file", str(pages), *FLAGS, *flags))
        except SystemExit as leave:
            code = leave.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "full"])
def test_every_policy_gets_its_options(generate: Generate, pages: Path, tmp_path: Path, policy: str) -> None:
    stats = tmp_path / "stats.json"
    flags = ("--budget", "0.2", "--sinks", "2", "--recent", "16", "--dense-layers", "0,1", "--stats-json", str(stats))
    own: dict[str, Any] = {"dense_until": 0} if policy == "auto" else {}
    code, out, err = generate("--policy", policy, *flags, *(("--dense-until", "0") if own else ()))
    assert (code, err) == (0, "")
    llm = LLM("reference", policy=policy, policy_options=WINDOW | own)
    ids = llm.encode(pages.read_text(encoding="utf-8"))[:300]
    (done,) = completed(llm.generate([ids], SamplingParams(max_tokens=6, temperature=0)))
    written = json.loads(stats.read_text())
    assert out == done.text
    assert (written["policy"], written["dense_layers"]) == (policy, [0, 1])
    assert written["exact_fraction"] == pytest.approx(done.stats.exact_fraction)
    assert written["sparse_exact_fraction"] == pytest.approx(0.2, abs=0.03)


def test_options_of_infinigen(monkeypatch: pytest.MonkeyPatch, generate: Generate) -> None:
    seen: dict[str, Any] = {}

    def stop(self: LLM, model: str, config: EngineConfig) -> None:
        seen.update(vars(config))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "__init__", stop)
    words = "--preset paper --max-missed-mass 0.02 --skew-method svd --columns calibration --scorer int2 --skew DIR"
    words += " --no-corrected"
    pool = "--eviction lru --protect none --kv-cache-dtype int4 --host-memory 1GiB --no-enable-prefix-caching"
    assert generate(*words.split(), *pool.split())[0] == 130
    assert seen["policy_options"] == {
        "preset": "paper", "max_missed_mass": 0.02, "skew": "svd", "columns": "calibration", "scorer": "int2",
        "corrected": False,
    }  # fmt: skip
    assert seen["skew"] == Path("DIR")
    assert (seen["kv_cache_dtype"], seen["host_memory"], seen["enable_prefix_caching"]) == ("int4", 2**30, False)
    assert seen["eviction"] == EvictionOptions("lru", "none")


def test_the_flags_are_those_that_there_were(generate: Generate) -> None:
    code, out, err = generate("--help")
    assert (code, err) == (0, "")
    words = (
        "policy preset budget alpha partial-ratio max-fraction max-missed-mass source corrected no-corrected scorer "
        "columns skew-method sinks recent dense-layers page"
    )
    assert not [word for word in words.split() if f"--{word} " not in out and f"--{word}\n" not in out]


@pytest.mark.parametrize("eviction", ["fifo", "lru", "counter"])
def test_a_bounded_pool_goes_on_with_eviction(generate: Generate, tmp_path: Path, eviction: str) -> None:
    stats = tmp_path / "stats.json"
    llm = LLM("reference", policy="full")
    limit = 5 * llm.runner.pool.chunk_bytes + 1
    flags = ("--host-memory", str(limit), "--max-new-tokens", "30", "--ignore-eos", "--stats-json", str(stats))
    code, _, err = generate("--policy", "full", *flags)
    assert (code, err.count("\n")) == (2, 1)
    code, _, err = generate("--policy", "infinigen", "--recent", "16", *flags, "--eviction", eviction)
    assert (code, err) == (0, "")
    written = json.loads(stats.read_text())
    assert written["new_tokens"] == 30
    assert written["kv_bytes_host"] <= limit


def test_a_kv_format_moves_fewer_bytes(generate: Generate, tmp_path: Path) -> None:
    moved = {}
    for name in ("auto", "int8", "int2"):
        stats = tmp_path / f"{name}.json"
        assert generate("--policy", "full", "--kv-cache-dtype", name, "--stats-json", str(stats))[0] == 0
        written = json.loads(stats.read_text())
        moved[name] = written["h2d_bytes"], written["kv_bytes_host"]
    assert moved["auto"][1] > 2.5 * moved["int8"][1] > 5 * moved["int2"][1]
    assert moved["auto"][0] > 2 * moved["int8"][0] > 4 * moved["int2"][0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--policy", "full", "--budget", "0.1"), ("full", "no options", "budget")),
        (("--policy", "h2o", "--alpha", "3"), ("BudgetOptions", "alpha")),
        (("--policy", "oracle", "--max-missed-mass", "0.1"), ("BudgetOptions", "max_missed_mass")),
        (("--policy", "streaming", "--page", "8"), ("BudgetOptions", "page")),
        (("--policy", "quest", "--scorer", "int4"), ("QuestOptions", "scorer")),
        (("--policy", "quest", "--page", "0"), ("page=0",)),
        (("--policy", "infinigen", "--page", "8"), ("InfiniGenOptions", "page")),
        (("--policy", "h2o", "--budget", "0"), ("budget=0", "(0, 1]")),
        (("--policy", "h2o", "--recent", "0"), ("recent=0", "at least 1")),
        (("--max-missed-mass", "1"), ("max_missed_mass=1", "(0, 1)")),
        (("--skew-method", "pca"), ("skew='pca'", "svd, balanced")),
        (("--eviction", "lfu"), ("eviction='lfu'", "fifo, lru, counter")),
        (("--eviction", "lru", "--protect", "sinks"), ("protect='sinks'", "window, none")),
        (("--protect", "none"), ("--protect none", "--eviction")),
        (("--kv-cache-dtype", "int3"), ("kv_cache_dtype='int3'", "int4")),
        (("--policy", "h2o", "--eviction", "lru"), ("h2o", "eviction")),
        (("--policy", "full", "--record", "RUN"), ("--record", "full")),
        (("--record", BOOK), ("cannot record", "new folder")),
    ],
    ids=lambda part: " ".join(part)[-40:],
)
def test_what_does_not_fit_is_one_clear_line(
    generate: Generate, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, out, err = generate(*flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert not [word for word in words if word not in err], err


def test_info_knows_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    for policy in ("full", "infinigen", "h2o", "quest", "streaming", "oracle"):
        assert main(("info", "reference", "--context", "100", "--policy", policy, "--device", "cpu")) == 0
        assert f"policy {policy}, 100 tokens" in capsys.readouterr().out


def test_info_prints_the_plan_under_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("info", "reference", "--context", "1024", "--device", "cpu", "--device-memory")
    assert main((*arguments, "24MiB")) == 0
    text = capsys.readouterr().out
    for words in ("resident layers", "streamed layers", "scoring keys", "weights copied per step"):
        assert words in text
    assert main((*arguments, "5MiB")) == 2
    assert "are missing" in capsys.readouterr().err


def test_info_counts_a_working_set(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("info", "reference", "--context", "1024", "--device", "cpu", "--dtype", "float32")
    assert main(arguments) == 0
    assert "working set" not in capsys.readouterr().out
    assert main((*arguments, "--working-set", "64")) == 0
    assert "device: working set" in (text := capsys.readouterr().out)
    assert "528 KiB" in text  # 8 layers * 2 heads * 65 tokens * (2 * 64 * 4 + 8) bytes
    assert main((*arguments, "--working-set", "100000", "--device-memory", "20MiB")) == 2
    assert "are missing" in capsys.readouterr().err
    assert main((*arguments, "--working-set", "-1")) == 2
    assert "working_set=-1" in capsys.readouterr().err
