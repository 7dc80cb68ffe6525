"""Test the policy registry, and the error messages for wrong names and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.select_models import CPU, artifact, geometry, no_keys

from offload_rt.config import SkewMethod
from offload_rt.errors import ConfigError
from offload_rt.policies.base import Policy
from offload_rt.policies.registry import make_policy, policy_names
from offload_rt.skewing.artifact import SkewArtifact


def make_test_policy(name: str, options: Mapping[str, Any], loaded_methods: list[str] | None = None) -> Policy:
    shape = geometry(layers=3)

    def load(method: SkewMethod) -> SkewArtifact:
        if loaded_methods is not None:
            loaded_methods.append(method)
        return artifact(shape)

    return make_policy(name, options, geometry=shape, device=CPU, dtype=torch.float32, artifact=load)


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_implements_the_interface(name: str) -> None:
    policy = make_test_policy(name, {})
    assert policy.name == name
    assert policy.sinks >= 0 and policy.recent >= 1
    assert policy.dense_layers <= {0, 1, 2}
    assert policy.provenance_key == make_test_policy(name, {}).provenance_key
    state = policy.new_state(no_keys)
    state.check_integrity()
    assert state.fork(no_keys).device_bytes == state.device_bytes


def test_full_is_dense_and_exact() -> None:
    policy = make_test_policy("full", {})
    assert policy.provenance_key == "exact"
    assert policy.dense_layers == {0, 1, 2}
    with pytest.raises(ConfigError, match="no options, but was given alpha"):
        make_test_policy("full", {"alpha": 3})


def test_infinigen_options_override_the_preset() -> None:
    loaded_methods: list[str] = []
    policy = make_test_policy("infinigen", {"preset": "paper", "sinks": 2}, loaded_methods)
    assert (policy.query_source, policy.sinks, policy.recent, policy.dense_layers) == ("attention_input", 2, 1, {0})
    assert make_test_policy("infinigen", {"skew": "balanced"}, loaded_methods).query_source == "query", (
        "the default on a CPU"
    )
    assert loaded_methods == ["svd", "balanced"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("infinigan", {}, "did you mean 'infinigen'"),
        ("infinigen", {"alhpa": 3}, "did you mean 'alpha'"),
        ("infinigen", {"preset": "papers"}, "did you mean 'paper'"),
        ("infinigen", {"alpha": -1}, "alpha=-1 must not be negative"),
        ("infinigen", {"budget": 0}, "budget=0 must be in"),
        ("infinigen", {"dense_layers": (3,)}, "layers 0 to 2"),
    ],
)
def test_errors_name_the_wrong_value(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_test_policy(name, options)
