"""The flags and the body of `offload-rt eval`. Nothing heavy is imported before a measurement starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ..config import check_choice
from ..errors import ConfigError

if TYPE_CHECKING:
    from .core.model_under_test import ModelUnderTest, Variant
    from .core.report import Report

ENGINE = ("host_memory", "eviction", "kv_format")
"""Settings of a variant that go to `LLM` and not to the policy."""

Say = Callable[[str], None]


EXAMPLES = """examples:
  offload-rt eval reference --perplexity BOOK --policies infinigen,h2o --budgets 0.05,0.1 --set recent=16 --out DIR
  offload-rt eval reference --perplexity BOOK --variant 'full kv_format=int4' \\
      --variant 'infinigen host_memory=6MiB eviction=lru' --out DIR
  offload-rt eval reference --bounded-pool BOOK --windows 16 --out DIR      (fifo, lru, counter in 80 % of the KV cache)
  offload-rt eval reference --retrieval --book BOOK --lengths 1k,2k --budgets 0.05,0.1 --set recent=16 --out DIR
  offload-rt eval reference --ablation BOOK --budgets 0.1,0.2 --windows 8 --out DIR
  OFFLOAD_RT_DATA=DATA offload-rt eval reference --dtype float32 --tasks piqa_local,copa_local --num-fewshot 5 \\
      --limit 50 --policies infinigen,quest --budgets 0.1 --harness-class --out DIR
