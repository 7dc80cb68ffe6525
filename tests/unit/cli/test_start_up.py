"""Test that imports load no heavy module before it is needed. Modules are counted, as times depend on the machine."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import offload_rt

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "matplotlib", "safetensors", "rich", "fastapi")

REPORT = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules], sep=' ', end='')"


def heavy_after(code: str, **variables: str) -> str:
    """Return the heavy modules that a fresh interpreter has imported after `code`. Output of `code` goes to stderr."""
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
    """All commands run in one process. If it fails, the output shows which one imports a heavy module first."""
    assert heavy_after(RUN_ALL) == ""


def test_stored_files_are_listed_without_torch(tmp_path: Path) -> None:
    commands = [
        command.split() for command in ("cache", f"sessions --store {tmp_path}", f"sessions show s --store {tmp_path}")
    ]
    code = f"from offload_rt.cli import main\nfor command in {commands!r}: main(command)"
    assert "torch" not in heavy_after(code, XDG_CACHE_HOME=str(tmp_path))


def test_plain_models_are_planned_without_transformers() -> None:
    """A first call takes a third of the time that it would take with transformers."""
    options = ("", "--device-memory 30MiB --dtype float32", "--context 1k --policy quest")
    commands = [f"info reference {option}".split() for option in options]
    code = f"from offload_rt.cli import main\nfor command in {commands!r}: assert main(command) == 0"
    assert "transformers" not in heavy_after(code)


def test_the_probe_sees_what_is_imported() -> None:
    assert heavy_after("import numpy, rich") == "numpy rich"


def test_the_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert offload_rt.__version__ == importlib.metadata.version("offload-rt")
    from offload_rt.cli import main

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"offload-rt {offload_rt.__version__}\n"
    assert set(offload_rt.__all__) <= set(dir(offload_rt))
    with pytest.raises(AttributeError, match="no attribute 'LML'"):
        offload_rt.LML  # noqa: B018


def environment_after(name: str, given: dict[str, str], before: str) -> str:
    """Return environment variable `name` in a process that runs `before` and imports the package."""
    kept = {key: value for key, value in os.environ.items() if key != name}
    code = f"import os, sys; {before}\nimport offload_rt; print(os.environ.get({name!r}), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=kept | given, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


LIMITED = """import pathlib
os.sched_getaffinity = lambda _: set(range(8))
said = {"/proc/self/cgroup": "0::/job", "/sys/fs/cgroup/job/cpu.max": "150000 100000"}
pathlib.Path.read_text = lambda path: said.get(str(path), "max 100000")
"""
"""A container with 1.5 of eight processors."""


@pytest.mark.parametrize(
    ("given", "before", "threads"),
    [
        ({}, LIMITED, "2"),
        ({"OMP_NUM_THREADS": "5"}, LIMITED, "5"),
        ({}, LIMITED.replace("150000", "800000"), "None"),
        ({}, LIMITED + "sys.modules['torch'] = sys; ", "None"),
    ],
)
def test_there_are_as_many_threads_as_a_container_has_processors(
    given: dict[str, str], before: str, threads: str
) -> None:
    """The limit applies only if the user set no variable and torch would use more threads."""
    assert environment_after("OMP_NUM_THREADS", given, before) == threads
