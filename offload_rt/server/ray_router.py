"""Consistent-hash router with load balancing for Ray Serve. Ray's routing processes import this module."""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from .proxy import balance_by_load

MAX_AHEAD = 4
"""A request goes to the replica that has its prefix cached, unless another one has over this many fewer requests."""


class BalancedRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Routes requests with the same session id to one replica, unless another replica has a much lower load.

    Ray's router waits until the first replica is full. This router instead sorts the replicas by load if the first one
    has over `MAX_AHEAD` more running requests than another. Loads are Ray's cached queue lengths.
    """

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """Return the replicas in the order to try them, with each replica in a list of one."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if any(len(rank) != 1 for rank in ranks):
            return ranks
        queues = [self.replica_queue_len_cache.get(rank[0].replica_id) or 0 for rank in ranks]
        return [ranks[i] for i in balance_by_load(queues, MAX_AHEAD)]
