"""How a model's makers would have its tokens chosen: `generation_config.json`."""

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
"""Those that vLLM takes, by transformers' names: the parameters that they are here. `do_sample` is not among them."""


def sampling_defaults(generation_config: Any) -> SamplingParams:
    """`SamplingParams` with what a generation configuration says (None: nothing). What it says and cannot be is left
    out, with a warning."""
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
