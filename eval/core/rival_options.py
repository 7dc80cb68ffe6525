"""Options of the policies in `quality/rivals.py`, and their registration. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from ...policies.options import BudgetOptions
from ...policies.registry import register_policy
from ...utils.config_fields import option

RIVALS = "offload_rt.eval.quality.rivals"


@dataclass(frozen=True)
class LandmarkOptions(BudgetOptions):
    block: int = option(8, help="tokens per landmark", metavar="N")


@dataclass(frozen=True)
class SnapKVOptions(BudgetOptions):
    observed: int = option(64, help="last queries of the prompt that vote", metavar="N")
    pooled: int = option(7, help="tokens of the max pooling of votes, odd", metavar="N")


def register_rivals() -> None:
    """Register the policies. Only evaluations call this function, so other commands do not list these policies."""
    register_policy("landmarks", f"{RIVALS}:Landmarks")(LandmarkOptions)
    register_policy("snapkv", f"{RIVALS}:SnapKV")(SnapKVOptions)
