"""Command-line flags of the evaluations. Most are created from the fields of configuration classes."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from ...utils.config_fields import option_of
from ...utils.texts import read_text, text_name

if TYPE_CHECKING:
    from ..core.model_under_test import Evaluation, ModelUnderTest
    from ..core.report import Report, Say
    from ..core.variants import Variant

T = TypeVar("T")

TEXT_HELP = "a file (plain text; .jsonl, .csv, .parquet[:COLUMN]), '-', or a data set: NAME[:CONFIG]:SPLIT[:COLUMN]"


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add a flag for each field of `config` that `config_fields.option` created.

    If a flag is not set, its value is None, and `config_of` uses the default in `config`.
    """
    hints = get_type_hints(config)
    for field in fields(config):
        if "option" not in field.metadata:
            continue
        option, default = option_of(field), field.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        known = "" if shown in (None, "") else f" (default: {shown})"
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            flag,
            type=_reader(hints[field.name]),
            metavar=option.metavar,
            help=f"{option.help}{known}".replace("%", "%%"),
        )


def config_of(args: argparse.Namespace, config: type[T], **more: Any) -> T:
    """Create `config` from the flags that are set and the fields `more`."""
    names = [field.name for field in fields(config) if "option" in field.metadata]  # type: ignore[arg-type]
    found = {name: value for name in names if (value := getattr(args, name)) is not None}
    return config(**found, **more)


def _reader(kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return {int: counts, float: numbers, str: words}[get_args(kind)[0]]
    return next((part for part in get_args(kind) if part is not NoneType), kind)


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL and the flags of measurements that use neither policies nor batches."""
    parser.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder of the results; a rerun computes only missing rows"
    )
    parser.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda")
    parser.add_argument("--quiet", action="store_true", help="no line per measurement")
    parser.set_defaults(skew=None, batch=1)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL and the flags that `model_under_test` reads."""
    add_checkpoint_flags(parser)
    parser.add_argument(
        "--skew", metavar="FILE|DIR", help="skew artifact, or a folder of 'skew' or 'tune' (default: calibrated once)"
    )
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="sequences decoded together (default: 32)")


def add_text_flag(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument("--text", required=default is None, default=default, metavar="SPEC", help=TEXT_HELP)


def add_variant_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies", type=words, default=("full", "infinigen"), metavar="A,B", help="full is always included"
    )
    parser.add_argument("--budgets", type=numbers, default=(), metavar="0.05,0.1", help="attended fractions to compare")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="option of every policy but full, such as recent=16 or dense_layers=0:1; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--variant", action="append", default=[], metavar='"POLICY KEY=VALUE ..."',
        help="a further variant, such as 'infinigen scorer=int2 budget=0.1' or "
        "'infinigen host_memory=4MiB eviction=lru'; may be repeated",
    )  # fmt: skip


def evaluation(args: argparse.Namespace) -> Evaluation:
    from ..core.model_under_test import Evaluation

    text, say = read_text(args.text), say_on_stderr(args.quiet)
    return Evaluation(model_under_test(args), text, text_name(args.text), Path(args.out), say)


def model_under_test(args: argparse.Namespace) -> ModelUnderTest:
    from ..core.model_under_test import ModelUnderTest

    return ModelUnderTest(args.model, device=args.device, dtype=args.dtype, skew=args.skew, batch=args.batch)


def variants(args: argparse.Namespace, tested: ModelUnderTest) -> list[Variant]:
    """Create the variants that the flags describe.

    If a policy option is unknown, raise ConfigError before anything is measured.
    """
    from ..core.variants import make_variants

    made = make_variants(args.policies, args.budgets, args.set, args.variant)
    for variant in made:
        tested.policy(variant, getattr(args, "context", None))
    return made


def say_on_stderr(quiet: bool = False) -> Say:
    """Return a function that prints a line to stderr, or ignores it if `quiet` is set."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet, highlight=False)
    return lambda line: console.print(line, soft_wrap=True, markup=False)


def show(report: Report, out: str, say: Say) -> int:
    print(report.markdown(), flush=True)
    say(f"wrote {out.rstrip('/')}/{report.name}.json, .csv, .md")
    return 0


def words(text: str) -> tuple[str, ...]:
    """Parse "a,b" into ("a", "b")."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str) -> tuple[float, ...]:
    """Parse "0.05,0.1" into (0.05, 0.1)."""
    try:
        return tuple(float(word) for word in words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers; write 0.05,0.1") from None


def counts(text: str) -> tuple[int, ...]:
    """Parse "1k,2048" into (1024, 2048), where k means 1,024."""
    try:
        return tuple(int(w[:-1]) * 1024 if w.lower().endswith("k") else int(w) for w in words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths; write 1k,2k or 1024,2048") from None
