"""Test the contents of an installation that is built, without network, from the working tree and from the sdist."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.compilers import fake_compiler
from transformers.utils import is_kernels_available

from offload_rt.utils import native_code, native_libraries

ROOT = Path(__file__).parents[3]
STRESS = "OFFLOAD_RT_STRESS" in os.environ
pytestmark = pytest.mark.slow
LINKED = ("kernels", "skewing", "eval")


def unignored_files() -> list[str]:
    """Return the files that git tracks, and those it does not ignore."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that a clone of the working tree would contain, and add a module to every linked folder.

    Model weights are truncated, because it would be slow to compress 22 MB three times.
    """
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the list of files comes from git")
    copy = tmp_path_factory.mktemp("tree")
    for name in unignored_files():
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
def out(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist and a wheel from the working tree. In `again`, build a wheel from the sdist without a compiler.

    `make stress` builds the first wheel as for a release. Otherwise, its libraries are empty files.
    """
    out = tmp_path_factory.mktemp("out")
    compiler = native_code.find_compiler()
    if compiler is not None and not STRESS:
        compiler = [str(fake_compiler(out / "quick"))]
    build = (
        "import setuptools.build_meta as b, sys\n"
        "_, out, *kinds = sys.argv\n"
        "for kind in kinds:\n"
        "    getattr(b, 'build_' + kind)(out)\n"
    )
    run(sys.executable, "-c", build, str(out), "sdist", "wheel", cwd=clone, CC=shlex.join(compiler or ["no-compiler"]))
    sdist = next(out.glob("*.tar.gz"))
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(out)], check=True)
    unpacked = out / sdist.name.removesuffix(".tar.gz")
    done = run(sys.executable, "-c", build, str(out / "again"), "wheel", cwd=unpacked, CC="no-compiler")
    assert done.stderr.count("no C code is prebuilt, it is compiled on first use: there is no compiler no-comp") == 1
    return out


@pytest.fixture(scope="module")
def archive_files(out: Path) -> dict[str, set[str]]:
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        in_sdist = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    return {
        "sdist": in_sdist,
        "wheel": set(zipfile.ZipFile(next(out.glob("*.whl"))).namelist()),
        "wheel from sdist": set(zipfile.ZipFile(next((out / "again").glob("*.whl"))).namelist()),
    }


@pytest.mark.parametrize("kind", ["sdist", "wheel", "wheel from sdist"])
def test_package_is_complete(archive_files: dict[str, set[str]], kind: str) -> None:
    names = archive_files[kind]
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "offload_rt").glob("*.py")}
    modules |= {f"offload_rt/{name}/probe.py" for name in LINKED}
    modules |= {f"offload_rt/{p.relative_to(ROOT)}" for name in LINKED for p in (ROOT / name).rglob("*.py")}
    data = {str(p.relative_to(ROOT)) for d in ("data", "reference") for p in (ROOT / "offload_rt" / d).rglob("*.*")}
    data = {name for name in data if (ROOT / name).is_file()}
    assert {"offload_rt/data/black_arrow.txt", "offload_rt/reference/llama/model.safetensors"} <= data
    assert modules | data | {"offload_rt/py.typed"} <= names
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.parametrize("kind", ["sdist", "wheel", "wheel from sdist"])
def test_data_files_are_included(archive_files: dict[str, set[str]], kind: str) -> None:
    folders = {f"{name}/": f"offload_rt/{name}/" for name in LINKED} | {"offload_rt/": "offload_rt/"}
    files = [name for name in unignored_files() if (ROOT / name).is_file() and not name.endswith((".py", "README.md"))]
    wanted = {
        inside + name.removeprefix(outside)
        for outside, inside in folders.items()
        for name in files
        if name.startswith(outside) and not name.startswith("eval/results/")
    }
    assert {"offload_rt/kernels/low_bit.c", "offload_rt/eval/quality/tasks/piqa_local.yaml"} <= wanted
    assert not wanted - archive_files[kind]


