"""C compilers for tests."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def unoptimised_compiler(compiler: Sequence[str], folder: Path) -> Path:
    """Write a compiler wrapper that disables optimisation, which halves the compile time."""
    return _script(folder, f'exec {shlex.join(compiler)} "$@" -O0')


def fake_compiler(folder: Path) -> Path:
    """Write a compiler whose output files are empty."""
    return _script(folder, 'while [ "$1" != -o ]; do shift; done; : > "$2"')


def _script(folder: Path, line: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "cc"
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o755)
    return script
