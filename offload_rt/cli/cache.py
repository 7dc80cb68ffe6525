"""`offload-rt cache list|delete|shrink|clear`: manage the packed weights that were converted from checkpoints."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..utils.config_fields import check_choice
from ..utils.home import expand_user
from ..utils.units import format_duration, format_size, parse_size
from .common import add_command, print_list, printable

if TYPE_CHECKING:
    from ..models.packed_cache import PackedEntry

_ID_LENGTH = 8


def run(args: argparse.Namespace) -> int:
    """List packed weights in the cache, delete those of one checkpoint, shrink the cache, or clear it. Deleted
    weights are converted again when their checkpoint is loaded."""
    check_choice("action", args.action, ACTIONS)
    for action, what, value, example in (
        ("delete", "NAME", args.name, "as `offload-rt cache list` shows it"),
        ("shrink", "--limit", args.limit, "such as 20GiB"),
    ):
        if args.action == action and value is None:
            raise InputError(f"cache {action} needs {what}, {example}")
        if args.action != action and value is not None:
            raise InputError(f"cache {args.action} takes no {what}; only cache {action} does")

    from ..models.packed_cache import packed_cache_folder  # imports rich, which errors do not need

    ACTIONS[args.action](packed_cache_folder(), args)
    return 0


def add(commands: Any) -> None:
    parser = add_command(commands, "cache", run, model=False)
    parser.add_argument("action", nargs="?", default="list", metavar="list|delete|shrink|clear", help="default: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="delete: a checkpoint, or its id in the list")
    parser.add_argument(
        "--limit", metavar="SIZE", help="shrink: delete the weights used least recently until the rest fits into SIZE"
    )


def _list(home: Path, args: argparse.Namespace) -> None:
    from ..models.packed_cache import cache_limit, packed_entries

    entries, now = packed_entries(home), time.time()
    rows = [
        (
            printable(entry.origin),
            entry.folder.name[:_ID_LENGTH],
            format_size(entry.size),
            f"{format_duration(max(0, now - entry.used))} ago",
        )
        for entry in reversed(entries)
    ]
    print_list(("checkpoint", "id", "size", "last used"), rows, "no packed weights")
    total = format_size(sum(entry.size for entry in entries))
    print(f"{total} of at most {format_size(cache_limit())} in {home}", file=sys.stderr)


def _delete(home: Path, args: argparse.Namespace) -> None:
    from ..models.packed_cache import delete_packed

    named = (args.name, str(expand_user(args.name).absolute()))
    deleted = delete_packed(
        home, lambda entry: entry.origin in named or args.name in (entry.folder.name, entry.folder.name[:_ID_LENGTH])
    )
    if not deleted:
        raise InputError(f"the cache has no packed weights of {args.name!r}: `offload-rt cache list` shows the names")
    _report(deleted)


def _shrink(home: Path, args: argparse.Namespace) -> None:
    from ..models.packed_cache import shrink_packed

    _report(shrink_packed(home, parse_size(args.limit, "--limit")))


def _clear(home: Path, args: argparse.Namespace) -> None:
    from ..models.packed_cache import shrink_packed

    _report(shrink_packed(home, 0))


def _report(deleted: list[PackedEntry]) -> None:
    for entry in deleted:
        print(f"deleted {printable(entry.origin)}: {format_size(entry.size)} freed", file=sys.stderr)
    if not deleted:
        print("nothing was deleted", file=sys.stderr)


ACTIONS = {"list": _list, "delete": _delete, "shrink": _shrink, "clear": _clear}
