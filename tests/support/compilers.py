"""C compilers for tests."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def unoptimised(compiler: Sequence[str], folder: Path, *, only: str = "") -> Path:
    """Write a compiler to `folder` that runs `compiler` without optimisation, which takes half of the time.

    If its arguments do not contain `only`, it writes an empty file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "cc"
    script.write_text(
        f"""#!/bin/sh
case "$*" in *{shlex.quote(only)}*) exec {shlex.join(compiler)} "$@" -O0;; esac
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
    )
    script.chmod(0o755)
    return script
