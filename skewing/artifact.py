"""The skew artifact: the result of calibration, stored in one safetensors file.

The file contains no date and no path, so the same calibration always writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..config import SkewMethod
from ..core import ModelGeometry
from ..errors import ArtifactError
from ..utils.atomic_files import write_atomic
from .prediction import SOURCES

VERSION: Final = 2
"""Format version of the file. Files with other versions are refused."""

_FORMAT: Final = "offload-rt skew"
_TENSORS: Final = ("query", "key", "key_mean", "key_std", "slope", "offset")


def artifact_bytes(geometry: ModelGeometry) -> int:
    """Return the size in bytes of the bases and corrections for a model with this geometry."""
    bases = geometry.kv_heads * geometry.head_dim**2
    corrections = geometry.hidden * (len(SOURCES) + geometry.most_between)
    return 2 * geometry.layers * (bases + corrections) * torch.float32.itemsize


@dataclass(frozen=True, eq=False)
class SkewArtifact:
    """Skewing bases for queries and keys, and corrections for predicted attention inputs.

    The bases are applied to queries and keys after bias, QK-norm and RoPE. Queries do not include the attention scale.

    Attributes:
        method: "svd" (paper §4.2, equations 2-3: queries and keys share one orthogonal matrix, so `query == key`) or
            "balanced" (queries and keys have different bases).
        query: B_q, float32 `[L, Hkv, d, d]`. The skewed query is q~ = q @ query[l, h]. Columns are in order of
            decreasing importance.
        key: B_k, float32 `[L, Hkv, d, d]`. The skewed key is k~ = k @ key[l, h]. With all columns, q~ k~^T equals q
            k^T, because B_q B_k^T = I.
        key_mean, key_std: Mean and standard deviation of each column of the skewed keys over the calibration text,
            float32 `[L, Hkv, d]`. They determine the quantisation levels of int4 and int2 scoring keys.
        slope, offset: `Correction` for predicted attention inputs, float32 `[S, L, D]`, or `[S, L, 1]` if all channels
            share one value.
        fingerprint: Fingerprint of the calibrated model.
        calibration: Description of the calibration text, with a digest of its tokens.
    """

    method: SkewMethod
    query: torch.Tensor
    key: torch.Tensor
    key_mean: torch.Tensor
    key_std: torch.Tensor
    slope: torch.Tensor
    offset: torch.Tensor
    fingerprint: str
    calibration: str

    def __post_init__(self) -> None:
        wrong = _inconsistency({name: getattr(self, name) for name in _TENSORS})
        assert not wrong, wrong

    @property
    def identity(self) -> str:
        """Description of the calibration. Unlike the bases, it is the same on all processors."""
        return f"{self.fingerprint} {self.method} {self.calibration}"

    def to(self, device: torch.device | str) -> SkewArtifact:
        return replace(self, **{name: getattr(self, name).to(device) for name in _TENSORS})

    def save(self, path: Path | str) -> None:
        """Write the artifact to `path` atomically. Missing folders are created.

        Raises:
            OSError: The file cannot be written. An existing file stays unchanged.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: getattr(self, name).detach().cpu().contiguous() for name in _TENSORS}
        if self.query.data_ptr() == self.key.data_ptr():  # safetensors does not accept tensors with shared storage
            tensors["key"] = tensors["key"].clone()
        header = {
            "format": _FORMAT,
            "version": VERSION,
            "method": self.method,
            "fingerprint": self.fingerprint,
            "calibration": self.calibration,
            "sha256": _digest(tensors),
        }
        # Use a single metadata entry, because safetensors writes several entries in random order.
        data = save(tensors, metadata={"skew": json.dumps(header, sort_keys=True)})
        write_atomic(path, data, private=False)

    @classmethod
    def load(cls, path: Path | str, fingerprint: str | None) -> SkewArtifact:
        """Load an artifact into CPU memory.

        Args:
            path: The safetensors file.
            fingerprint: Fingerprint that the artifact must have. None accepts the artifact of any model.

        Raises:
            ArtifactError: The file is missing, damaged, not a skew artifact, has another format version, or was made
                for another model.
        """
        path = Path(path)
        header, tensors = _read(path)
        if header.get("version") != VERSION:
            raise ArtifactError(
                f"{path} is a skew artifact of format version {header.get('version')}, this program reads version "
                f"{VERSION}; make it again with 'offload-rt skew'"
            )
        if set(tensors) != set(_TENSORS) or header.get("sha256") != _digest(tensors):
            raise ArtifactError(_damaged(path, "its contents do not match its digest"))
        method, of_model = header.get("method"), str(header.get("fingerprint"))
        if method not in get_args(SkewMethod):
            raise ArtifactError(_damaged(path, f"unknown method {method!r}"))
        if fingerprint is not None and of_model != fingerprint:
            raise ArtifactError(
                f"{path} was calibrated on another model: its fingerprint is {of_model}, this model's is "
                f"{fingerprint}; make one for this model with 'offload-rt skew'"
            )
        if wrong := _inconsistency(tensors):
            raise ArtifactError(_damaged(path, wrong))
        calibration = str(header.get("calibration"))
        return cls(method=cast(SkewMethod, method), fingerprint=of_model, calibration=calibration, **tensors)


def _damaged(path: Path, why: str) -> str:
    return f"{path} is a damaged skew artifact ({why}); make it again with 'offload-rt skew'"


def _read(path: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; a skew artifact is made with 'offload-rt skew MODEL --out DIR'")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("skew", "null")
            # Clone the tensors, because the memory-mapped file may be replaced later.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        header = json.loads(text)
    except (SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(_damaged(path, f"not a complete safetensors file: {error}")) from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ArtifactError(f"{path} is a safetensors file but no skew artifact; give the skew.safetensors of a model")
    return dict(header), tensors


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _inconsistency(tensors: dict[str, torch.Tensor]) -> str:
    """Return a description of the first invalid tensor, or ""."""
    shape = tensors["query"].shape
    if len(shape) != 4 or shape[-1] != shape[-2]:
        return f"query has shape {tuple(shape)}, expected [L, Hkv, d, d]"
    slope = tensors["slope"].shape  # hybrid models have more sources
    channels = (max(slope[0], len(SOURCES)), shape[0], slope[-1])
    for name, expected in zip(_TENSORS, (shape, shape, shape[:3], shape[:3], channels, channels), strict=True):
        tensor = tensors[name]
        if tensor.shape != expected or tensor.dtype != torch.float32:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected float32 {tuple(expected)}"
        if not bool(torch.isfinite(tensor).all()):
            return f"{name} has values that are not finite"
    return ""
