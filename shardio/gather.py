"""Threads that copy scattered samples into slots, in the order in which batches are asked for.

Every batch is split over all threads, so that the first is there soon; a queue in submission order keeps all threads on
the earliest unfinished batch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardio.ring import Slot
from shardio.shardset import ShardSet


class Pending:
    """A batch of `size` samples that is being gathered into a slot, in `parts` parts. Thread safe.

    The slot belongs to the pending batch until somebody takes it; `abandon` sees to it that it returns to the ring.
    """

    def __init__(self, slot: Slot, size: int, parts: int) -> None:
        self.size = size
        self.gather_seconds = 0.0
        """Of copying, summed over the parts. Complete after wait()."""
        self._slot = [slot]  # list.pop is atomic: whoever pops it owns it
        self._missing = parts
        self._error: BaseException | None = None
        self._release: Callable[[Slot], None] | None = None
        # Reentrant: `abandon` may be called by a finaliser, which may run in the middle of run_part.
        self._lock = threading.RLock()
        self._done = threading.Event()

    def run_part(self, copy: Callable[[], None]) -> None:
        """Do one part, in a gather thread. Never raises: an error belongs to whoever waits."""
        error: BaseException | None = None
        start = time.perf_counter()
        try:
            if self._release is None:  # else nobody wants the batch any more
                copy()
        except BaseException as raised:
            error = raised
        with self._lock:
            self.gather_seconds += time.perf_counter() - start
            self._error = self._error or error
            self._missing -= 1
            if self._missing:
                return
        self._done.set()
        self._give_back()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Slot:
        """Wait for all parts and take the slot. Raises what a part raised, with its traceback."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._slot.pop()

    def abandon(self, release: Callable[[Slot], None]) -> None:
        """Nobody wants the batch: call `release` with the slot once no part touches it any more. Does not wait."""
        with self._lock:
            self._release = release
            if self._missing:
                return
        self._give_back()

    def _give_back(self) -> None:
        if self._release is not None:
            try:
                slot = self._slot.pop()
            except IndexError:
                return
            self._release(slot)


_Job = tuple[Pending, Callable[[], None]]


class GatherThreads:
    """`num_threads` daemon threads that serve one queue. Thread safe.

    They hold no reference to whoever owns this object, so that an owner that is forgotten can close it from its
    finaliser. After `close`, what is still queued fails with RuntimeError instead of being copied.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs, self._closed), name=f"shardio-gather-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, shards: ShardSet, indices: NDArray[np.int64], slot: Slot) -> Pending:
        """Begin to copy the samples `indices`, their labels and the indices themselves into the slot."""
        size = len(indices)
        parts = max(1, min(self.num_threads, size))
        bounds = [size * part // parts for part in range(parts + 1)]
        pending = Pending(slot, size, parts)
        for start, stop in pairwise(bounds):
            self._jobs.put((pending, partial(_copy, shards, indices, slot, start, stop)))
        return pending

    def close(self) -> None:
        """End the threads and wait for them: no longer than they need for what they are copying. Idempotent."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a finaliser may run in any thread
                thread.join()


def _copy(shards: ShardSet, indices: NDArray[np.int64], slot: Slot, start: int, stop: int) -> None:
    part = indices[start:stop]
    shards.gather(part, slot.images[start:stop])
    slot.labels[start:stop] = shards.index["label"][part]
    slot.indices[start:stop] = part


def _refuse() -> None:
    raise RuntimeError("the loader was closed while a batch was being gathered")


def _serve(jobs: queue.SimpleQueue[_Job | None], closed: threading.Event) -> None:
    while (job := jobs.get()) is not None:
        pending, copy = job
        pending.run_part(_refuse if closed.is_set() else copy)
        # Or this frame would keep the batch's memory alive while it waits for the next job.
        del job, pending, copy
