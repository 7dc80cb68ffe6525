"""Decorator for methods that run with their model's device as the current device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..models.adapter import ModelAdapter
from ..transfer.streams import on_device


class Computes(Protocol):
    adapter: ModelAdapter


S = TypeVar("S", bound=Computes)
T = TypeVar("T")
P = ParamSpec("P")


def on_own_device(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run `method` with the device of `self.adapter` as the current device."""

    @wraps(method)
    def with_device(computes: S, /, *args: P.args, **named: P.kwargs) -> T:
        with on_device(computes.adapter.device):
            return method(computes, *args, **named)

    return with_device
