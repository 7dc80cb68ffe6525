"""`offload-rt info`."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import InfiniGenOptions, check_choice, parse_size
from ..errors import ConfigError
from .common import add_command
from .policy_flags import add_device_flags, add_policy_flags, policy_options

KNOWN = ("infinigen", "full")


def run(args: argparse.Namespace) -> int:
    """Shows what a model and a context will need, and whether they fit here. Loads no weights."""
    from rich.console import Console

    from ..models.checkpoint import resolve_device
    from ..models.registry import load_config_geometry
    from ..runtime.report import requirements_table
    from ..runtime.requirements import Machine, obstacles, requirements

    if args.context < 1:
        raise ConfigError(f"--context {args.context} must be at least 1 token")
    check_choice("policy", args.policy, KNOWN)
    options = policy_options(args)
    chosen = InfiniGenOptions.preset(**_named(options)) if args.policy == "infinigen" else None
    host_memory = None if args.host_memory is None else parse_size(args.host_memory, "host_memory")
    device = resolve_device(args.device)
    geometry, weight_bytes, dtype = load_config_geometry(args.model, device=device, dtype=args.dtype)
    machine = Machine.here(host_memory, device)
    needed = requirements(geometry, weight_bytes, dtype, args.context, chosen)
    Console().print(requirements_table(args.model, args.policy, needed, machine))
    found, notes = obstacles(needed, machine), []
    if args.context > geometry.max_positions:
        made_for = f"The model was made for {geometry.max_positions:,} positions"
        if geometry.absolute_positions:
            found.append(f"{made_for}; it cannot take more.")
        else:
            notes.append(f"{made_for}; quality beyond is not known.")
    print("\n".join(["It does not fit here." if found else "It fits here.", *found, *notes]))
    return 0


def add(commands: Any) -> None:
    """Enters the subcommand."""
    parser = add_command(commands, "info", run)
    parser.add_argument("--context", type=int, required=True, metavar="N", help="tokens, prompt and new ones together")
    add_device_flags(parser)
    add_policy_flags(parser)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the preset under the name of the parameter."""
    others = {key: value for key, value in options.items() if key != "preset"}
    return {"name": options.get("preset", "default"), **others}
