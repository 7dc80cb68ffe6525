"""`offload-rt skew`: calibrate a model and write its skew artifact."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from ..config import SkewMethod
from ..errors import InputError
from ..utils.config_fields import check_choice
from ..utils.texts import read_text
from .common import add_command
from .flags import given


def run(args: argparse.Namespace) -> int:
    """Calibrate a model and write its skew artifact; for OPT and GPT-2 also the folded checkpoint."""
    check_choice("method", args.method, get_args(SkewMethod))

    if (Path(args.out) / "skew.safetensors").exists() and not args.overwrite:
        raise InputError(f"{args.out!r} already contains an artifact: --overwrite replaces it")

    from rich.console import Console

    from ..skewing.fold import skew_model
    from .tables import skew_table

    report = skew_model(
        args.model,
        args.out,
        method=args.method,
        calibration=None if args.calibration is None else read_text(args.calibration),
        dtype=args.dtype,
        **given(args, ("calibration_tokens",)),
    )
    Console().print(skew_table(args.model, report))
    return 0


def add(commands: Any) -> None:
    parser = add_command(commands, "skew", run)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the artifact")
    parser.add_argument("--overwrite", action="store_true", help="replace an artifact in DIR")
    parser.add_argument(
        "--method", default="balanced", metavar="svd|balanced", help="svd is the paper's method (default: balanced)"
    )
    parser.add_argument("--calibration", metavar="FILE", help="calibration text (default: the packaged one)")
    parser.add_argument("--calibration-tokens", type=int, metavar="N", help="length of the text (default: 2048)")
