"""Stored rows: sizes, error bounds, and numbers that survive being stored twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt import ConfigError
from offload_rt.pool.kv_format import Quantised, kv_format

DIMS = [16, 24, 64, 80, 96, 128, 256]


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_row_sizes(head_dim: int, bits: int) -> None:
    """d = 128 in int4: 64 bytes of codes and two groups of 4 bytes, against 256 bytes in 16 bit."""
    stored = kv_format(f"int{bits}", torch.float32, head_dim)  # type: ignore[arg-type]
    rows = torch.randn(3, 5, head_dim)
    assert stored.encode(rows).shape == (3, 5, stored.width) and stored.storage == torch.uint8
    assert stored.width == head_dim * bits // 8 + 4 * -(-head_dim // 64)


@settings(deadline=None)
@given(
    head_dim=st.sampled_from(DIMS),
    bits=st.sampled_from([8, 4, 2]),
    scale=st.floats(1e-3, 1e2),
    offset=st.floats(-50, 50),
    seed=st.integers(0, 99),
)
def test_errors_are_half_a_step(head_dim: int, bits: int, scale: float, offset: float, seed: int) -> None:
    """Half a step of the group's range, widened by what float16 does to minimum and step: relative 2^-11 each, of the
    largest magnitude and of the range."""
    stored = Quantised(bits, torch.float32, head_dim)
    rows = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(seed)) * scale + offset
    error = (stored.decode(stored.encode(rows)) - rows).abs().unflatten(-1, (stored.groups, -1)).amax(-1)
    grouped = rows.unflatten(-1, (stored.groups, -1))
    span = grouped.amax(-1) - grouped.amin(-1)
    magnitude = grouped.abs().amax(-1)
    bound = span / (2 * (2**bits - 1)) + 2.0**-10 * (magnitude + span) + 1e-4
    assert (error <= bound).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_constant_rows_stay_constant(bits: int) -> None:
    stored = Quantised(bits, torch.float32, 64)
    for value in (0.0, 1.5, -3.0):
        assert torch.equal(stored.decode(stored.encode(torch.full((2, 64), value))), torch.full((2, 64), value))


def test_native_rows_are_the_rows() -> None:
    rows = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    stored = kv_format("auto", torch.bfloat16, 8)
    assert stored.encode(rows) is rows and stored.decode(rows) is rows and stored.exact
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        kv_format("int9", torch.float32, 64)  # type: ignore[arg-type]
