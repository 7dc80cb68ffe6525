"""Test that the Python snippets in the documentation run and that its commands are valid.

The tests use a tiny model, few new tokens and short texts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import TEMPLATE
from support.tiny_models import tiny_checkpoint

import offload_rt
from offload_rt import LLM, SamplingParams
from offload_rt.cli import _parser, main
from offload_rt.eval.cli import MEASURES
from offload_rt.utils.native_code import user_cache

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]

NOT_RUN = {
    "extending.md": "tests/unit/project/test_seams.py and others run the whole examples",
    "transformers.md": "needs an instruct model; tests/unit/engine/test_drop_in.py runs pipelines",
    "models.md": "needs bitsandbytes and a download; tests/unit/models/test_packed.py runs it on a tiny model",
}
"""Pages whose snippets are not run here, with the reason."""


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def shell_lines(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def documented_commands(page: Path) -> list[str]:
    """Return the lines of shell sessions, and the commands that are quoted in sentences."""
    text, found = page.read_text(encoding="utf-8"), shell_lines(page)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    quoted = [" ".join(code.split()) for code in re.findall(r"`((?:offload-rt|make|python)\s[^`]+)`", prose)]
    return [*found, *quoted]


@dataclasses.dataclass(frozen=True)
class FewTokens(SamplingParams):
    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", min(self.max_tokens, 4))
        super().__post_init__()


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("instruct")
    tiny_checkpoint(folder, "llama", num_hidden_layers=2, head_dim=32, max_position_embeddings=512)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture
def snippet_globals(instruct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Write the files that snippets read. Yield the global names that snippets use."""

    class TinyLLM(LLM):
        """The `LLM` that snippets use. It loads a tiny model with a small KV cache, not the model they name."""

        def __init__(self, model: Any, *args: Any, **options: Any) -> None:
            supported = {
                name: value for name, value in options.items() if name not in ("tokenizer", "disk", "disk_limit")
            }
            super().__init__(instruct, *args, **supported | {"host_memory": "64MiB", "device": "cpu"})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(user_cache().parent))  # with the compiled C code
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(offload_rt, "LLM", TinyLLM)
    monkeypatch.setattr(offload_rt, "SamplingParams", FewTokens)
    write_document = offload_rt.write_document
    monkeypatch.setattr(
        offload_rt, "write_document", lambda *args, **given: write_document(*args, **given | {"max_tokens": 4})
    )
    for name in ("book.txt", "report.txt"):
        Path(name).write_text("It was a dark night, and nobody was on the road to the moat house. " * 4)
    Path("questions.txt").write_text("Who was there?\nWhere was it?\n")
    with contextlib.redirect_stdout(io.StringIO()):
        yield {"LLM": TinyLLM, "SamplingParams": FewTokens, "offload_rt": offload_rt, "__name__": "snippet"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that snippets do not close
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run(page: Path, snippet_globals: dict[str, Any]) -> None:
    code_blocks = snippets(page)
    if page.name in NOT_RUN:
        for code in code_blocks:
            compile(code, page.name, "exec")
        return
    if page.name == "README.md":
        code_blocks = [code for code in code_blocks if "model.generate" not in code]  # needs a transformers model
    for code in code_blocks:
        exec(compile(code, page.name, "exec"), snippet_globals)


def check_command(command: str) -> None:
    """Raise an error if the command names an option, target, extra or file that does not exist."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = shlex.split(command.split(" > ")[0], comments=True)
    words = words[next(i for i, word in enumerate(words) if "=" not in word) :]  # without variables of the environment
    if words[0] == "make":
        assert all(word.split("=")[0] in makefile for word in words[2:]), command
        dry_run = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, check=False)
        assert dry_run.returncode == 0, command
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), command
    elif words[:2] == ["pip", "install"]:
        extras = [name for word in words for group in re.findall(r"\[(.*)\]", word) for name in group.split(",")]
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(f"\n{extra} = [" in project for extra in extras), command
    elif words[0] == "offload-rt":
        flags = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {"--help"}
        assert flags <= set(re.findall(r"--?[a-z][a-z_-]*", help_text(words[1:]))), command


def help_text(words: list[str]) -> str:
    """Return the help text of a command, a benchmark or an evaluation."""
    name = words[1] if words[0] == "eval" else words[0]
    if name == "--help":
        return ""
    if words[0] in ("eval", "bench", "tune", "lm-eval"):
        if name.endswith(".py"):
            return " ".join(words)
        parser, add_flags = argparse.ArgumentParser(), MEASURES[name].add_flags
        if add_flags is None:
            return " ".join(words)
        add_flags(parser)
        return parser.format_help()
    [choices] = [action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return str(choices[name].format_help())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_valid(page: Path) -> None:
    for command in documented_commands(page):
        check_command(command)


COMMANDS_RUN = ("info", "generate", "write", "chat", "batch", "skew")
"""Commands that are run here. `serve`, `eval` and `tune` have their own tests."""

SMALL_VALUES = {
    "--max-new-tokens": "4", "--chapter-tokens": "4", "--chapters": "2", "--more": "4", "--host-memory": "64MiB",
    "--disk-limit": "128MiB",
}  # fmt: skip
"""Values that replace those in the documentation."""


LENGTH_OPTIONS = dict.fromkeys(("generate", "write", "chat"), ("--max-new-tokens", "4"))
LENGTH_OPTIONS["skew"] = ("--calibration-tokens", "128")
"""Options that shorten commands which do not set a length."""


def is_run(line: str) -> bool:
    words = line.split()
    return words[0] in ("cp", "head") or (words[0] == "offload-rt" and words[1] in COMMANDS_RUN)


def run_line(line: str, model: str) -> int:
    """Run one line of a shell session in this process. Return its exit code."""
    words = shlex.split(line, comments=True)
    out = io.StringIO()
    if words[0] == "offload-rt":
        values = [SMALL_VALUES.get(before, word) for before, word in itertools.pairwise(words)]
        args = [model if word in ("MODEL", "reference") or word.startswith("meta-llama/") else word for word in values]
        args = [str(Path.cwd() / "kv") if word == "/nvme/kv" else word for word in args]
        if args[0] in LENGTH_OPTIONS and not set(args) & {"--max-new-tokens", "--more", "--chapters", "--outline"}:
            args[1:1] = LENGTH_OPTIONS[args[0]]
        with contextlib.redirect_stdout(out):
            code = main(args[: args.index(">")] if ">" in args else args)
    else:
        done = subprocess.run(words[: words.index(">")] if ">" in words else words, capture_output=True, text=True)
        out.write(done.stdout)
        code = done.returncode
    if ">" in words:
        Path(words[words.index(">") + 1]).write_text(out.getvalue())
    return code


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(is_run, shell_lines(page)))], ids=lambda page: page.name
)
def test_commands_run(
    page: Path, instruct: str, snippet_globals: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(Path(instruct) / "cache"))
    Path("offload_rt").symlink_to(ROOT / "offload_rt")
    Path("opening.txt").write_text("It was a dark night.")
    Path("outline.txt").write_text("The road\nThe house\n")
    for name in ("questions.jsonl", "IN.jsonl"):
        Path(name).write_text('{"prompt": "It was"}\n{"prompt": "Nobody was"}\n')
    for line in filter(is_run, shell_lines(page)):
        monkeypatch.setattr(
            "sys.stdin", io.StringIO("/read chapter.txt Who was there?\n" if "novel" in line else "Who?\n")
        )
        if "write" in line and "--more" not in line:  # each command begins a new document
            Path("novel.txt").unlink(missing_ok=True)
            shutil.rmtree("novel.txt.session", ignore_errors=True)
        assert run_line(line, instruct) == 0, line


def test_unknown_options_and_targets_are_found() -> None:
    for command in ("offload-rt generate MODEL --no-such-option", "make no-such-target", "make stress PART=nothing"):
        with pytest.raises(AssertionError):
            check_command(command)
