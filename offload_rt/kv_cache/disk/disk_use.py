"""Counters of disk reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class DiskUse:
    """Counters of disk reads and writes.

    Attributes:
        wanted: KV entries (K and V of a token, layer and head) requested by `gather`.
        cached: Those found in memory.
        requests: Read requests to the disk.
        bytes_read: Bytes read.
        bytes_written: Bytes written.
    """

    wanted: int = 0
    cached: int = 0
    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def since(self, before: DiskUse) -> DiskUse:
        """Return the difference to the earlier counters `before`."""
        return DiskUse(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))
