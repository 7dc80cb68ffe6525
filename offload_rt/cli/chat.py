"""`offload-rt chat`: a conversation with a stored session."""

from __future__ import annotations

import argparse
from typing import Any

from ..utils.texts import read_text
from .common import add_command, stderr_console
from .engine_flags import add_engine_flags, engine_config
from .sampling_flags import add_sampling_flags, sampling_given
from .store_flags import add_store_flags, store_options


def run(args: argparse.Namespace) -> int:
    """Chat with a model in the terminal. The session and its KV cache are stored and can be resumed."""
    from .chat_loop import Chat

    sampling = sampling_given(args)
    config, store = engine_config(args, progress=True), store_options(args)
    console = stderr_console(quiet=False)

    from ..llm import LLM

    llm = LLM(args.model, config)
    session = llm.session(args.session, args.store, store, system=args.system)
    Chat(llm, session, llm.get_default_sampling_params(**sampling), read_text, console).run()
    return 0


def add(commands: Any) -> None:
    parser = add_command(commands, "chat", run)
    parser.add_argument("--session", required=True, metavar="NAME", help="name of a new or existing session")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of a new session")
    add_store_flags(parser)
    add_engine_flags(parser)
    add_sampling_flags(parser, several=False)
