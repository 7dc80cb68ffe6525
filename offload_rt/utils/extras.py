"""Installation of optional packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version


def install_command(extra: str) -> str:
    try:
        listed = requires("offload-rt") or []
    except PackageNotFoundError:  # The package runs from the source folder and is not installed.
        listed = []
    # The command lists the packages themselves, because this project is not on the package index.
    marker = f'extra == "{extra}"'
    found = [repr(entry.partition(";")[0].strip()) for entry in listed if marker in entry.replace("'", '"')]
    return f"pip install {' '.join(found)}" if found else f"pip install '.[{extra}]' in the checkout"


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
