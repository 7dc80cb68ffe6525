"""Count which code runs for attention on a CPU: C kernels that read KV in place, or torch functions.

In C or in torch, respectively: decode uses `attend_in_c`, or `attention_weights` and `KVPart.mix` (after
`_Scratch.gather` for selected KV). Scores, selection and approximate KV use `NativeQuery` or `LowBitQuery`. Prefill
uses `causal_cpu._attend`, or `causal.py` and `causal_blocks.py`.

C kernels need a head dimension that is a multiple of 32, and float32 or bfloat16. Shared prefixes of dense layers
(`attend_runs`) and attention weights (`group_weights`, for H2O) have no C code.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from offload_rt.core import KVPart
from offload_rt.kernels import causal_cpu, decode_attention, low_bit_lists
from offload_rt.kernels.low_bit_sequence import NativeQuery
from offload_rt.transfer import cpu

IN_PLACE = ("attend_in_c",)
LOW_BIT = ("merge",)
FALLBACKS = ("mix", "gather", "approximate_attention")


def count_kernels(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of calls by function name. It is updated until `patch` is undone."""
    calls = Counter[str]()

    def count(owner: Any, name: str, attribute: str | None = None) -> None:
        own = getattr(owner, attribute or name)

        def counted(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return own(*args, **named)

        patch.setattr(owner, attribute or name, counted)

    for name in IN_PLACE:
        count(decode_attention, name)
    for name in LOW_BIT:
        count(NativeQuery, name)
    count(causal_cpu, "causal", "_attend")
    count(KVPart, "mix")
    count(decode_attention.PagedPart, "mix")
    count(cpu._Scratch, "gather")
    count(low_bit_lists, "approximate_attention")
    return calls


def assert_in_place(calls: Counter[str], *needed: str) -> None:
    """Assert that the `needed` kernels ran (by default, at least one of `IN_PLACE`) and no torch fallback did."""
    if needed:
        assert all(calls[name] for name in needed), f"{needed} must run: {dict(calls)}"
    else:
        assert any(calls[name] for name in IN_PLACE), f"one of {IN_PLACE} must run: {dict(calls)}"
    assert not any(calls[name] for name in FALLBACKS), f"torch replaced C code: {dict(calls)}"
