"""Counters of a loader: batches delivered, and the time spent on each stage.

The consumer's thread updates the counters, and any thread may read them. A batch that is being delivered may not be
counted yet.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass
class Counts:
    """Sums over the delivered batches: see `shardio.loading.loader.ShardLoader.stats`."""

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
    """The counts at one moment. They include the time of a wait that is not over yet."""

    counts: Counts
    no_core_seconds: float = 0.0
    """Seconds that gather threads were ready to run but had no core, summed over all threads."""
    storage_nbytes: float = 0.0
    """Bytes that this process has read from storage since the loader was made, into the page cache or directly."""
    waiting_seconds: float = 0.0
    """Seconds that the consumer has been waiting for its current batch; 0.0 if it is not waiting."""


class Meter:
    """The counts of one loader and the progress of its consumer.

    Only the consumer's thread may call it, except for `snapshot`, which any thread may call.
    """

    def __init__(self, no_core_seconds: Callable[[], float]) -> None:
        """`no_core_seconds` returns how many seconds gather threads have waited for a core so far."""
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
