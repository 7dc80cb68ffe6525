"""Evaluations of quality: perplexity, retrieval, harness tasks, tuning."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from ...errors import ConfigError
from ...utils.extras import install_command
from ...utils.texts import read_text, text_name
from ..core.registry import measure
from .flags import (
    TEXT_HELP,
    add_checkpoint_flags,
    add_model_flags,
    add_options,
    add_text_flag,
    add_variant_flags,
    config_of,
    evaluation,
    model_under_test,
    numbers,
    say_on_stderr,
    show,
    variants,
    words,
)

PACKAGED = str(files("offload_rt").joinpath("data", "black_arrow.txt"))


def _perplexity_flags(parser: argparse.ArgumentParser) -> None:
    from ..quality.perplexity import PerplexityConfig

    add_model_flags(parser)
    add_text_flag(parser)
    add_variant_flags(parser)
    add_options(parser, PerplexityConfig)


@measure("perplexity", "perplexity of a text under each policy, window by window against full", _perplexity_flags)
def perplexity(args: argparse.Namespace) -> int:
    """Measure the perplexity of a text under each policy, in windows that are spread over the text. The last quarter of
    each window is decoded with the policy and compared with full attention. Example: offload-rt eval
    perplexity reference --text BOOK --policies infinigen,h2o --budgets 0.05,0.1 --set recent=16 --out DIR"""
    from ..quality.perplexity import PerplexityConfig, run_perplexity

    config = config_of(args, PerplexityConfig)
    job = evaluation(args)
    return show(run_perplexity(job, variants(args, job.tested), config), args.out, job.say)


@measure("divergence", "KL divergence and top-1 agreement with full, position by position", _perplexity_flags)
def divergence(args: argparse.Namespace) -> int:
    """Measure how far the next-token distribution of each policy is from full attention: KL divergence over
    the whole vocabulary and agreement of the most probable token. Example: offload-rt eval divergence reference --text
    BOOK --budgets 0.02,0.05 --windows 4 --out DIR"""
    from ..quality.divergence import run_divergence
    from ..quality.perplexity import PerplexityConfig

    config = config_of(args, PerplexityConfig)
    job = evaluation(args)
    return show(run_divergence(job, variants(args, job.tested), config), args.out, job.say)


def _kv_formats_flags(parser: argparse.ArgumentParser) -> None:
    from ..quality.perplexity import PerplexityConfig

    add_checkpoint_flags(parser)
    add_text_flag(parser)
    add_options(parser, PerplexityConfig)


@measure("kv-formats", "KL divergence that published 4-bit and 2-bit KV caches cause", _kv_formats_flags)
def kv_formats(args: argparse.Namespace) -> int:
    """Measure how far published formats of a quantised KV cache (KIVI, Hadamard rotation) move the next-token
    distribution, simulated with transformers. Example: offload-rt eval kv-formats MODEL --text BOOK --context 8192
    --decode-from 8064 --windows 2 --out DIR"""
    from ..quality.kv_formats import run_kv_formats
    from ..quality.perplexity import PerplexityConfig

    config, job = config_of(args, PerplexityConfig), evaluation(args)
    return show(run_kv_formats(job, config), args.out, job.say)


def _working_set_flags(parser: argparse.ArgumentParser) -> None:
    _perplexity_flags(parser)
    parser.add_argument("--shares", type=numbers, default=(0.02, 0.04, 0.08), metavar="0.02,0.04",
                        help="sizes of working sets as fractions of the context (default: 0.02,0.04,0.08)")  # fmt: skip


@measure("working-set", "hit rates of working sets with the selections of a trained model", _working_set_flags)
def working_set(args: argparse.Namespace) -> int:
    """Measure how many selected KV entries are already in a working set, for several sizes. A text is decoded with each
    policy except full. Example: offload-rt eval working-set MODEL --text BOOK --context 16000 --decode-from 15872
    --windows 1 --out DIR"""
    from ..quality.perplexity import PerplexityConfig
    from ..quality.working_set import run_working_set

    config, job = config_of(args, PerplexityConfig), evaluation(args)
    selecting = [variant for variant in variants(args, job.tested) if variant.policy != "full"]
    return show(run_working_set(job, selecting, config, args.shares), args.out, job.say)


def _retrieval_flags(parser: argparse.ArgumentParser) -> None:
    from ..quality.retrieval import RetrievalConfig

    add_model_flags(parser)
    add_text_flag(parser, PACKAGED)
    add_variant_flags(parser)
    add_options(parser, RetrievalConfig)


@measure("retrieval", "share of needles found in a text under each policy, by kind and distance", _retrieval_flags)
def retrieval(args: argparse.Namespace) -> int:
    """Hide needles in a text and measure the fraction of questions with all answer tokens correct, by kind, length and
    distance."""
    from ..quality.retrieval import RetrievalConfig, run_retrieval

    config = config_of(args, RetrievalConfig)
    job = evaluation(args)
    return show(run_retrieval(job, variants(args, job.tested), config), args.out, job.say)


def _tasks_flags(parser: argparse.ArgumentParser) -> None:
    from ..quality.lm_eval_tasks import TasksConfig

    add_model_flags(parser)
    add_variant_flags(parser)
    add_options(parser, TasksConfig)
    parser.add_argument(
        "--tasks", type=words, required=True, metavar="A,B", help="the harness' names, or ours: piqa_local"
    )


@measure("tasks", "tasks of the LM Evaluation Harness under each policy, request by request against full", _tasks_flags)
def tasks(args: argparse.Namespace) -> int:
    """Run tasks of the LM Evaluation Harness under each policy. Example: OFFLOAD_RT_DATA=DATA offload-rt eval tasks
    reference --tasks piqa_local,copa_local --num-fewshot 5 --limit 50 --budgets 0.1 --out DIR"""
    from ..quality.lm_eval_tasks import TasksConfig, run_tasks

    config = config_of(args, TasksConfig, tasks=args.tasks)
    say, tested = say_on_stderr(args.quiet), model_under_test(args)
    report = run_tasks(tested, variants(args, tested), config, Path(args.out), say=say)
    return show(report, args.out, say)


def _tune_flags(parser: argparse.ArgumentParser) -> None:
    from ..quality.tune import TuneConfig

    parser.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
    parser.add_argument("--prompt-file", "--text", dest="text", required=True, metavar="SPEC", help=TEXT_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="skew.safetensors, policy.json and all trials")
    add_options(parser, TuneConfig)
    parser.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


@measure("tune", "infinigen's settings with the fewest bytes within a limit on the missed attention mass", _tune_flags)
def tune(args: argparse.Namespace) -> int:
    """Find the scorer, source, window, skew and threshold of infinigen that read the fewest bytes while the missed
    attention mass on a text stays within a limit. 'generate --skew DIR' uses the saved options as defaults.
    """
    from ...utils.progress import Progress
    from ..core.model_under_test import ModelUnderTest
    from ..quality.tune import TuneConfig, most_trials, run_tune

    config = config_of(args, TuneConfig)
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
        raise ConfigError(f"{error.name} is not installed: {install_command('eval')}") from error
    return harness(args.arguments)
