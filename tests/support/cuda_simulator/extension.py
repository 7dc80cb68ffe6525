"""Build and load the simulator's compiled part (`device.cpp`). Builds are cached by version."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "offload_rt_cuda_simulator"


@cache
def load() -> Any:
    """Return the compiled module. Skip the test if it cannot be built or if there is a CUDA device."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device: no simulation is needed")
    kept = _kept()
    if not kept.exists():
        _build(kept)
    spec = importlib.util.spec_from_file_location(NAME, kept)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kept() -> Path:
    from torch.utils import cpp_extension

    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    return Path(cpp_extension.get_default_build_root()) / NAME / f"{NAME}_{version}.so"


def _build(target: Path) -> None:
    if shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None:
        pytest.skip("the simulator of CUDA is compiled: it needs a C++ compiler and ninja")
    from torch.utils import cpp_extension

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        cpp_extension.load(NAME, [str(SOURCE)], extra_cflags=["-O1"], build_directory=folder)
        os.replace(Path(folder, f"{NAME}.so"), target)
