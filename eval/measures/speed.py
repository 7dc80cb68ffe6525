"""Speed measures: decode steps, prompts, sessions, disk, compiled kernels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..core.registry import measure
from .flags import TEXT_HELP, counts, given, numbers, say_on_stderr, show, words


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.baselines import MAKERS, SHAPES
    from ..speed.bench import BURST, BenchConfig

    def names(text: str) -> list[str]:
        return list(MAKERS) if text == "all" else words(text)

    default = BenchConfig()
    parser.add_argument("--out", default="out", metavar="DIR", help="folder for JSON, tables, pictures (default: out)")
    parser.add_argument(
        "--shape", type=words, default=[default.shape], metavar="A,B", help=f"random Llamas: {', '.join(SHAPES)}"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers of each shape")
    parser.add_argument("--contexts", type=counts, default=default.contexts, metavar="16k,32k", help="tokens")
    parser.add_argument("--batches", type=counts, default=default.batches, metavar="1,4", help="sequences")
    parser.add_argument("--fraction", type=float, default=default.fraction, metavar="F", help="share of planted tokens")
    parser.add_argument(
        "--spread", type=float, default=default.spread, metavar="F", help="single KV heads have up to F more or less"
    )
    parser.add_argument("--repeats", type=int, default=default.repeats, metavar="N", help=f"of {BURST} tokens each")
    parser.add_argument("--threads", type=int, default=default.threads, metavar="N")
    parser.add_argument("--device", default=default.device, metavar="auto|cpu|cuda")
    parser.add_argument("--dtype", default=default.dtype, metavar="auto|float32|bfloat16|float16")
    parser.add_argument(
        "--baselines", type=names, default=default.baselines, metavar="A,B", help=f"of {', '.join(MAKERS)}, or all"
    )


@measure("bench", "a decode step against transformers' caches, on random weights", _bench_flags)
def bench(args: argparse.Namespace) -> int:
    """Compare the time of a decode step with the caches of transformers. All baselines run in one process, one after
    another. Times are CPU time, or synchronized wall time on CUDA, as medians and quartiles. Counterparts of
    InfiniGen's figures: Figure 14 with --batches 1,2,4,8, Figure 15 with --contexts 8k,16k, Figure 16 with --shape A,B.
    Every run contains the breakdown of Figure 18."""
    from rich.console import Console

    from ...utils.config_fields import check_choice
    from ..speed.baselines import SHAPES
    from ..speed.bench import BenchConfig, run_bench

    options: dict[str, Any] = given(args, list(vars(args)))
    out, shapes = Path(options.pop("out")), options.pop("shape")
    for shape in shapes:
        check_choice("shape", shape, SHAPES)
    run_bench(BenchConfig(shape=shapes[0], **options), out, Console(), *shapes[1:])
    return 0


def _real_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.competitors import COMPETITORS, FIRST, SpeedConfig

    def names(text: str) -> list[str]:
        return text.split(";") if text != "all" else [name for name in COMPETITORS if name != FIRST]

    default = SpeedConfig()
    parser.add_argument("model", metavar="MODEL", help="a local folder or a hub id of a trained model")
    parser.add_argument("--text", required=True, metavar="SPEC", help=TEXT_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="real_speed.json, .csv and .md")
    parser.add_argument("--contexts", type=counts, default=default.contexts, metavar="2k,8k", help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=default.tokens, metavar="N", help="decoded after each")
    parser.add_argument("--repeats", type=int, default=default.repeats, metavar="N", help="prompts of each length")
    parser.add_argument("--threads", type=int, default=default.threads, metavar="N")
    parser.add_argument("--dtype", default=default.dtype, metavar="bfloat16|float32")
    parser.add_argument(
        "--who", type=names, default=default.who, metavar="A;B", help=f"all, or of {'; '.join(COMPETITORS)}"
    )
    parser.add_argument("--gguf", metavar="FILE", help="the model for llama.cpp (package llama-cpp-python)")


@measure("real-speed", "a trained model's prompts and steps beside what people would use", _real_flags)
def real_speed(args: argparse.Namespace) -> int:
    """Compare transformers' caches, the policies of this package, and kvpress and llama.cpp if installed, on the same
    model and text. Reports the time to the first token, the time of each further token, memory, and agreement with
    float32. Each competitor runs in its own process; they answer alternately. Times are CPU time."""
    from ...utils.texts import read_text
    from ..speed.competitors import SpeedConfig
    from ..speed.real_speed import run_real_speed

    options = given(args, ["contexts", "tokens", "repeats", "threads", "dtype", "who", "gguf"])
    say = say_on_stderr(False)
    show(run_real_speed(args.model, read_text(args.text), SpeedConfig(**options), Path(args.out), say), args.out, say)
    return 0


def _threads_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.threads import ThreadsConfig

    default = ThreadsConfig()
    parser.add_argument("model", metavar="MODEL", help="a local folder or a hub id of a trained model")
    parser.add_argument("--text", required=True, metavar="SPEC", help=TEXT_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="threads.json, .csv and .md")
    parser.add_argument("--context", type=int, default=default.context, metavar="N", help="tokens of the prompt (6000)")
    parser.add_argument("--tokens", type=int, default=default.tokens, metavar="N", help="timed for each policy (48)")
    parser.add_argument("--threads", type=counts, default=default.threads, metavar="1,2,4", help="of torch")
    parser.add_argument(
        "--busy",
        type=numbers,
        default=default.busy,
        metavar="0,0.5",
        help="shares of a processor used by another process",
    )
    parser.add_argument("--policies", type=words, default=default.policies, metavar="A,B", help="full comes first")
    parser.add_argument("--dtype", default=default.dtype, metavar="auto|bfloat16|float32")


@measure("threads", "wall time of a token by number of threads, idle and beside a busy process", _threads_flags)
def threads(args: argparse.Namespace) -> int:
    """Measure the wall time of a token for several numbers of threads, on an idle machine and next to a busy process.
    torch is imported before this package."""
    from ...utils.texts import read_text
    from ..speed.threads import ThreadsConfig, run_threads

    options = given(args, ["context", "tokens", "threads", "busy", "policies", "dtype"])
    say = say_on_stderr(False)
    report = run_threads(args.model, read_text(args.text), ThreadsConfig(**options), say)
    report.write(Path(args.out))
    show(report, args.out, say)
    return 0


def _drafts_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.drafts import KINDS, DraftsConfig

    default = DraftsConfig()
    parser.add_argument("model", metavar="MODEL", help="a local folder or a hub id of a trained model")
    parser.add_argument("--text", required=True, metavar="SPEC", help=TEXT_HELP)
    parser.add_argument("--name", metavar="NAME", help="of the text, in the table (its file's)")
    parser.add_argument("--out", required=True, metavar="DIR", help="drafts.json, .csv and .md; other texts' rows stay")
    parser.add_argument("--contexts", type=counts, default=default.contexts, metavar="16k,32k", help="tokens (16k)")
    parser.add_argument("--tokens", type=int, default=default.tokens, metavar="N", help="decoded behind each (96)")
    parser.add_argument(
        "--temperatures", type=numbers, default=default.temperatures, metavar="0,0.8", help="0 is greedy (0,0.8)"
    )
    parser.add_argument(
        "--kinds",
        type=words,
        default=default.kinds,
        metavar="A,B",
        help=f"of {', '.join(KINDS)} (all)".replace("%", "%%"),
    )
    parser.add_argument("--dtype", default=default.dtype, metavar="bfloat16|float32")
    parser.add_argument("--threads", type=int, default=default.threads, metavar="N")


@measure("drafts", "exact decoding from drafts: what is accepted, bytes and time of a token", _drafts_flags)
def drafts(args: argparse.Namespace) -> int:
    """Measure exact decoding with each kind of draft on a trained model: acceptance by full attention, host-to-device
    transfer per token, and CPU time per token, compared with the policy full on the same prompt."""
    from ...utils.texts import read_text
    from ..speed.drafts import DraftsConfig, run_drafts

    config = DraftsConfig(**given(args, ["contexts", "tokens", "temperatures", "kinds", "dtype", "threads"]))
    say, text = say_on_stderr(False), read_text(args.text)
    show(run_drafts(args.model, args.name or Path(args.text).name, text, config, Path(args.out), say), args.out, say)
    return 0


def _session_flags(parser: argparse.ArgumentParser) -> None:
    lengths = [16, 64, 256, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--out", required=True, metavar="DIR", help="resume and read_buffer, each .json, .csv and .md")
    parser.add_argument("--histories", type=counts, default=lengths, metavar="16,1k", help="of the random shape")
    parser.add_argument(
        "--reference",
        type=counts,
        default=[16, 64, 256, 1024, 1920],
        metavar="16,64",
        help="within its 2,048 positions",
    )
    parser.add_argument(
        "--buffer-history", type=int, default=2048, metavar="N", help="where pre-loading is timed (2048)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of every source (5)")


@measure("session-ttft", "first token of a session's next turn: recomputed, from memory, from disk", _session_flags)
def session_ttft(args: argparse.Namespace) -> int:
    """Measure the time to the first token of the next turn of a session: recomputed, from host memory, and from disk,
    warm and cold. Also measures the time saved by a read buffer."""
    from ..speed.session_ttft import run_session_ttft

    say = say_on_stderr(False)
    for report in run_session_ttft(Path(args.out), args.histories, args.reference, args.buffer_history, args.repeats):
        show(report, args.out, say)
    return 0


def _disk_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.baselines import SHAPES

    parser.add_argument("--out", required=True, metavar="DIR", help="disk_speed and disk_steps, each .json, .csv, .md")
    parser.add_argument("--disk", required=True, metavar="DIR", help="folder on the disk that is measured")
    parser.add_argument("--record", metavar="RUN", help="selections of a model (default: drawn ones)")
    parser.add_argument("--shape", default="llama-1b", metavar="A", help=f"of drawn ones: {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers of the shape")
    parser.add_argument("--contexts", type=counts, default=(65_536,), metavar="64k,256k", help="of drawn ones (64k)")
    parser.add_argument("--fraction", type=float, default=0.05, metavar="F", help="selected of drawn ones (0.05)")
    parser.add_argument("--neighbours", type=float, default=2.0, metavar="N", help="tokens of a drawn run (2)")
    parser.add_argument("--stay", type=float, default=0.8, metavar="F", help="drawn runs selected again (0.8)")
    parser.add_argument("--host", type=numbers, default=[0.05, 0.1, 0.25], metavar="F,F", help="host memory, of KV")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="drawn, 2 in 5 to fill memory (30)")
    parser.add_argument("--full-steps", type=int, default=3, metavar="N", help="under full attention (3)")


@measure("disk", "steps of a context on disk, beside the disk's own speed", _disk_flags)
def disk(args: argparse.Namespace) -> int:
    """Measure decode steps of a context on disk, with several fractions of it in host memory and under full attention.
    Reports the bytes requested and read, the time, and the resident memory above the limit. The same run also measures
    the speed of the disk itself."""
    from dataclasses import replace

    from ...engine.recording import Recording
    from ..speed import disk_tier as tier
    from ..speed.baselines import SHAPES

    folder, say = Path(args.disk), say_on_stderr(False)
    speeds, speed = tier.disk_speeds(folder)
    if args.record:
        case, steps = tier.recorded_case(Recording.open(Path(args.record)), SHAPES[args.shape].head_dim)
        cases, about = [case], {"selections": f"recorded: {Path(args.record).name}"}
    else:
        shape = SHAPES[args.shape]
        drawn = tier.DiskCase(
            args.layers or shape.layers, shape.kv_heads, shape.head_dim, 0, shape.heads // shape.kv_heads,
            args.fraction, args.neighbours, args.stay,
        )  # fmt: skip
        cases = [replace(drawn, context=context) for context in args.contexts]
        about = {"selections": f"drawn: runs of {args.neighbours} tokens, {args.stay:.0%} of them again"}
    about["disk"] = f"a request {1e6 * speed.seek:.1f} us, {1e-6 / speed.byte:,.0f} MB a second; direct reads"
    rows: list[Any] = []
    for case in cases:
        steps = steps if args.record else list(tier.drawn_steps(case, args.steps))
        rows += tier.measure_case(case, steps, folder, args.host, speed, args.full_steps)
        about["shape"] = f"{case.layers} layers, {case.kv_heads} KV heads of {case.head_dim}, {case.dtype}"
        for one in tier.report(about, speeds, rows):
            one.write(Path(args.out))  # after each case, because the next one may take an hour
    for one in tier.report(about, speeds, rows):
        show(one, args.out, say)
    return 0


def _disk_prefill_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.disk_prefill import PrefillConfig

    default = PrefillConfig()
    parser.add_argument("model", metavar="MODEL", help="a local folder or a hub id of a trained model")
    parser.add_argument("--text", required=True, metavar="SPEC", help=TEXT_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="disk_prefill.json, .csv and .md")
    parser.add_argument("--disk", required=True, metavar="DIR", help="folder on the disk that rows go to")
    parser.add_argument("--context", type=int, default=default.context, metavar="N", help="tokens of a prompt (8000)")
    parser.add_argument("--host", type=float, default=default.host, metavar="F", help="host memory, of KV (0.25)")
    parser.add_argument("--repeats", type=int, default=default.repeats, metavar="N", help="prompts (3)")
    parser.add_argument("--policy", default=default.policy, metavar="NAME", help="(full)")
    parser.add_argument("--dtype", default=default.dtype, metavar="bfloat16|float32")


@measure("disk-prefill", "a trained model's prompt whose rows go to a disk, beside one in memory", _disk_prefill_flags)
def disk_prefill(args: argparse.Namespace) -> int:
    """Compare the CPU time of a prompt with the KV cache in memory, and with the KV cache on disk and a fraction of it
    in memory, alternately. The first tokens must be equal."""
    from ...utils.texts import read_text
    from ..speed.disk_prefill import PrefillConfig, run_disk_prefill

    config = PrefillConfig(**given(args, ["context", "host", "repeats", "policy", "dtype"]))
    report = run_disk_prefill(args.model, read_text(args.text), Path(args.disk), config)
    report.write(Path(args.out))
    show(report, args.out, say_on_stderr(False))
    return 0


def _compiled_flags(parser: argparse.ArgumentParser) -> None:
    from ..speed.compiled_kernels import CAPABILITIES, CASES

    parser.add_argument("--out", required=True, metavar="DIR", help="compiled_kernels.json, .csv and .md")
    parser.add_argument(
        "--arch", type=words, default=list(CAPABILITIES), metavar="A,B", help=f"of {', '.join(CAPABILITIES)} (all)"
    )
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help=f"of {'; '.join(CASES)} (all)")


@measure("compiled-kernels", "registers, spills and width of loads of each kernel; needs no GPU", _compiled_flags)
def compiled_kernels(args: argparse.Namespace) -> int:
    """Compile every Triton kernel for several GPU architectures; no GPU is needed. Reports registers, spilled bytes,
    shared memory and the bytes moved by each load instruction, as found in the machine code."""
    from ..speed.compiled_kernels import compile_report

    report = compile_report(args.arch, args.case)
    report.write(Path(args.out))
    show(report, args.out, say_on_stderr(False))
    return 0


def _cpu_kernels_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="DIR", help="cpu_kernels.json, .csv and .md")
    parser.add_argument("--tokens", type=counts, default=(8192, 32_768, 131_072), metavar="8k,32k", help="in context")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="of which the fastest counts")


@measure("cpu-kernels", "C kernels at each instruction set level against memory and arithmetic", _cpu_kernels_flags)
def cpu_kernels(args: argparse.Namespace) -> int:
    """Time each C kernel of a decode step against its lower bounds, at each instruction set level of this processor, or
    only at the level set by OFFLOAD_RT_CPU_LEVEL."""
    from ..speed.cpu_kernels import kernel_report

    report = kernel_report(args.tokens, args.repeats)
    report.write(Path(args.out))
    show(report, args.out, say_on_stderr(False))
    return 0
