"""Fixtures shared by all tests.

Without a CUDA device, tests marked `gpu` are skipped, unless they are also marked `simulated`. Those run on a simulated
device.

Heavy modules are imported inside functions, because the pytest-xdist controller loads this file before it starts the
workers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.sampling import ALL_CASES, split

import offload_rt
from offload_rt.utils import native_code

if TYPE_CHECKING:
    import torch

ALL_SCHEDULES = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
"""Whether all `gpu` tests run on a simulated device, not just those marked `simulated` (`make stress PART=gpu`)."""

QUICK = os.environ.get("OFFLOAD_RT_QUICK") == "1"
"""Whether only the first case of each parametrised test runs (`make quick`)."""

LEAN = os.environ.get("OFFLOAD_RT_LEAN") == "1"
"""Whether to skip tests whose extras are missing, for example in a GPU image that was not built for this project."""

EXTRAS = ("fastapi", "gguf", "httpx2", "openai", "starlette", "uvicorn")

NO_CUDA = pytest.mark.skip(reason="no CUDA device on this machine")


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection() -> None:
    """Configure torch and Triton before tests are imported."""
    # Imports create half a million objects, and scanning these takes seconds.
    gc.disable()
    import torch

    if not has_cuda():
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported; kernels then run in Python on CPU tensors
    # Threads do not speed up tiny tensors, and threads that compete on a busy machine cost minutes.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    missing = [name for name in EXTRAS if LEAN and report.failed and f"No module named '{name}'" in report.longreprtext]
    if missing:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"{missing[0]} is not installed")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if QUICK:
        cases = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        first = list(reversed(cases.values()))
        config.hook.pytest_deselected(items=list(set(items).difference(first)))
        items[:] = first
    if not ALL_CASES:
        items[:], left = split(items)
        config.hook.pytest_deselected(items=left)
    if has_cuda():
        return
    for item in items:
        simulated = not item.get_closest_marker("hardware") if ALL_SCHEDULES else item.get_closest_marker("simulated")
        if item.get_closest_marker("gpu") and not simulated:
            item.add_marker(NO_CUDA)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def freeze_existing_objects() -> None:
    """Exclude existing objects from garbage collection and from tensor counts, because scanning them is slow."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def simulated_device(request: pytest.FixtureRequest) -> Iterator[None]:
    markers = [request.node.get_closest_marker(name) for name in ("gpu", "simulated")]
    if has_cuda() or not (all(markers) or (ALL_SCHEDULES and markers[0])):
        yield
        return
    from support.cuda_simulator import Seeded, simulated

    with simulated(Seeded(0)):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run a test on the CPU and on CUDA. With `-m gpu`, run it on CUDA only."""
    import torch

    return torch.device(request.param)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device for Triton kernels: CUDA if available, and otherwise the CPU with Triton's interpreter."""
    import torch

    pytest.importorskip("triton", reason="triton is not installed")
    if request.param == "cuda":
        return torch.device("cuda")
    if has_cuda():
        pytest.skip("the kernels are compiled on this machine")
    return torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let all workers of this run share a new cache folder, so that each model is verified and calibrated only once."""
    base = tmp_path_factory.getbasetemp()
    shared = base if os.environ.get("PYTEST_XDIST_WORKER") is None else base.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_RT_CACHE", str(shared / "cache"))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    from support.interpreter import fast_interpreter

    with nullcontext() if has_cuda() else fast_interpreter():
        yield


@pytest.fixture(scope="session")
def short_book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the first pages of the book. Tokenizing the whole book would take half a second."""
    text = (Path(offload_rt.__file__).parent / "data" / "black_arrow.txt").read_text(encoding="utf-8")
    file = tmp_path_factory.mktemp("book") / "pages.txt"
    file.write_text(text[:12_000], encoding="utf-8")
    return file


@pytest.fixture(params=native_code.available_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test at each instruction set level of this processor."""
    from support.levels import unload

    monkeypatch.setenv(native_code.LEVEL_VARIABLE, request.param)
    unload()
    yield request.param
    unload()
