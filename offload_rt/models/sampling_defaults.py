"""Default sampling parameters from a model's `generation_config.json`."""

from __future__ import annotations

import warnings
from typing import Any

from ..errors import ConfigError
from ..sampling_params import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names in transformers and in `SamplingParams`. As in vLLM, `do_sample` is ignored."""


def sampling_defaults(generation_config: Any) -> SamplingParams:
    """Return `SamplingParams` with the values of a generation configuration, if any.

    Invalid values are ignored with a warning.
    """
    found: dict[str, Any] = {}
    for name, ours in _NAMES.items():
        value = getattr(generation_config, name, None)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except ConfigError as error:
            warnings.warn(f"the model's generation_config is not followed in {name}: {error}", stacklevel=2)
        else:
            found[ours] = value
    return SamplingParams(**found)
