"""Create and close engines: one for each policy in use. All engines share the weights and the KV pool."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ..async_llm import AsyncLLM
from ..engine.async_clients import EngineLoad
from .errors import RefusedError, bad_request
from .options import ServerOptions

_ADDED = (
    "waiting", "running", "prompt_tokens", "cached_tokens", "generated_tokens", "h2d_bytes", "device_kv_bytes",
    "host_hit_tokens",
)  # fmt: skip
"""Fields of `EngineLoad` that are summed over all engines. All other fields have the same value in every engine."""


class Engines:
    """The engine for the server's policy, and up to `max_engines - 1` engines for policies that clients choose.

    Each engine decodes its own batch. All engines share cached prefixes. If there are `max_engines` already, a new
    policy replaces an idle engine.
    """

    def __init__(self, own: AsyncLLM, options: ServerOptions) -> None:
        self.own, self._options = own, options
        self._others: OrderedDict[str, AsyncLLM] = OrderedDict()
        self._users: dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._past = dict.fromkeys(_ADDED, 0)

    @asynccontextmanager
    async def engine_for(self, policy: str | None, options: Mapping[str, Any] | None) -> AsyncIterator[AsyncLLM]:
        """Yield the engine for a policy, and keep it open during the `async with` statement.

        Raises:
            RefusedError: The server does not let clients choose a policy, or too many policies are in use.
            ConfigError: The policy does not exist, or its options are invalid.
        """
        if policy is None:
            if options:
                raise bad_request(
                    "policy_options requires policy: add policy, or remove policy_options", "policy_options"
                )
            yield self.own
            return
        key = json.dumps([policy, dict(options or {})], sort_keys=True)
        taking = asyncio.ensure_future(self._acquire(key, policy, options or {}))
        try:
            yield await asyncio.shield(taking)  # finish opening the engine even if the client disconnects
        finally:
            if taking.done():
                self._release(key, taking)
            else:
                taking.add_done_callback(lambda taken: self._release(key, taken))

    async def _acquire(self, key: str, policy: str, options: Mapping[str, Any]) -> AsyncLLM:
        async with self._lock:
            engine = self._others.get(key) or await self._open(key, policy, options)
            self._others.move_to_end(key)
            self._users[key] = self._users.get(key, 0) + 1
            return engine

    def _release(self, key: str, taken: asyncio.Future[AsyncLLM]) -> None:
        if not taken.cancelled() and taken.exception() is None:
            self._users[key] -= 1

    async def _open(self, key: str, policy: str, options: Mapping[str, Any]) -> AsyncLLM:
        limit, own = self._options.max_engines, self.own.llm.config.policy
        if limit == 1:
            raise bad_request(
                f"this server allows only policy {own!r}: remove policy, or restart it with a higher --max-engines",
                "policy",
            )
        if len(self._others) >= limit - 1:
            idle = next((name for name in self._others if not self._users.get(name)), None)
            if idle is None:
                raise RefusedError(
                    429, f"{limit} policies are in use: retry later, or remove policy", headers={"Retry-After": "5"}
                )
            await self._close(idle)

        def make() -> AsyncLLM:
            return AsyncLLM(self.own.llm.under(policy, options), max_waiting=self._options.max_waiting)

        self._others[key] = engine = await asyncio.to_thread(make)
        return engine

    async def _close(self, key: str) -> None:
        engine = self._others[key]
        await engine.close()
        load = engine.load()
        del self._others[key]  # no await between this line and the addition of the totals, so `load` counts them once
        self._users.pop(key, None)
        for name in _ADDED:
            self._past[name] += getattr(load, name)

    def load(self) -> EngineLoad:
        own, others = self.own.load(), [engine.load() for engine in self._others.values()]
        added = {name: self._past[name] + sum(getattr(load, name) for load in (own, *others)) for name in _ADDED}
        return replace(own, **added)

    async def close(self) -> None:
        async with self._lock:
            for key in list(self._others):
                await self._close(key)
        await self.own.close()  # close it last, because the other engines use its pool
