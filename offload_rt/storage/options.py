"""Configuration of session stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..utils.config_fields import Duration, Size, check, check_choice, check_fields, option

Overflow = Literal["truncate", "error"]
LIVE_POLICIES = ("lookahead", "lru", "fifo")


@dataclass(frozen=True)
class StoreOptions:
    """Options of a session store: memory and disk tiers for conversations (CachedAttention §3.3).

    `limit` may be a string such as "50GiB", and `ttl` a string such as "7d".

    Attributes:
        limit: Hard limit on the total size of stored KV and session histories in bytes, including files that are being
            written. None means no limit. The file `lock` (a few bytes) and the folder `server`, in which `offload-rt
            serve` stores texts, are not counted.
        policy: Eviction policy. "lookahead" keeps KV that queued turns will use, and evicts all other KV in an order
            that depends on last use and recomputation cost. "lru" and "fifo" ignore the queue and the cost, and do not
            prefetch.
        ttl: Number of seconds after the last use when stored KV is deleted and KV in host memory is released. None
            means never.
        free_host: Fraction of the KV cache in host memory to keep free, so that loading a session does not have to wait
            for evictions.
        overflow: What to do if a turn would exceed the model's maximum length. "truncate" drops the oldest half of the
            conversation except its first tokens, without recomputing the rest. "error" refuses the turn. With models
            that use absolute positions, conversations are never truncated.
    """

    limit: Size | None = option(
        None,
        help="limit on stored KV and session histories, such as 50GiB (default: none)",
        flag="--store-limit",
        group="store",
    )
    policy: Literal["lookahead", "lru", "fifo"] = option(
        "lookahead", help="eviction policy of the store (default: lookahead)", flag="--store-policy", group="store"
    )
    ttl: Duration | None = option(
        None, help="delete KV that was not used for this time, such as 7d or 12h", flag="--store-ttl", group="store"
    )
    free_host: float = option(0.1, help="fraction of the host KV cache kept free for loading, [0, 1)", metavar="F")
    overflow: Overflow = option(
        "truncate", help="if a turn would outgrow the model: drop the oldest half (default), or fail",
        group="store",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_choice("store policy", self.policy, LIVE_POLICIES)
        check_fields(self)
        check(0 <= self.free_host < 1, f"free_host={self.free_host} must be in [0, 1)")