@pytest.mark.parametrize("kind", ["wheel", "wheel from sdist"])
def test_wheel_contains_one_top_level_package(archive_files: dict[str, set[str]], kind: str) -> None:
    tops = {name.split("/", 1)[0] for name in archive_files[kind]}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"offload_rt"}


def test_wheel_has_all_libraries_and_the_platform_tag(out: Path, archive_files: dict[str, set[str]]) -> None:
    """Without a compiler, the wheel has no libraries and is tagged for any platform."""
    assert next((out / "again").glob("*.whl")).stem.endswith("-py3-none-any")
    assert not any("/native/" in name for name in archive_files["wheel from sdist"])
    if native_code.find_compiler() is None:
        pytest.skip("no C compiler")
    names = {native_code.library_name(*library) for library in native_libraries.prebuilt_libraries()}
    assert {name.rsplit("/", 1)[1] for name in archive_files["wheel"] if "/native/" in name} == names
    wheel = next(out.glob("*.whl"))
    assert wheel.stem.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}")
    with zipfile.ZipFile(wheel) as archive:
        size = sum(one.compress_size for one in archive.infolist() if "/native/" in one.filename)
    assert size < 3 * 2**20


@pytest.mark.skipif(not STRESS, reason="needs a release build: make stress PART=wheel")
def test_wheel_runs_without_a_compiler(out: Path, tmp_path: Path) -> None:
    if native_code.find_compiler() is None:
        pytest.skip("no C compiler")
    environment, cache = tmp_path / "environment", tmp_path / "cache"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=tmp_path)
    python = environment / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, str(next(out.glob("*.whl"))), cwd=tmp_path)
    [site] = environment.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for weights in (ROOT / "offload_rt/reference").rglob("*.safetensors"):
        copied = site / weights.relative_to(ROOT)
        copied.unlink()
        copied.symlink_to(weights)
    variables = {"PATH": str(environment / "bin"), "XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path)}
    variables |= {"OMP_NUM_THREADS": "1"}
    stats, prompt = tmp_path / "stats.json", tmp_path / "prompt.txt"
    prompt.write_text("The night was dark. " * 20)
    flags = ("--prompt-file", str(prompt), "--max-new-tokens", "8", "--stats-json", str(stats))
    generate = (str(environment / "bin/offload-rt"), "generate", "reference", *flags)
    for level in native_code.available_levels():
        forced = variables | {native_code.LEVEL_VARIABLE: level}
        done = subprocess.run(generate, env=forced, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert json.loads(stats.read_text())["native_code"] == f"{level}, prebuilt"
        assert not list(cache.rglob("*.so")) and "C code" not in done.stderr


def test_editable_install_has_linked_folders_only_in_the_package(clone: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--target", str(target), "--editable", str(clone), cwd=tmp_path)
    probe = (
        "import importlib, importlib.util, site, sys\n"
        f"site.addsitedir({str(target)!r})\n"
        f"sys.path.append({sysconfig.get_path('purelib')!r})\n"
        "from pathlib import Path\n"
        "import offload_rt\n"
        f"assert Path(next(iter(offload_rt.__path__))).is_relative_to({str(clone)!r}), offload_rt.__path__\n"
        f"for name in {LINKED!r}:\n"
        "    assert importlib.import_module(f'offload_rt.{name}.probe').NAME == name\n"
        "    spec = importlib.util.find_spec(name)\n"
        f"    assert spec is None or {str(clone)!r} not in str(spec), spec\n"
    )
    # -S uses this environment's packages without its .pth files, whose editable install would be found first.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", probe], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_no_file_is_too_large_for_git() -> None:
    limit = 16 * 2**20
    large = [n for n in unignored_files() if (ROOT / n).is_file() and (ROOT / n).stat().st_size > limit]
    assert not large
    assert (ROOT / "offload_rt/data/black_arrow.txt").stat().st_size <= 400_000


def test_transformers_ignores_the_folder_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports a package named `kernels`. It must not find this project's folder with that name."""
    monkeypatch.syspath_prepend(ROOT)
    is_kernels_available.cache_clear()
    assert not is_kernels_available()
