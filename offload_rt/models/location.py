"""From a name to the place of a checkpoint: what ships with the package, a folder, a GGUF file, or the hub."""

from __future__ import annotations

import importlib.resources
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError

SHIPPED = {"reference": "llama", "reference-opt": "opt"}
"""Names of the checkpoints that ship in the package, and their folders under `offload_rt/reference`."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/(\w[\w./-]*\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class Location:
    """Where a checkpoint is.

    place: a folder or a hub id, as transformers takes it.
    gguf: the GGUF file in it that holds configuration, weights and tokenizer; None where they are files of their own.
    shipped: whether it ships with the package.
    """

    place: str
    gguf: str | None = None
    shipped: bool = False

    @property
    def folder(self) -> Path | None:
        """The folder that it is, None on the hub."""
        return Path(self.place) if Path(self.place).is_dir() else None

    def __str__(self) -> str:
        """The place as messages name it, quoted."""
        what = self.place if self.gguf is None else f"{self.place}/{self.gguf}"
        return f"'{what}'" if self.folder else f"'{what}' (no such folder, so sought on the hub)"


def locate(model: str | os.PathLike[str]) -> Location:
    """What `model` means: a shipped name, a folder, a GGUF file, else a hub id ("name" or "owner/name"), or a GGUF file
    on the hub ("owner/name/file.gguf"). A folder without safetensors that holds one GGUF file means that file.

    Raises ModelError where it is none of these; nothing that looks like a path ever reaches the network.
    """
    name = os.fspath(model)
    if name in SHIPPED:
        folder = Path(str(importlib.resources.files("offload_rt"))) / "reference" / SHIPPED[name]
        if not folder.is_dir():
            raise ModelError(f"model {name!r} does not ship with this version; name a folder or a hub id")
        return Location(str(folder), shipped=True)
    path = Path(name).expanduser()
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r:.80} is no name of a folder or a file: {error!s:.80}") from None
    if is_folder:
        return Location(str(path), _only_gguf(path))
    if is_there:
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"model {name!r} is a file; name the folder that holds config.json and *.safetensors, or a GGUF file"
            )
        return Location(str(path.parent), path.name)
    if (file := _HUB_FILE.fullmatch(name)) and not Path(name.partition("/")[0]).exists():
        return Location(file[1], file[2])
    if not _HUB_ID.fullmatch(name):
        what = "file" if path.suffix.lower() == ".gguf" else "folder"
        raise ModelError(f"model {what} {name!r} does not exist")
    return Location(name)


def _only_gguf(folder: Path) -> str | None:
    """The GGUF file that `folder` means. ModelError where there are several, and no safetensors to take instead."""
    files = sorted(file.name for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ModelError(f"'{folder}' holds {len(files)} GGUF files ({', '.join(files[:3])} ...); name one of them")
    return files[0]
