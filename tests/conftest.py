"""What every test file shares: `gpu` tests skip where there is no CUDA device, or run on a simulated one if they are
`simulated` too; `device` runs a test on each device."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.interpreter import interpreted_quickly
from support.levels import forget

import offload_rt
from offload_rt.utils import native_code

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    """Before anything imports Triton: its kernels then run in Python on CPU tensors."""

torch.set_num_threads(1)
"""Tiny tensors gain nothing from threads, and threads that wait for each other on a busy machine cost minutes."""

gc.disable()
"""Until all is imported, which makes half a million objects that stay: looking for garbage among them takes seconds."""

EVERY = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
"""Whether every `gpu` test runs on a simulated device, not only those marked `simulated` (`make stress PART=gpu`)."""

LEAN = os.environ.get("OFFLOAD_RT_LEAN") == "1"
"""Whether packages of the extras may be missing, as on a GPU's image that is not ours: what needs them is skipped."""

EXTRAS = ("anthropic", "fastapi", "gguf", "httpx2", "openai", "starlette", "uvicorn")

NO_CUDA = pytest.mark.skip(reason="no CUDA device on this machine")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    missing = [name for name in EXTRAS if LEAN and report.failed and f"No module named '{name}'" in report.longreprtext]
    if missing:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"{missing[0]} is not installed")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        simulated = not item.get_closest_marker("hardware") if EVERY else item.get_closest_marker("simulated")
        if item.get_closest_marker("gpu") and not simulated:
            item.add_marker(NO_CUDA)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def older_objects_apart() -> None:
    """What a file's tests find there, a million objects of imports and caches, is looked at no more: not for garbage
    (each look took most of a second), nor by those that count the tensors they have made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def simulated_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where there is no CUDA device, the simulated one of a test that is marked `gpu` and `simulated`."""
    markers = [request.node.get_closest_marker(name) for name in ("gpu", "simulated")]
    if torch.cuda.is_available() or not (all(markers) or (EVERY and markers[0])):
        yield
        return
    from support.cuda_simulator import Seeded, simulated

    with simulated(Seeded(0)):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device a test runs on; with `-m gpu` CUDA alone."""
    return torch.device(request.param)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton kernels run: on the CPU under the interpreter where there is no CUDA device, compiled where there
    is one."""
    pytest.importorskip("triton", reason="triton is not installed")
    if request.param == "cuda":
        return torch.device("cuda")
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled on this machine")
    return torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Skew artifacts that tests calibrate go to a folder of the session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_RT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Of Triton's kernels, where they are interpreted."""
    with interpreted_quickly() if not torch.cuda.is_available() else nullcontext():
        yield


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first pages of the packaged book, some 4,000 tokens: the whole takes half a second to tokenise."""
    text = (Path(offload_rt.__file__).parent / "data" / "black_arrow.txt").read_text(encoding="utf-8")
    file = tmp_path_factory.mktemp("book") / "pages.txt"
    file.write_text(text[:12_000], encoding="utf-8")
    return file


@pytest.fixture(params=native_code.available_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with the C code of each instruction set level that this processor has."""
    monkeypatch.setenv(native_code.LEVEL_VARIABLE, request.param)
    forget()
    yield request.param
    forget()
