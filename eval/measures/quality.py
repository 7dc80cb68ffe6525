"""Quality measures: perplexity, retrieval, harness tasks, attention analysis, ablation, tuning."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from ...errors import ConfigError
from ...utils.texts import read_text, text_name
from ..core.registry import measure
from .flags import (
    TEXT_HELP,
    WINDOW_FLAGS,
    add_model_flags,
    add_text_flag,
    add_variant_flags,
    add_window_flags,
    counts,
    given,
    model_under_test,
    numbers,
    say_on_stderr,
    show,
    variants,
    words,
)

PACKAGED = str(files("offload_rt").joinpath("data", "black_arrow.txt"))


def _perplexity_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_text_flag(parser)
    add_variant_flags(parser)
    add_window_flags(parser)


@measure("perplexity", "perplexity of a text under each policy, window by window against full", _perplexity_flags)
def perplexity(args: argparse.Namespace) -> int:
    """Measure the perplexity of a text under each policy. The windows are spread over the text. The last quarter of
    each is decoded under the policy and scored, and compared with full window by window. Example: offload-rt eval
    perplexity reference --text BOOK --policies infinigen,h2o --budgets 0.05,0.1 --set recent=16 --out DIR"""
    from ..quality.perplexity import PerplexityConfig, run_perplexity

    config = PerplexityConfig(**given(args, WINDOW_FLAGS))
    text, say, tested = read_text(args.text), say_on_stderr(args.quiet), model_under_test(args)
    compared = variants(args, tested)
    show(run_perplexity(tested, text, text_name(args.text), compared, config, Path(args.out), say), args.out, say)
    return 0


def _retrieval_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_variant_flags(parser)
    size = parser.add_argument_group("size")
    size.add_argument(
        "--text", default=PACKAGED, metavar="SPEC", help=f"hides the needles (default: ours); {TEXT_HELP}"
    )
    size.add_argument("--lengths", type=counts, metavar="1k,2k", help="tokens of a passage (1024,2048)")
    size.add_argument("--passages", type=int, metavar="N", help="passages of each kind and length (20)")
    size.add_argument("--kinds", type=words, metavar="A,B", help="kinds of needles (default: all five)")


@measure("retrieval", "share of needles found in a text under each policy, by kind and distance", _retrieval_flags)
def retrieval(args: argparse.Namespace) -> int:
    """Hide needles in a text and measure the fraction of questions with all answer tokens correct, by kind, length and
    distance."""
    from ..quality.retrieval import RetrievalConfig, run_retrieval

    config = RetrievalConfig(**given(args, ("lengths", "passages", "kinds")))
    text, say, tested = read_text(args.text), say_on_stderr(args.quiet), model_under_test(args)
    compared = variants(args, tested)
    show(run_retrieval(tested, text, text_name(args.text), compared, config, Path(args.out), say), args.out, say)
    return 0


def _tasks_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_variant_flags(parser)
    parser.add_argument(
        "--tasks", type=words, required=True, metavar="A,B", help="the harness' names, or ours: piqa_local"
    )
    size = parser.add_argument_group("size")
    size.add_argument("--num-fewshot", type=int, metavar="N", help="examples in front of each request")
    size.add_argument("--limit", type=int, metavar="N", help="documents of each task (default: all)")
    size.add_argument("--lengths", type=counts, metavar="4k,8k", help="tokens of RULER's documents")
    size.add_argument("--decode-from", type=int, metavar="N", help="tokens of a request prefilled exactly at most")
    size.add_argument("--include-path", metavar="DIR", help="more task files of the harness")
    size.add_argument("--harness-class", action="store_true", help="the harness' own transformers class beside full")


@measure("tasks", "tasks of the LM Evaluation Harness under each policy, request by request against full", _tasks_flags)
def tasks(args: argparse.Namespace) -> int:
    """Run tasks of the LM Evaluation Harness under each policy. Example: OFFLOAD_RT_DATA=DATA offload-rt eval tasks
    reference --tasks piqa_local,copa_local --num-fewshot 5 --limit 50 --budgets 0.1 --harness-class --out DIR"""
    from ..quality.lm_eval_tasks import TasksConfig, run_tasks

    names = ("num_fewshot", "limit", "decode_from", "include_path", "lengths")
    config = TasksConfig(tasks=tuple(args.tasks), **given(args, names))
    say, tested = say_on_stderr(args.quiet), model_under_test(args)
    report = run_tasks(tested, variants(args, tested), config, Path(args.out), own_class=args.harness_class, say=say)
    show(report, args.out, say)
    return 0


def _windows_only(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_text_flag(parser)
    add_window_flags(parser)


@measure("attention", "pictures of attention on a text, as the paper's figures", _windows_only)
def attention(args: argparse.Namespace) -> int:
    """Analyse the attention of a model on a text: similarity of layer inputs, number of tokens that a query needs,
    recall of partial scoring keys. Writes analysis.{json,csv,md} and plots."""
    from ..quality.attention_analysis import run_analysis
    from ..quality.perplexity import PerplexityConfig

    found = given(args, WINDOW_FLAGS)
    start = found.get("context", PerplexityConfig().context) // 8  # early, so that a budget takes effect
    config = PerplexityConfig(**{"windows": 2, "decode_from": start} | found)
    text, say = read_text(args.text), say_on_stderr(args.quiet)
    show(run_analysis(model_under_test(args), text, text_name(args.text), config, Path(args.out), say), args.out, say)
    return 0


def _ablation_flags(parser: argparse.ArgumentParser) -> None:
    _windows_only(parser)
    parser.add_argument("--budgets", type=numbers, default=[0.1, 0.2], metavar="0.1,0.2", help="attended shares")


@measure("ablation", "each part of the selection replaced in turn, on a text", _ablation_flags)
def ablation(args: argparse.Namespace) -> int:
    """Replace each part of infinigen's selection in turn, at fixed fractions of the context, and measure the captured
    attention mass and the cost."""
    from ..quality.ablation import run_ablation
    from ..quality.perplexity import PerplexityConfig

    config = PerplexityConfig(**given(args, WINDOW_FLAGS))
    text, name, say = read_text(args.text), text_name(args.text), say_on_stderr(args.quiet)
    tested, budgets = model_under_test(args), tuple(args.budgets)
    show(run_ablation(tested, text, name, budgets, config, Path(args.out), say), args.out, say)
    return 0


def _bounded_pool_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_text_flag(parser)
    add_window_flags(parser, decoded=False)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="option of infinigen; may be repeated"
    )


@measure("bounded-pool", "perplexity of a text in a pool of 80 % of its KV, by what is evicted", _bounded_pool_flags)
def bounded_pool(args: argparse.Namespace) -> int:
    """Measure the perplexity of a text with a pool of 80 % of its KV cache, by eviction policy: fifo, lru, counter."""
    from ..core.variants import read_settings
    from ..quality.bounded_pool import BoundedPoolConfig, run_bounded_pool

    config, options = BoundedPoolConfig(**given(args, ("context", "windows"))), read_settings(args.set)
    text, name, say = read_text(args.text), text_name(args.text), say_on_stderr(args.quiet)
    tested = model_under_test(args)
    show(run_bounded_pool(tested, text, name, config, Path(args.out), say, options), args.out, say)
    return 0


def _truncation_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
    add_text_flag(parser)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="truncation and truncation_recall, .json, .csv, .md"
    )
    for name, default, help in (
        ("context", 1920, "tokens before the truncation"),
        ("keep", 960, "tokens kept"),
        ("scored", 128, "tokens scored after it"),
        ("windows", 96, "of the text"),
        ("passages", 64, "of each kind of question"),
        ("seed", 0, "of the questions"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{help} ({default})")


@measure("truncation", "what a truncated session still knows: perplexity, questions", _truncation_flags)
def truncation(args: argparse.Namespace) -> int:
    """Measure perplexity and question accuracy after a truncation: recomputed, KV kept with its positions, KV kept with
    the gap closed but keys not rotated (naive), and not truncated."""
    from ..quality.truncation import TruncationConfig, run_truncation

    config = TruncationConfig(args.context, args.keep, args.scored, args.windows, args.passages, args.seed)
    say = say_on_stderr(False)
    for report in run_truncation(args.model, read_text(args.text), text_name(args.text), config, Path(args.out), say):
        show(report, args.out, say)
    return 0


def _continuation_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
    add_text_flag(parser)
    parser.add_argument("--context", type=int, metavar="N", help="tokens, prompt and scored (default: all positions)")
    parser.add_argument("--scored", type=int, default=256, metavar="N", help="tokens at the end, predicted (256)")
    parser.add_argument("--start", type=float, default=0.3, metavar="F", help="where in the text, as a share (0.3)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for side_by_side.json, .csv and .md")


@measure("continuation", "one passage under four policies, side by side, step by step", _continuation_flags)
def continuation(args: argparse.Namespace) -> int:
    """Run one passage of a text under full, infinigen and its presets "rows" and "paper". Reports the host-to-device
    transfer, the attended fraction, the device memory, and the log-probability of the next tokens of the text."""
    from ..quality.continuation import run_continuation

    text, say = read_text(args.text), say_on_stderr(False)
    report = run_continuation(args.model, text, text_name(args.text), args.context, args.scored, args.start)
    report.write(Path(args.out))
    show(report, args.out, say)
    return 0


def _tune_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
    parser.add_argument("--prompt-file", "--text", dest="text", required=True, metavar="SPEC", help=TEXT_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="skew.safetensors, policy.json and all trials")
    parser.add_argument("--max-missed-mass", type=float, metavar="M", help="limit, worst layer's mean (0.01)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of the text taken (2048)")
    parser.add_argument("--scored", type=int, metavar="N", help="of them, the last ones, decoded and measured (128)")
    parser.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


@measure("tune", "infinigen's settings that keep a limit on the missed mass at the fewest bytes", _tune_flags)
def tune(args: argparse.Namespace) -> int:
    """Choose infinigen's scorer, source, window, skew and threshold, so that a limit on the missed attention mass of a
    text is kept with the fewest bytes. Saves them with the skew artifact; 'generate --skew DIR' uses them as defaults.
    """
    from ...utils.progress import Progress
    from ..core.model_under_test import ModelUnderTest
    from ..quality.tune import TuneConfig, most_trials, run_tune

    config = TuneConfig(**given(args, ("max_missed_mass", "context", "scored")))
    text, say = read_text(args.text), say_on_stderr(args.quiet)
    tested = ModelUnderTest(args.model, device=args.device, dtype=args.dtype)
    with Progress(enabled=not args.quiet).items("tune", most_trials()) as done:
        report, tuned = run_tune(tested, text, text_name(args.text), config, Path(args.out), done)
    print(report.markdown(), flush=True)
    if not tuned.measured["kept"]:
        say(f"No setting tried keeps {config.max_missed_mass:.2%}: this one misses least.")
    say(f"wrote {args.out}: use it with --skew {args.out}")
    return 0


@measure("lm-eval", "the LM Evaluation Harness' own command line, our runtime as its model", None)
def lm_eval(args: argparse.Namespace) -> int:
    """Run the command line of the LM Evaluation Harness with this runtime as the model "offload-rt"."""
    try:
        from ..quality.lm_eval_adapter import main as harness
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'offload-rt[eval]'") from error
    return harness(args.arguments)
