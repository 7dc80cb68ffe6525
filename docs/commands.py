"""Generate the command reference from the parsers of the command line.

python docs/commands.py docs/pages/reference/commands.md
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ["COLUMNS"] = "110"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: sub for action in actions for name, sub in action.choices.items()}


def section(name: str, parser: argparse.ArgumentParser) -> str:
    return f"## {name}\n\n```text\n{parser.format_help().strip()}\n```\n"


def page() -> str:
    from offload_rt.cli import _parser

    parts = ["# Commands\n", "The output of `--help` for every command.\n", section("offload-rt", _parser())]
    for name, sub in subcommands(_parser()).items():
        parts.append(section(f"offload-rt {name}", sub))
        parts += [section(f"offload-rt {name} {inner}", deeper) for inner, deeper in subcommands(sub).items()]
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
