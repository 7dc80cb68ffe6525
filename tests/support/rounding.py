"""What rounding to a dtype may cost an attention."""

from __future__ import annotations

import torch

ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
"""Relative rounding of a softmax weight to the rows' dtype: the share of the largest |v| an output may be off by."""
