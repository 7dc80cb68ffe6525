"""Test imports: no folder imports from a folder above or beside it, and no modules import each other in a circle."""

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
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms.split()}
LINKED = {"kernels", "skewing", "eval"}  # top-level folders that must not be imported by these names
BARE = re.compile(r"\b(from|import)\s.*\b(kernels|skewing|eval)\b")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node. Visiting expressions too would take ten times as long."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


@functools.cache
def imported(source: str, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the absolute name of every module imported in `source`, as parts. `package` is the package of `source`."""
    found: list[tuple[str, ...]] = []
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            names = ((*base, *(node.module or "").split("."), alias.name) for alias in node.names)
            found += (tuple(part for part in name if part) for name in names)
    return found


def violations(source: str, path: Path) -> list[str]:
    """Return the forbidden imports in `source`, the text of file `path` (relative to the repository)."""
    room = path.with_suffix("").parts[1] if path.parts[0] == "offload_rt" else None
    found: list[str] = []
    if room is None and not BARE.search(source):
        return found
    for name in imported(source, path.parent.parts):
        if name[0] in LINKED:
            found.append(f"{path}: bare import of {name[0]}; it is offload_rt.{name[0]}")
        if room is None or name[0] != "offload_rt":
            continue
        other = name[1] if len(name) > 1 and name[1] in RANK else "__init__"
        if other != room and RANK[other] >= RANK[room]:
            found.append(f"{path}: {room} may not import {other}")
    return found


def module(path: Path) -> tuple[str, ...]:
    """Return the module name of file `path`, as parts."""
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def import_graph(sources: dict[Path, str]) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """Return the imports between these modules.

    A name re-exported by a package counts as an import of the package. Parent packages of an imported module do not
    count.
    """
    modules = {module(path) for path in sources}
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path, source in sources.items():
        targets = {name if name in modules else name[:-1] for name in imported(source, path.parent.parts)}
        graph[module(path)] = (targets & modules) - {module(path)}
    return graph


def circles(graph: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[list[str]]:
    """Return the modules in import cycles: one sorted list for each strongly connected component."""

    def reach(start: tuple[str, ...]) -> set[tuple[str, ...]]:
        found: set[tuple[str, ...]] = set()
        ahead = list(graph[start])
        while ahead:
            if (name := ahead.pop()) not in found:
                found.add(name)
                ahead += graph[name]
        return found

    reached = {name: reach(name) for name in graph}
    knots = {frozenset(other for other in found if name in reached[other]) for name, found in reached.items()}
    return sorted(sorted(".".join(name) for name in knot) for knot in knots if knot)


EVAL_ORDER = ("core", "quality speed", "suites", "measures", "cli")
EVAL_RANK = {folder: rank for rank, folders in enumerate(EVAL_ORDER) for folder in folders.split()}


def eval_violations(source: str, path: Path) -> list[str]:
    """Return the forbidden imports in `source`, the text of file `path` of `eval` (relative to the repository)."""
    folder, found = path.with_suffix("").parts[2], []
    for parts in imported(source, path.parent.parts):
        if parts[:2] != ("offload_rt", "eval") or len(parts) < 3:
            continue
        if parts[2] != folder and EVAL_RANK[parts[2]] >= EVAL_RANK[folder]:
            found.append(f"{path}: eval/{folder} may not import eval/{parts[2]}")
    return found


def files() -> list[Path]:
    """Return the Python files of package, scripts and tests, relative to the repository."""
    folders = [entry for entry in PACKAGE.iterdir() if entry.is_dir()] + [ROOT / "scripts", ROOT / "tests"]
    paths = [*PACKAGE.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return sorted(path.relative_to(ROOT) for path in paths)


def test_no_import_against_the_order() -> None:
    found = [line for path in files() for line in violations((ROOT / path).read_text(encoding="utf-8"), path)]
    assert not found, "\n" + "\n".join(found)


def test_no_import_cycles() -> None:
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in files() if path.parts[0] == "offload_rt"}
    assert len(sources) > 100
    assert circles(import_graph(sources)) == []


def test_every_kind_of_import_cycle_is_found() -> None:
    sources = {
        Path("offload_rt/a/one.py"): "from .two import f",
        Path("offload_rt/a/two.py"): "def f():\n    from offload_rt.b import three",
        Path("offload_rt/b/three.py"): "if TYPE_CHECKING:\n    import offload_rt.a.one",
        Path("offload_rt/b/four.py"): "from . import three",
        Path("offload_rt/__init__.py"): "from .a.one import f",
    }
    assert circles(import_graph(sources)) == [["offload_rt.a.one", "offload_rt.a.two", "offload_rt.b.three"]]
    del sources[Path("offload_rt/b/three.py")]
    assert circles(import_graph(sources)) == []


def test_no_import_against_the_order_of_eval() -> None:
    mine = [path for path in files() if path.parts[:2] == ("offload_rt", "eval")]
    assert {path.with_suffix("").parts[2] for path in mine} == EVAL_RANK.keys()
    found = [line for path in mine for line in eval_violations((ROOT / path).read_text(encoding="utf-8"), path)]
    assert not found, "\n" + "\n".join(found)
    bad = "from ..speed.bench import run_bench"
    assert len(eval_violations(bad, Path("offload_rt/eval/quality/x.py"))) == 1
    assert eval_violations(bad, Path("offload_rt/eval/suites/x.py")) == []


def test_every_file_is_in_a_known_folder() -> None:
    rooms = {path.with_suffix("").parts[1] for path in files() if path.parts[0] == "offload_rt"}
    assert rooms <= RANK.keys(), f"rooms without a rank: {sorted(rooms - RANK.keys())}"
    assert {"errors", "core", "config", "models", "policies", "transfer"} <= rooms


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
def test_violations_are_found(path: str, source: str) -> None:
    assert len(violations(source, Path(path))) == 1


def test_linked_folders_are_no_packages() -> None:
    for name in sorted(LINKED):
        assert not (ROOT / name / "__init__.py").exists()
        assert (PACKAGE / name).is_symlink()
        assert (PACKAGE / name).readlink() == Path("..", name)
