"""Command-line flags shared by several measures, and the objects built from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.model_under_test import ModelUnderTest, Variant
    from ..core.report import Report

Say = Callable[[str], None]

TEXT_HELP = "a file (plain text; .jsonl, .csv, .parquet[:COLUMN]), '-', or a data set: NAME[:CONFIG]:SPLIT[:COLUMN]"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --out and the runtime flags read by `model_under_test`."""
    parser.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
    parser.add_argument("--out", required=True, metavar="DIR", help="results; a rerun goes on with what is missing")
    group = parser.add_argument_group("machine")
    group.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
    group.add_argument("--device", default="auto", metavar="auto|cpu|cuda")
    group.add_argument(
        "--skew",
        metavar="FILE|DIR",
        help="skew artifact, or what 'offload-rt skew' or 'tune' wrote (default: calibrated once and cached)",
    )
    group.add_argument("--path", default="layers", metavar="layers|steps", help="many positions a layer, or LLM.score")
    group.add_argument("--batch", type=int, default=32, metavar="N", help="sequences decoded together (path steps)")
    group.add_argument("--quiet", action="store_true", help="no line per measurement")


def add_text_flag(parser: argparse.ArgumentParser) -> None:
    """Add the required flag --text."""
    parser.add_argument("--text", required=True, metavar="SPEC", help=TEXT_HELP)


def add_variant_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags read by `variants`."""
    group = parser.add_argument_group("policies")
    group.add_argument("--policies", type=words, default=["full", "infinigen"], metavar="A,B", help="full is always in")
    group.add_argument("--budgets", type=numbers, default=[], metavar="0.05,0.1", help="attended shares to compare at")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of every policy but full, such as recent=16 or dense_layers=0:1; may be repeated",
    )
    group.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar='"POLICY KEY=VALUE ..."',
        help="one more to compare, such as 'infinigen scorer=int2 budget=0.1' or\n"
        "'infinigen host_memory=4MiB eviction=lru'; may be repeated",
    )


def add_window_flags(parser: argparse.ArgumentParser, *, decoded: bool = True) -> None:
    """Add --context and --windows; with `decoded` also --decode-from and --margin."""
    group = parser.add_argument_group("size")
    group.add_argument("--context", type=int, metavar="N", help="tokens of a window (default 2048)")
    group.add_argument("--windows", type=int, metavar="N", help="windows, spread evenly over the text")
    if decoded:
        group.add_argument("--decode-from", type=int, metavar="N", help="tokens prefilled exactly; 1 decodes them all")
        group.add_argument("--margin", type=float, metavar="F", help="share left out at either end of a text (0.01)")


WINDOW_FLAGS = ("context", "windows", "decode_from", "margin")


def model_under_test(args: argparse.Namespace) -> ModelUnderTest:
    """Create the model under test from the flags."""
    from ..core.model_under_test import ModelUnderTest

    return ModelUnderTest(
        args.model, device=args.device, dtype=args.dtype, skew=args.skew, path=args.path, batch=args.batch
    )


def variants(args: argparse.Namespace, tested: ModelUnderTest) -> list[Variant]:
    """Create the variants from the flags.

    Raises ConfigError if an option of a policy is unknown, before anything is measured.
    """
    from ..core.variants import make_variants

    made = make_variants(args.policies, args.budgets, args.set, args.variant)
    for variant in made:
        tested.policy(variant, getattr(args, "context", None))
    return made


def say_on_stderr(quiet: bool) -> Say:
    """Return a function that prints a line to stderr, or nothing if `quiet`."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet, highlight=False)
    return lambda line: console.print(line, soft_wrap=True, markup=False)


def show(report: Report, out: str, say: Say) -> None:
    """Print a report as Markdown, followed by the paths of its files."""
    print(report.markdown(), flush=True)
    say(f"wrote {out.rstrip('/')}/{report.name}.json, .csv, .md")


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the flags in `names` that are not None, with lists as tuples."""
    # Flags that were not given keep the defaults of the configuration classes.
    found = {name: value for name in names if (value := getattr(args, name)) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def words(text: str) -> list[str]:
    """Parse "a,b" into ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[float]:
    """Parse "0.05,0.1" into [0.05, 0.1]."""
    try:
        return [float(word) for word in words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; write 0.05,0.1") from None


def counts(text: str) -> list[int]:
    """Parse "1k,2048" into [1024, 2048]; k means 1,024."""
    try:
        return [int(w[:-1]) * 1024 if w.lower().endswith("k") else int(w) for w in words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths; write 1k,2k or 1024,2048") from None
