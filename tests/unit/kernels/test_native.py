"""Test C code: compilation on first use, the cache of compiled code, and torch as the fallback."""

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
def native_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache folder and a compiler that does not optimise, and unload all libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if (compiler := native_code.find_compiler()) is not None:
        monkeypatch.setenv("CC", str(unoptimised_compiler(compiler, tmp_path / "quick")))
    unload()
    yield tmp_path / "offload-rt" / "native"
    unload()


def scores_in_c_and_torch() -> tuple[torch.Tensor, torch.Tensor]:
    storage, q, mean = random_pages(LAYOUT, 2, 100), torch.randn(2, 1, 32), torch.randn(2, 32)
    arguments = (q, mean, storage, LAYOUT, range(3, 90))
    return low_bit_query(*arguments).scores, low_bit.low_bit_scores(*arguments)


def test_code_is_compiled_once_for_all_processes(native_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if low_bit_sequence.library(32, 2) is None:
        pytest.skip("no C compiler")
    torch.testing.assert_close(*scores_in_c_and_torch(), rtol=1e-6, atol=1e-5)
    names = sorted(path.name.split("-")[0] for path in native_cache.iterdir() if path.suffix == ".so")
    assert [name for name in names if name != "team"] == ["low_bit"]
    assert len(names) == len(list(native_cache.iterdir())), "no temporary file remains"

    def run(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", run)
    unload()
    assert low_bit_sequence.library(32, 2) is not None


@pytest.mark.slow
def test_each_level_is_compiled_to_its_own_file(native_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with different processors may share a home folder and thus the cache."""
    if low_bit_sequence.library(32, 2) is None:
        pytest.skip("no C compiler")
    for level in native_code.available_levels():
        monkeypatch.setenv(native_code.LEVEL_VARIABLE, level)
        unload()
        assert low_bit_sequence.library(32, 2) is not None and len(list(native_cache.glob(f"*-{level}-*"))) == 1


def test_unsupported_level_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_code.LEVEL_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match="OFFLOAD_RT_CPU_LEVEL='avx1024': this processor runs the levels "):
        native_code.processor_level()


def test_unsupported_shapes_have_no_c_code() -> None:
    assert low_bit_sequence.library(48, 2) is None


def test_torch_computes_without_a_compiler(native_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert low_bit_sequence.library(32, 2) is None and not native_cache.exists()
    torch.testing.assert_close(*scores_in_c_and_torch(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("fault", ["compiler fails", "no library written", "cache not writable"])
def test_failing_compiler_is_reported_and_torch_computes(
    fault: str, native_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "cache not writable":
        native_cache.parent.write_text("a file")
    else:
        compiler = native_cache.parents[1] / "cc"
        does = "exit 1" if fault == "compiler fails" else 'while [ "$1" != -o ]; do shift; done; echo no > "$2"'
        compiler.write_text(f"#!/bin/sh\n{does}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.INFO, native_code.__name__):
        assert low_bit_sequence.library(32, 2) is None
    assert "low_bit.c is not available, torch computes instead" in caplog.text
    torch.testing.assert_close(*scores_in_c_and_torch(), rtol=1e-6, atol=1e-5)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if low_bit_sequence.library(32, 2) is None:
        pytest.skip("no C compiler")
    storage, q, mean = random_pages(LAYOUT, 5, 200), torch.randn(5, 3, 32), torch.randn(5, 32)
    monkeypatch.setattr(native, "MIN_SCORES_PER_THREAD", 1)
    results = []
    for threads in (1, 2, 5, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        query = low_bit_query(q, mean, storage, LAYOUT, range(70, 190))
        chosen = query.select(math.inf, 9) + 70
        results.append((query.scores, chosen, *approximate_only(query, chosen)))
    assert all(
        torch.equal(tensor, same) for result in results[1:] for tensor, same in zip(results[0], result, strict=True)
    )


@pytest.mark.parametrize("command", ["env cc", "a folder/cc", " "])
def test_compiler_command_may_have_arguments_or_spaces_or_be_blank(
    command: str, native_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PATH", str(native_cache.parents[1] / "quick"), prepend=os.pathsep)
    folder = native_cache.parents[1] / "a folder"
    folder.mkdir()
    (folder / "cc").symlink_to(str(shutil.which("cc")))
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("CC", command)
    assert low_bit_sequence.library(32, 2) is not None and len(list(native_cache.iterdir())) == 1


def test_missing_code_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.INFO, native_code.__name__):
        assert low_bit_sequence.library(32, 2) is None and low_bit_sequence.library(64, 2) is None
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "is not in this package, and there is no compiler" in warning.message
    assert "low_bit.c is not available, torch computes instead: there is no compiler no-such-compiler" in caplog.text
    assert native_libraries.native_status().origin == "missing"


def test_prebuilt_code_is_used_without_a_compiler(
    native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if low_bit_sequence.library(32, 2) is None:
        pytest.skip("no C compiler")
    assert native_libraries.native_status().origin == "compiled"
    monkeypatch.setattr(native_code, "PREBUILT", native_cache.rename(tmp_path / "shipped"))
    monkeypatch.setenv("CC", "no-such-compiler")
    unload()
    assert low_bit_sequence.library(32, 2) is not None and not native_cache.exists() and not caplog.text
    assert low_bit_sequence.library(64, 2) is None, "head dimension 64 was not prebuilt"


def test_all_value_bits_page_sizes_and_c_files_are_prebuilt() -> None:
    prebuilt = native_libraries.LIBRARIES["low_bit"].constants
    assert set(prebuilt["VALUE_BITS"]) == set(VALUE_BITS.values()) and prebuilt["PAGE_BLOCKS"] == (PAGE_BLOCKS,)
    sources = {path for folder in ("kernels", "kv_cache/disk") for path in (PACKAGE / folder).glob("*.c")}
    assert {library.path for library in native_libraries.LIBRARIES.values()} == sources


def test_process_without_a_home_folder_has_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, the user may have no home folder."""
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
def test_c_code_compiles_without_warnings(name: str, level: str, tmp_path: Path) -> None:
    if (compiler := native_code.find_compiler()) is None:
        pytest.skip("no C compiler")
    library = LIBRARIES[name]
    # the smallest and the largest value of each constant
    extremes = ({name: values[i] for name, values in library.constants.items()} for i in ((0, -1) if STRESS else (-1,)))
    for i, flags in enumerate(
        {(*library.flags_for(constants), "-Wall", "-Wextra", "-Werror") for constants in extremes}
    ):
        if STRESS:
            native_code.compile_library(library.path, flags, level, tmp_path / f"library{i}.so")
        else:
            # `make test` only parses the code, to save time.
            command = [*compiler, *native_code.LEVEL_FLAGS[level], *flags, "-fsyntax-only", str(library.path)]
            subprocess.run(command, check=True, timeout=120)


def test_structure_that_differs_from_c_is_an_error() -> None:
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
