"""Counters of a loader, and reports that say how long training waited for data, and which stage was the bottleneck.

The consumer's thread updates the counters, and any thread may read them. The loop's time runs from batch to batch, so
the time between epochs does not count. The wait for the first batch of an epoch is counted separately.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from shardio.errors import printable
from shardio.loading.world import World
from shardio.system.threads import Ticker

Stage = Literal["consumer", "storage", "gather", "copy", "transform"]

# Less than this share of the time is no reason to change anything. A transform may take more: it is part of the step
# as long as it does not take most of the time.
_LITTLE, _MOST = 0.05, 0.5
# Gather threads that are blocked for more than this share of their time wait for storage, and not for memory.
_BLOCKED = 0.5
# So large a share of the bytes that came from storage, and not from the page cache, is what the threads wait for.
_FROM_STORAGE = 0.3
# With so large a share of their time without a core, gather threads have too few cores.
_NO_CORE = 0.3


@dataclass
class Counts:
    """Sums over the delivered batches: see `ShardLoader.stats`."""

    batches: int = 0
    images: int = 0
    nbytes: int = 0
    loop_seconds: float = 0.0
    wait_seconds: float = 0.0
    first_wait_seconds: float = 0.0
    stall_seconds: float = 0.0
    transform_seconds: float = 0.0
    gather_seconds: float = 0.0
    gather_cpu_seconds: float = 0.0
    copy_seconds: float = 0.0
    read_ahead_batches: int = 0


@dataclass(frozen=True)
class Snapshot:
    """A loader's sums at one moment: batches, bytes, seconds. They include the time of a wait that is not over yet."""

    counts: Counts
    no_core_seconds: float = 0.0
    """Seconds that gather threads were ready to run but had no core, summed over all threads."""
    storage_nbytes: float = 0.0
    """Bytes that this process has read from storage since the loader was made, into the page cache or directly."""
    waiting_seconds: float = 0.0
    """Seconds that the consumer has been waiting for its current batch; 0.0 if it is not waiting."""


class Meter:
    """The counts of one loader. To be used by the thread that requests batches; any thread may call `snapshot`.
    `no_core_seconds` returns how many seconds gather threads have waited for a core so far."""

    def __init__(self, no_core_seconds: Callable[[], float]) -> None:
        self.counts = Counts()
        self._no_core_seconds = no_core_seconds
        self._storage_start = _storage_nbytes()
        self._since = 0.0  # when the batch before was received, or the first of an iterator was asked for
        self._waits_since: float | None = None
        self._is_first = True

    def begin_epoch(self) -> None:
        """Starts to count the time of an iterator, when its first batch is requested."""
        self._is_first = True
        self._since = time.perf_counter()

    def begin_wait(self) -> None:
        self._waits_since = time.perf_counter()

    def end_wait(self) -> None:
        since, self._waits_since = self._waits_since, None
        if since is not None:
            seconds = time.perf_counter() - since
            self.counts.wait_seconds += seconds
            if self._is_first:
                self.counts.first_wait_seconds += seconds

    def received(self, num_images: int, nbytes: int) -> None:
        """Counts a batch that is about to be delivered to the consumer."""
        now = time.perf_counter()
        counts = self.counts
        counts.batches += 1
        counts.images += num_images
        counts.nbytes += nbytes
        counts.loop_seconds += now - self._since
        self._since = now
        self._is_first = False

    def step_seconds(self) -> float:
        """Returns the seconds since the previous batch was received; 0.0 before the first batch of an iterator."""
        return 0.0 if self._is_first else time.perf_counter() - self._since

    def snapshot(self) -> Snapshot:
        """Returns the current counts. Any thread may call this."""
        waits_since, counts, now = self._waits_since, replace(self.counts), time.perf_counter()
        waiting = 0.0
        if waits_since is not None:
            waiting = max(now - waits_since, 1e-9)
            counts.wait_seconds += waiting
            counts.loop_seconds += max(now - self._since, 0.0)
            if self._is_first:
                counts.first_wait_seconds += waiting
        storage = _storage_nbytes() - self._storage_start
        return Snapshot(counts, self._no_core_seconds(), storage, waiting)


def _storage_nbytes() -> float:
    """Returns the bytes that this process has read from storage, as Linux counts them; 0.0 on other systems."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512.0 if sys.platform == "linux" else 0.0


@dataclass(frozen=True)
class LoaderFacts:
    """The facts about a loader that a report names in addition to the loader's counts."""

    num_threads: int
    num_cores: int
    """Cores that this process may use."""
    prefetch: int
    world: World


