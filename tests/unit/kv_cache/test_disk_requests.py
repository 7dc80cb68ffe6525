"""Test io_uring reads when a system call fails while reads are pending."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from offload_rt.kv_cache.disk import requests
from offload_rt.kv_cache.disk.requests import Requests, RingReader, file_position
from offload_rt.utils.native_libraries import PACKAGE

SOURCE = """
#define _GNU_SOURCE
#include <errno.h>
#include <unistd.h>
#include <sys/syscall.h>

int failing_call, calls;

/* Fail one call of io_uring_enter before the kernel sees it. */
static long flaky(long number, long a, long b, long c, long d, void *e, long f) {
    if (number == __NR_io_uring_enter && ++calls == failing_call) { errno = ENOMEM; return -1; }
    return syscall(number, a, b, c, d, e, f);
}
#define ring_flaky(number, a, b, c, d, e, f, ...) flaky(number, (long)(a), (long)(b), c, d, e, f)
#define syscall(...) ring_flaky(__VA_ARGS__, 0, 0, 0, 0, 0)
#include "REQUESTS"
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return `requests.c`, compiled so that one call to io_uring_enter fails."""
    compiler, folder = shutil.which("cc"), tmp_path_factory.mktemp("ring")
    if compiler is None or RingReader.open() is None:
        pytest.skip("no compiler or no io_uring")
    path = PACKAGE / "kv_cache" / "disk" / "requests.c"
    (folder / "flaky.c").write_text(SOURCE.replace("REQUESTS", str(path)))
    command = [compiler, "-O2", "-std=gnu11", "-shared", "-fPIC", "flaky.c", "-o", "flaky.so"]
    subprocess.run(command, cwd=folder, check=True)
    faulty, real = ctypes.CDLL(str(folder / "flaky.so")), requests._library()
    assert real is not None
    for name in ("ring_open", "ring_close", "ring_read"):
        function, real_function = getattr(faulty, name), getattr(real, name)
        function.restype, function.argtypes = real_function.restype, real_function.argtypes
    return faulty


def test_failed_call_waits_for_pending_reads(library: ctypes.CDLL, tmp_path: Path) -> None:
    """A read from an empty pipe is pending when the call fails. After the error, it must not write to its buffer."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    file, (reading, writing) = os.open(tmp_path / "file", os.O_RDONLY), os.pipe()
    handles = np.asarray([file, reading], np.int32)
    reader = RingReader(library, library.ring_open(4))
    sizes = np.full(6, 4096, np.int64)
    offsets = np.asarray([0, file_position(1), 4096, 8192, 0, 4096])
    delayed_write = threading.Timer(0.3, lambda: os.write(writing, b"x" * 4096))
    ctypes.c_int.in_dll(library, "calls").value = 0
    ctypes.c_int.in_dll(library, "failing_call").value = 2
    buffer = bytearray(6 * 4096)
    delayed_write.start()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        reader.read(handles, Requests(offsets, sizes, np.arange(6) * 4096), memoryview(buffer))
    data_at_error = bytes(buffer)
    delayed_write.join()
    again = bytearray(8192)
    reader.read(handles, Requests(offsets[[2, 3]], sizes[:2], np.arange(2) * 4096), memoryview(again))
    assert bytes(again) == bytes(range(256)) * 32, "the ring works after the error"
    assert bytes(buffer) == data_at_error and b"x" in data_at_error, "the read from the pipe ended before the error"
    for handle in (file, reading, writing):
        os.close(handle)
