"""Test the script that writes a long document. `tests/unit/cli/test_write.py` tests the function it calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.scripts import load_example


def test_repeated_command_continues_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = load_example("generate_document"), tmp_path / "novel.txt"
    for chapters in ("1", "2"):
        given = ("--chapters", chapters, "--chapter-tokens", "10", "--policy", "full")
        monkeypatch.setattr("sys.argv", ["generate_document.py", str(path), *given])
        script.main()
    text = path.read_text(encoding="utf-8")
    assert text.startswith(script.OPENING) and re.findall(r"\n\nCHAPTER (\d+)\n\n", text) == ["1", "2"]
    assert "2 chapters" in capsys.readouterr().err


def test_invalid_input_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "novel.txt"
    monkeypatch.setattr("sys.argv", ["generate_document.py", str(path), "--chapters", "0"])
    with pytest.raises(SystemExit, match="2"):
        load_example("generate_document").main()
    monkeypatch.setattr("sys.argv", ["generate_document.py", str(path), "--start", str(tmp_path / "none.txt")])
    with pytest.raises(SystemExit, match=r"none\.txt.*No such file"):
        load_example("generate_document").main()
    assert not path.exists()
