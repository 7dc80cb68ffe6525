"""The command line: one subcommand, one function. `generate` writes text to stdout and everything else to stderr, so
that its output can be piped. A user's mistake is one line on stderr and exit code 2; Ctrl-C is exit code 130."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from .config import InfiniGenOptions, SamplingParams, SkewMethod, check_choice, parse_size
from .errors import ConfigError, InputError, OffloadError

if TYPE_CHECKING:
    from rich.console import Console

    from .llm import LLM

USER_ERROR, INTERRUPTED = 2, 130

TAIL = 40
"""Tokens of the prompt that are shown before the new text."""

POLICY_OPTIONS = ("preset", "alpha", "partial_ratio", "max_fraction", "source", "scorer", "dense_layers")
SAMPLING = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        with _quiet_libraries():
            return int(args.run(args))
    except OffloadError as error:
        print(f"offload-rt: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("offload-rt: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our stdout has left, as `head` does; flushing at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# ----------------------------------------------------------------------------------------------------- subcommands


def generate(args: argparse.Namespace) -> int:
    """Continues a text file: streams the text, then shows what the runtime did."""
    params = SamplingParams(**_given(args, SAMPLING))
    options = _policy_options(args)
    text = read_text(args.prompt_file)
    for file in (args.stats_json, args.plot):
        _check_writable(file)
    console = _stderr(args.quiet)

    from .llm import LLM

    llm = LLM(
        args.model,
        policy=args.policy,
        policy_options=options,
        device=args.device,
        dtype=args.dtype,
        host_memory=args.host_memory,
        skew=args.skew,
        progress=console.is_terminal and not args.quiet,
    )
    prompt = _prompt_ids(llm, text, args.prompt_tokens, params.max_new_tokens)
    finished = _write_stream(llm, prompt, params, console)
    _report(llm, args.stats_json, args.plot, console)
    return 0 if finished else INTERRUPTED


def skew(args: argparse.Namespace) -> int:
    """Calibrates a model and writes its skew artifact; for OPT and GPT-2 also the folded checkpoint."""
    from rich.console import Console

    from .runtime.report import skew_table
    from .skewing.fold import skew_model

    check_choice("method", args.method, get_args(SkewMethod))
    report = skew_model(
        args.model,
        args.out,
        method=args.method,
        calibration=None if args.calibration is None else read_text(args.calibration),
        dtype=args.dtype,
        **_given(args, ("calibration_tokens",)),
    )
    Console().print(skew_table(args.model, report))
    return 0


def info(args: argparse.Namespace) -> int:
    """Shows what a model and a context will need, and whether they fit here. Loads no weights."""
    from rich.console import Console

    from .models.checkpoint import resolve_device
    from .models.registry import load_config_geometry
    from .runtime.report import requirements_table
    from .runtime.requirements import Machine, obstacles, requirements

    if args.context < 1:
        raise ConfigError(f"--context {args.context} must be at least 1 token")
    options = _policy_options(args)
    chosen = (
        InfiniGenOptions.preset(options.pop("preset", "default"), **options) if args.policy == "infinigen" else None
    )
    host_memory = None if args.host_memory is None else parse_size(args.host_memory, "host_memory")
    device = resolve_device(args.device)
    geometry, weight_bytes, dtype = load_config_geometry(args.model, device=device, dtype=args.dtype)
    machine = Machine.here(host_memory, device)
    needed = requirements(geometry, weight_bytes, dtype, args.context, chosen)
    Console().print(requirements_table(args.model, args.policy, needed, machine))
    found = obstacles(needed, machine)
    if args.context > geometry.max_positions:
        effect = "it cannot take more" if geometry.absolute_positions else "quality beyond is not known"
        found.append(f"The model was made for {geometry.max_positions:,} positions; {effect}.")
    print("\n".join(["It does not fit here.", *found]) if found else "It fits here.")
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measures a decode step against transformers' caches, on random weights. `bench --help` lists its options."""
    from .eval import speed

    return speed.bench(args.arguments)


