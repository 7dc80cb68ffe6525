"""`offload-rt info`: show the memory requirements of a model and a context."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..models.source import find_source, hub_of
from .common import add_command, token_count
from .flags import add_engine_flags, engine_config


def run(args: argparse.Namespace) -> int:
    """Show how much memory a model and a context need, and whether they fit. No weights are loaded."""
    context = args.context
    if context is not None and context < 1:
        raise ConfigError(f"--context {context} must be at least 1 token")
    config = engine_config(args, max_model_len=context)
    source = find_source(args.model, hub_of(config))  # checked before torch is imported
    source.check_files()
    source.check_reachable()

    from rich.console import Console

    from ..core import BLOCK_SIZE
    from ..model_runner.cuda_graphs import max_graphs
    from ..models.linear import GGUF_NOTE
    from ..models.shape import load_shape
    from ..planning.device_plan import costs_for, plan_for, requested_placement
    from ..planning.host_memory import divide_host_memory
    from ..planning.memory_model import SystemMemory, disk_plan, obstacles, requirements
    from ..utils.native_libraries import native_status
    from .tables import requirements_table

    shape = load_shape(
        args.model, device=config.device, dtype=config.dtype, hub=hub_of(config), max_model_len=context,
        quantize=config.quantize,
    )  # fmt: skip
    context = context or shape.geometry.max_positions
    config = replace(config, max_model_len=context)
    disk, geometry = disk_plan(config, shape), shape.geometry
    host = divide_host_memory(config, geometry, shape.dtype)
    machine = SystemMemory.measure(host.kv, shape.device, None if disk is None else disk.limit)
    plan = None if config.device_memory is None else plan_for(config, shape)
    shape = shape.with_placement(requested_placement(config, shape)) if plan is None else plan.costs.shape
    costs, placement = (costs_for(config, shape), shape.placement) if plan is None else (plan.costs, plan.placement)
    # While a sequence grows, one graph is captured per length bucket. Up to 512 tokens, each block is a bucket.
    graphs = min(-(-context // BLOCK_SIZE), max_graphs(config, shape.device, streams=bool(placement)))
    needed = requirements(costs, shape.weight_bytes if plan is None else plan.weights, context, graphs)
    needed = replace(needed, snapshots=host.snapshots)
    Console().print(requirements_table(args.model, config.policy, needed, machine, plan, disk, shape))
    found, notes = obstacles(needed, machine, shape.host_bytes if plan is None else plan.host_bytes), []
    if source.gguf is not None and shape.packing is None:
        notes.append(f"Note: {GGUF_NOTE}.")
    if context > geometry.max_positions:
        length = f"The context length of the model is {geometry.max_positions:,} tokens"
        if geometry.absolute_positions:
            found.append(f"{length}; longer texts are impossible.")
        else:
            notes.append(f"{length}; the quality of longer texts is unknown.")
    verdict = "It does not fit in memory." if found else "It fits in memory."
    print("\n".join([verdict, *found, *notes, f"CPU kernels: {native_status()}."]))
    return 0


def add(commands: Any) -> None:
    parser = add_command(commands, "info", run)
    parser.add_argument(
        "--context",
        type=token_count,
        metavar="N",
        help="number of tokens, including new tokens, such as 50000 or 128k (default: the model's context length)",
    )
    add_engine_flags(parser, plan=True)
