"""The engine that answers, and others over the same weights and pool, under policies that requests ask for."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

from ..async_llm import AsyncLLM
from ..engine.callers import EngineLoad
from .errors import RefusedError, refused
from .options import ServerOptions

_ADDED = (
    "waiting", "running", "prompt_tokens", "cached_tokens", "generated_tokens", "link_bytes", "device_kv_bytes",
)  # fmt: skip
"""Fields of `EngineLoad` that all engines have of their own."""


class Engines:
    """The server's own engine, and up to `max_policies - 1` others. Each decodes a batch of its own; on their pool they
    take turns, step by step, and a prompt that one has prefilled is there for the others."""

    def __init__(self, own: AsyncLLM, options: ServerOptions) -> None:
        self.own, self._options = own, options
        self._others: OrderedDict[str, AsyncLLM] = OrderedDict()
        self._users: dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._past = dict.fromkeys(_ADDED, 0)

    @asynccontextmanager
    async def under(self, policy: str | None, options: Mapping[str, Any] | None) -> AsyncIterator[AsyncLLM]:
        """The engine of a policy, for as long as the block. Raises RefusedError where no other policy may be asked for,
        or too many are in use; ConfigError for one that does not exist or does not fit."""
        if policy is None:
            if options:
                raise refused("policy_options are for a request that names its policy", "policy_options")
            yield self.own
            return
        key = json.dumps([policy, dict(options or {})], sort_keys=True)
        taking = asyncio.ensure_future(self._take(key, policy, options or {}))
        try:
            yield await asyncio.shield(taking)  # a client that leaves leaves no engine half made, or half closed
        finally:
            if taking.done():
                self._give_back(key, taking)
            else:
                taking.add_done_callback(lambda taken: self._give_back(key, taken))

    async def _take(self, key: str, policy: str, options: Mapping[str, Any]) -> AsyncLLM:
        async with self._lock:
            engine = self._others.get(key) or await self._make(key, policy, options)
            self._others.move_to_end(key)
            self._users[key] = self._users.get(key, 0) + 1
            return engine

    def _give_back(self, key: str, taken: asyncio.Future[AsyncLLM]) -> None:
        if not taken.cancelled() and taken.exception() is None:
            self._users[key] -= 1

    async def _make(self, key: str, policy: str, options: Mapping[str, Any]) -> AsyncLLM:
        most, own = self._options.max_policies, self.own.llm.config.policy
        if most == 1:
            raise refused(
                f"this server answers under the policy {own!r}: leave policy out, or start it with --max-policies",
                "policy",
            )
        if len(self._others) >= most - 1:
            idle = next((name for name in self._others if not self._users.get(name)), None)
            if idle is None:
                raise RefusedError(
                    429, f"{most} policies are in use: try later, or leave policy out", headers={"Retry-After": "5"}
                )
            await self._drop(idle)

        def make() -> AsyncLLM:
            return AsyncLLM(self.own.llm.under(policy, options), max_waiting=self._options.max_waiting)

        self._others[key] = engine = await asyncio.to_thread(make)
        return engine

    async def _drop(self, key: str) -> None:
        engine = self._others[key]
        await engine.close()
        load = engine.load()
        del self._others[key]  # what it counted is always counted once
        self._users.pop(key, None)
        for name in _ADDED:
            self._past[name] += getattr(load, name)

    def load(self) -> EngineLoad:
        """What all engines have to do, and have done."""
        own, loads = self.own.load(), [engine.load() for engine in self._others.values()]
        added = {name: self._past[name] + sum(getattr(load, name) for load in (own, *loads)) for name in _ADDED}
        return EngineLoad(**{field.name: getattr(own, field.name) for field in fields(EngineLoad)} | added)

    async def close(self) -> None:
        """Closes all of them, the server's own last: the others use its pool."""
        async with self._lock:
            for key in list(self._others):
                await self._drop(key)
        await self.own.close()
