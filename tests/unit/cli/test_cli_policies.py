"""Test `offload-rt generate` with every policy, with policy options and with KV cache options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Cli
from support.outputs import completed
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, EvictionOptions
from offload_rt.policies.registry import policy_names

FLAGS = ("--prompt-tokens", "300", "--max-new-tokens", "6", "--temperature", "0", "--quiet")
WINDOW: dict[str, Any] = {"budget": 0.2, "sinks": 2, "recent": 16, "dense_layers": (0, 1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def generate(cli: Cli, model: str, short_book: Path) -> Cli:
    return lambda *flags: cli("generate", model, "--prompt-file", str(short_book), *FLAGS, *flags)


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "full"])
def test_every_policy_gets_its_options(
    generate: Cli, model: str, short_book: Path, tmp_path: Path, policy: str
) -> None:
    stats = tmp_path / "stats.json"
    flags = ("--budget", "0.2", "--sinks", "2", "--recent", "16", "--dense-layers", "0,1", "--stats-json", str(stats))
    own: dict[str, Any] = {"dense_until": 0} if policy == "auto" else {}
    run = generate("--policy", policy, *flags, *(("--dense-until", "0") if own else ()))
    assert (run.code, run.err) == (0, "")
    llm = LLM(model, policy=policy, policy_options=WINDOW | own)
    ids = llm.encode(short_book.read_text(encoding="utf-8"))[:300]
    (done,) = completed(llm.generate([ids], SamplingParams(max_tokens=6, temperature=0)))
    written = json.loads(stats.read_text())
    assert run.out == done.text
    assert (written["policy"], written["dense_layers"]) == (policy, [0, 1])
    assert written["exact_fraction"] == pytest.approx(done.stats.exact_fraction)
    assert written["sparse_exact_fraction"] == pytest.approx(0.2, abs=0.03)


def test_flags_become_options_of_infinigen(monkeypatch: pytest.MonkeyPatch, generate: Cli) -> None:
    seen: dict[str, Any] = {}

    def stop(self: LLM, model: str, config: EngineConfig) -> None:
        seen.update(vars(config))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "__init__", stop)
    words = "--preset paper --max-missed-mass 0.02 --skew-method svd --columns calibration --scorer int2 --skew DIR"
    words += " --no-corrected"
    pool = "--eviction lru --protect none --kv-cache-dtype int4 --host-memory 1GiB --no-enable-prefix-caching"
    assert generate(*words.split(), *pool.split()).code == 130
    assert seen["policy_options"] == {
        "preset": "paper", "max_missed_mass": 0.02, "skew": "svd", "columns": "calibration", "scorer": "int2",
        "corrected": False,
    }  # fmt: skip
    assert seen["skew"] == Path("DIR")
    assert (seen["kv_cache_dtype"], seen["host_memory"], seen["enable_prefix_caching"]) == ("int4", 2**30, False)
    assert seen["eviction"] == EvictionOptions("lru", "none")


def test_eviction_keeps_the_memory_limit(generate: Cli, model: str, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    llm = LLM(model, policy="full")
    limit = 5 * llm.runner.pool.block_bytes + 1
    flags = ("--host-memory", str(limit), "--max-new-tokens", "30", "--ignore-eos", "--stats-json", str(stats))
    generate("--policy", "full", *flags).fails_with("--host-memory")
    run = generate("--policy", "infinigen", "--recent", "16", *flags, "--eviction", "counter")
    assert (run.code, run.err) == (0, "")
    written = json.loads(stats.read_text())
    assert written["new_tokens"] == 30
    assert written["kv_bytes_host"] <= limit


def test_quantised_kv_takes_fewer_bytes(generate: Cli, tmp_path: Path) -> None:
    moved = {}
    for name in ("auto", "int8", "int2"):
        stats = tmp_path / f"{name}.json"
        assert generate("--policy", "full", "--kv-cache-dtype", name, "--stats-json", str(stats)).code == 0
        written = json.loads(stats.read_text())
        moved[name] = written["h2d_bytes"], written["kv_bytes_host"]
    assert moved["auto"][1] > 2.5 * moved["int8"][1] > 5 * moved["int2"][1]
    assert moved["auto"][0] > 2 * moved["int8"][0] > 4 * moved["int2"][0]
