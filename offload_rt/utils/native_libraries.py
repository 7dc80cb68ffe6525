"""Declarations of this package's C libraries, used for loading them and for building the wheel (`setup.py`).

This module imports only the standard library, because torch is not available when the wheel is built.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from .native_code import find_compiler, library_paths, load_library, machine_levels, processor_level

if TYPE_CHECKING:
    import ctypes

PACKAGE = Path(__file__).parents[1]

KERNEL_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-std=gnu11", "-pthread")
SYSTEM_FLAGS = ("-O2", "-std=gnu11", "-pthread")

PAGE_BLOCKS = 8
"""Number of blocks per page of approximate KV.

Each kernel program looks up the address of one page. On a CPU, pages of 8, 16 and 32 blocks are equally fast. The first
write after a fork copies half a page on average, so small pages are better.
"""

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)
"""Head dimensions for which kernels are prebuilt. Kernels for other multiples of 32 are compiled on first use."""


@dataclass(frozen=True)
class NativeLibrary:
    source: str  # path relative to the package folder
    flags: tuple[str, ...]  # in addition to the flags of the level
    fallback: str  # consequence if the library is missing, for the log message
    constants: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # values of macros that are prebuilt

    @property
    def path(self) -> Path:
        return PACKAGE / self.source

    def flags_for(self, constants: Mapping[str, int]) -> tuple[str, ...]:
        assert constants.keys() == self.constants.keys()
        return (*self.flags, *(f"-D{name}={constants[name]}" for name in self.constants))

    def prebuilt_flags(self) -> Iterator[tuple[str, ...]]:
        """Yield the compiler flags for each combination of macro values that is prebuilt."""
        for values in product(*self.constants.values()):
            yield self.flags_for(dict(zip(self.constants, values, strict=True)))


_TORCH = "torch computes instead"

LIBRARIES = {
    "low_bit": NativeLibrary(
        "kernels/low_bit.c",
        KERNEL_FLAGS,
        _TORCH,
        {"HEAD_DIM": HEAD_DIMS, "VALUE_BITS": (2, 4), "PAGE_BLOCKS": (PAGE_BLOCKS,)},
    ),
    "best_scores": NativeLibrary("kernels/best_scores.c", KERNEL_FLAGS, _TORCH),
    "causal": NativeLibrary("kernels/causal.c", KERNEL_FLAGS, _TORCH, {"HEAD_DIM": HEAD_DIMS, "BFLOAT16": (0, 1)}),
    "decode_attention": NativeLibrary(
        "kernels/decode_attention.c", KERNEL_FLAGS, _TORCH, {"HEAD_DIM": HEAD_DIMS, "BFLOAT16": (0, 1)}
    ),
    "row_products": NativeLibrary("kernels/row_products.c", KERNEL_FLAGS, _TORCH, {"BFLOAT16": (0, 1)}),
    "packed_products": NativeLibrary("kernels/packed_products.c", KERNEL_FLAGS, _TORCH, {"BFLOAT16": (0, 1)}),
    "team": NativeLibrary("kernels/team.c", SYSTEM_FLAGS, "kernels run on one thread"),
    "merge": NativeLibrary("kv_cache/disk/merge.c", SYSTEM_FLAGS, "requests are merged by numpy"),
    "requests": NativeLibrary("kv_cache/disk/requests.c", SYSTEM_FLAGS, "disk reads are made by threads"),
    "rows": NativeLibrary("kv_cache/disk/rows.c", SYSTEM_FLAGS, "rows are copied by torch"),
    "row_cache": NativeLibrary("kv_cache/disk/row_cache.c", ("-O3", "-std=gnu11"), "cached rows are found by numpy"),
}
"""All C libraries of this package, by name."""


def load(name: str, **constants: int) -> ctypes.CDLL | None:
    """Return the library `name`, compiled with the macro values `constants`, or None if it is not available (see
    `load_library`).
    """
    library = LIBRARIES[name]
    return load_library(library.path, library.flags_for(constants), library.fallback)


def prebuilt_libraries() -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """For each library in a wheel for this machine, yield its source, compiler flags and level."""
    for level in machine_levels():
        for library in LIBRARIES.values():
            for flags in library.prebuilt_flags():
                yield library.path, flags, level


@dataclass(frozen=True)
class NativeStatus:
    level: str  # as in `OFFLOAD_RT_CPU_LEVEL`
    origin: str  # "prebuilt" (in the wheel), "compiled" (by this machine's compiler on first use) or "missing"

    def __str__(self) -> str:
        hint = " (no C compiler; torch computes instead, slower)" if self.origin == "missing" else ""
        return f"{self.level}, {self.origin}{hint}"


def native_status() -> NativeStatus:
    level = processor_level()
    return NativeStatus(level, _origin(level))


def build_id() -> str:
    """Return an identifier that depends on the sources, compiler flags and level of the libraries in use."""
    level = processor_level()
    names = [library_paths(library.path, library.flags, level)[1].name for library in LIBRARIES.values()]
    return " ".join([*names, _origin(level)])


@functools.cache
def _origin(level: str) -> str:
    paths = [library_paths(each.path, flags, level) for each in LIBRARIES.values() for flags in each.prebuilt_flags()]
    if all(prebuilt.exists() for prebuilt, _ in paths):
        return "prebuilt"
    can_compile = find_compiler() is not None or any(cached.exists() for _, cached in paths)
    return "compiled" if can_compile else "missing"
