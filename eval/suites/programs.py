"""Run other programs as parts of a suite: tests, other evaluations, training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

CLI = (sys.executable, "-P", "-m", "offload_rt")
"""Command line for `offload-rt` that works even if its script is not on the path."""

TIMED_OUT = 124
"""Exit code of a program that was stopped at its time limit."""

KEPT_OUTPUT = 6000
"""Number of characters that are kept of a failed program's output."""


def run_program(command: Sequence[str], limit: float, **variables: str) -> tuple[int, str]:
    """Run a program in the repository's root folder. Return its exit code and output.

    After `limit` seconds, the program is interrupted, and the returned exit code is `TIMED_OUT`. `variables` are
    environment variables for the program.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **variables})
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # lets the program save its state
            try:
                process.wait(25)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code = TIMED_OUT
        log.seek(0)
        return code, log.read()


def run_tests(arguments: Sequence[str], limit: float, prefix: Sequence[str] = (), **variables: str) -> dict[str, Any]:
    """Run pytest. Return its exit code, and the number of tests for each result.

    If a test failed, also return the end of the output.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*prefix, sys.executable, "-P", "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        code, output = run_program(command, limit, **variables)
        suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
    counts = {} if suite is None else {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    passed = counts.get("tests", 0) - sum(counts.get(k, 0) for k in ("failures", "errors", "skipped"))
    no_tests = 5  # exit code of pytest if no test was selected
    return {"exit_code": 0 if code == no_tests else code, "passed": passed, **counts} | (
        {} if code in (0, no_tests) else {"output": output[-KEPT_OUTPUT:]}
    )
