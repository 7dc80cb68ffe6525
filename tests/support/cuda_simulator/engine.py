"""Streams as queues of work, events as points in these queues, and schedules that decide which stream advances."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch

Work = Callable[[], None]


class CaptureError(RuntimeError):
    """Raised for operations that CUDA forbids while a stream is captured."""


@dataclass(eq=False)
class Point:
    """A position in a queue, reached when all earlier entries have run. A point with a `capture` is never reached."""

    queue: Queue
    reached: bool = False
    capture: Capture | None = None


@dataclass(frozen=True)
class Wait:
    """An entry that blocks its queue until `point` is reached."""

    point: Point


@dataclass(frozen=True)
class Poisoning:
    """An entry that poisons memory. CUDA does no such work, so it may come last in a captured stream."""

    work: Work

    def __call__(self) -> None:
        self.work()


Entry = Work | Point | Wait


@dataclass(eq=False)
class Queue:
    """A stream with its pending work.

    Attributes:
        number: Index of the stream in order of creation. 0 is the default stream.
        capture: Graph that is being captured and receives new entries, if any.
    """

    number: int
    device: int
    entries: deque[Entry] = field(default_factory=deque)
    capture: Capture | None = None


@dataclass(eq=False)
class Capture:
    """A captured graph.

    Attributes:
        origin: Stream on which the capture began.
        pool: Id of the graph's memory pool.
        thread: Thread that must not wait for the device during the capture. None means all threads.
        queues: Entries by the stream in which they were captured.
        failed: Whether an operation that CUDA forbids has made the capture invalid.
    """

    origin: Queue
    pool: int
    thread: int | None
    queues: dict[Queue, list[Entry]] = field(default_factory=dict)
    failed: bool = False

    def add(self, queue: Queue, entry: Entry) -> None:
        """Capture an entry and all later entries of its stream."""
        self.queues.setdefault(queue, []).append(entry)
        queue.capture = self

    @property
    def nodes(self) -> int:
        return sum(
            not isinstance(entry, (Point, Wait, Poisoning)) for entries in self.queues.values() for entry in entries
        )

    def check_complete(self) -> None:
        """Raise CaptureError if an operation was not allowed, or if the origin does not wait for a captured stream."""
        if self.failed:
            raise CaptureError("operation failed due to a previous error during capture")
        joined: set[Queue] = set()
        more = {self.origin}
        while more:
            joined |= more
            waits = [e.point for queue in joined for e in self.queues.get(queue, ()) if isinstance(e, Wait)]
            more = {point.queue for point in waits if self._ends_at(point)} - joined
        if left := [queue.number for queue in self.queues if queue not in joined]:
            raise CaptureError(f"streams {left} were captured and not joined again")

    def _ends_at(self, point: Point) -> bool:
        entries = self.queues[point.queue]
        return all(isinstance(entry, (Point, Wait, Poisoning)) for entry in entries[entries.index(point) :])


class Schedule(Protocol):
    """Decides which work runs after the host has queued an entry."""

    def advance(self, engine: Engine) -> None: ...


class Lazy:
    """Runs work only when the host waits for it."""

    def advance(self, engine: Engine) -> None:
        pass


@dataclass(frozen=True)
class Late:
    """Runs the streams in `numbers` only when the host waits for them, and all others as soon as possible."""

    numbers: tuple[int, ...] = ()

    def advance(self, engine: Engine) -> None:
        others = [queue for queue in engine.queues if queue.entries and queue.number not in self.numbers]
        while sum([engine.run(queue) for queue in others]):
            pass


class Seeded:
    """Each time the host queues an entry, runs a few entries of a random stream with probability 1/4."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def advance(self, engine: Engine) -> None:
        if self._random.random() < 0.25:
            queue = self._random.choice(engine.queues)
            engine.run(queue, self._random.randint(1, 12))