def evaluate(args: argparse.Namespace) -> int:
    """Measures perplexity, retrieval, harness tasks or attention under each policy; tables go to stdout and --out."""
    from .eval.command import run_eval

    console = _stderr(args.quiet)
    return run_eval(args, read_text, lambda line: console.print(line, soft_wrap=True, markup=False))


def lm_eval(args: argparse.Namespace) -> int:
    """Runs the LM Evaluation Harness' own command line with our runtime as its model "offload-rt"."""
    try:
        from .eval.lm_eval_adapter import main as harness
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'offload-rt[eval]'") from error
    return harness(args.arguments)


# ------------------------------------------------------------------------------------------------ parts of generate


def read_text(path: str) -> str:
    """The text of a UTF-8 file, "-" for stdin. Raises InputError where it is missing, unreadable, binary or empty."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path!r}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path!r} is not text: byte {error.start} is not UTF-8; give a plain text file in UTF-8"
        ) from error
    if "\0" in text:
        raise InputError(f"{path!r} is a binary file: it holds NUL bytes; give a plain text file in UTF-8")
    if not text.strip():
        raise InputError(f"{path!r} is empty: there is nothing to continue")
    return text


def _prompt_ids(llm: LLM, text: str, wanted: int | None, max_new_tokens: int) -> list[int]:
    """The first `wanted` tokens of the text; None: as many as leave room for the new ones in the model's positions."""
    ids = llm.encode(text)
    room = llm.geometry.max_positions - max_new_tokens
    if wanted is None:
        if room < 1:
            raise InputError(
                f"--max-new-tokens {max_new_tokens} leaves no room for a prompt: {llm.name} has "
                f"{llm.geometry.max_positions} positions"
            )
        return ids[:room]
    if not 1 <= wanted <= len(ids):
        raise InputError(f"--prompt-tokens {wanted} must be between 1 and {len(ids)}, the tokens of the prompt file")
    return ids[:wanted]


