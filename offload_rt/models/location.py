"""From a name to the place of a checkpoint: what ships with the package, a folder, a GGUF file, or the hub."""

from __future__ import annotations

import importlib.resources
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import ModelError

SHIPPED = {"reference": "llama", "reference-opt": "opt"}
"""Names of the checkpoints that ship in the package, and their folders under `offload_rt/reference`."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/(\w[\w./-]*\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class Hub:
    """How what is not here is fetched from the hub, and whether code that comes with a checkpoint may run.

    revision: a branch, a tag or a commit; None is the newest of the main branch.
    token: for checkpoints that are not open to all; None takes what `hf auth login` left, or $HF_TOKEN.
    folder: where files are kept; None is the hub's own cache folder.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    folder: Path | None = None
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What transformers' `from_pretrained` is told of it."""
        folder = None if self.folder is None else str(self.folder)
        asked = {"revision": self.revision, "token": self.token, "cache_dir": folder}
        given = {name: value for name, value in asked.items() if value is not None}
        return {**given, "trust_remote_code": self.trust_remote_code}


def hub_of(config: EngineConfig) -> Hub:
    """What a configuration says of it."""
    return Hub(config.revision, config.hf_token, config.download_dir, config.trust_remote_code)


OPEN = Hub()
"""The newest of what is open to all, and no code but transformers'."""


@dataclass(frozen=True)
class Location:
    """Where a checkpoint is.

    place: a folder or a hub id, as transformers takes it.
    gguf: the GGUF file in it that holds configuration, weights and tokenizer; None where they are files of their own.
    shipped: whether it ships with the package.
    hub: how it is fetched.
    """

    place: str
    gguf: str | None = None
    shipped: bool = False
    hub: Hub = OPEN

    @property
    def folder(self) -> Path | None:
        """The folder that it is, None on the hub."""
        return Path(self.place) if Path(self.place).is_dir() else None

    def __str__(self) -> str:
        """The place as messages name it, quoted."""
        what = self.place if self.gguf is None else f"{self.place}/{self.gguf}"
        return f"'{what}'" if self.folder else f"'{what}' (no such folder, so sought on the hub)"


def locate(model: str | os.PathLike[str], hub: Hub = OPEN) -> Location:
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
        return Location(str(path), _only_gguf(path), hub=hub)
    if is_there:
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"model {name!r} is a file; name the folder that holds config.json and *.safetensors, or a GGUF file"
            )
        return Location(str(path.parent), path.name, hub=hub)
    if (file := _HUB_FILE.fullmatch(name)) and not Path(name.partition("/")[0]).exists():
        return Location(file[1], file[2], hub=hub)
    if not _HUB_ID.fullmatch(name):
        what = "file" if path.suffix.lower() == ".gguf" else "folder"
        raise ModelError(f"model {what} {name!r} does not exist")
    return Location(name, hub=hub)


def _only_gguf(folder: Path) -> str | None:
    """The GGUF file that `folder` means. ModelError where there are several, and no safetensors to take instead."""
    files = sorted(file.name for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ModelError(f"'{folder}' holds {len(files)} GGUF files ({', '.join(files[:3])} ...); name one of them")
    return files[0]
