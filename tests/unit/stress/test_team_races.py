"""Test the thread team (`team.c`) for races in a separate C program, with late workers and with ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from offload_rt.kernels import team
from offload_rt.utils import native_code

TEAM = Path(team.__file__).with_name("team.c")

PROGRAM = r"""
#include "team.c"
#include <stdio.h>
#define PARTS 64
enum { ALIVE = 12345 };
/* Plain numbers: only the team orders a part's writes before the caller's reads. */
typedef struct { int state; int64_t parts; int seen[PARTS]; } Call;
static int calls;
static long helped;

static void count(const void *given, int64_t part) {
    Call *call = (Call *)given;
    if (call->state != ALIVE || part >= call->parts) { puts("a part of a call that has ended"); exit(1); }
    call->seen[part]++;
}

static void *caller(void *given) {
    unsigned seed = (unsigned)(intptr_t)given;
    for (int i = 0; i < calls; i++) {
        Call call = {.state = ALIVE, .parts = 1 + rand_r(&seed) % PARTS};
        team_run(count, &call, call.parts, 2 + rand_r(&seed) % 3);
        for (int part = 0; part < PARTS; part++)
            if (call.seen[part] != (part < call.parts)) { puts("a part not computed once"); exit(1); }
        call.state = 0;
        if (pthread_mutex_trylock(&team.busy)) continue;
        helped += atomic_load(&team.helped);
        team.alone_until = 0; /* the team never rests */
        pthread_mutex_unlock(&team.busy);
    }
    return NULL;
}

int main(int count, char **given) {
    pthread_t callers[2];
    calls = atoi(given[1]);
    for (int i = 0; i < 2; i++) pthread_create(&callers[i], NULL, caller, (void *)(intptr_t)(i + 1));
    for (int i = 0; i < 2; i++) pthread_join(callers[i], NULL);
    if (!helped) puts("workers did nothing");
    return !helped;
}
"""

BEFORE_TAKING = "        if (part >= parts) return 0;\n"
DELAY = "        if (helper && seen % 4 == 0) usleep(rand() % 60);\n"
"""C code that delays a worker after it has read a call and before it takes a part of this call."""


@pytest.fixture
def compiler() -> list[str]:
    command = native_code.find_compiler()
    if command is None:
        pytest.skip("no C compiler")
    return command


def build(compiler: list[str], folder: Path, source: str, *flags: str) -> Path | None:
    """Compile `PROGRAM` with `source` in place of team.c. Return None if the compiler does not support a flag."""
    (folder / "team.c").write_text(source, encoding="utf-8")
    (folder / "races.c").write_text(PROGRAM, encoding="utf-8")
    command = [*compiler, "-O1", "-g", "-std=gnu11", "-pthread", f"-I{TEAM.parent}", *flags, "races.c", "-o", "races"]
    built = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert flags or not built.returncode, built.stderr.decode()
    return None if built.returncode else folder / "races"


def test_late_worker_takes_no_part_of_an_ended_call(compiler: list[str], tmp_path: Path) -> None:
    source = TEAM.read_text(encoding="utf-8")
    assert source.count(BEFORE_TAKING) == 1
    program = build(compiler, tmp_path, source.replace(BEFORE_TAKING, BEFORE_TAKING + DELAY))
    ended = subprocess.run([str(program), "20000"], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_thread_sanitizer_finds_no_race(compiler: list[str], tmp_path: Path) -> None:
    program = build(compiler, tmp_path, TEAM.read_text(encoding="utf-8"), "-fsanitize=thread")
    if program is None or shutil.which("setarch") is None:
        pytest.skip("no ThreadSanitizer")
    # Old sanitizers do not work with randomised addresses.
    command, environment = ["setarch", "-R", str(program), "20000"], {**os.environ, "TSAN_OPTIONS": "exitcode=66"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
