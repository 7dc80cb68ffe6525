"""Simulation measures: replay of recordings with other sizes and policies, and of request traces on a store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...config import EvictionOptions
from ...errors import ConfigError
from ...utils.config_fields import check_choice
from ...utils.texts import check_writable, read_text, text_name
from ...utils.units import parse_size
from ..core.registry import measure
from .flags import add_text_flag, given, numbers, say_on_stderr, show, words

RATES = ("token_bytes", "link_bandwidth", "disk_bandwidth", "free_share", "gpu_price", "host_price", "disk_price")


def _layout_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recordings", nargs="+", metavar="RUN", help="folders of 'offload-rt generate --record RUN'")
    parser.add_argument("--out", required=True, metavar="DIR", help="disk_layout.json, .csv and .md")
    parser.add_argument("--row-bytes", type=int, default=256, metavar="N", help="K and V of a token and head (256)")
    parser.add_argument(
        "--kept", type=numbers, default=[0.0, 0.1, 0.25], metavar="F,F", help="shares of rows in memory"
    )
    parser.add_argument(
        "--clusters", type=int, metavar="N", help="rows by clusters of N tokens with like keys too: computes the prompt"
    )
    parser.add_argument("--seek", type=float, default=18.0, metavar="US", help="of a request of the disk (18)")
    parser.add_argument("--rate", type=float, default=1150.0, metavar="MB", help="a second that it reads (1150)")


@measure("disk-layout", "recorded selections as blocks and requests of a disk", _layout_flags)
def disk_layout(args: argparse.Namespace) -> int:
    """Compare disk layouts of the KV cache: disk blocks and requests of recorded selections, for several layouts and
    fractions of the KV in memory."""
    from ...engine.recording import Recording
    from ...kv_cache.disk.speed import DiskSpeed
    from ..simulate.disk_layout import report
    from ..simulate.key_clusters import recorded_places

    runs = [Recording.open(Path(run)) for run in args.recordings]
    clusters = [recorded_places(run, args.clusters) if args.clusters else () for run in runs]
    one = report(runs, args.row_bytes, args.kept, DiskSpeed(args.seek * 1e-6, 1e-6 / args.rate), clusters)
    if args.clusters:
        one.about["clusters"] = f"{args.clusters} tokens on average, by k-means of a head's keys of the prompt"
    one.write(Path(args.out))
    show(one, args.out, say_on_stderr(False))
    return 0


def _replay_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", metavar="RUN", help="folder that 'offload-rt generate --record RUN' wrote")
    parser.add_argument("--working-set", type=numbers, metavar="0.05,0.1", help="rows kept, as shares of the tokens")
    parser.add_argument("--cache", type=words, metavar="decay,lru,lfu,counter", help="what leaves a working set first")
    parser.add_argument("--budgets", type=numbers, metavar="0.5,0.8", help="pool limits, as shares of the tokens")
    parser.add_argument("--eviction", type=words, metavar="fifo,lru,counter", help="what a smaller pool evicts")
    parser.add_argument(
        "--protect", metavar="window|none", help="what eviction spares (default: fifo is tried with both)"
    )
    parser.add_argument("--out", metavar="DIR", help="results (default: RUN/replay)")
    parser.add_argument("--html", metavar="FILE", help="page of the text: which passages each sentence read")
    parser.add_argument("--quiet", action="store_true", help="tables only")


@measure("replay", "a recorded run under other working sets and smaller pools", _replay_flags)
def replay(args: argparse.Namespace) -> int:
    """Replay a recording of `generate --record`: transfers saved by a working set, and losses of a smaller pool. Tables
    go to stdout and --out; --html writes a page that shows the passages read by each sentence."""
    from ...engine.recording import Recording
    from ..simulate.attention_page import write_page
    from ..simulate.selection_replay import ReplayConfig, run_replay

    check_writable(args.html)
    config = ReplayConfig(**_replay_settings(args))
    recording, say = Recording.open(Path(args.recording)), say_on_stderr(args.quiet)
    out = args.out if args.out is not None else str(Path(args.recording) / "replay")
    for report in run_replay(recording, config, Path(out), say):
        show(report, out, say)
    if args.html is not None:
        write_page(recording, Path(args.html))
        say(f"wrote {args.html}")
    return 0


def _replay_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for `ReplayConfig`. Raises ConfigError if they are invalid."""
    names = {"working_sets": args.working_set, "caches": args.cache, "budgets": args.budgets}
    settings: dict[str, Any] = {name: tuple(value) for name, value in names.items() if value is not None}
    if args.eviction is not None:
        for name in args.eviction:
            check_choice("eviction", name, ("fifo", "lru", "counter"))
        settings["evictions"] = tuple(EvictionOptions(name, args.protect or "window") for name in args.eviction)
    elif args.protect is not None:
        raise ConfigError(f"--protect {args.protect} goes with --eviction: give both")
    return settings


def _working_set_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="'reference', a local folder or a hub id")
    add_text_flag(parser)
    parser.add_argument("--context", type=int, metavar="N", help="tokens, prompt and new ones (default: all positions)")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N", help="generated (256)")
    parser.add_argument("--starts", type=numbers, default=[0.3, 0.7], metavar="0.3,0.7", help="in the text, as shares")
    parser.add_argument(
        "--shares", type=numbers, default=[0.01, 0.02, 0.04, 0.08], metavar="F,F", help="working sets, of 16-bit KV"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="working_set and working_set_rules")


