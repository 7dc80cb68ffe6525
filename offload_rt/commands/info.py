"""`offload-rt info`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig, parse_size
from ..errors import ConfigError
from .common import add_command, given
from .policy_flags import add_device_flags, add_policy_flags, policy_options

if TYPE_CHECKING:
    from ..planning.device_plan import DevicePlan
    from ..planning.memory_model import DeviceCosts


def run(args: argparse.Namespace) -> int:
    """Shows what a model and a context will need, and whether they fit here. Loads no weights."""
    from rich.console import Console

    from ..models.registry import load_shape
    from ..planning.memory_model import DeviceCosts, Machine, obstacles, requirements
    from ..select.registry import memory_demand
    from .tables import requirements_table

    if args.context < 1:
        raise ConfigError(f"--context {args.context} must be at least 1 token")
    options = policy_options(args)
    host_memory = None if args.host_memory is None else parse_size(args.host_memory, "host_memory")
    config = EngineConfig(**given(args, ("working_set",)))
    shape = load_shape(args.model, device=args.device, dtype=args.dtype)
    machine, geometry = Machine.here(host_memory, shape.device), shape.geometry
    demand = memory_demand(args.policy, options, geometry, shape.dtype)
    costs = DeviceCosts(shape, demand, config.prefill_slice, working_set=config.working_set)
    plan = _plan(args.device_memory, costs, args.context)
    if plan is not None:
        costs = plan.costs
    needed = requirements(costs, shape.weight_bytes if plan is None else plan.weights, args.context)
    Console().print(requirements_table(args.model, args.policy, needed, machine, plan))
    found, notes = obstacles(needed, machine, 0 if plan is None else plan.host_bytes), []
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
    add_device_flags(parser, max_context=False)
    add_policy_flags(parser)


def _plan(limit: str | None, costs: DeviceCosts, context: int) -> DevicePlan | None:
    """The plan under a limit of the device, if one is given. Raises MemoryLimitError where none holds."""
    from ..planning.device_plan import plan_device

    return None if limit is None else plan_device(parse_size(limit, "device_memory"), costs, context)
