"""Load the C code of this package: prebuilt in the wheel, else compiled on first use into the user's cache.

Code is compiled for instruction set levels instead of one processor, so that a wheel and a shared home folder can hold
it for all of them. If there is no compiler and no library, callers use torch or numpy instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError

_log = logging.getLogger(__name__)

LEVEL_VARIABLE = "OFFLOAD_RT_CPU_LEVEL"

_X86_FEATURES = {
    "scalar": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx512_bf16": frozenset({"avx512_bf16", "avx512_vnni"}),
}
"""Processor flags, as in /proc/cpuinfo, that each level needs in addition to those of the level before."""

LEVEL_FLAGS = {
    "scalar": (),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx512_bf16": ("-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512vnni", "-mavx512bf16"),
    "neon": (),
}
"""Compiler flags of each level. A level's code runs on every processor of this or a higher level."""

PREBUILT = Path(__file__).parents[1] / "native"
"""Libraries that the wheel's build compiled, named as in the user's cache."""


@functools.cache
def available_levels() -> tuple[str, ...]:
    """Return the levels that this processor runs, lowest first."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ("neon",)
    if machine not in ("x86_64", "amd64"):
        return ("scalar",)
    flags, found = _processor_flags(), []
    for level, needed in _X86_FEATURES.items():
        if not needed <= flags:
            break
        found.append(level)
    return tuple(found)


def processor_level() -> str:
    """Return the level whose code is used: `OFFLOAD_RT_CPU_LEVEL`, else the highest that the processor runs.

    Raises:
        ConfigError: The variable names an unknown level, or one that this processor does not run.
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


def load_library(source: Path, flags: Sequence[str], without: str) -> ctypes.CDLL | None:
    """Return the library that `source` compiles to with `flags` at the processor's level. Return None if it is neither
    prebuilt nor can be compiled; the log then reports what happens `without` it."""
    level = processor_level()
    name = library_name(source, flags, level)
    try:
        if (shipped := PREBUILT / name).exists():
            return ctypes.CDLL(str(shipped))
        cached = user_cache() / "native" / name
        if not cached.exists():
            compile_library(source, flags, level, cached)
        return ctypes.CDLL(str(cached))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("%s: %s", without, error)
        return None


def library_name(source: Path, flags: Sequence[str], level: str) -> str:
    """Return the file name of a compiled library. It changes with the source, its folder's headers, and the flags."""
    digest = hashlib.sha256(" ".join((*LEVEL_FLAGS[level], *flags)).encode() + source.read_bytes())
    for header in sorted(source.parent.glob("*.h")):
        digest.update(header.read_bytes())
    return f"{source.stem}-{platform.machine().lower()}-{level}-{digest.hexdigest()[:16]}.so"


def compile_library(source: Path, flags: Sequence[str], level: str, target: Path) -> None:
    """Compile `source` to `target`, which appears whole or not at all.

    Raises:
        OSError: There is no compiler, or the folder of `target` cannot be written.
        subprocess.SubprocessError: The compiler failed.
    """
    given = os.environ.get("CC", "").strip() or "cc"
    named, *options = [given] if shutil.which(given) else given.split()
    if (compiler := shutil.which(named)) is None:
        raise FileNotFoundError(f"there is no compiler {named}")
    command = [compiler, *options, *LEVEL_FLAGS[level], *flags, "-shared", "-fPIC"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        subprocess.run([*command, str(source), "-o", str(built), "-lm"], check=True, capture_output=True, timeout=120)
        with built.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(built, target)


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/offload-rt`, else `~/.cache/offload-rt`; for a user who has no home folder, one that goes with
    the process."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload-rt"
    except RuntimeError:
        return Path(_passing().name)


@functools.cache
def _passing() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="offload-rt-")


def _processor_flags() -> frozenset[str]:
    """Return the flags of the first processor in /proc/cpuinfo; none if the file does not exist."""
    described = Path("/proc/cpuinfo")
    for line in described.read_text().splitlines() if described.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
