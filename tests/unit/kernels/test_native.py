"""Test C code that is compiled at first use, cached for later processes, and replaced by torch if it is unavailable."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compilers import unoptimised_compiler
from support.levels import unload
from support.low_bit import approximate_only, random_pages

from offload_rt.errors import ConfigError
from offload_rt.kernels import low_bit, low_bit_sequence, native
from offload_rt.kernels.low_bit import Layout
from offload_rt.kernels.low_bit_sequence import low_bit_query
from offload_rt.kernels.pages import PAGE_BLOCKS
from offload_rt.policies.infinigen.approximate_kv import VALUE_BITS
from offload_rt.utils import native_code, native_libraries
from offload_rt.utils.native_code import cache_folder
from offload_rt.utils.native_libraries import LIBRARIES, PACKAGE

LAYOUT = Layout(32, 2)
STRESS = "OFFLOAD_RT_STRESS" in os.environ


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache folder and a compiler without optimisation, with no library loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if (compiler := native_code.find_compiler()) is not None:
        monkeypatch.setenv("CC", str(unoptimised_compiler(compiler, tmp_path / "quick")))
    unload()
    yield tmp_path / "offload-rt" / "native"
    unload()


def scores() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores of the same low-bit KV from the C code and from torch."""
    storage, q, mean = random_pages(LAYOUT, 2, 100), torch.randn(2, 1, 32), torch.randn(2, 32)
    given = (q, mean, storage, LAYOUT, range(3, 90))
    return low_bit_query(*given).scores, low_bit.low_bit_scores(*given)


