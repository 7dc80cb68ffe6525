"""Count which code attention on a CPU takes: C kernels that read KV in place, or torch functions that replace them.

Decode: `attend_in_c` if `decode_attention.library` is not None, else `attention_weights` and `KVPart.mix`, with
    `_Scratch.gather` before them for selected KV.
Scores, selection and approximate KV: `NativeQuery` if `low_bit_sequence.library` is not None, else `LowBitQuery`.
Prefill: `causal_cpu._attend` if `causal_cpu.library_for` the queries, else torch in `causal.py` and `causal_blocks.py`.

All need a head dimension that 32 divides, and float32 or bfloat16 (queries of low-bit KV are always float32). Shared
prefixes of dense layers (`attend_runs`) and attention weights (`group_weights`, for H2O) have no C code.
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
    """Return a counter of calls from now on, by the names of the functions above, until `patch` is undone."""
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
    """Assert that the kernels `needed` ran (without names one of `IN_PLACE`) and that torch replaced none."""
    if needed:
        assert all(calls[name] for name in needed), f"{needed} must run: {dict(calls)}"
    else:
        assert any(calls[name] for name in IN_PLACE), f"one of {IN_PLACE} must run: {dict(calls)}"
    assert not any(calls[name] for name in FALLBACKS), f"torch replaced C code: {dict(calls)}"