@measure("working-set", "rows kept on the device: rules and sizes compared, bytes saved", _working_set_flags)
def working_set(args: argparse.Namespace) -> int:
    """Continue a text with working sets of several sizes and rules. Reports hit rates, host-to-device transfer, and
    whether the tokens are equal."""
    from ..simulate.working_set import run_working_set

    text, say = read_text(args.text), say_on_stderr(False)
    for report in run_working_set(
        args.model,
        text,
        text_name(args.text),
        Path(args.out),
        context=args.context,
        new_tokens=args.new_tokens,
        starts=args.starts,
        shares=args.shares,
    ):
        show(report, args.out, say)
    return 0


def _expert_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a mixture of experts: a local folder or a hub id")
    add_text_flag(parser)
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens of the text (2048)")
    parser.add_argument("--shares", type=numbers, default=[0.25, 0.5], metavar="F,F", help="experts on the device")
    parser.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16|float16|float64")
    parser.add_argument("--out", required=True, metavar="DIR", help="experts.json, .csv and .md")


@measure("experts", "experts that tokens choose: how often N are enough, and a layer's guess right", _expert_flags)
def experts(args: argparse.Namespace) -> int:
    """Analyse the experts chosen by the tokens of a text: number of experts that a layer must fetch if it keeps some on
    the device, and hits and misses of prefetching one layer ahead. The whole model runs."""
    from ..simulate.expert_choices import run_expert_choices

    text, say = read_text(args.text), say_on_stderr(False)
    report = run_expert_choices(
        args.model,
        text,
        text_name(args.text),
        Path(args.out),
        context=args.context,
        shares=args.shares,
        dtype=args.dtype,
    )
    show(report, args.out, say)
    return 0


def _store_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", required=True, metavar="FILE", help="Mooncake's format, one JSON object a line")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument(
        "--host", type=words, default=["128GiB"], metavar="SIZE,...", help="memory; several are all tried"
    )
    parser.add_argument("--disk", type=words, default=["0", "2TiB"], metavar="SIZE,...", help="disk; 0 is none")
    parser.add_argument("--speed", type=numbers, default=[1.0], metavar="X,...", help="2: requests come twice as fast")
    parser.add_argument(
        "--service-rate", type=numbers, default=[20_000.0], metavar="R,...", help="prefilled tokens a second"
    )
    parser.add_argument(
        "--policies",
        type=words,
        default=["lookahead", "lru", "fifo", "belady"],
        metavar="P,...",
        help="what is evicted",
    )
    parser.add_argument("--out", metavar="DIR", help="write tables and pictures there")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--token-bytes", metavar="SIZE", help="KV of one token (128KiB: Llama-3-8B)")
    machine.add_argument("--link-bandwidth", metavar="SIZE", help="host to device, a second (26GB)")
    machine.add_argument("--disk-bandwidth", metavar="SIZE", help="disk to host, a second (5GB)")
    machine.add_argument("--free-share", type=float, metavar="S", help="of host memory kept for fetching (0.1)")
    machine.add_argument("--gpu-price", type=float, metavar="D", help="dollars an hour")
    machine.add_argument("--host-price", type=float, metavar="D", help="dollars an hour and GB of host memory")
    machine.add_argument("--disk-price", type=float, metavar="D", help="dollars an hour and GB of disk")


@measure("store", "a request trace over a session store: tiers, policies, loads", _store_flags)
def store(args: argparse.Namespace) -> int:
    """Replay a request trace on a session store. Reports hits by tier, stalls and cost of each policy."""
    from ...storage.policies import POLICIES
    from ..simulate.store import StoreMachine, label, read_trace, simulate
    from ..simulate.store_report import findings, write_report

    for policy in args.policies:
        check_choice("policy", policy, POLICIES)
    options = given(args, RATES)
    for name in ("token_bytes", "link_bandwidth", "disk_bandwidth"):
        if name in options:
            options[name] = parse_size(options[name], f"--{name.replace('_', '-')}")
    machines = [
        StoreMachine(_size(host, "--host"), _size(disk, "--disk"), prefill_rate=rate, **options)
        for host in args.host
        for disk in args.disk
        for rate in args.service_rate
    ]
    requests = read_trace(Path(args.trace), args.requests)
    rows = simulate(requests, machines, args.policies, args.speed)
    for row in rows:
        print(
            f"{label(row)}  {row['policy']:9}  hit {row['hit']:6.1%} (host {row['host_hit']:.1%}, disk "
            f"{row['disk_hit']:.1%})  saved {row['tokens_saved']:,}  stall {row['stall_seconds']:.1f} s  TTFT p50 "
            f"{row['ttft_p50']:.2f} s  ${row['dollars_gpu'] + row['dollars_storage']:.2f}"
        )
    print("\n".join(findings(rows)))
    if args.out is not None:
        about, say = {"trace": Path(args.trace).name, "requests": len(requests)}, say_on_stderr(False)
        for path in write_report(rows, about, Path(args.out)):
            say(f"wrote {path}")
    return 0


def _size(text: str, name: str) -> int:
    return 0 if text.strip() == "0" else parse_size(text, name)