def test_code_is_compiled_once_for_all_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if low_bit_sequence.library(32, 2) is None:
        pytest.skip("no C compiler")
    torch.testing.assert_close(*scores(), rtol=1e-6, atol=1e-5)
    names = sorted(path.name.split("-")[0] for path in cache.iterdir() if path.suffix == ".so")
    assert [name for name in names if name != "team"] == ["low_bit"]
    assert len(names) == len(list(cache.iterdir())), "no temporary file stays behind"

    def run(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", run)
    unload()
    assert low_bit_sequence.library(32, 2) is not None


@pytest.mark.slow
def test_each_level_has_its_own_code(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may share a home folder, so file names contain the instruction set level."""
    if low_bit_sequence.library(32, 2) is None:
        pytest.skip("no C compiler")
    for level in native_code.available_levels():
        monkeypatch.setenv(native_code.LEVEL_VARIABLE, level)
        unload()
        assert low_bit_sequence.library(32, 2) is not None and len(list(cache.glob(f"*-{level}-*"))) == 1


def test_a_level_that_the_processor_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_code.LEVEL_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match="OFFLOAD_RT_CPU_LEVEL='avx1024': this processor runs the levels "):
        native_code.processor_level()


def test_unsupported_shapes_have_no_c_code() -> None:
    assert low_bit_sequence.library(48, 2) is None


def test_without_a_compiler_torch_computes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert low_bit_sequence.library(32, 2) is None and not cache.exists()
    torch.testing.assert_close(*scores(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("fault", ["it fails", "it writes no library", "no place to write"])
def test_a_failing_compiler_is_reported_and_torch_computes(
    fault: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "no place to write":
        cache.parent.write_text("a file")
    else:
        compiler = cache.parents[1] / "cc"
        does = "exit 1" if fault == "it fails" else 'while [ "$1" != -o ]; do shift; done; echo no > "$2"'
        compiler.write_text(f"#!/bin/sh\n{does}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.INFO, native_code.__name__):
        assert low_bit_sequence.library(32, 2) is None
    assert "low_bit.c is not available, torch computes instead" in caplog.text
    torch.testing.assert_close(*scores(), rtol=1e-6, atol=1e-5)


def test_heads_are_distributed_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if low_bit_sequence.library(32, 2) is None:
        pytest.skip("no C compiler")
    storage, q, mean = random_pages(LAYOUT, 5, 200), torch.randn(5, 3, 32), torch.randn(5, 32)
    monkeypatch.setattr(native, "MIN_SCORES_PER_THREAD", 1)
    found = []
    for threads in (1, 2, 5, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        asked = low_bit_query(q, mean, storage, LAYOUT, range(70, 190))
        chosen = asked.select(math.inf, 9) + 70
        found.append((asked.scores, chosen, *approximate_only(asked, chosen)))
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


@pytest.mark.parametrize("named", ["env cc", "a folder/cc", " "])
def test_a_compiler_may_be_a_command_with_arguments(named: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover a command such as `ccache cc`, a path with spaces, and an empty value."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PATH", str(cache.parents[1] / "quick"), prepend=os.pathsep)
    folder = cache.parents[1] / "a folder"
    folder.mkdir()
    (folder / "cc").symlink_to(str(shutil.which("cc")))
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("CC", named)
    assert low_bit_sequence.library(32, 2) is not None and len(list(cache.iterdir())) == 1


def test_missing_code_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.INFO, native_code.__name__):
        assert low_bit_sequence.library(32, 2) is None and low_bit_sequence.library(64, 2) is None
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "is not in this package, and there is no compiler" in warning.message
    assert "low_bit.c is not available, torch computes instead: there is no compiler no-such-compiler" in caplog.text
    assert native_libraries.native_status().origin == "missing"


def test_prebuilt_code_is_used_without_a_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if low_bit_sequence.library(32, 2) is None:
        pytest.skip("no C compiler")
    assert native_libraries.native_status().origin == "compiled"
    monkeypatch.setattr(native_code, "PREBUILT", cache.rename(tmp_path / "shipped"))
    monkeypatch.setenv("CC", "no-such-compiler")
    unload()
    assert low_bit_sequence.library(32, 2) is not None and not cache.exists() and not caplog.text
    assert low_bit_sequence.library(64, 2) is None, "this one was not shipped"


def test_options_are_prebuilt() -> None:
    """Cover all numbers of bits, the page size and all C files."""
    prebuilt = native_libraries.LIBRARIES["low_bit"].constants
    assert set(prebuilt["VALUE_BITS"]) == set(VALUE_BITS.values()) and prebuilt["PAGE_BLOCKS"] == (PAGE_BLOCKS,)
    sources = {path for folder in ("kernels", "kv_cache/disk") for path in (PACKAGE / folder).glob("*.c")}
    assert {library.path for library in native_libraries.LIBRARIES.values()} == sources


def test_without_a_home_folder_the_process_has_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a user id without a home folder."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("OFFLOAD_RT_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~").expanduser())
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_folder().is_dir() and cache_folder() == native_code.user_cache()


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "levels"),
    [
        ("x86_64", "flags : sse2 avx\n", ("scalar",)),
        ("x86_64", "flags : avx2 fma bmi1 bmi2 f16c avx512_bf16\n", ("scalar", "avx2")),
        ("AMD64", "", ("scalar",)),
        ("aarch64", "Features : fp sve\n", ("neon",)),
        ("riscv64", "", ("scalar",)),
    ],
)
def test_levels_of_a_processor(
    machine: str, cpuinfo: str, levels: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpuinfo:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{cpuinfo}")
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(native_code, "Path", lambda _: tmp_path / "cpuinfo")
    native_code.available_levels.cache_clear()
    assert native_code.available_levels() == levels
    native_code.available_levels.cache_clear()


@pytest.mark.parametrize("level", native_code.available_levels() if STRESS else native_code.available_levels()[-1:])
@pytest.mark.parametrize("name", LIBRARIES)
def test_code_has_no_warnings(name: str, level: str, tmp_path: Path) -> None:
    """Cover the smallest and largest value of each constant. `make test` only parses the code, of the highest level."""
    if (compiler := native_code.find_compiler()) is None:
        pytest.skip("no C compiler")
    library = LIBRARIES[name]
    ends = ({name: values[i] for name, values in library.constants.items()} for i in (0, -1))
    for i, flags in enumerate({(*library.flags_for(each), "-Wall", "-Wextra", "-Werror") for each in ends}):
        if STRESS:
            native_code.compile_library(library.path, flags, level, tmp_path / f"library{i}.so")
        else:
            command = [*compiler, *native_code.LEVEL_FLAGS[level], *flags, "-fsyntax-only", str(library.path)]
            subprocess.run(command, check=True, timeout=120)


def test_a_structure_unlike_the_one_in_c_is_an_error() -> None:
    """If the fields differed, C code would read wrong values."""
    if (code := low_bit_sequence.library(32, 2)) is None:
        pytest.skip("no C compiler")
    own = list(low_bit_sequence._StoreCall._fields_)
    native_code.check_structure(code, low_bit_sequence._StoreCall)
    for fields in (
        [own[1], own[0], *own[2:]],
        own[:-1],
        [*own, ("more", ctypes.c_int32)],
        [*own[:-1], ("values", ctypes.c_int64)],
        [("page", ctypes.c_void_p), *own[1:]],
    ):
        changed = type("_StoreCall", (ctypes.Structure,), {"_fields_": fields})
        with pytest.raises(RuntimeError, match=r"StoreCall .* differ in .* Declare the same fields in both"):
            native_code.check_structure(code, changed)
