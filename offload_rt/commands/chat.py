"""`offload-rt chat`: a conversation that goes on where it was left."""

from __future__ import annotations

import argparse
from typing import Any

from ..sampling_params import SamplingParams
from ..texts import read_text
from .common import add_command, given, stderr_console
from .engine_flags import add_engine_flags, engine_config
from .store_flags import add_store_flags, store_options

SAMPLING = ("max_tokens", "temperature", "top_p", "seed")


def run(args: argparse.Namespace) -> int:
    """Talks with a model in the terminal; the session is stored and comes back, with its KV cache, the next time."""
    from .chat_loop import Chat

    asked = given(args, SAMPLING)
    SamplingParams(**asked)  # what is wrong is said before a model is loaded
    config, store = engine_config(args, progress=True), store_options(args)
    console = stderr_console(quiet=False)

    from ..llm import LLM

    llm = LLM(args.model, config)
    params = llm.get_default_sampling_params(**asked)
    Chat(llm, llm.session(args.session, args.store, store), params, read_text, console).run()
    return 0


def add(commands: Any) -> None:
    """Enters the subcommand."""
    parser = add_command(commands, "chat", run)
    parser.add_argument("--session", required=True, metavar="NAME", help="a new name, or one to go on with")
    add_store_flags(parser)
    add_engine_flags(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", dest="max_tokens", type=int, metavar="N")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
