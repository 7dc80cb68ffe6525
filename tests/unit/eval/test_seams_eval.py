"""Test that a single file outside the package can register a benchmark."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from offload_rt.cli import main
from offload_rt.eval.core.registry import MEASURES

TOY = '''
"""How many words a text has."""

import argparse

from offload_rt.eval.core.registry import measure
from offload_rt.utils.texts import read_text


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", required=True)
    parser.add_argument("--least", type=int, default=0)


@measure("NAME", "how many words a text has", add_flags)
def words(args: argparse.Namespace) -> int:
    """Counts the words of a text that have at least as many letters."""
    print(sum(len(word) >= args.least for word in read_text(args.text).split()))
    return 0
'''


@pytest.fixture
def external_benchmark(tmp_path: Path) -> str:
    (tmp_path / "book.txt").write_text("to be or not to be here")
    (tmp_path / "toy.py").write_text(TOY.replace("NAME", "words"))
    return str(tmp_path / "toy.py")


def test_benchmark_in_one_file_runs(
    external_benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(tmp_path / "book.txt")
    for _ in range(2):  # it is registered again each time
        assert main(["eval", external_benchmark, "--text", text, "--least", "3"]) == 0
        assert capsys.readouterr().out == "2\n"
    assert "words" not in MEASURES
    with pytest.raises(SystemExit, match="0"):
        main(["eval", external_benchmark, "--help"])
    said = capsys.readouterr().out
    assert "--least" in said and "Counts the words of a text" in said


def test_benchmark_of_the_documentation_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "pages" / "extending.md"
    snippet = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[-1]
    (tmp_path / "words.py").write_text(snippet)
    (tmp_path / "book.txt").write_text("to be or not to be here")
    assert main(["eval", str(tmp_path / "words.py"), "--text", str(tmp_path / "book.txt"), "--least", "3"]) == 0
    assert capsys.readouterr().out == "2\n"


def test_invalid_arguments_are_reported_in_one_line(
    external_benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, taken = tmp_path / "empty.py", tmp_path / "taken.py"
    empty.write_text("")
    taken.write_text(TOY.replace("NAME", "perplexity"))
    for arguments, words in (
        ([external_benchmark], "required: --text"),
        ([external_benchmark, "--text", "x", "--least", "a"], "invalid int value"),
        ([str(empty)], "registers 0 evaluations"),
        ([str(taken)], "there is an evaluation 'perplexity' already"),
        ([str(tmp_path / "none.py")], "there is no such file"),
    ):
        assert main(["eval", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_listing_benchmarks_imports_no_heavy_module() -> None:
    """Modules that `import offload_rt` already loads are allowed."""
    code = (
        "import sys; import offload_rt; before = set(sys.modules);"
        "from offload_rt.eval.cli import listing; assert 'perplexity' in listing();"
        "heavy = {'torch', 'transformers', 'matplotlib', 'datasets', 'scipy', 'rich', 'lm_eval'};"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
