"""What runs when: streams as queues, events as points in them, and the schedule that says which stream gets on while
the host goes ahead."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

Work = Callable[[], None]


class CaptureError(RuntimeError):
    """What CUDA forbids while a stream is being captured."""


@dataclass(eq=False)
class Point:
    """A place in a queue's order, which is reached once everything before it has run. One that was recorded in a
    `capture` belongs to the graph, and is never reached itself."""

    queue: Queue
    reached: bool = False
    capture: Capture | None = None


@dataclass(frozen=True)
class Wait:
    """What is behind it in a queue does not run before `point` is reached."""

    point: Point


@dataclass(frozen=True)
class Poisoning:
    """What no stream launches: it may be the last of a captured one."""

    work: Work

    def __call__(self) -> None:
        self.work()


Entry = Work | Point | Wait


@dataclass(eq=False)
class Queue:
    """What a stream has still to run, in order. `number` counts streams as they were made, 0 is the default one. While
    there is a `capture` what is queued goes there."""

    number: int
    device: int
    entries: deque[Entry] = field(default_factory=deque)
    capture: Capture | None = None


@dataclass(eq=False)
class Capture:
    """Entries of a graph by the streams they were captured in, the one that began it first; `pool` has its memory.
    `thread`: None where no other thread may wait for the device meanwhile."""

    origin: Queue
    pool: int
    thread: int | None
    queues: dict[Queue, list[Entry]] = field(default_factory=dict)

    def add(self, queue: Queue, entry: Entry) -> None:
        """Captures an entry; the first one of a stream draws it in."""
        self.queues.setdefault(queue, []).append(entry)
        queue.capture = self

    def check_joined(self) -> None:
        """Raises CaptureError where work of a stream is not before the end of the one that began."""
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
    """Decides what runs by itself, whenever the host has queued something."""

    def advance(self, engine: Engine) -> None:
        """Runs as much as it wants."""
        ...


class Lazy:
    """Nothing runs before the host waits for it: the host is as far ahead as it can be."""

    def advance(self, engine: Engine) -> None:
        """Runs nothing."""


@dataclass(frozen=True)
class Late:
    """Streams run as soon as they can, all but those with these numbers, which only run when they must."""

    numbers: tuple[int, ...] = ()

    def advance(self, engine: Engine) -> None:
        """Runs all streams but the late ones until nothing can go on."""
        others = [queue for queue in engine.queues if queue.entries and queue.number not in self.numbers]
        while sum([engine.run(queue) for queue in others]):
            pass


class Seeded:
    """A random stream runs a few entries, now and then."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def advance(self, engine: Engine) -> None:
        """Runs up to a dozen entries of one stream, of three times in four nothing."""
        if self._random.random() < 0.25:
            queue = self._random.choice(engine.queues)
            engine.run(queue, self._random.randint(1, 12))


class Engine:
    """Queues of work. Entries of one run in order, beside those of others; an error of one is raised where it runs.
    Any thread may queue and wait; one at a time runs."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.lock = threading.RLock()
        self.queues: list[Queue] = []
        self._numbers = itertools.count()

    def new_queue(self, device: int) -> Queue:
        """A stream."""
        queue = Queue(next(self._numbers), device)
        with self.lock:
            self.queues.append(queue)
        return queue

    def replay(self, capture: Capture, behind: Queue) -> None:
        """Queues all that was captured, behind and before what else is queued in a stream."""
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
        """Queues work."""
        with self.lock:
            if queue.capture is not None:
                queue.capture.add(queue, work)
                return
            queue.entries.append(work)
            self.schedule.advance(self)

    def record(self, queue: Queue) -> Point:
        """The point behind everything queued so far."""
        with self.lock:
            point = Point(queue, capture=queue.capture)
            if queue.capture is not None:
                queue.capture.add(queue, point)
                return point
            queue.entries.append(point)
            self.schedule.advance(self)
            return point

    def wait(self, queue: Queue, point: Point) -> None:
        """What is queued from now on runs behind `point`."""
        with self.lock:
            if point.capture is not None:
                if point.capture is not point.queue.capture:
                    raise CaptureError("waits for an event of a capture that has ended")
                point.capture.add(queue, Wait(point))
            elif queue.capture is not None:
                raise CaptureError("a captured stream waits for an event that was recorded outside")
            elif not point.reached:
                queue.entries.append(Wait(point))

    def finish(self, point: Point) -> None:
        """The host waits: runs what must have run before `point`, an entry at a time, and what the schedule wants."""
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
            raise CaptureError("the host waits for an event of a capture")
        for capture in {queue.capture for queue in self.queues if queue.capture is not None}:
            if capture.thread in (None, threading.get_ident()):
                raise CaptureError("the host waits for the device while a stream is captured")

    def finish_all(self) -> None:
        """The host waits for everything."""
        for queue in list(self.queues):
            self.finish(self.record(queue))

    def run(self, queue: Queue, entries: int = 1 << 30, until: Point | None = None) -> bool:
        """Runs up to `entries` entries of a queue, up to a point, as far as it can go; whether there was any."""
        ran = 0
        if not queue.entries or (isinstance(head := queue.entries[0], Wait) and not head.point.reached):
            return False
        with _disable_current_modes(), torch.inference_mode():
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
                    head()
        return ran > 0