def _write_stream(llm: LLM, prompt: list[int], params: SamplingParams, console: Console) -> bool:
    """Writes the new text to stdout as it comes; False where Ctrl-C ended it. What the prompt ends with goes before it,
    to stderr, once the prompt has been taken in."""
    tail = llm.tokenizer.decode(prompt[-TAIL:]) if llm.tokenizer is not None else ""
    with closing(llm.stream(prompt, params)) as events:  # type: ignore[type-var]
        try:
            for event in events:
                if event.index == 0:
                    console.print(f"{llm.name} continues {len(prompt):,} tokens:", soft_wrap=True)
                    console.print(f"… {tail}", style="dim", markup=False, soft_wrap=True, end="")
                sys.stdout.write(event.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            return False
        finally:
            if sys.stdout.isatty():
                sys.stdout.write("\n")
    return True


def _report(llm: LLM, stats_json: str | None, plot: str | None, console: Console) -> None:
    """The table on stderr, and the files that were asked for."""
    from .runtime.report import plot_run, stats_table

    stats = llm.last_stats
    console.print()
    if stats is None:
        console.print("Interrupted before the prompt was taken in: there are no statistics.")
        return
    console.print(stats_table(stats))
    if stats_json is not None:
        try:
            Path(stats_json).write_text(json.dumps(stats.to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {stats_json!r}: {error.strerror}") from error
    if plot is not None:
        plot_run(stats, plot)
    for file in filter(None, (stats_json, plot)):
        console.print(f"wrote {file}")


def _check_writable(path: str | None) -> None:
    """Raises InputError now rather than after the run."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path!r}: there is no folder {str(folder)!r}")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise InputError(f"cannot write {path!r}: it is a folder, or writing is not permitted")


# ------------------------------------------------------------------------------------------------ options and parser


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options that were given, so that defaults stay where they are defined."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _policy_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the policy, checked before a model is loaded."""
    from .select.registry import POLICIES

    check_choice("policy", args.policy, POLICIES)
    options = _given(args, POLICY_OPTIONS)
    if args.policy == "infinigen":
        InfiniGenOptions.preset(options.get("preset", "default"), **{k: v for k, v in options.items() if k != "preset"})
    return options


def _layers(text: str) -> tuple[int, ...]:
    """Layer numbers from "0,1"; "none" for no layer."""
    try:
        return () if text == "none" else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers; write 0,1 or none") from None


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silences what libraries say; our own warnings become one line each on stderr."""
    from transformers.utils import logging

    package = str(Path(__file__).parent)

    def show(message: Warning | str, category: type[Warning], filename: str, *where: object, **line: object) -> None:
        if Path(filename).is_relative_to(package):
            print(f"offload-rt: note: {message}", file=sys.stderr)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def _stderr(quiet: bool) -> Console:
    from rich.console import Console

    return Console(stderr=True, quiet=quiet, highlight=False)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints fit one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        self.exit(USER_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="offload-rt",
        description="Long-context generation with the KV cache in host memory.",
        epilog="MODEL is 'reference' (ships with the package), a local folder or a hub id.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for function, configure in ((generate, _generate_flags), (skew, _skew_flags), (info, _info_flags)):
        summary = (function.__doc__ or "").strip()
        command = commands.add_parser(function.__name__, help=summary.split(". ")[0].rstrip("."), description=summary)
        command.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
        command.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
        configure(command)
        command.set_defaults(run=function)
    _eval_commands(commands)
    _bench_command(commands)
    return parser


def _eval_commands(commands: Any) -> None:
    """`eval`, whose flags stand beside what they measure, and `lm-eval`, whose arguments all go to the harness."""
    from .eval.command import eval_flags

    summary = (evaluate.__doc__ or "").strip()
    command = commands.add_parser("eval", help=summary.split(";")[0], description=summary)
    command.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
    command.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
    eval_flags(command)
    command.set_defaults(run=evaluate)
    summary = (lm_eval.__doc__ or "").strip()
    command = commands.add_parser("lm-eval", help=summary.rstrip("."), add_help=False, prefix_chars="\0")
    command.add_argument("arguments", nargs="*")
    command.set_defaults(run=lm_eval)


def _bench_command(commands: Any) -> None:
    """`bench`, whose arguments stand beside what they measure: reading them there loads transformers."""
    summary = (bench.__doc__ or "").strip()
    command = commands.add_parser("bench", help=summary.split(". ")[0], add_help=False, prefix_chars="\0")
    command.add_argument("arguments", nargs="*")
    command.set_defaults(run=bench)


def _generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-file", required=True, metavar="BOOK", help="text to continue (UTF-8); '-' is stdin")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="continue the book from its Nth token (default: the longest prompt the model takes)",
    )
    _policy_flags(parser)
    parser.add_argument("--skew", metavar="FILE", help="skew artifact (default: calibrated once and cached)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--min-p", type=float, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, metavar="R")
    sampling.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end-of-text token")
    output = parser.add_argument_group("output")
    output.add_argument("--stats-json", metavar="FILE", help="write the statistics as JSON")
    output.add_argument("--plot", metavar="FILE.png", help="draw attended fraction and missed attention mass")
    output.add_argument("--quiet", action="store_true", help="nothing but the text")


def _policy_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host-memory", metavar="SIZE", help="limit of KV in host memory, such as 200GiB")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda")
    parser.add_argument("--policy", default="infinigen", metavar="full|infinigen")
    group = parser.add_argument_group("options of the policy infinigen")
    group.add_argument("--preset", metavar="default|paper")
    group.add_argument("--alpha", type=float, metavar="A", help="threshold below a head's largest score")
    group.add_argument("--partial-ratio", type=float, metavar="R", help="share of the head dimension scored, (0, 1]")
    group.add_argument("--max-fraction", type=float, metavar="F", help="largest share of tokens fetched, (0, 1]")
    group.add_argument("--source", metavar="attention_input|normed_input|residual")
    group.add_argument("--scorer", metavar="partial|int8|int4|int2")
    group.add_argument("--dense-layers", type=_layers, metavar="0,1", help="layers that attend to everything; 'none'")


def _skew_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--method", default="svd", metavar="svd|balanced")
    parser.add_argument("--calibration", metavar="FILE", help="calibration text (default: the packaged one)")
    parser.add_argument("--calibration-tokens", type=int, metavar="N")


def _info_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--context", type=int, required=True, metavar="N", help="tokens, prompt and new ones together")
    _policy_flags(parser)
