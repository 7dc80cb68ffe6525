"""What an installation holds: built without network, once from the tree and once through the sdist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from transformers.utils import is_kernels_available

ROOT = Path(__file__).parents[3]
LINKED = ("kernels", "skewing", "eval")


def tracked_or_new() -> list[str]:
    """Paths of the working tree that git does not ignore, links not followed."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree as a clone would have it, with a module in every linked folder. Of the models' weights
    only the beginning: 22 MB would be compressed three times, and nothing is said of what they hold."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the list of files comes from git")
    copy = tmp_path_factory.mktemp("tree")
    for name in tracked_or_new():
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        if name.endswith(".safetensors"):
            os.truncate(copy / name, 1000)
    for name in LINKED:
        (copy / name).mkdir(exist_ok=True)
        (copy / name / "probe.py").write_text(f'NAME = "{name}"\n')
    return copy


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names inside the wheel built from the tree, inside the sdist, and inside the wheel built from the sdist."""
    out = tmp_path_factory.mktemp("out")
    build = (
        "import setuptools.build_meta as b, sys\n"
        "_, out, *kinds = sys.argv\n"
        "for kind in kinds:\n"
        "    getattr(b, 'build_' + kind)(out)\n"
    )
    run(sys.executable, "-c", build, str(out), "sdist", "wheel", cwd=tree)
    sdist = next(out.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
        archive.extractall(out, filter="data")
    run(sys.executable, "-c", build, str(out / "again"), "wheel", cwd=out / sdist.name.removesuffix(".tar.gz"))
    return {
        "sdist": in_sdist,
        "wheel": set(zipfile.ZipFile(next(out.glob("*.whl"))).namelist()),
        "wheel from sdist": set(zipfile.ZipFile(next((out / "again").glob("*.whl"))).namelist()),
    }


@pytest.mark.parametrize("kind", ["sdist", "wheel", "wheel from sdist"])
def test_package_is_complete(built: dict[str, set[str]], kind: str) -> None:
    names = built[kind]
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "offload_rt").glob("*.py")}
    modules |= {f"offload_rt/{name}/probe.py" for name in LINKED}
    modules |= {f"offload_rt/{p.relative_to(ROOT)}" for name in LINKED for p in (ROOT / name).rglob("*.py")}
    data = {str(p.relative_to(ROOT)) for d in ("data", "reference") for p in (ROOT / "offload_rt" / d).rglob("*.*")}
    data = {name for name in data if (ROOT / name).is_file()}
    assert {"offload_rt/data/black_arrow.txt", "offload_rt/reference/llama/model.safetensors"} <= data
    assert modules | data | {"offload_rt/py.typed"} <= names
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.parametrize("kind", ["sdist", "wheel", "wheel from sdist"])
def test_what_code_reads_beside_itself_is_there(built: dict[str, set[str]], kind: str) -> None:
    """Every file of the package's rooms that is not Python: C code, texts, models, task files. Pages for readers of the
    repository and measured results are not read."""
    rooms = {f"{name}/": f"offload_rt/{name}/" for name in LINKED} | {"offload_rt/": "offload_rt/"}
    files = [name for name in tracked_or_new() if (ROOT / name).is_file() and not name.endswith((".py", "README.md"))]
    wanted = {
        inside + name.removeprefix(outside)
        for outside, inside in rooms.items()
        for name in files
        if name.startswith(outside) and not name.startswith("eval/results/")
    }
    assert {"offload_rt/kernels/low_bit.c", "offload_rt/eval/quality/tasks/piqa_local.yaml"} <= wanted
    assert not wanted - built[kind]


@pytest.mark.parametrize("kind", ["wheel", "wheel from sdist"])
def test_wheel_holds_one_top_level_package(built: dict[str, set[str]], kind: str) -> None:
    tops = {name.split("/", 1)[0] for name in built[kind]}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"offload_rt"}


def test_editable_install_reaches_the_links_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--target", str(target), "--editable", str(tree), cwd=tmp_path)
    probe = (
        "import importlib, importlib.util, site, sys\n"
        f"site.addsitedir({str(target)!r})\n"
        f"sys.path.append({sysconfig.get_path('purelib')!r})\n"
        "from pathlib import Path\n"
        "import offload_rt\n"
        f"assert Path(next(iter(offload_rt.__path__))).is_relative_to({str(tree)!r}), offload_rt.__path__\n"
        f"for name in {LINKED!r}:\n"
        "    assert importlib.import_module(f'offload_rt.{name}.probe').NAME == name\n"
        "    spec = importlib.util.find_spec(name)\n"
        f"    assert spec is None or {str(tree)!r} not in str(spec), spec\n"
    )
    # -S: this environment's packages without its .pth files, whose own editable install would answer first.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", probe], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_no_file_is_too_large_for_git() -> None:
    limit = 16 * 2**20
    large = [n for n in tracked_or_new() if (ROOT / n).is_file() and (ROOT / n).stat().st_size > limit]
    assert not large
    assert (ROOT / "offload_rt/data/black_arrow.txt").stat().st_size <= 400_000


def test_transformers_does_not_take_our_kernels_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernels` is the name of a package that transformers imports; from the repository root ours must not answer."""
    monkeypatch.syspath_prepend(ROOT)
    is_kernels_available.cache_clear()
    assert not is_kernels_available()
