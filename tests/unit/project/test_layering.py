"""Test imports: no folder imports from a folder in a higher or the same layer, and there are no import cycles."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "offload_rt"
ORDER = (
    "errors core", "utils", "config outputs sampling_params", "kernels", "models kv_cache", "skewing", "policies",
    "transfer", "model_runner storage planning", "engine", "sessions", "llm", "async_llm drop_in writing", "__init__",
    "eval server", "cli", "__main__",
)  # fmt: skip
RANK = {folder: rank for rank, folders in enumerate(ORDER) for folder in folders.split()}
LINKED = {"kernels", "skewing", "eval"}  # top-level folders that must not be imported by these names
BARE = re.compile(r"\b(from|import)\s.*\b(kernels|skewing|eval)\b")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node. Skip expressions, because visiting them would take ten times as long."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


@functools.cache
def imported_modules(source: str, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the name of each imported module, split at dots. Relative imports are resolved against `package`."""
    found: list[tuple[str, ...]] = []
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            names = ((*base, *(node.module or "").split("."), alias.name) for alias in node.names)
            found += (tuple(part for part in name if part) for name in names)
    return found


def find_violations(source: str, path: Path) -> list[str]:
    folder = path.with_suffix("").parts[1] if path.parts[0] == "offload_rt" else None
    found: list[str] = []
    if folder is None and not BARE.search(source):
        return found
    for name in imported_modules(source, path.parent.parts):
        if name[0] in LINKED:
            found.append(f"{path}: bare import of {name[0]}; it is offload_rt.{name[0]}")
        if folder is None or name[0] != "offload_rt":
            continue
        other = name[1] if len(name) > 1 and name[1] in RANK else "__init__"
        if other != folder and RANK[other] >= RANK[folder]:
            found.append(f"{path}: {folder} may not import {other}")
    return found


def module_name(path: Path) -> tuple[str, ...]:
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def import_graph(sources: dict[Path, str]) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """Return the modules that each module imports.

    Importing a name that a package re-exports counts as importing that package. Parent packages of an imported module
    do not count.
    """
    modules = {module_name(path) for path in sources}
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path, source in sources.items():
        targets = {name if name in modules else name[:-1] for name in imported_modules(source, path.parent.parts)}
        graph[module_name(path)] = (targets & modules) - {module_name(path)}
    return graph


def find_cycles(graph: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[list[str]]:
    """Return the modules in each import cycle (strongly connected component)."""

    def reach(start: tuple[str, ...]) -> set[tuple[str, ...]]:
        found: set[tuple[str, ...]] = set()
        ahead = list(graph[start])
        while ahead:
            if (name := ahead.pop()) not in found:
                found.add(name)
                ahead += graph[name]
        return found

    reached = {name: reach(name) for name in graph}
    components = {frozenset(other for other in found if name in reached[other]) for name, found in reached.items()}
    return sorted(sorted(".".join(name) for name in component) for component in components if component)


EVAL_ORDER = ("core", "quality speed", "suites", "measures", "cli")
EVAL_RANK = {folder: rank for rank, folders in enumerate(EVAL_ORDER) for folder in folders.split()}


def find_eval_violations(source: str, path: Path) -> list[str]:
    folder, found = path.with_suffix("").parts[2], []
    for parts in imported_modules(source, path.parent.parts):
        if parts[:2] != ("offload_rt", "eval") or len(parts) < 3:
            continue
        if parts[2] != folder and EVAL_RANK[parts[2]] >= EVAL_RANK[folder]:
            found.append(f"{path}: eval/{folder} may not import eval/{parts[2]}")
    return found


def python_files() -> list[Path]:
    folders = [entry for entry in PACKAGE.iterdir() if entry.is_dir()] + [ROOT / "scripts", ROOT / "tests"]
    paths = [*PACKAGE.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return sorted(path.relative_to(ROOT) for path in paths)


def test_no_folder_imports_from_a_higher_layer() -> None:
    found = [
        line for path in python_files() for line in find_violations((ROOT / path).read_text(encoding="utf-8"), path)
    ]
    assert not found, "\n" + "\n".join(found)


def test_no_import_cycles() -> None:
    sources = {
        path: (ROOT / path).read_text(encoding="utf-8") for path in python_files() if path.parts[0] == "offload_rt"
    }
    assert len(sources) > 100
    assert find_cycles(import_graph(sources)) == []


def test_import_cycles_are_found() -> None:
    sources = {
        Path("offload_rt/a/one.py"): "from .two import f",
        Path("offload_rt/a/two.py"): "def f():\n    from offload_rt.b import three",
        Path("offload_rt/b/three.py"): "if TYPE_CHECKING:\n    import offload_rt.a.one",
        Path("offload_rt/b/four.py"): "from . import three",
        Path("offload_rt/__init__.py"): "from .a.one import f",
    }
    assert find_cycles(import_graph(sources)) == [["offload_rt.a.one", "offload_rt.a.two", "offload_rt.b.three"]]
    del sources[Path("offload_rt/b/three.py")]
    assert find_cycles(import_graph(sources)) == []


def test_no_folder_of_eval_imports_from_a_higher_layer() -> None:
    eval_files = [path for path in python_files() if path.parts[:2] == ("offload_rt", "eval")]
    assert {path.with_suffix("").parts[2] for path in eval_files} == EVAL_RANK.keys()
    found = [
        line for path in eval_files for line in find_eval_violations((ROOT / path).read_text(encoding="utf-8"), path)
    ]
    assert not found, "\n" + "\n".join(found)
    bad = "from ..speed.bench import run_bench"
    assert len(find_eval_violations(bad, Path("offload_rt/eval/quality/x.py"))) == 1
    assert find_eval_violations(bad, Path("offload_rt/eval/suites/x.py")) == []


def test_every_file_is_in_a_known_folder() -> None:
    folders = {path.with_suffix("").parts[1] for path in python_files() if path.parts[0] == "offload_rt"}
    assert folders <= RANK.keys(), f"folders without a rank: {sorted(folders - RANK.keys())}"
    assert {"errors", "core", "config", "models", "policies", "transfer"} <= folders


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("offload_rt/models/decoder.py", "from ..kv_cache.pool import HostPool"),
        ("offload_rt/models/decoder.py", "def f():\n    from ..policies import base"),
        ("offload_rt/core.py", "from . import config"),
        ("offload_rt/kv_cache/layout.py", "import offload_rt.engine.engine"),
        ("offload_rt/sessions/turn.py", "from offload_rt import LLM"),
        ("offload_rt/skewing/fold.py", "from ..llm import LLM"),
        ("offload_rt/transfer/cpu.py", "from kernels import reference"),
        ("scripts/x.py", "import eval.speed"),
    ],
)
def test_forbidden_imports_are_found(path: str, source: str) -> None:
    assert len(find_violations(source, Path(path))) == 1


def test_linked_folders_are_no_packages() -> None:
    for name in sorted(LINKED):
        assert not (ROOT / name / "__init__.py").exists()
        assert (PACKAGE / name).is_symlink()
        assert (PACKAGE / name).readlink() == Path("..", name)
