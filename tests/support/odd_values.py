"""Values of many types that users may pass to a function, most of them invalid."""

from __future__ import annotations

import math
from collections import UserDict, UserList, UserString, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from offload_rt import SamplingParams

MADE: list[Callable[[], Any]] = [
    lambda: iter([1]), lambda: (i for i in [1, 2]), lambda: deque([1, 2]), lambda: UserDict(a=1),
    lambda: UserList([1, 2]), lambda: UserString("ab"), lambda: bytearray(b"x"), lambda: memoryview(b"ab"),
    lambda: np.array([1, 2]), lambda: np.array([]), lambda: np.array(3), lambda: np.array([[1, 2], [3, 4]]),
    lambda: np.array([1.5]), lambda: np.array(["a"]), lambda: np.array([None]), lambda: torch.tensor([1, 2]),
    lambda: torch.tensor([]), lambda: torch.tensor(1.0), lambda: torch.tensor([1.0]),
    lambda: torch.tensor([1, 2], device="meta"), lambda: torch.eye(2), object, lambda: Exception("x"),
    lambda: {"input_ids": [1]}, lambda: {"input_ids": None}, lambda: {"input_ids": [1], "attention_mask": [[[1]]]},
    lambda: {"input_ids": [1, 2], "attention_mask": [1]}, lambda: {"role": "user", "content": "hi"},
]  # fmt: skip
"""Factories of mutable arguments, so that no test changes the argument of another."""

PLAIN: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 198, 199, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 1.0, 0.5, -1.5,
    math.nan, math.inf, -math.inf, 1e-320, 1e308, "", "a", "0.5", "1", "\0", "\ud800", "x" * 300, "é/..", "../x",
    "full", "infinigen", "GiB", "1GiB", "-1GiB", "9" * 400 + "T", "7d", "nand", "auto", "cpu", "int8", "none", b"",
    b"abc", [], [1], [1, 2, 3], [-1], [10**30], [198], [199], [[1]], [["a"]], ["a"], ["a", 1], [None], [1.5],
    [math.nan], [True], (), (1, 2), {}, {"a": 1}, {1: 2}, set(), {1}, frozenset(), np.float32(1), np.int64(3),
    np.bool_(True), np.str_("a"), torch.float16, torch.device("cpu"), Decimal("1.5"), Decimal("nan"), Fraction(1,
    3), 1j, len, Path("x"), range(3), range(0), slice(1), Ellipsis, NotImplemented, type, math,
    SamplingParams(max_tokens=2, temperature=0),
]  # fmt: skip

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=4)
_NESTED = st.recursive(_LEAVES, lambda one: st.lists(one, max_size=4) | st.dictionaries(st.text(max_size=4), one))

ANYTHING: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(PLAIN), st.sampled_from(MADE).map(lambda make: make()), _NESTED, st.lists(st.integers(0, 198))
)
"""Any value of any type."""