@dataclass(frozen=True, repr=False)
class LoaderReport(Snapshot):
    """The increase of the counts over some time. `str(report)` is a line with the result, and a line of advice."""

    facts: LoaderFacts = field(kw_only=True)

    @staticmethod
    def between(before: Snapshot, after: Snapshot, facts: LoaderFacts) -> LoaderReport:
        """Returns the report about the time from snapshot `before` to snapshot `after`."""
        counts = Counts(**{name: value - getattr(before.counts, name) for name, value in vars(after.counts).items()})
        no_core = max(after.no_core_seconds - before.no_core_seconds, 0.0)
        storage = max(after.storage_nbytes - before.storage_nbytes, 0.0)
        return LoaderReport(counts, no_core, storage, after.waiting_seconds, facts=facts)

    @property
    def seconds(self) -> float:
        """The loop's time in seconds, without the waits for first batches."""
        return max(self.counts.loop_seconds - self.counts.first_wait_seconds, 0.0)

    @property
    def images_per_second(self) -> float:
        return self.counts.images / self.counts.loop_seconds if self.counts.loop_seconds else 0.0

    @property
    def waited(self) -> float:
        """The share of the time that the consumer, or its device, waited for data: from 0 to 1."""
        return min(self._share(self._gather_wait) + self._share(self.counts.stall_seconds), 1.0)

    @property
    def transformed(self) -> float:
        """The share of the time that the consumer's thread spent in the transform: from 0 to 1."""
        return min(self._share(self.counts.transform_seconds), 1.0)

    @property
    def is_stuck(self) -> bool:
        """Whether the consumer has been waiting for one batch most of the time, and for more than a second."""
        return self.waiting_seconds > max(1.0, self.seconds / 2)

    @property
    def stage(self) -> Stage:
        """The stage that is the bottleneck.

        "consumer": the training step; data is not the bottleneck.
        "storage": gather threads are blocked most of the time, or load pages from storage.
        "gather": gather threads are busy copying, or wait for a core.
        "copy": the device waits for copies.
        "transform": the transform takes most of the time.
        """
        waits: dict[Stage, float] = {
            "gather": self.waiting_seconds if self.is_stuck else self._gather_wait,
            "copy": self.counts.stall_seconds,
            "transform": self.counts.transform_seconds,
        }
        if not self.is_stuck and self.waited < _LITTLE and self.transformed < _MOST:
            return "consumer"
        most = max(waits, key=lambda stage: waits[stage])
        # Bringing pages in from a fast disk takes the threads' own time, too: then they are not blocked.
        is_storage = self.blocked > _BLOCKED or 0 < _FROM_STORAGE * self.counts.nbytes < self.storage_nbytes
        return "storage" if most == "gather" and is_storage else most

    @property
    def blocked(self) -> float:
        """The share of their time that gather threads neither ran nor waited for a core, from 0 to 1; 1.0 if no batch
        has arrived."""
        busy = self.counts.gather_seconds
        if busy <= 0.0:
            return 1.0 if self.waiting_seconds else 0.0
        return max(busy - self.counts.gather_cpu_seconds - self.no_core_seconds, 0.0) / busy

    @property
    def advice(self) -> str:
        """A sentence that says what to change to wait less for data."""
        facts, busy = self.facts, self.counts.gather_seconds
        match self.stage:
            case "storage":
                rate = f"{self.counts.nbytes / max(self.seconds, 1e-9) / 1e6:,.0f} MB/s"
                return (
                    f"storage gave {rate}: try cache= on a disk of the node, a set in memory, "
                    'shuffle="block", or more num_threads='
                )
            case "gather" if busy and self.no_core_seconds / busy > _NO_CORE:
                return "gather threads had no core: other processes, or torch's own threads, use them"
            case "gather" if facts.prefetch < 2:
                return f"prefetch={facts.prefetch} keeps too few batches ready: try prefetch=2"
            case "gather" if facts.num_threads < facts.num_cores:
                who = "one gather thread" if facts.num_threads == 1 else f"{facts.num_threads} gather threads"
                return f"{who} copied all the time: try num_threads={facts.num_cores}"
            case "gather":
                return "this machine copies no faster: try smaller samples, or fewer processes at once"
            case "copy":
                return "copies to the device are too slow: let the transform crop, and check that memory is pinned"
            case "transform":
                return "the transform takes too much of the consumer's time: use shardio.augment's, or simplify it"
        step = "data is not your bottleneck: the time goes into the training step"
        if busy and self.no_core_seconds / busy > _NO_CORE:
            step += "; threads wait for cores: try OMP_NUM_THREADS=1, or fewer processes"
        return step

    @property
    def line(self) -> str:
        """The report in one line, without advice."""
        world = self.facts.world
        place = f"rank {world.rank}/{world.world_size}: " if world.world_size > 1 else ""
        if self.is_stuck:
            return f"{place}no batch for {self.waiting_seconds:,.0f} s: {_RESULTS[self.stage]}"
        transform = f", transform {self.transformed:.1%}" if self.transformed >= _LITTLE else ""
        waited = f"waited {self.waited:.1%}{transform} of {self.seconds:,.0f} s"
        return f"{place}{self.images_per_second:,.0f} images/s, {waited}: {_RESULTS[self.stage]}"

    def __str__(self) -> str:
        if not self.counts.batches and not self.waiting_seconds:
            return "no batch has been requested yet"
        first = self.counts.first_wait_seconds
        beside = f"; the first batches of epochs took {first:,.1f} s more" if first >= 0.05 else ""
        return f"{self.line}{beside}\n{self.advice}"

    __repr__ = __str__

    @property
    def _gather_wait(self) -> float:
        return max(self.counts.wait_seconds - self.counts.first_wait_seconds, 0.0)

    def _share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0


_RESULTS: dict[Stage, str] = {
    "consumer": "data keeps up",
    "storage": "storage limits",
    "gather": "gathering limits",
    "copy": "copies to the device limit",
    "transform": "the transform limits",
}


def report_thread(owner: object, meter: Meter, facts: LoaderFacts, seconds: float) -> Ticker:
    """Returns a thread, not begun, that prints a report line to stderr every `seconds`, if a batch arrived meanwhile or
    the consumer is stuck. It ends at its `close`, or when `owner` is garbage collected."""
    return Ticker(owner, partial(_report, [meter.snapshot()], meter, facts), seconds, "shardio-report")


def _report(before: list[Snapshot], meter: Meter, facts: LoaderFacts) -> None:
    """Prints a line about the time since before[0], the only snapshot there, and replaces that by a new snapshot."""
    before.append(meter.snapshot())
    report = LoaderReport.between(before.pop(0), before[0], facts)
    if report.counts.batches or report.is_stuck:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
            print(printable(f"shardio: {report.line}"), file=sys.stderr, flush=True)
