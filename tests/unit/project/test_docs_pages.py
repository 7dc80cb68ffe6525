"""Pages that scripts of `docs/` make from the code: all commands, and the picture of the rooms."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import test_layering

from offload_rt.models import registry

DOCS = Path(__file__).parents[3] / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_has_its_help_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # the script sets its own, for this process alone
    commands = script("commands")
    page = commands.page()
    from offload_rt.cli import _parser

    named = commands.subcommands(_parser())
    assert {"generate", "chat", "sessions", "skew", "info"} <= named.keys()
    assert all(f"## offload-rt {name}\n\n```text\nusage: offload-rt {name}" in page for name in named)
    assert "--preset" in page


def test_the_picture_has_every_room_and_no_import_points_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    house = script("house")
    lines, uses = house.rooms()
    where = house.places(lines)
    assert where.keys() == lines.keys() and {"eval/measures", "kernels", "llm"} <= where.keys()
    assert sum(lines.values()) == sum(
        (house.ROOT / path).read_text(encoding="utf-8").count("\n")
        for path in test_layering.files()
        if path.parts[0] == "offload_rt"
    )
    assert all(where[other][1] > where[room][1] for room, others in uses.items() for other in others & where.keys())
    monkeypatch.setattr(sys, "argv", ["house.py", str(tmp_path / "house.svg")])
    house.main()
    assert (tmp_path / "house.svg").read_text(encoding="utf-8").count("<rect") == 1 + len(lines)
    assert len(capsys.readouterr().out.splitlines()) == len(lines)


def test_the_architectures_are_those_of_the_tests() -> None:
    architectures = script("architectures")
    text = architectures.PAGE.read_text(encoding="utf-8")
    assert architectures.page(text) == text, "run python docs/architectures.py"
    assert all(f"`{name}`" in text for name in registry.architectures())


@pytest.mark.parametrize("page", ["nothing_lost", "without_a_gpu"])
def test_the_tests_that_a_page_names_are_there(page: str) -> None:
    there = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[2].rglob("test_*.py"))
    text = (DOCS / "pages" / f"{page}.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:tests/[\w/]+\.py::test_)?([a-z0-9]+(?:_[a-z0-9]+){3,})`", text)
    assert len(named) > 10 and not [name for name in named if f"def test_{name.removeprefix('test_')}(" not in there]
