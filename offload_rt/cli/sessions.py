"""`offload-rt sessions list|show|export|delete|clear`: manage stored sessions without loading a model."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..utils.config_fields import check_choice
from ..utils.home import expand_user
from ..utils.texts import check_writable
from ..utils.units import format_duration, format_size, parse_duration
from .common import add_command, default_store, print_list, printable, write_file

if TYPE_CHECKING:
    from ..sessions.deletion import Removed


def run(args: argparse.Namespace) -> int:
    """List the sessions of a store, show, export or delete one, or clear the KV of prompts without a session."""
    check_choice("action", args.action, ACTIONS)
    if args.store_ttl is not None and args.action != "list":
        raise InputError(f"--store-ttl applies to sessions list only: remove it from sessions {args.action}")
    if args.action not in ("list", "clear") and args.name is None:
        raise InputError(f"sessions {args.action} needs the NAME of a session")
    if args.action in ("list", "clear") and args.name is not None:
        cure = f"remove it, or write sessions show {args.name}" if args.action == "list" else "remove it"
        raise InputError(f"sessions {args.action} takes no NAME, and {args.name!r} was given: {cure}")
    ACTIONS[args.action](expand_user(args.store) if args.store else default_store(), args)
    return 0


def add(commands: Any) -> None:
    parser = add_command(commands, "sessions", run, model=False)
    parser.add_argument(
        "action", nargs="?", default="list", metavar="list|show|export|delete|clear", help="default: list"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show, export, delete: name of the session")
    parser.add_argument(
        "--store", metavar="DIR", help="folder of the store, as in chat --store (default: the store of serve)"
    )
    parser.add_argument(
        "--store-ttl", metavar="TIME", help="list: show how much this time to live would delete, such as 7d or 12h"
    )
    parser.add_argument("--model", metavar="MODEL", help="model of the session, if NAME exists for several models")
    parser.add_argument("--out", metavar="FILE", help="export: write to this file instead of stdout")


def _list(folder: Path, args: argparse.Namespace) -> None:
    from ..sessions.catalog import read_catalog

    ttl = None if args.store_ttl is None else parse_duration(args.store_ttl, "--store-ttl")
    headings = ["session", "model", "turns", "tokens", "on disk", "unshared", "last used"]
    rows, now, catalog = list[list[str]](), time.time(), read_catalog(folder)
    for one in catalog.sessions:
        history = one.history
        cells = [printable(history.name), printable(history.model)]
        cells += [f"{len(history.turns) // 2:,}", f"{len(history.tokens):,}", format_size(one.bytes)]
        cells += [format_size(one.own_bytes), f"{format_duration(max(0, now - one.used))} ago"]
        rows.append(cells if ttl is None else [*cells, format_size(one.bytes_unused_since(now - ttl))])
    rows += [[printable(damaged.name), damaged.namespace, "damaged"] for damaged in catalog.damaged]
    print_list(headings if ttl is None else [*headings, "expires"], rows, "no sessions")
    for one in catalog.sessions:
        if one.damage:
            name = printable(one.history.name)
            print(f"{name}: {one.damage}; the table shows the previous save", file=sys.stderr)


def _show(folder: Path, args: argparse.Namespace) -> None:
    from ..sessions.catalog import export_text, find_stored

    one = find_stored(folder, args.name, args.model)
    history = one.history
    cut = f"{history.removed:,} tokens were cut, " if history.removed else ""
    print(
        f"{printable(history.name)} ({history.model}): {len(history.turns) // 2:,} turns, "
        f"{len(history.tokens):,} tokens, {cut}"
        f"{format_size(one.bytes)} on disk, {format_size(one.own_bytes)} of it not shared\n",
        file=sys.stderr,
    )
    print(export_text(history), end="")


def _export(folder: Path, args: argparse.Namespace) -> None:
    from ..sessions.catalog import export_text, find_stored

    check_writable(args.out)
    text = export_text(find_stored(folder, args.name, args.model).history)
    if args.out is None:
        print(text, end="")
    else:
        write_file(args.out, text)


def _delete(folder: Path, args: argparse.Namespace) -> None:
    from ..sessions.catalog import delete_stored

    gone = delete_stored(folder, args.name, args.model)
    print(f"deleted {printable(gone.name)} ({gone.model}): {_result(gone.removed)}", file=sys.stderr)


def _clear(folder: Path, args: argparse.Namespace) -> None:
    from ..sessions.catalog import clear_prompts

    print(f"KV of prompts without a session was deleted: {_result(clear_prompts(folder))}", file=sys.stderr)


def _result(removed: Removed) -> str:
    note = f"; {removed.note}" if removed.note else ""
    return f"{format_size(removed.bytes)} freed{note}"


ACTIONS = {"list": _list, "show": _show, "export": _export, "delete": _delete, "clear": _clear}
