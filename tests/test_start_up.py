"""What is imported before it is needed: nothing heavy. Modules are counted, for seconds depend on the machine."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import offload_rt

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "matplotlib", "safetensors", "rich")

COMMANDS: dict[int, list[tuple[str, ...]]] = {
    0: [
        ("--help",),
        ("--version",),
        *((name, "--help") for name in ("generate", "chat", "info", "sessions", "skew", "eval")),
    ],
    2: [
        (),
        ("generat",),
        ("generate", "reference", "--prompt-file", "x", "--polcy", "full"),
        ("generate", "reference", "--prompt-file", "x", "--policy", "ful"),
        ("generate", "reference", "--prompt-file", "x", "--policy", "h2o", "--alpha", "3"),
        ("generate", "reference", "--prompt-file", "x", "--host-memory", "many"),
        ("chat", "reference", "--session", "s", "--store", "x", "--store-ttl", "soon"),
        ("info", "reference", "--context", "0"),
        ("skew", "reference", "--out", "x", "--method", "pca"),
        ("sessions", "list", "--wrong"),
    ],
}
"""Command lines that load no model, by their exit codes."""

RUN = """
from offload_rt.cli import main

def run(arguments):
    try:
        return main(arguments)
    except SystemExit as leave:
        return leave.code

for wanted, commands in COMMANDS.items():
    for arguments in commands:
        code = run(arguments)
        assert code == wanted, (arguments, code)
        assert not seen(), (arguments, seen())
"""


def heavy_after(code: str) -> str:
    """The heavy modules that a fresh interpreter has imported after `code`, in which `seen()` says which those are; its
    output goes to stderr."""
    whole = (
        f"import sys; out, sys.stdout = sys.stdout, sys.stderr\nCOMMANDS = {COMMANDS!r}\n"
        f"def seen(): return ' '.join(name for name in {HEAVY!r} if name in sys.modules)\n"
        f"{code}\nout.write(seen())"
    )
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import offload_rt; offload_rt.SamplingParams(), offload_rt.EngineConfig(), offload_rt.ConfigError",
        "import offload_rt; assert offload_rt.__version__ and 'LLM' in dir(offload_rt)",
        RUN,
    ],
    ids=["options", "names", "commands"],
)
def test_nothing_heavy_is_imported_before_a_model_is_loaded(code: str) -> None:
    assert heavy_after(code) == ""


def test_the_probe_sees_what_is_imported() -> None:
    assert heavy_after("import offload_rt, numpy") == "numpy"


def test_the_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert offload_rt.__version__ == importlib.metadata.version("offload-rt")
    from offload_rt.cli import main

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"offload-rt {offload_rt.__version__}\n"
    assert set(offload_rt.__all__) <= set(dir(offload_rt))
    with pytest.raises(AttributeError, match="no attribute 'LML'"):
        offload_rt.LML  # noqa: B018
