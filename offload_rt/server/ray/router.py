"""Ray Serve's router by consistent hashing, which gives way to load. Serve imports it by its name where requests are
routed."""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from ..affinity import give_way


class AffinityRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Requests of one session id go to one replica, and where it has no room to the next on the ring, as with
    Serve's own router; besides, one that has over `most_ahead` requests more under way than another is passed over
    before it is full. What is under way elsewhere is what this router has last heard."""

    def initialize_state(self, most_ahead: int = 4, **options: Any) -> None:
        """Takes the options that the deployment gives."""
        self._most_ahead = most_ahead
        super().initialize_state(**options)

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """Ranks of one replica each, in the order in which they are tried."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if any(len(rank) != 1 for rank in ranks):
            return ranks
        queues = [self.replica_queue_len_cache.get(rank[0].replica_id) or 0 for rank in ranks]
        return [ranks[i] for i in give_way(queues, self._most_ahead)]
