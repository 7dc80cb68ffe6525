"""Build step of the wheel: compile the C libraries of `utils/native_libraries.py` for all levels of this machine.

Without a working C compiler the wheel is pure Python, and the C code is compiled on first use. An editable install
compiles nothing.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


def native_modules(package: Path) -> tuple[Any, Any]:
    """Import `native_code` and `native_libraries` from `package` without importing the package, which needs torch."""
    name = "_offload_rt_build"
    parent = types.ModuleType(name)
    parent.__path__ = [str(package)]
    sys.modules[name] = parent
    code, libraries = (importlib.import_module(f"{name}.utils.native_{part}") for part in ("code", "libraries"))
    return code, libraries


def compile_libraries(package: Path) -> int:
    """Compile all prebuilt libraries into the folder `native` of `package`. Return their number, or 0 if one fails."""
    code, libraries = native_modules(package)
    target = package / "native"
    shutil.rmtree(target, ignore_errors=True)

    def compile_one(library: Any) -> None:
        code.compile_library(*library, target / code.library_name(*library))

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            count = len(list(pool.map(compile_one, libraries.prebuilt_libraries())))
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(target, ignore_errors=True)
        reason = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().partition("\n")[0] or error
        print(f"offload-rt: no C code is prebuilt, it is compiled on first use: {reason}", file=sys.stderr)
        return 0
    return count


class BuildWithLibraries(build_py):
    """Compile the C libraries after the Python files are copied, except for an editable install."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            compile_libraries(Path(self.build_lib) / "offload_rt")


class PlatformWheel(bdist_wheel):
    """Tag the wheel for this machine, but for every Python 3, if it contains compiled code."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not (Path(self.get_finalized_command("build_py").build_lib) / "offload_rt/native").exists()
        # Install to the folder for platform-specific packages, as setuptools does for its own extension modules.
        self.distribution.has_ext_modules = lambda: not self.root_is_pure
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel})
