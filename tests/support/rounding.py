"""Rounding errors of attention by dtype."""

from __future__ import annotations

import torch

ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
"""Relative rounding error of softmax weights. Outputs may differ by this fraction of the largest |v|."""
