"""Test pages that scripts in `docs/` generate, such as the command reference and the diagram of folders."""

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
    monkeypatch.setenv("COLUMNS", "80")  # the script must set its own value, for this process only
    commands = script("commands")
    page = commands.page()
    from offload_rt.cli import _parser

    named = commands.subcommands(_parser())
    assert {"generate", "chat", "sessions", "skew", "info"} <= named.keys()
    assert all(f"## offload-rt {name}\n\n```text\nusage: offload-rt {name}" in page for name in named)
    assert "--preset" in page


def test_the_picture_has_every_folder_and_no_import_points_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    structure = script("structure")
    lines, uses = structure.folders()
    where = structure.places(lines)
    assert where.keys() == lines.keys() and {"eval/measures", "kernels", "llm"} <= where.keys()
    assert sum(lines.values()) == sum(
        (structure.ROOT / path).read_text(encoding="utf-8").count("\n")
        for path in test_layering.files()
        if path.parts[0] == "offload_rt"
    )
    assert all(where[other][1] > where[folder][1] for folder, others in uses.items() for other in others & where.keys())
    monkeypatch.setattr(sys, "argv", ["structure.py", str(tmp_path / "structure.svg")])
    structure.main()
    assert (tmp_path / "structure.svg").read_text(encoding="utf-8").count("<rect") == 1 + len(lines)
    assert len(capsys.readouterr().out.splitlines()) == len(lines)


@pytest.mark.slow
def test_the_table_of_architectures_is_up_to_date() -> None:
    models = script("models")
    text = models.PAGE.read_text(encoding="utf-8")
    assert models.page() == text, "run python docs/models.py"
    assert all(f"`{name}`" in text for name in registry.architectures())


def test_the_tables_of_results_are_up_to_date() -> None:
    results = script("results")
    for path, text in results.pages().items():
        assert text == path.read_text(encoding="utf-8"), f"run python docs/results.py: {path.name} is out of date"


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    root = DOCS.parent
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        links = re.findall(r"\]\(([^)#]+)", (root / name).read_text(encoding="utf-8"))
        missing = [link for link in links if not link.startswith("https://") and not (root / link).exists()]
        assert links and not missing, f"{name} links to missing files: {missing}"


def test_every_page_is_in_the_navigation() -> None:
    menu = (DOCS / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {str(path.relative_to(DOCS / "pages")) for path in (DOCS / "pages").rglob("*.md")}
    assert {line.split("- ")[1] for line in menu.splitlines() if line.endswith(".md")} >= pages
