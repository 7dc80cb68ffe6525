"""Test that commands import torch and other heavy modules only if they need them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.tiny_models import tiny_model

import offload_rt
from offload_rt import LLM, SamplingParams

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "matplotlib", "safetensors", "rich", "fastapi")

REPORT = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules], sep=' ', end='')"


def heavy_imports_of(code: str, **variables: str) -> str:
    whole = f"import sys; out, sys.stdout = sys.stdout, sys.stderr\n{code}\nsys.stdout = out\n{REPORT}"
    done = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, timeout=120, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return done.stdout


COMMANDS = {
    "--help": 0,
    "--version": 0,
    "": 2,
    "generat": 2,
    "generate reference --prompt-file x --polcy full": 2,
    "generate reference --prompt-file x --policy ful": 2,
    "generate reference --prompt-file x --policy h2o --alpha 3": 2,
    "generate reference --prompt-file x --host-memory many": 2,
    "generate reference x --exact --eviction lru": 2,
    "write reference no/such/novel.txt x": 2,
    "chat reference --session s --store /dev/null": 2,
    "chat reference --session s --store x --store-ttl soon": 2,
    "info reference --context 0": 2,
    "skew reference --out x --method pca": 2,
    "sessions list --wrong": 2,
    "cache burn": 2,
    "serve reference --port 70000": 2,
    **{f"{name} --help": 0 for name in ("generate", "chat", "serve", "info", "sessions", "skew", "cache", "eval")},
}
"""Command lines and their exit codes."""

RUN_ALL = f"""
import sys
import offload_rt
offload_rt.SamplingParams(), offload_rt.EngineConfig(), offload_rt.ConfigError
assert offload_rt.__version__ and 'LLM' in dir(offload_rt)
from offload_rt.cli import main
for command, expected in {COMMANDS!r}.items():
    try:
        code = main(command.split())
    except SystemExit as leave:
        code = leave.code
    assert code == expected, (command, code)
    print(command, "imports", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


def test_nothing_heavy_is_imported_before_a_model_is_loaded() -> None:
    assert heavy_imports_of(RUN_ALL) == ""


def run_all(commands: Iterable[str]) -> str:
    """Return code that runs command lines in one process, and prints the imports that each of them adds to stderr."""
    return f"""
import sys
from offload_rt.cli import main
for command in {[command.split() for command in commands]!r}:
    assert main(command) == 0, command
    print(command, "imports", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


def test_stored_files_are_listed_without_torch(tmp_path: Path) -> None:
    llm = LLM(tiny_model("llama", num_hidden_layers=1), policy="full", host_memory="4MiB")
    with llm.session("s", tmp_path) as session:
        assert len([*session.send([1, 2, 3], SamplingParams(max_tokens=2))]) == 2
    code = run_all(["cache", f"sessions --store {tmp_path}", f"sessions show s --store {tmp_path}"])
    assert "torch" not in heavy_imports_of(code, XDG_CACHE_HOME=str(tmp_path))


def test_plain_models_are_planned_without_transformers() -> None:
    """Importing transformers would make `offload-rt info` take three times as long."""
    options = ("", "--device-memory 30MiB --dtype float32", "--context 1k --policy quest")
    found = heavy_imports_of(run_all(f"info reference {each}" for each in options))
    assert "transformers" not in found and "torch" in found


def test_heavy_imports_are_detected() -> None:
    assert heavy_imports_of("import numpy, rich") == "numpy rich"


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert offload_rt.__version__ == importlib.metadata.version("offload-rt")
    from offload_rt.cli import main

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"offload-rt {offload_rt.__version__}\n"
    assert set(offload_rt.__all__) <= set(dir(offload_rt))
    with pytest.raises(AttributeError, match="no attribute 'LML'"):
        offload_rt.LML  # noqa: B018


def variable_after_import(name: str, given: dict[str, str], before: str) -> str:
    """Return the environment variable `name` in a process that has run `before` and imported the package."""
    kept = {key: value for key, value in os.environ.items() if key != name}
    code = f"import os, sys; {before}\nimport offload_rt; print(os.environ.get({name!r}), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=kept | given, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


LIMITED = """import pathlib
os.sched_getaffinity = lambda _: set(range(8))
contents = {"/proc/self/cgroup": "0::/job", "/sys/fs/cgroup/job/cpu.max": "150000 100000"}
pathlib.Path.read_text = lambda path: contents.get(str(path), "max 100000")
"""
"""Code that simulates a container limited to 1.5 of eight processors."""


@pytest.mark.parametrize(
    ("given", "before", "threads"),
    [
        ({}, LIMITED, "2"),
        ({"OMP_NUM_THREADS": "5"}, LIMITED, "5"),  # the user has set the variable
        ({}, LIMITED.replace("150000", "800000"), "None"),  # all processors
        ({}, LIMITED + "sys.modules['torch'] = sys; ", "None"),  # torch has already been imported
    ],
)
def test_threads_are_limited_to_the_processors_of_a_container(given: dict[str, str], before: str, threads: str) -> None:
    assert variable_after_import("OMP_NUM_THREADS", given, before) == threads
