"""`offload-rt simulate-store`: a request trace over tiers, policies and loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config import check_choice, parse_size
from .common import add_command, given, numbers

RATES = ("token_bytes", "link_bandwidth", "disk_bandwidth", "free_share", "gpu_price", "host_price", "disk_price")


def run(args: argparse.Namespace) -> int:
    """Replays a request trace over a session store: hits by tier, stalls, cost, for each policy."""
    from rich.console import Console

    from ..eval.simulate.store import StoreMachine, label, read_trace, simulate
    from ..eval.simulate.store_report import findings, write_report
    from ..storage.policies import POLICIES

    policies = args.policies.split(",")
    for policy in policies:
        check_choice("policy", policy, POLICIES)
    options = given(args, RATES)
    for name in ("token_bytes", "link_bandwidth", "disk_bandwidth"):
        if name in options:
            options[name] = parse_size(options[name], f"--{name.replace('_', '-')}")
    machines = [
        StoreMachine(_size(host, "--host"), _size(disk, "--disk"), prefill_rate=rate, **options)
        for host in args.host.split(",")
        for disk in args.disk.split(",")
        for rate in args.service_rate
    ]
    requests = read_trace(Path(args.trace), args.requests)
    rows = simulate(requests, machines, policies, args.speed)
    for row in rows:
        print(
            f"{label(row)}  {row['policy']:9}  hit {row['hit']:6.1%} (host {row['host_hit']:.1%}, disk "
            f"{row['disk_hit']:.1%})  saved {row['tokens_saved']:,}  stall {row['stall_seconds']:.1f} s  TTFT p50 "
            f"{row['ttft_p50']:.2f} s  ${row['dollars_gpu'] + row['dollars_storage']:.2f}"
        )
    print("\n".join(findings(rows)))
    if args.out is not None:
        about = {"trace": Path(args.trace).name, "requests": len(requests)}
        for path in write_report(rows, about, Path(args.out)):
            Console(stderr=True, highlight=False).print(f"wrote {path}", soft_wrap=True)
    return 0


def add(commands: Any) -> None:
    """Enters the subcommand."""
    parser = add_command(commands, "simulate-store", run, model=False)
    parser.add_argument("--trace", required=True, metavar="FILE", help="Mooncake's format, one JSON object a line")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--host", default="128GiB", metavar="SIZE,...", help="host memory; several are all tried")
    parser.add_argument("--disk", default="0,2TiB", metavar="SIZE,...", help="disk; 0 is none")
    parser.add_argument("--speed", type=numbers, default=[1.0], metavar="X,...", help="2: requests come twice as fast")
    parser.add_argument(
        "--service-rate", type=numbers, default=[20_000.0], metavar="R,...", help="prefilled tokens a second"
    )
    parser.add_argument("--policies", default="lookahead,lru,fifo,belady", metavar="P,...")
    parser.add_argument("--out", metavar="DIR", help="write tables and pictures there")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--token-bytes", metavar="SIZE", help="KV of one token (128KiB: Llama-3-8B)")
    machine.add_argument("--link-bandwidth", metavar="SIZE", help="host to device, a second (26GB)")
    machine.add_argument("--disk-bandwidth", metavar="SIZE", help="disk to host, a second (5GB)")
    machine.add_argument("--free-share", type=float, metavar="S", help="of host memory kept for fetching (0.1)")
    machine.add_argument("--gpu-price", type=float, metavar="D", help="dollars an hour")
    machine.add_argument("--host-price", type=float, metavar="D", help="dollars an hour and GB of host memory")
    machine.add_argument("--disk-price", type=float, metavar="D", help="dollars an hour and GB of disk")


def _size(text: str, name: str) -> int:
    return 0 if text.strip() == "0" else parse_size(text, name)