class Engine:
    """Runs queues of work in the order that a schedule decides. Errors are raised where an entry runs.

    Any thread may queue work and wait, but only one thread at a time runs entries.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.lock = threading.RLock()
        self.queues: list[Queue] = []
        self._numbers = itertools.count()

    def new_queue(self, device: int) -> Queue:
        queue = Queue(next(self._numbers), device)
        with self.lock:
            self.queues.append(queue)
        return queue

    def replay(self, capture: Capture, behind: Queue) -> None:
        with self.lock:
            start = self.record(behind)
            points: dict[Point, Point] = {}
            copies = {queue: Queue(queue.number, queue.device) for queue in capture.queues}

            def copy(point: Point) -> Point:
                return points.setdefault(point, Point(copies[point.queue]))

            ends = []
            for queue, entries in capture.queues.items():
                own = copies[queue]
                own.entries.append(Wait(start))
                for entry in entries:
                    if isinstance(entry, Wait):
                        own.entries.append(Wait(copy(entry.point)))
                    else:
                        own.entries.append(copy(entry) if isinstance(entry, Point) else entry)
                ends.append(Point(own))
                own.entries.append(ends[-1])
                own.entries.append(functools.partial(self.queues.remove, own))
            self.queues += copies.values()
            behind.entries += [Wait(end) for end in ends]
            self.schedule.advance(self)

    def submit(self, queue: Queue, work: Work) -> None:
        with self.lock:
            if queue.capture is not None:
                queue.capture.add(queue, work)
                return
            queue.entries.append(work)
            self.schedule.advance(self)

    def record(self, queue: Queue) -> Point:
        """Return the point after all entries queued so far."""
        with self.lock:
            point = Point(queue, capture=queue.capture)
            if queue.capture is not None:
                queue.capture.add(queue, point)
                return point
            queue.entries.append(point)
            self.schedule.advance(self)
            return point

    def wait(self, queue: Queue, point: Point) -> None:
        with self.lock:
            if point.capture is not None:
                if point.capture is not point.queue.capture:
                    raise CaptureError("waits for an event of a capture that has ended")
                point.capture.add(queue, Wait(point))
            elif queue.capture is not None:
                queue.capture.failed = True
                raise CaptureError("a captured stream waits for an event that was recorded outside")
            elif not point.reached:
                queue.entries.append(Wait(point))

    def finish(self, point: Point) -> None:
        """Let the host wait for `point`. Run the entries before it, and others as the schedule decides."""
        with self.lock:
            self._check_may_wait(point)
            while not point.reached:
                if self.run(point.queue, 1, until=point):
                    self.schedule.advance(self)
                    continue
                head = point.queue.entries[0]
                assert isinstance(head, Wait)
                self.finish(head.point)

    def _check_may_wait(self, point: Point) -> None:
        if point.capture is not None:
            point.capture.failed = True
            raise CaptureError("the host waits for an event of a capture")
        for capture in {queue.capture for queue in self.queues if queue.capture is not None}:
            if capture.thread in (None, threading.get_ident()):
                capture.failed = True
                raise CaptureError("the host waits for the device while a stream is captured")

    def finish_all(self) -> None:
        for queue in list(self.queues):
            self.finish(self.record(queue))

    def run(self, queue: Queue, entries: int = 1 << 30, until: Point | None = None) -> bool:
        """Run up to `entries` entries of a queue, but stop at the point `until`. Return whether any entry ran."""
        ran = 0
        with ExitStack() as modes:
            on_host = False
            while queue.entries and ran < entries:
                head = queue.entries[0]
                if isinstance(head, Wait) and not head.point.reached:
                    break
                queue.entries.popleft()
                ran += 1
                if isinstance(head, Point):
                    head.reached = True
                    if head is until:
                        break
                elif not isinstance(head, Wait):
                    if not on_host:  # in C, because entering the Python context managers may take too long
                        modes.enter_context(torch._C._DisableTorchDispatch())
                        modes.enter_context(torch._C._InferenceMode(True))
                        on_host = True
                    head()
        return ran > 0
