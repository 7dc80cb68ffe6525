"""Sampling flags."""

from __future__ import annotations

import argparse
from typing import Any

from ..sampling_params import SamplingParams
from .common import given

STREAMED = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "ignore_eos",
)  # fmt: skip
"""Fields of `SamplingParams` that can be used with streaming."""

SEVERAL = ("n", "num_beams", "length_penalty")
"""Fields of `SamplingParams` for several outputs and beam search, which cannot be streamed."""


def add_sampling_flags(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Add the sampling flags, with the flags for several outputs if `several` is true."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", dest="max_tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="R")
    group.add_argument("--presence-penalty", type=float, metavar="P", help="subtracted from logits of generated tokens")
    group.add_argument("--frequency-penalty", type=float, metavar="P", help="subtracted for each occurrence")
    group.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="continue after the end-of-text token")
    if several:
        group.add_argument("-n", dest="n", type=int, metavar="N", help="number of texts, printed when complete")
        group.add_argument("--num-beams", type=int, metavar="N", help="beam search of this width")
        group.add_argument("--length-penalty", type=float, metavar="P", help="above 0 favours long beams")


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that are set. Raises ConfigError before the model is loaded."""
    found = given(args, [name for name in (*STREAMED, *SEVERAL) if hasattr(args, name)])
    SamplingParams(**found)
    return found
