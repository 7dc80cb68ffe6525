"""Policies that `offload-rt tune` has chosen for a model.

A tuned policy is a folder with `skew.safetensors` and `policy.json`. If the engine option `skew` is this folder, the
options in `policy.json` become the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from ..config import SkewMethod
from ..errors import ArtifactError
from ..utils.config_fields import check
from ..utils.small_files import read_json
from .artifact import SkewArtifact

ARTIFACT: Final = "skew.safetensors"
POLICY: Final = "policy.json"
VERSION: Final = 1

_FORMAT: Final = "offload-rt policy"


@dataclass(frozen=True)
class TunedPolicy:
    policy: str  # value for `LLM(policy=...)`
    options: Mapping[str, Any]
    fingerprint: str  # fingerprint of the model
    # Record of the tuning run, for information: limit on the missed attention mass, objective, calibration text, and
    # results of the chosen options.
    measured: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps({"format": _FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, folder: Path, fingerprint: str | None) -> Self | None:
        """Load the policy in `folder`, or return None if there is none.

        Args:
            folder: Folder with `policy.json`.
            fingerprint: Fingerprint that the policy must have. None accepts the policy of any model.

        Raises:
            ArtifactError: The file is damaged, has another format version, or was made for another model.
        """
        path = folder / POLICY
        if not path.exists():
            return None
        hint = "make it again with 'offload-rt tune'"
        try:
            record = read_json(path)
            file_format, version = record.pop("format"), record.pop("version")
            tuned = cls(**record)
            options = {str(name): value for name, value in dict(tuned.options).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path} is damaged ({error}); {hint}") from error
        if (file_format, version) != (_FORMAT, VERSION):
            raise ArtifactError(
                f"{path} is {file_format!r} of version {version}, expected {_FORMAT!r} {VERSION}; {hint}"
            )
        if fingerprint is not None and tuned.fingerprint != fingerprint:
            raise ArtifactError(
                f"{path} was chosen for another model: its fingerprint is {tuned.fingerprint}, this model's is "
                f"{fingerprint}; make one for this model with 'offload-rt tune'"
            )
        return cls(tuned.policy, options, tuned.fingerprint, tuned.measured)


def default_options(
    skew: Path | None, policy: str, options: Mapping[str, Any], fingerprint: str | None
) -> Mapping[str, Any]:
    """Return `options`, supplemented by the options of a tuned policy.

    Tuned options are used only if `skew` is a folder that contains a tuned policy of this name, and `options` has no
    preset.

    Args:
        skew: Skew artifact or folder.
        policy: Policy of the engine. "auto" uses the tuned options of "infinigen".
        options: Options given by the user. They take precedence.
        fingerprint: Fingerprint of the model, or None if it is not loaded yet.

    Raises:
        ArtifactError: The tuned policy cannot be used (`TunedPolicy.load`).
    """
    if skew is None or not skew.is_dir() or "preset" in options:
        return options
    tuned = TunedPolicy.load(skew, fingerprint)
    policy = "infinigen" if policy == "auto" else policy
    if tuned is None or tuned.policy != policy:
        return options
    # Policies without this option were tuned with approximate KV off.
    base = {"approximate_kv": "off"} if policy == "infinigen" else {}
    return {**base, **tuned.options, **options}


def load_artifact(skew: Path, fingerprint: str, method: SkewMethod | None = None) -> SkewArtifact:
    """Load the artifact from a file, or from `skew.safetensors` in a folder.

    The artifact must have this `fingerprint` and this `method`. If `method` is None, any method is accepted.

    Raises:
        ArtifactError: The artifact cannot be used (`SkewArtifact.load`).
        ConfigError: The artifact was made with a different method.
    """
    artifact = SkewArtifact.load(skew / ARTIFACT if skew.is_dir() else skew, fingerprint)
    if method is not None:
        check_method(artifact, method, skew)
    return artifact


def check_method(artifact: SkewArtifact, method: SkewMethod, skew: Path) -> None:
    check(
        method == artifact.method,
        f"{str(skew)!r} was made with the method {artifact.method!r}, and the policy's options name {method!r} "
        f"(skew, --skew-method, a preset): remove this option, or make one with 'offload-rt skew --method {method}'",
    )
