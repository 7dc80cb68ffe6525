"""Test that the Python snippets of the documentation run and that its commands are valid.

Snippets run with the reference model in place of other models, a short text in place of books, and few new tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offload_rt
from offload_rt import LLM, SamplingParams
from offload_rt.cli import _parser

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]

NOT_RUN = {
    "extending.md": "tests/unit/project/test_seams.py and others run the whole examples",
    "transformers.md": "needs an instruct model; tests/unit/engine/test_drop_in.py runs pipelines",
    "models.md": "needs bitsandbytes and a download; tests/unit/models/test_packed.py runs it on a tiny model",
}
"""Pages whose snippets do not run here, with the reason."""


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Return the lines of shell sessions, and commands within sentences."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    quoted = [" ".join(code.split()) for code in re.findall(r"`((?:offload-rt|make|python)\s[^`]+)`", prose)]
    return [*found, *quoted]


class Reference(LLM):
    """The reference model with a small KV cache, whatever model and memory a snippet names."""

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        options = {name: value for name, value in options.items() if name not in ("tokenizer", "disk", "disk_limit")}
        super().__init__("reference", *args, **options | {"host_memory": "64MiB", "device": "cpu"})


@dataclasses.dataclass(frozen=True)
class FewTokens(SamplingParams):
    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", min(self.max_tokens, 4))
        super().__post_init__()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Provide files that snippets read, and names that an earlier part of a page has defined."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(offload_rt, "LLM", Reference)
    monkeypatch.setattr(offload_rt, "SamplingParams", FewTokens)
    for name in ("book.txt", "report.txt"):
        Path(name).write_text("It was a dark night, and nobody was on the road to the moat house. " * 4)
    Path("questions.txt").write_text("Who was there?\nWhere was it?\n")
    with contextlib.redirect_stdout(io.StringIO()):
        yield {"LLM": Reference, "SamplingParams": FewTokens, "offload_rt": offload_rt, "__name__": "snippet"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page: Path, workplace: dict[str, Any]) -> None:
    found = snippets(page)
    if page.name in NOT_RUN or not found:
        for code in found:
            compile(code, page.name, "exec")
        return
    if page.name == "README.md":
        found = [code for code in found if "model.generate" not in code]  # needs a transformers model
    for code in found:
        names = workplace if "exact=True" not in code else dict(workplace)
        exec(compile(code, page.name, "exec"), names)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def check(command: str) -> None:
    """Raise an error if a command names an option, target, extra or file that does not exist."""
    words = shlex.split(command.split(" > ")[0].split(" | ")[0], comments=True)
    words = words[next(i for i, word in enumerate(words) if "=" not in word or word.startswith("-")) :]
    if words[0] == "make":
        assert words[1] in make_targets(), command
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(word.split("=")[0] in makefile for word in words[2:]), command
        assert all(f"STRESS_{part[5:]}" in makefile for part in words[2:] if words[1] == "stress"), command
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), command
    elif words[:2] == ["pip", "install"]:
        extras = [name for word in words for group in re.findall(r"\[(.*)\]", word) for name in group.split(",")]
        toml = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(f"\n{extra} = [" in toml for extra in extras), command
    elif words[0] == "offload-rt" and not any(re.search(r"[…|]|^\.\.\.$", word) for word in words):
        check_arguments(words[1:], command)


def check_arguments(words: list[str], command: str) -> None:
    subject = words[1:] if words[0] in ("eval",) else []
    if subject and (subject[0].startswith("./") or subject[0] == "--help"):
        return
    known = {flag for _, _, flags in options_of(words) for flag in flags}
    used = {word.split("=")[0] for word in words if word.startswith("-")} - {"--help", "-h"}
    assert used <= known, f"{command}: unknown options {sorted(used - known)}"


def options_of(words: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the options of a command and its subcommand."""
    from offload_rt.eval.core.registry import measures  # type: ignore[attr-defined]

    raise NotImplementedError
