"""Resolve a model name to a shipped checkpoint, a folder, a GGUF file or a hub repository."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import InputError, ModelError
from ..utils.home import expand_user
from ..utils.small_files import read_json
from .registry import has_remote_code, refuse_unknown

SHIPPED = {"reference": "llama", "reference-opt": "opt"}
"""Maps the name of each shipped model to its checkpoint folder under `offload_rt/reference`."""

MERGE = (
    "merge the adapter with peft.PeftModel.from_pretrained(model, ADAPTER).merge_and_unload(), and pass the result or "
    "the folder where it is saved"
)

_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "sentencepiece.*", "tekken.json")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/(\w[\w./-]*\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class Hub:
    """Options for downloads from the Hugging Face hub.

    Attributes:
        revision: Branch, tag or commit. None selects the newest commit of the main branch.
        token: Access token. None uses `$HF_TOKEN` or the login of `hf auth login`.
        folder: Download folder. None selects the hub's own cache folder.
        trust_remote_code: Whether code that comes with a checkpoint may run.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    folder: Path | None = None
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        folder = None if self.folder is None else str(self.folder)
        options = {"revision": self.revision, "token": self.token, "cache_dir": folder}
        present = {name: value for name, value in options.items() if value is not None}
        return {**present, "trust_remote_code": self.trust_remote_code}


def hub_of(config: EngineConfig) -> Hub:
    return Hub(config.revision, config.hf_token, config.download_dir, config.trust_remote_code)


DEFAULT_HUB = Hub()


