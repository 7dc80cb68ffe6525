"""Load this package's C code. It is either prebuilt in the wheel, or compiled into the user's cache on first use.

The code is compiled separately for each instruction set level. If there is neither a prebuilt library nor a compiler,
callers use torch or numpy instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ..errors import ConfigError

_log = logging.getLogger(__name__)

LEVEL_VARIABLE = "OFFLOAD_RT_CPU_LEVEL"

_X86_FEATURES = {
    "scalar": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx512_bf16": frozenset({"avx512_bf16", "avx512_vnni"}),
}
"""Processor flags (as named in /proc/cpuinfo) that each level requires in addition to those of the previous level."""

LEVEL_FLAGS = {
    "scalar": (),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx512_bf16": ("-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512vnni", "-mavx512bf16"),
    "neon": (),
}
"""Compiler flags for each level. Code compiled for a level runs on all processors of that level or a higher one."""

PREBUILT = Path(__file__).parents[1] / "native"
"""Folder with the prebuilt libraries in the wheel. Their file names are the same as in the user's cache."""


@functools.cache
def available_levels() -> tuple[str, ...]:
    """Return the instruction set levels that this processor supports, lowest first."""
    if (levels := machine_levels())[-1] not in _X86_FEATURES or len(levels) == 1:
        return levels
    flags, found = frozenset(cpuinfo("flags").split()), []
    for level, needed in _X86_FEATURES.items():
        if not needed <= flags:
            break
        found.append(level)
    return tuple(found)


def processor_level() -> str:
    """Return the instruction set level to use: `OFFLOAD_RT_CPU_LEVEL` if set, otherwise the processor's highest level.

    Raises:
        ConfigError: The variable is set to a level that is unknown or not supported by this processor.
    """
    levels, forced = available_levels(), os.environ.get(LEVEL_VARIABLE, "").strip()
    if not forced:
        return levels[-1]
    if forced not in levels:
        raise ConfigError(
            f"{LEVEL_VARIABLE}={forced!r}: this processor runs the levels {', '.join(levels)}; choose one of them, or "
            "unset the variable"
        )
    return forced


def machine_levels() -> tuple[str, ...]:
    """Return all instruction set levels of this processor's architecture, lowest first, whether supported or not."""
    architecture = platform.machine().lower()
    if architecture in ("aarch64", "arm64"):
        return ("neon",)
    return tuple(_X86_FEATURES) if architecture in ("x86_64", "amd64") else ("scalar",)


def library_paths(source: Path, flags: Sequence[str], level: str) -> tuple[Path, Path]:
    name = library_name(source, flags, level)
    return PREBUILT / name, user_cache() / "native" / name


class _Field(ctypes.Structure):
    """The structure `Field` of kernels/fields.h, which describes a field of another structure."""

    _fields_: ClassVar = [("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64)]


def check_structure(library: ctypes.CDLL, structure: type[ctypes.Structure]) -> None:
    """Check that the Python structure `_Name` has the same fields as the C structure `Name`.

    Raises:
        RuntimeError: A field differs in name, offset or size.
    """
    name = structure.__name__.strip("_")
    described = ctypes.cast(ctypes.addressof(_Field.in_dll(library, f"fields_of_{name}")), ctypes.POINTER(_Field))
    fields = itertools.takewhile(lambda field: field.name is not None, map(described.__getitem__, itertools.count()))
    in_c = {field.name.decode(): (field.offset, field.size) for field in fields}
    in_c["the total size"] = 0, described[len(in_c)].size
    places = {field[0]: getattr(structure, field[0]) for field in structure._fields_}
    in_python = {field: (place.offset, place.size) for field, place in places.items()}
    in_python["the total size"] = 0, ctypes.sizeof(structure)
    if unlike := [field for field in {**in_c, **in_python} if in_c.get(field) != in_python.get(field)]:
        raise RuntimeError(
            f"{name} in {Path(library._name).name} and {structure.__name__} in {structure.__module__} differ in "
            f"{', '.join(unlike)}. Declare the same fields in both, or install offload-rt again."
        )


def load_library(source: Path, flags: Sequence[str], fallback: str) -> ctypes.CDLL | None:
    """Return the library built from `source` for the processor's level.

    It is prebuilt, cached, or compiled now with `flags`.

    If this fails, log the text `fallback`, warn once per process, and return None.
    """
    level = processor_level()
    prebuilt, cached = library_paths(source, flags, level)
    try:
        if prebuilt.exists():
            return ctypes.CDLL(str(prebuilt))
        if not cached.exists():
            compile_library(source, flags, level, cached)
        return ctypes.CDLL(str(cached))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("%s is not available, %s: %s", source.name, fallback, error)
        _warn_once(level)
        return None


@functools.cache
def _warn_once(level: str) -> None:
    why = "could not be compiled" if find_compiler() is not None else "is not in this package, and there is no compiler"
    _log.warning(
        "offload-rt: C code for the processor level %s %s; torch computes instead, slower. Install a wheel for this "
        "machine, or gcc.",
        level,
        why,
    )


def library_name(source: Path, flags: Sequence[str], level: str) -> str:
    """Return the file name of a compiled library.

    The name contains a hash of its source, headers and compiler flags.
    """
    digest = hashlib.sha256(" ".join((*LEVEL_FLAGS[level], *flags)).encode() + source.read_bytes())
    for header in sorted(source.parent.glob("*.h")):
        digest.update(header.read_bytes())
    return f"{source.stem}-{platform.machine().lower()}-{level}-{digest.hexdigest()[:16]}.so"


def compile_library(source: Path, flags: Sequence[str], level: str, target: Path) -> None:
    """Compile `source` for an instruction set level, and write the result to `target` atomically.

    Raises OSError if there is no compiler or the folder cannot be written, and SubprocessError if the compiler fails.
    """
    if (compiler := find_compiler()) is None:
        raise FileNotFoundError(f"there is no compiler {_compiler_command()[0]}")
    command = [*compiler, *LEVEL_FLAGS[level], *flags, "-shared", "-fPIC"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        subprocess.run([*command, str(source), "-lm", "-o", str(built)], check=True, capture_output=True, timeout=120)
        with built.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(built, target)


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler: `$CC` with its arguments, or `cc`. Return None if it is not installed."""
    name, *options = _compiler_command()
    compiler = shutil.which(name)
    return None if compiler is None else [compiler, *options]


def _compiler_command() -> list[str]:
    given = os.environ.get("CC", "").strip() or "cc"
    return [given] if shutil.which(given) else given.split()


def cache_folder() -> Path:
    """Return the folder for results that are computed only once: `$OFFLOAD_RT_CACHE` if set, otherwise
    `user_cache()`.
    """
    own = os.environ.get("OFFLOAD_RT_CACHE")
    return Path(own) if own else user_cache()


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/offload-rt`, `~/.cache/offload-rt`, or a temporary folder of this process, in this order
    of preference.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload-rt"
    except RuntimeError:
        return Path(_temporary_folder().name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="offload-rt-")


def processor_name() -> str:
    return cpuinfo("model name") or platform.processor()


def cpuinfo(wanted: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, or "" if it is not stated."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == wanted:
            return value.strip()
    return ""
