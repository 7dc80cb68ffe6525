"""Test the pages that scripts in `docs/` generate, such as the command reference and the folder diagram."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_layering
from support.scripts import load_docs_script

from offload_rt.models import registry

DOCS = Path(__file__).parents[3] / "docs"


def test_command_reference_has_the_help_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # the script must set its own value, for this process only
    commands = load_docs_script("commands")
    page = commands.page()
    from offload_rt.cli import _parser

    named = commands.subcommands(_parser())
    assert {"generate", "chat", "sessions", "skew", "info"} <= named.keys()
    assert all(f"## offload-rt {name}\n\n```text\nusage: offload-rt {name}" in page for name in named)
    assert "--preset" in page


def test_structure_diagram_has_every_folder_and_no_upward_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    structure = load_docs_script("structure")
    lines, uses = structure.folders()
    positions = structure.places(lines)
    assert positions.keys() == lines.keys() and {"eval/measures", "kernels", "llm"} <= positions.keys()
    assert sum(lines.values()) == sum(
        (structure.ROOT / path).read_text(encoding="utf-8").count("\n")
        for path in test_layering.python_files()
        if path.parts[0] == "offload_rt"
    )
    assert all(
        positions[other][1] > positions[folder][1]
        for folder, others in uses.items()
        for other in others & positions.keys()
    )
    monkeypatch.setattr(sys, "argv", ["structure.py", str(tmp_path / "structure.svg")])
    structure.main()
    assert (tmp_path / "structure.svg").read_text(encoding="utf-8").count("<rect") == 1 + len(lines)
    assert len(capsys.readouterr().out.splitlines()) == len(lines)


@pytest.mark.slow
def test_table_of_architectures_is_up_to_date() -> None:
    models = load_docs_script("models")
    text = models.PAGE.read_text(encoding="utf-8")
    assert models.page() == text, "run python docs/models.py"
    assert all(f"`{name}`" in text for name in registry.architectures())


def test_tables_of_results_are_up_to_date() -> None:
    results = load_docs_script("results")
    for path, text in results.pages().items():
        assert text == path.read_text(encoding="utf-8"), f"run python docs/results.py: {path.name} is out of date"


def test_warnings_are_errors_when_the_site_is_built() -> None:
    commands = subprocess.run(
        ["make", "--dry-run", "site"], cwd=DOCS.parent, capture_output=True, text=True, check=True
    ).stdout
    [build] = [line for line in commands.splitlines() if "mkdocs" in line]
    assert "--strict" in build and "--quiet" not in build, "with --quiet, mkdocs counts no warnings"
    ignored = re.findall(r"^/(docs/pages/.+)$", (DOCS.parent / ".gitignore").read_text(encoding="utf-8"), re.MULTILINE)
    before = commands.partition(build)[0]
    assert ignored and all(path in before for path in ignored), "a fresh clone lacks a generated file"


def test_links_of_the_readme_lead_to_files() -> None:
    root = DOCS.parent
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        links = re.findall(r"\]\(([^)#]+)", (root / name).read_text(encoding="utf-8"))
        missing = [link for link in links if not link.startswith("https://") and not (root / link).exists()]
        assert links and not missing, f"{name} links to missing files: {missing}"


def test_every_page_is_in_the_navigation() -> None:
    menu = (DOCS / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {str(path.relative_to(DOCS / "pages")) for path in (DOCS / "pages").rglob("*.md")}
    assert {line.split("- ")[1] for line in menu.splitlines() if line.endswith(".md")} >= pages