@dataclass(frozen=True)
class ModelSource:
    """Location of the files of a checkpoint, as returned by `find_source`.

    Attributes:
        name_or_path: Folder or hub id, as accepted by transformers.
        gguf: Name of the GGUF file that contains configuration, weights and tokenizer. None for other checkpoints.
        shipped: Whether the checkpoint ships with the package.
        hub: Download options.
    """

    name_or_path: str
    gguf: str | None = None
    shipped: bool = False
    hub: Hub = DEFAULT_HUB

    @property
    def folder(self) -> Path | None:
        return Path(self.name_or_path) if Path(self.name_or_path).is_dir() else None

    @property
    def location(self) -> str:
        """The absolute path of a local folder or file, or the name of a checkpoint on the hub."""
        name = self.name_or_path if self.gguf is None else f"{self.name_or_path}/{self.gguf}"
        return name if self.folder is None else str(Path(name).absolute())

    def check_files(self) -> None:
        """Raise ModelError if the local folder contains no model, or if the local GGUF file is damaged or incomplete.

        This is fast, because it imports neither torch nor transformers.
        """
        folder = self.folder
        if self.gguf is not None:
            from .gguf_header import read_header, require_gguf

            require_gguf(self)
            if folder is not None:
                read_header(folder / self.gguf).check(self)
            return
        if folder is None:
            return
        if (folder / "config.json").is_file():
            entries = _check_config(folder / "config.json")
            if not has_remote_code(entries, trusted=self.hub.trust_remote_code):
                refuse_unknown(entries, _text_with_class_names)
            return
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"{self} is a PEFT adapter, not a model; {MERGE}", reason="peft")
        expected = "a model folder contains config.json and *.safetensors, or one GGUF file"
        raise ModelError(f"{self} has no config.json; {expected}")

    @property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint may have a tokenizer. Only False for a local folder without tokenizer files."""
        folder = self.folder
        return folder is None or self.gguf is not None or any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)

    def check_tokenizer(self) -> None:
        """Raise ModelError if tokenizer.json in a local folder is incomplete or not a JSON object.

        Parsing the file takes up to a second, so only its first and last bytes are read.
        """
        path = Path(self.name_or_path) / "tokenizer.json"
        if self.gguf is not None or not path.is_file():
            return
        with path.open("rb") as file:
            start = file.read(64).strip()
            file.seek(max(0, path.stat().st_size - 64))
            end = file.read().strip()
        if not (start.startswith(b"{") and end.endswith(b"}") and len(end) > 1):
            raise ModelError(
                f"cannot load the tokenizer of {self}: tokenizer.json is damaged or incomplete; download it again, or "
                "choose another tokenizer"
            )

    def check_reachable(self) -> None:
        """Raise ModelError without a long wait if a hub model is not in the cache and the hub cannot be reached."""
        if self.folder is not None:
            return
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

        file, revision = self.gguf or "config.json", self.hub.revision
        if isinstance(
            try_to_load_from_cache(self.name_or_path, file, cache_dir=self.hub.folder, revision=revision), str
        ):
            return
        hint = "pass the folder of a downloaded model"
        if constants.is_offline_mode():
            raise ModelError(f"{self} is not in the cache, and HF_HUB_OFFLINE forbids a download: {hint}")
        try:
            get_hf_file_metadata(
                hf_hub_url(self.name_or_path, file, revision=revision), timeout=2, token=self.hub.token
            )
        except Exception as error:  # The type of a connection error differs between versions of huggingface_hub.
            if getattr(error, "response", None) is not None:
                return  # The hub can be reached, so transformers will report the reason.
            raise ModelError(
                f"{self} is not in the cache, and {constants.ENDPOINT} cannot be reached ({error}): {hint}, or set "
                "HF_ENDPOINT to a mirror"
            ) from error

    def __str__(self) -> str:
        what = self.name_or_path if self.gguf is None else f"{self.name_or_path}/{self.gguf}"
        return f"'{what}'" if self.folder else f"'{what}' (not a local folder, so looked up on the hub)"


def _text_with_class_names() -> str:
    """Return the text of the transformers source files that list its model classes.

    Importing them would take seconds.
    """
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    return "".join(file.read_text() for file in (Path(package.origin).parent / "models" / "auto").glob("*.py"))


def _check_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read the configuration of '{path.parent}': config.json is damaged ({error}); download it again"
        ) from error
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("architectures")):
        raise ModelError(
            f"the configuration of '{path.parent}' is not valid: config.json has neither model_type nor architectures; "
            "expected the file of a transformers model"
        )
    packed = config.get("quantization_config")
    if packed is not None and not isinstance(packed, dict):
        raise ModelError(
            f"the configuration of '{path.parent}' is not valid: quantization_config is {packed!r:.40}; expected an "
            "object with quant_method, or no such entry"
        )
    return config


def find_source(model: str | os.PathLike[str], hub: Hub = DEFAULT_HUB) -> ModelSource:
    """Return the location of the checkpoint `model`, without network access.

    Args:
        model: A shipped name, a folder, a GGUF file, a hub id ("name" or "owner/name"), or a GGUF file on the hub
            ("owner/name/file.gguf"). If a folder has one GGUF file and no safetensors, that file is used.
        hub: Download options.

    Raises:
        ModelError: `model` is none of these.
    """
    name = os.fspath(model)
    if name in SHIPPED:
        folder = Path(str(importlib.resources.files("offload_rt"))) / "reference" / SHIPPED[name]
        if not folder.is_dir():
            raise ModelError(f"model {name!r} does not ship with this version; use a folder or a hub id")
        return ModelSource(str(folder), shipped=True)
    try:
        path = expand_user(name)
        is_folder, exists = path.is_dir(), path.exists()
    except InputError as error:
        raise ModelError(f"model {error}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r:.80} is not a valid path: {error!s:.80}") from None
    if is_folder:
        return ModelSource(str(path), _only_gguf(path), hub=hub)
    if exists:
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"model {name!r} is a file; expected a GGUF file, or the folder with config.json and *.safetensors"
            )
        return ModelSource(str(path.parent), path.name, hub=hub)
    if (file := _HUB_FILE.fullmatch(name)) and not Path(name.partition("/")[0]).exists():
        return ModelSource(file[1], file[2], hub=hub)
    if not _HUB_ID.fullmatch(name):  # never looked up on the hub
        what = "file" if path.suffix.lower() == ".gguf" else "folder"
        raise ModelError(f"model {what} {name!r} does not exist")
    return ModelSource(name, hub=hub)


def _only_gguf(folder: Path) -> str | None:
    """Return the name of a folder's GGUF file, or None if it has safetensors. Raise ModelError for several files."""
    files = sorted(file.name for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ModelError(
            f"'{folder}' holds {len(files)} GGUF files ({', '.join(files[:3])} ...); give the path of one of them"
        )
    return files[0]
