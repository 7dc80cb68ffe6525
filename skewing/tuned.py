"""The policy that `offload-rt tune` chose for a model, beside its skew artifact: a folder with `skew.safetensors` and
`policy.json`, whose options are the defaults of whoever loads the folder."""

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
    """policy, options: as `LLM` takes them. fingerprint: of the model. measured: what they were chosen by, for people
    (contract, objective, text, missed mass, bytes)."""

    policy: str
    options: Mapping[str, Any]
    fingerprint: str
    measured: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """What `policy.json` holds."""
        return json.dumps({"format": _FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, folder: Path, fingerprint: str | None) -> Self | None:
        """The choice in `folder`; None where there is none. Raises ArtifactError where it is damaged, of another
        version or of another model (`fingerprint` None: whatever the model)."""
        path = folder / POLICY
        if not path.exists():
            return None
        again = "make it again with 'offload-rt tune'"
        try:
            record = read_json(path)
            form, version = record.pop("format"), record.pop("version")
            tuned = cls(**record)
            options = {str(name): value for name, value in dict(tuned.options).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path} is damaged ({error}); {again}") from error
        if (form, version) != (_FORMAT, VERSION):
            raise ArtifactError(f"{path} is {form!r} of version {version}, expected {_FORMAT!r} {VERSION}; {again}")
        if fingerprint is not None and tuned.fingerprint != fingerprint:
            raise ArtifactError(
                f"{path} was chosen for another model: its fingerprint is {tuned.fingerprint}, this model's is "
                f"{fingerprint}; make one for this model with 'offload-rt tune'"
            )
        return cls(tuned.policy, options, tuned.fingerprint, tuned.measured)


def default_options(
    skew: Path | None, policy: str, given: Mapping[str, Any], fingerprint: str | None
) -> Mapping[str, Any]:
    """The options `given`, on top of those chosen for this policy in the folder `skew`, if it is one. A preset that is
    given replaces the choice altogether. `fingerprint` None: the model is not loaded yet. Raises ArtifactError as
    `TunedPolicy.load`."""
    if skew is None or not skew.is_dir() or "preset" in given:
        return given
    tuned = TunedPolicy.load(skew, fingerprint)
    policy = "infinigen" if policy == "auto" else policy
    if tuned is None or tuned.policy != policy:
        return given
    without = (
        {"tail": "off"} if policy == "infinigen" else {}
    )  # what a choice that says nothing of a tail was made with
    return {**without, **tuned.options, **given}


def load_artifact(skew: Path, fingerprint: str, method: SkewMethod | None = None) -> SkewArtifact:
    """The artifact in the file `skew`, or in the folder `skew`; of `method`, where that is given. Raises ArtifactError
    as `SkewArtifact.load`, ConfigError where it is of another method."""
    artifact = SkewArtifact.load(skew / ARTIFACT if skew.is_dir() else skew, fingerprint)
    if method is not None:
        check_method(artifact, method, skew)
    return artifact


def check_method(artifact: SkewArtifact, method: SkewMethod, skew: Path) -> None:
    """Raises ConfigError where the artifact, from `skew`, is of another method than the one that options name."""
    check(
        method == artifact.method,
        f"{str(skew)!r} was made with the method {artifact.method!r}, and the policy's options name {method!r} "
        f"(skew, --skew-method, a preset): leave that out, or make one with 'offload-rt skew --method {method}'",
    )
