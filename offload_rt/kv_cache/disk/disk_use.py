"""What reading and writing the rows of a pool on disk has cost."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class DiskUse:
    """What reading and writing rows has cost so far. `wanted`: rows (K and V of a token, layer and head) that were
    asked for one by one; `cached`: those of them that were in memory. `requests`: reads of the disk."""

    wanted: int = 0
    cached: int = 0
    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def since(self, before: DiskUse) -> DiskUse:
        """What has come since `before`."""
        return DiskUse(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))
