"""The flags that say how new tokens are chosen."""

from __future__ import annotations

import argparse
from typing import Any

from ..sampling_params import SamplingParams
from .common import given

STREAMED = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "ignore_eos",
)  # fmt: skip
"""Fields of `SamplingParams` that an answer which is shown as it comes may have."""

SEVERAL = ("n", "num_beams", "length_penalty")
"""Those of several answers, or of one that is known at the end."""


def add_sampling_flags(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Enters them under a heading; several: also those of several answers."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", dest="max_tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="R")
    group.add_argument("--presence-penalty", type=float, metavar="P", help="taken off what has been said")
    group.add_argument("--frequency-penalty", type=float, metavar="P", help="the same, as often as it was said")
    group.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end-of-text token")
    if several:
        group.add_argument("-n", dest="n", type=int, metavar="N", help="so many texts, each when it is done")
        group.add_argument("--num-beams", type=int, metavar="N", help="beam search of this width")
        group.add_argument("--length-penalty", type=float, metavar="P", help="above 0 favours long beams")


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of them: the model's own defaults fill in the rest. Raises ConfigError now rather than after the
    model is loaded."""
    asked = given(args, [name for name in (*STREAMED, *SEVERAL) if hasattr(args, name)])
    SamplingParams(**asked)
    return asked
