"""Create runtimes for tiny hybrid models, and prompts for these models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload_rt import LLM, SamplingParams
from offload_rt.sessions.session import Session

from . import sessions
from .architectures import RECURRENT, VOCAB, architecture

FAMILIES = tuple(name for name in RECURRENT if "multimodal" not in name)
"""All families of hybrid models."""

GREEDY = SamplingParams(max_tokens=6, temperature=0)
SPARSE_DRAFTS: dict[str, Any] = {
    "policy": "infinigen",
    "policy_options": {"budget": 0.1, "sinks": 2, "recent": 8, "approximate_kv": "off"},
    "exact": {"method": "sparse", "tokens": 4, "adaptive": False},
}
"""Options for lossless mode, with a budget so small that drafts are often wrong."""


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rotated_pairs(names: Sequence[str], values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return all pairs of names and values, ordered so that `sampled(len(values))` keeps one pair per name."""
    return [(name, values[(i + k) % len(values)]) for i, name in enumerate(names) for k in range(len(values))]


def make_llm(name: str, *, overrides: dict[str, Any] | None = None, **options: Any) -> tuple[Any, LLM]:
    model = architecture(name, **overrides or {})
    return model, LLM(model, **{"policy": "full", "host_memory": "8MiB", "verify": "off"} | options)


def take_turn(session: Session, turn: list[int], params: SamplingParams = GREEDY) -> list[int]:
    """Take a turn, then check that the idle session has no state on the device."""
    answer = sessions.take_turn(session, turn, params)
    states = session.kv.runner.states
    assert states is not None and states.used == 0, "an idle session holds no state on the device"
    return answer


def computed_tokens(session: Session) -> int:
    assert session.last_stats is not None
    return session.last_stats.prompt_tokens - session.last_stats.reused_tokens
