"""C compilers for tests."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def unoptimised(compiler: Sequence[str], folder: Path) -> Path:
    """Write a compiler to `folder` that runs `compiler` without optimisation, which takes a third of the time."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "cc"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@" -O0\n')
    script.chmod(0o755)
    return script
