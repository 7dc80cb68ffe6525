"""Flags of the session store."""

from __future__ import annotations

import argparse
from dataclasses import fields

from ..config import StoreOptions
from ..utils.config_fields import from_mapping, option_of
from .option_flags import add_option, given_options

PREFIX = "store_option_"


def add_store_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --store and the flags of `StoreOptions`."""
    group = parser.add_argument_group("store")
    without = "" if required else " (default: sessions are not stored)"
    group.add_argument("--store", required=required, metavar="DIR", help=f"folder of stored sessions{without}")
    for field in fields(StoreOptions):
        if option_of(field).group:
            add_option(group, StoreOptions, field, prefix=PREFIX)


def store_options(args: argparse.Namespace) -> StoreOptions:
    """Return the store options from the flags. Raises ConfigError."""
    return from_mapping(StoreOptions, given_options(args, [field.name for field in fields(StoreOptions)], PREFIX))