"""


def eval_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `offload-rt eval` (MODEL and --dtype are there already)."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "\n".join(wrap(parser.description or "", 100))
    parser.epilog = EXAMPLES
    what = parser.add_argument_group("what to measure (one or several)")
    what.add_argument("--perplexity", metavar="FILE", help="perplexity of a text under each policy")
    what.add_argument("--retrieval", action="store_true", help="needles hidden in the text of --book")
    what.add_argument(
        "--tasks", type=_words, metavar="A,B", help="tasks of the LM Evaluation Harness; ours: piqa_local"
    )
    what.add_argument("--analysis", metavar="FILE", help="pictures of attention on a text, as the paper's figures")
    what.add_argument("--ablation", metavar="FILE", help="each part of the selection replaced in turn, on a text")
    what.add_argument(
        "--bounded-pool", metavar="FILE", help="perplexity of a text in a pool too small, by what gives way"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="results; a rerun goes on with what is missing")
    _variant_flags(parser.add_argument_group("policies"))
    size = parser.add_argument_group("size")
    size.add_argument("--context", type=int, metavar="N", help="tokens of a window (default 2048)")
    size.add_argument("--windows", type=int, metavar="N", help="windows, spread evenly over the text (default 32)")
    size.add_argument("--decode-from", type=int, metavar="N", help="tokens prefilled exactly; 1 decodes every position")
    size.add_argument("--margin", type=float, metavar="F", help="share left out at either end of a text (0.01)")
    size.add_argument("--book", metavar="FILE", help="text that needles are hidden in (default: the packaged one)")
    size.add_argument("--lengths", type=_lengths, metavar="1k,2k", help="tokens of a retrieval passage (1024,2048)")
    size.add_argument("--passages", type=int, metavar="N", help="retrieval passages of each kind and length (20)")
    size.add_argument("--kinds", type=_words, metavar="A,B", help="kinds of needles (default: all five)")
    size.add_argument("--num-fewshot", type=int, metavar="N", help="examples in front of each harness request")
    size.add_argument("--limit", type=int, metavar="N", help="documents of each harness task (default: all)")
    size.add_argument("--include-path", metavar="DIR", help="more task files of the harness")
    size.add_argument("--harness-class", action="store_true", help="the harness' own transformers class beside full")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="auto", metavar="auto|cpu|cuda")
    machine.add_argument(
        "--skew",
        metavar="FILE|DIR",
        help="skew artifact, or what 'offload-rt skew' or 'tune' wrote (default: calibrated once and cached)",
    )
    machine.add_argument(
        "--path", default="layers", metavar="layers|steps", help="many positions a layer, or LLM.score"
    )
    machine.add_argument("--batch", type=int, default=32, metavar="N", help="sequences decoded together (path steps)")
    machine.add_argument("--quiet", action="store_true", help="no line per measurement")


def _variant_flags(group: Any) -> None:
    group.add_argument(
        "--policies", type=_words, default=["full", "infinigen"], metavar="A,B", help="full is always in"
    )
    group.add_argument("--budgets", type=_numbers, default=[], metavar="0.05,0.1", help="attended shares to compare at")
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
        help="one more to compare, such as 'infinigen scorer=int2 budget=0.1' or "
        "'infinigen host_memory=4MiB eviction=lru'; may be repeated",
    )


def run_eval(args: argparse.Namespace, read_text: Callable[[str], str], say: Say) -> int:
    """Measures what `args` asks for. Raises OffloadError for anything that cannot be measured as asked."""
    asked = [name for name in _MEASURES if getattr(args, name)]
    if not asked:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in _MEASURES)
        raise ConfigError(f"nothing to measure: give one or several of {flags}")
    variants = make_variants(args.policies, args.budgets, args.set, args.variant)

    from .core.model_under_test import ModelUnderTest

    tested = ModelUnderTest(
        args.model, device=args.device, dtype=args.dtype, skew=args.skew, path=args.path, batch=args.batch
    )
    for variant in variants:
        tested.policy(variant)  # a wrong option is told before anything is measured
    for name in asked:
        report = _MEASURES[name](tested, variants, args, read_text, say)
        print(report.markdown(), flush=True)
        say(f"wrote {Path(args.out) / report.name}.json, .csv, .md")
    return 0


def _perplexity(
    tested: ModelUnderTest, variants: list[Variant], args: argparse.Namespace, read_text: Callable[[str], str], say: Say
) -> Report:
    from .quality.perplexity import PerplexityConfig, run_perplexity

    config = PerplexityConfig(**_given(args, ("context", "windows", "decode_from", "margin")))
    text = read_text(args.perplexity)
    return run_perplexity(tested, text, Path(args.perplexity).name, variants, config, Path(args.out), say)


def _retrieval(
    tested: ModelUnderTest, variants: list[Variant], args: argparse.Namespace, read_text: Callable[[str], str], say: Say
) -> Report:
    from .quality.retrieval import RetrievalConfig, run_retrieval

    config = RetrievalConfig(**_given(args, ("lengths", "passages", "kinds")))
    book = args.book or str(files("offload_rt").joinpath("data", "black_arrow.txt"))
    return run_retrieval(tested, read_text(book), Path(book).name, variants, config, Path(args.out), say)


def _tasks(
    tested: ModelUnderTest, variants: list[Variant], args: argparse.Namespace, read_text: Callable[[str], str], say: Say
) -> Report:
    from .quality.lm_eval_tasks import TasksConfig, run_tasks

    names = ("num_fewshot", "limit", "decode_from", "include_path")
    config = TasksConfig(tasks=tuple(args.tasks), **_given(args, names))
    return run_tasks(tested, variants, config, Path(args.out), own_class=args.harness_class, say=say)


def _analysis(
    tested: ModelUnderTest, variants: list[Variant], args: argparse.Namespace, read_text: Callable[[str], str], say: Say
) -> Report:
    from .quality.attention_analysis import run_analysis
    from .quality.perplexity import PerplexityConfig

    given = _given(args, ("context", "windows", "decode_from", "margin"))
    start = given.get("context", PerplexityConfig().context) // 8  # early, so that a budget has time to show
    config = PerplexityConfig(**{"windows": 2, "decode_from": start} | given)
    name = Path(args.analysis).name
    return run_analysis(tested, read_text(args.analysis), name, config, Path(args.out), say)


def _ablation(
    tested: ModelUnderTest, variants: list[Variant], args: argparse.Namespace, read_text: Callable[[str], str], say: Say
) -> Report:
    from .quality.ablation import run_ablation
    from .quality.perplexity import PerplexityConfig

    config = PerplexityConfig(**_given(args, ("context", "windows", "decode_from", "margin")))
    name, budgets = Path(args.ablation).name, tuple(args.budgets) or (0.1, 0.2)
    return run_ablation(tested, read_text(args.ablation), name, budgets, config, Path(args.out), say)


def _bounded_pool(
    tested: ModelUnderTest, variants: list[Variant], args: argparse.Namespace, read_text: Callable[[str], str], say: Say
) -> Report:
    from .quality.bounded_pool import BoundedPoolConfig, run_bounded_pool

    config = BoundedPoolConfig(**_given(args, ("context", "windows")))
    options, name = _settings(args.set), Path(args.bounded_pool).name
    return run_bounded_pool(tested, read_text(args.bounded_pool), name, config, Path(args.out), say, options)


_MEASURES: dict[str, Callable[..., Report]] = {
    "perplexity": _perplexity,
    "retrieval": _retrieval,
    "tasks": _tasks,
    "analysis": _analysis,
    "ablation": _ablation,
    "bounded_pool": _bounded_pool,
}


def make_variants(
    policies: Sequence[str], budgets: Sequence[float], settings: Sequence[str], more: Sequence[str]
) -> list[Variant]:
    """full, then policies times budgets, then the variants given in words; no variant twice."""
    from .core.model_under_test import grid

    shared = _settings(settings)
    made = grid(policies, budgets, shared)
    for text in more:
        policy, *words = text.split() or [""]
        made.append(_variant(policy, _settings(words)))
    unique: list[Variant] = []
    for variant in made:
        if variant not in unique:
            unique.append(variant)
    return unique


def _variant(policy: str, settings: Mapping[str, Any]) -> Variant:
    from ..select.registry import policy_names
    from .core.model_under_test import Variant

    check_choice("policy", policy, policy_names())
    engine = {key: value for key, value in settings.items() if key in ENGINE}
    return Variant(policy, {key: value for key, value in settings.items() if key not in engine}, engine)


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """{"recent": 16} from "recent=16": numbers, true, false, null and words; layers as 0:1, none as ()."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is no setting; write key=value, such as recent=16")
        found[key] = _layers(value) if key == "dense_layers" else _value(value)
    return found


def _layers(text: str) -> list[int]:
    try:
        return [] if text == "none" else [int(layer) for layer in text.replace(",", ":").split(":")]
    except ValueError:
        raise ConfigError(f"dense_layers={text!r} is no list of layers; write 0:1 or none") from None


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, (dict, list)) else value


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """What was given, so that defaults stay where they are defined."""
    found = {name: value for name in names if (value := getattr(args, name)) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; write 0.05,0.1") from None


def _lengths(text: str) -> list[int]:
    """Tokens from "1k,2k" (k is 1,024)."""
    try:
        return [int(w[:-1]) * 1024 if w.lower().endswith("k") else int(w) for w in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths; write 1k,2k or 1024,2048") from None
