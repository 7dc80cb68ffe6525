"""Replay of a request trace over the tiers of a session store: what is hit where, what waits, what it costs.

The trace is Mooncake's: one JSON a line with `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`,
one id for each block of 512 input tokens and everything before it. Only leading blocks can be reused. Its clock ticks
every three seconds: requests of one tick are spread evenly until the next, or there would always be a queue.

The machine, in stated simplifications. One server takes requests in order of arrival and prefills what is not reused at
`prefill_rate` tokens a second; decoding runs beside it and is not modelled. Blocks lie in host memory or on disk, never
in both. A request's stored blocks are read while it is prefilled, layer by layer (CachedAttention §3.2.1), those on
disk through the disk: it stalls for what reading takes longer than prefilling. Reading stops where recomputing the rest
is quicker. A policy with look-ahead moves blocks of waiting requests from disk to host memory while others are served,
at the disk's speed, within the window of §3.3.1. Writes are asynchronous and only counted. What a request generated
is stored when the next turn that contains it has computed it: the trace has no ids for it before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, InputError
from ...storage.policies import NEVER, POLICIES, LookAhead, Order, eviction_window, make_order, prefetch_window
from ...utils.small_files import parse_json, read_small
from ...utils.units import format_size

BLOCK = 512
"""Tokens of one id of the trace."""


@dataclass(frozen=True)
class TraceRequest:
    """One line of the trace; `arrival` in seconds."""

    arrival: float
    tokens: int
    new_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class StoreMachine:
    """Sizes in bytes, bandwidths in bytes a second, prices in dollars an hour (of a GPU; of 10^9 bytes). Default prices
    are CachedAttention's (§4.2), bandwidths PCIe 4's and one SSD's, `token_bytes` Llama-3-8B's in 16 bits."""

    host: int
    disk: int
    prefill_rate: float = 20_000.0
    token_bytes: int = 131_072
    link_bandwidth: float = 26e9
    disk_bandwidth: float = 5e9
    free_share: float = 0.1
    gpu_price: float = 5.0
    host_price: float = 0.0088
    disk_price: float = 0.000082

    def __post_init__(self) -> None:
        rates = (self.prefill_rate, self.token_bytes, self.link_bandwidth, self.disk_bandwidth)
        if min(rates) <= 0 or min(self.host, self.disk) < 0 or not 0 <= self.free_share < 1:
            raise ConfigError(f"sizes must not be negative, rates must be positive, free_share in [0, 1): {self}")


@dataclass(frozen=True)
class Outcome:
    """What a replay found. Hit rates are of input tokens; seconds of the server unless said otherwise."""

    policy: str
    speed: float
    host_hit: float
    disk_hit: float
    tokens_saved: int
    prefill_seconds: float
    stall_seconds: float
    makespan: float
    mean_wait: float
    ttft_p50: float
    ttft_p99: float
    longest_queue: int
    prefetched_bytes: int
    written_bytes: int
    dollars_gpu: float
    dollars_storage: float

    @property
    def hit(self) -> float:
        """Of both tiers."""
        return self.host_hit + self.disk_hit


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a Mooncake trace by arrival, at most `limit`. Raises InputError."""
    try:
        lines = read_small(path).decode("utf-8").splitlines()[:limit]
        rows = [parse_json(line) for line in lines]
        found = [
            TraceRequest(
                float(row["timestamp"]) / 1000,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(int(block) for block in row["hash_ids"]),
            )
            for row in rows
        ]
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(
            f"{str(path)!r} is no request trace ({error!r}): each line must be a JSON object with timestamp (ms), "
            "input_length, output_length and hash_ids"
        ) from error
    wrong = next((r for r in found if r.tokens < 1 or len(r.blocks) != -(-r.tokens // BLOCK)), None)
    if wrong is not None or not found:
        raise InputError(f"{str(path)!r} has no requests, or one without an id for each {BLOCK} tokens: {wrong}")
    return spread_ticks(sorted(found, key=lambda request: request.arrival))


def spread_ticks(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Requests of equal arrival spread evenly until the next arrival; those of the last one come at once."""
    ticks = [list(group) for _, group in itertools.groupby(requests, key=lambda request: request.arrival)]
    spread = []
    for tick, following in itertools.zip_longest(ticks, ticks[1:]):
        step = (following[0].arrival - tick[0].arrival) / len(tick) if following else 0.0
        spread += [replace(request, arrival=request.arrival + i * step) for i, request in enumerate(tick)]
    return spread


class Tier:
    """Blocks in one kind of memory, at most `capacity` of them."""

    def __init__(self, capacity: int, order: Order[int]) -> None:
        self.capacity, self.order = capacity, order
        self.blocks: set[int] = set()

    def add(self, block: int, next_use: int) -> int | None:
        """Takes a block in; returns the one that had to leave for it (maybe itself), if any."""
        self.blocks.add(block)
        self.order.enter(block, next_use)
        if len(self.blocks) <= self.capacity:
            return None
        gone = self.order.victim()
        self.remove(gone)
        return gone

    def remove(self, block: int) -> None:
        """The block leaves."""
        self.blocks.discard(block)
        self.order.leave(block)


class Replay:
    """One run of one policy over one trace."""

    def __init__(self, requests: Sequence[TraceRequest], machine: StoreMachine, policy: str, speed: float) -> None:
        if speed <= 0:
            raise ConfigError(f"speed={speed} must be positive: 2 lets requests arrive twice as fast")
        self.machine, self.policy, self.speed = machine, policy, speed
        self.requests = requests
        self._block_bytes = BLOCK * machine.token_bytes
        self._host = Tier(machine.host // self._block_bytes, make_order(policy))
        self._disk = Tier(machine.disk // self._block_bytes, make_order(policy))
        mean = sum(r.tokens for r in requests) / len(requests) * machine.token_bytes
        self.prefetch_window = max(1, prefetch_window(int(machine.host * machine.free_share), mean))
        self.eviction_window = eviction_window(machine.host, machine.disk, mean)
        self._uses: dict[int, list[int]] = {}
        for number, request in reversed(list(enumerate(requests))):
            for block in request.blocks:
                self._uses.setdefault(block, []).append(number)
        self._expected: dict[int, int] = {}
        self._window_end = 1
        self._prefetched = self._written = 0

    def run(self) -> Outcome:
        """Serves every request in turn."""
        free_at = prefill = stall = wait = 0.0
        host_tokens = disk_tokens = longest = arrived = 0
        ttft = []
        for number, request in enumerate(self.requests):
            arrival = request.arrival / self.speed
            start = max(arrival, free_at)
            while arrived < len(self.requests) and self.requests[arrived].arrival / self.speed <= start:
                arrived += 1
            longest = max(longest, arrived - number - 1)
            self._look_ahead(number, arrived)
            on_host, on_disk = self._reusable(request)
            computing = (request.tokens - on_host - on_disk) / self.machine.prefill_rate
            stalled = max(0.0, self._reading(on_host, on_disk) - computing)
            self._use(number, request)
            free_at = start + computing + stalled
            if self.policy in ("lookahead", "belady"):
                self._prefetch(number, arrived, computing + stalled)
            prefill, stall, wait = prefill + computing, stall + stalled, wait + start - arrival
            host_tokens, disk_tokens = host_tokens + on_host, disk_tokens + on_disk
            ttft.append(free_at - arrival)
        total = sum(request.tokens for request in self.requests)
        machine, hours = self.machine, free_at / 3600
        storage = (machine.host * machine.host_price + machine.disk * machine.disk_price) / 1e9 * hours
        return Outcome(
            policy=self.policy,
            speed=self.speed,
            host_hit=host_tokens / total,
            disk_hit=disk_tokens / total,
            tokens_saved=host_tokens + disk_tokens,
            prefill_seconds=prefill,
            stall_seconds=stall,
            makespan=free_at,
            mean_wait=wait / len(ttft),
            ttft_p50=float(np.percentile(ttft, 50)),
            ttft_p99=float(np.percentile(ttft, 99)),
            longest_queue=longest,
            prefetched_bytes=self._prefetched * self._block_bytes,
            written_bytes=self._written * self._block_bytes,
            dollars_gpu=machine.gpu_price * (prefill + stall) / 3600,
            dollars_storage=storage,
        )

    def _look_ahead(self, number: int, arrived: int) -> None:
        """Tells both tiers which blocks requests (number, ...) in the eviction window will use."""
        if self.policy != "lookahead":
            return
        for block in self.requests[number].blocks:
            if block in self._expected and self._expected[block] == number:
                del self._expected[block]
        self._window_end = max(self._window_end, number + 1)
        stop = min(arrived, number + 1 + self.eviction_window)
        for waiting in range(self._window_end, stop):
            for block in self.requests[waiting].blocks:
                self._expected[block] = waiting
                self._host.order.expect(block, waiting)
                self._disk.order.expect(block, waiting)
        self._window_end = max(self._window_end, stop)

    def _reusable(self, request: TraceRequest) -> tuple[int, int]:
        """Leading tokens in host memory and on disk; one token at least is computed, and reading from disk stops where
        the server would have computed the rest sooner."""
        tokens = [0, 0]
        for block in request.blocks:
            tier = 0 if block in self._host.blocks else 1 if block in self._disk.blocks else None
            if tier is None:
                break
            more = min(BLOCK, request.tokens - 1 - sum(tokens))
            after = [tokens[0] + more * (tier == 0), tokens[1] + more * (tier == 1)]
            if self._seconds(request, after) > self._seconds(request, tokens):
                break
            tokens = after
        return tokens[0], tokens[1]

    def _seconds(self, request: TraceRequest, tokens: Sequence[int]) -> float:
        """Time to serve a request that reuses `tokens` of each tier."""
        return max((request.tokens - sum(tokens)) / self.machine.prefill_rate, self._reading(*tokens))

    def _reading(self, on_host: int, on_disk: int) -> float:
        size = self.machine.token_bytes
        return max(
            (on_host + on_disk) * size / self.machine.link_bandwidth, on_disk * size / self.machine.disk_bandwidth
        )

    def _next_use(self, block: int, number: int) -> int:
        """The first request after `number` that has the block."""
        uses = self._uses[block]
        while uses and uses[-1] <= number:
            uses.pop()
        return uses[-1] if uses else NEVER

    def _use(self, number: int, request: TraceRequest) -> None:
        """All of the request's blocks are in host memory now, the last one as the oldest: a prefix outlives what is
        behind it."""
        for block in reversed(request.blocks):
            if block in self._disk.blocks:
                self._disk.remove(block)
            self._into_host(block, number)
            if self.policy == "lookahead":
                self._renew(block)

    def _renew(self, block: int) -> None:
        order = self._host.order
        assert isinstance(order, LookAhead)
        if block in self._host.blocks and block not in self._expected:
            order.done(block)
        elif block in self._host.blocks:
            order.expect(block, self._expected[block])

    def _into_host(self, block: int, number: int) -> None:
        gone = self._host.add(block, self._next_use(block, number))
        if gone is not None and self._disk.capacity:
            self._written += 1
            lost = self._disk.add(gone, self._next_use(gone, number))
            if self.policy == "lookahead" and gone in self._expected and lost != gone:
                self._disk.order.expect(gone, self._expected[gone])

    def _prefetch(self, number: int, arrived: int, seconds: float) -> None:
        """While a request is served, blocks of those waiting in the prefetch window move from disk to host memory."""
        budget = int(seconds * self.machine.disk_bandwidth / self._block_bytes)
        for waiting in range(number + 1, min(arrived, number + 1 + self.prefetch_window)):
            for block in self.requests[waiting].blocks:
                if budget == 0:
                    return
                if block in self._disk.blocks:
                    self._disk.remove(block)
                    self._into_host(block, number)
                    if self.policy == "lookahead" and block in self._host.blocks:
                        self._host.order.expect(block, waiting)
                    self._prefetched += 1
                    budget -= 1
                elif block not in self._host.blocks:
                    break  # what is behind it cannot be reused


def simulate(
    requests: Sequence[TraceRequest],
    machines: Iterable[StoreMachine],
    policies: Sequence[str] = POLICIES,
    speeds: Sequence[float] = (1.0,),
) -> list[dict[str, Any]]:
    """A flat row for every machine, speed and policy."""
    rows = []
    for machine, speed, policy in itertools.product(machines, speeds, policies):
        replay = Replay(requests, machine, policy, speed)
        outcome = replay.run()
        windows = {"prefetch_window": replay.prefetch_window, "eviction_window": replay.eviction_window}
        rows.append(asdict(machine) | asdict(outcome) | {"hit": outcome.hit} | windows)
    return rows


def label(row: dict[str, Any]) -> str:
    """The machine and load of a row, for tables."""
    disk = f"{format_size(row['disk'])} disk" if row["disk"] else "no disk"
    return f"{format_size(row['host'])} + {disk}, {row['prefill_rate']:g}/s, x{row['speed']:g}"
