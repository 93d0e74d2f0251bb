"""Threads that fill slots: every byte right, every error delivered, every slot given back exactly once."""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import in_time, until
from numpy.typing import NDArray

from shardio.loading.gather import GatherThreads, Pending, head_start_seconds
from shardio.loading.loader import ShardLoader
from shardio.loading.pipeline import Pipeline
from shardio.loading.ring import Slot, new_slot
from shardio.reading.reader import BatchMemory, Reader, Request

SHAPE = (6, 5, 3)
DEADLINE_SECONDS = 10
NOBODY = -99
InThreads = Callable[[Callable[[int], None], int], None]


class StandIn(Reader):
    """Calls `before` with a part's indices before it copies that part."""

    def __init__(self, before: Callable[[NDArray[np.int64]], None] = lambda indices: None) -> None:
        super().__init__()
        self.before = before

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        assert name == "label"
        return indices * 3

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Any = None) -> None:
        self.before(indices)
        out[:] = indices.astype(np.uint8)[:, None, None, None]


class Caller(Reader):
    """Reads a part by calling it."""

    def read(self, request: Request, memory: BatchMemory, part: Any) -> None:
        part()


def pending_of(slot: Slot, size: int, num_parts: int) -> Pending:
    return Pending(Caller(), Request(np.arange(size)), slot, num_parts)


def fresh_slot(batch_size: int = 9) -> Slot:
    slot = new_slot(batch_size, SHAPE)
    slot.images.fill(0xEE)
    slot.labels.fill(NOBODY)
    slot.indices.fill(NOBODY)
    return slot


def check(slot: Slot, indices: NDArray[np.int64]) -> None:
    """Checks that the slot holds the stand-in's samples of these indices, and that nothing behind them was touched."""
    size, expected = len(indices), fresh_slot(len(slot.labels))
    expected.images[:size] = indices.astype(np.uint8)[:, None, None, None]
    expected.labels[:size], expected.indices[:size] = indices * 3, indices
    for name in ("images", "labels", "indices"):
        assert np.array_equal(getattr(slot, name), getattr(expected, name))


def parts_of(size: int, num_threads: int, min_part_nbytes: int = 0) -> list[int]:
    """The sizes of the parts in which threads read a batch."""
    parts: list[int] = []
    reader, threads = StandIn(lambda indices: parts.append(len(indices))), GatherThreads(num_threads)
    reader.min_part_nbytes = min_part_nbytes
    threads.submit(reader, Request(np.arange(size)), fresh_slot()).wait()
    threads.close()
    return parts


@pytest.mark.parametrize("num_threads", [1, 3, 4])
def test_a_batch_is_split_over_all_threads_as_evenly_as_can_be(num_threads: int) -> None:
    for size in range(10):
        parts = parts_of(size, num_threads)
        assert (sum(parts), len(parts)) == (size, min(num_threads, size))
        assert max(parts, default=0) - min(parts, default=0) <= 1


def test_a_batch_that_is_only_copied_takes_a_thread_for_so_many_bytes() -> None:
    # 9 samples of 90 bytes.
    for min_part_nbytes, num_parts in ((100, 4), (300, 3), (810, 2), (811, 1)):
        assert len(parts_of(9, 4, min_part_nbytes)) == num_parts


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_gather_threads_preempt_nobody_and_the_caller_stays_as_it_is() -> None:
    policies: list[int] = []
    threads = GatherThreads(1)
    reader = StandIn(lambda indices: policies.append(os.sched_getscheduler(0)))
    threads.submit(reader, Request(np.arange(3)), fresh_slot()).wait()
    threads.close()
    before = os.sched_getscheduler(0)
    assert policies == [os.SCHED_BATCH if before == os.SCHED_OTHER else before]
    assert threads.no_core_seconds() >= 0.0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_reaches_wait_with_its_traceback_and_no_other_batch(num_threads: int) -> None:
    def before(indices: NDArray[np.int64]) -> None:
        if 13 in indices:
            raise OSError(5, "the disk is gone")

    threads = GatherThreads(num_threads)
    batches = [(np.arange(start, start + 4), fresh_slot()) for start in range(0, 40, 4)]
    submitted = [threads.submit(StandIn(before), Request(indices), slot) for indices, slot in batches]
    released: list[Slot] = []
    for pending, (indices, slot) in zip(submitted, batches, strict=True):
        if 13 not in indices:
            assert pending.wait() is slot
            check(slot, indices)
            continue
        with pytest.raises(OSError, match="the disk is gone") as caught:
            pending.wait()
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names[-2:] == ["copy", "before"]
        assert pending.done()
        pending.abandon(released.append)
        assert released == [slot]
    threads.close()


@pytest.mark.parametrize(("parts", "fails"), [(1, False), (3, False), (3, True)])
def test_an_abandoned_slot_returns_once_whenever_it_is_abandoned(parts: int, fails: bool) -> None:
    def copy() -> None:
        copied.append(1)
        if fails:
            raise LookupError("no such row")

    for done_before, again_after in product(range(parts + 1), range(parts + 2)):
        case = f"{done_before=} {again_after=}"
        slot = fresh_slot()
        pending = pending_of(slot, 9, parts)
        released: list[Slot] = []
        copied: list[int] = []
        for number in range(parts + 1):
            if number == done_before:
                pending.abandon(released.append)
            if number == again_after:
                pending.abandon(released.append)
            first = min(done_before, again_after)
            finished = number == parts and first <= number
            assert released == ([slot] if finished else []), (case, number)
            assert pending.done() == (number == parts), (case, number)
            if number < parts:
                pending.run(copy, refused=False)
        pending.abandon(released.append)
        assert released == [slot], case
        # Later parts are not wanted, and need not be copied.
        assert len(copied) == min(done_before, again_after, parts), case


def test_a_batch_abandoned_from_within_its_own_part_returns_after_it() -> None:
    # A finalizer that happens to run in a gather thread does the same.
    slot = fresh_slot()
    pending = pending_of(slot, 9, 1)
    released: list[Slot] = []

    def copy() -> None:
        pending.abandon(released.append)
        assert released == []

    in_time(lambda: pending.run(copy, refused=False))
    assert released == [slot]
    assert pending.done()


def test_abandoning_in_a_race_with_the_last_part_returns_the_slot_once(in_threads: InThreads) -> None:
    batches = [pending_of(fresh_slot(1), 1, 2) for _ in range(500)]
    released: list[list[Slot]] = [[] for _ in batches]
    barrier = threading.Barrier(3)

    def work(number: int) -> None:
        for pending, into in zip(batches, released, strict=True):
            barrier.wait(DEADLINE_SECONDS)
            if number:
                pending.run(lambda: None, refused=False)
            else:
                pending.abandon(into.append)

    in_threads(work, 3)
    assert [len(into) for into in released] == [1] * len(batches)


def test_closing_refuses_what_is_queued_and_ends_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, closing, go_on = threading.Event(), threading.Event(), threading.Event()

    def hold(indices: NDArray[np.int64]) -> None:
        entered.set()
        assert go_on.wait(DEADLINE_SECONDS)

    threads = GatherThreads(1)
    running = threads.submit(StandIn(hold), Request(np.arange(4)), slot := fresh_slot())
    queued = [threads.submit(StandIn(hold), Request(np.arange(4)), fresh_slot()) for _ in range(3)]
    assert entered.wait(DEADLINE_SECONDS)
    (worker,) = threads._threads
    wait = worker.wait
    monkeypatch.setattr(worker, "wait", lambda seconds: (closing.set(), wait(seconds)))
    closer = threading.Thread(target=threads.close, daemon=True)
    closer.start()
    assert closing.wait(DEADLINE_SECONDS)
    assert closer.is_alive()  # it waits for what is being copied
    go_on.set()
    closer.join(DEADLINE_SECONDS)
    assert not closer.is_alive()
    assert running.wait() is slot
    check(slot, np.arange(4))
    for pending in queued:
        with pytest.raises(RuntimeError, match="the loader was closed while a batch was being gathered"):
            in_time(pending.wait)
        released: list[Slot] = []
        pending.abandon(released.append)
        assert len(released) == 1
    assert not any(thread.is_alive() for thread in threads._threads)


def test_what_is_submitted_after_closing_fails_instead_of_waiting_for_ever() -> None:
    threads = GatherThreads(2)
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("shardio-gather-")]
    assert [thread.daemon for thread in mine] == [True, True]
    for _ in range(2):
        in_time(threads.close)
        assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(RuntimeError, match="closed"):
        in_time(lambda: threads.submit(StandIn(), Request(np.arange(4)), fresh_slot()).wait())


def test_a_gather_thread_may_close_its_own_threads() -> None:
    # The finalizer of a forgotten loader may run in any thread.
    threads = GatherThreads(2)
    done = threads.submit(StandIn(lambda indices: threads.close()), Request(np.array([3])), fresh_slot())
    in_time(done.wait)
    for thread in threads._threads:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def test_an_idle_thread_holds_no_batch() -> None:
    threads = GatherThreads(1)
    reader = StandIn()
    slot = fresh_slot()
    dead = threading.Event()
    weakref.finalize(slot, dead.set)
    threads.submit(reader, Request(np.arange(9)), slot).wait()
    del slot
    assert dead.wait(DEADLINE_SECONDS)
    threads.close()


HOUR = 3600.0


def test_a_head_start_is_a_small_share_of_the_step_and_never_long() -> None:
    for step_seconds in [0.0, *(10.0**power for power in np.arange(-9, 9, 0.125)), math.inf]:
        seconds = head_start_seconds(step_seconds)
        assert 0.0 <= seconds <= min(step_seconds / 8, 0.02)
        # A consumer that only takes batches is given none, one that trains is.
        assert (seconds > 0.0) == (step_seconds >= 0.008)


def submitted(threads: GatherThreads, begun: list[float], seconds: float) -> Pending:
    reader = StandIn(lambda indices: begun.append(time.perf_counter()))
    return threads.submit(reader, Request(np.arange(9)), fresh_slot(), seconds)


def test_no_part_is_begun_before_the_head_start_is_over() -> None:
    threads, begun = GatherThreads(3), list[float]()
    earliest = time.perf_counter() + 0.05
    until(submitted(threads, begun, 0.05).done)
    assert len(begun) == 3
    assert min(begun) >= earliest
    pending = submitted(threads, begun, HOUR)
    check(in_time(pending.wait), np.arange(9))  # one that is waited for is begun at once in all its parts
    assert len(begun) == 6
    threads.close()


def test_a_batch_that_is_abandoned_gives_its_slot_back_at_once() -> None:
    threads, begun = GatherThreads(3), list[float]()
    given_back: list[Slot] = []
    submitted(threads, begun, HOUR).abandon(given_back.append)
    until(lambda: given_back)
    in_time(threads.close)
    assert (len(given_back), begun) == (1, [])


@pytest.fixture
def head_starts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those of all batches that are submitted, in their order, each for a slot of its own."""
    monkeypatch.setattr("shardio.loading.pipeline._MOST_PER_SLOT", 1)
    given: list[float] = []
    submit = Pipeline.submit

    def noting(self: Pipeline, request: Request, cut: Any, seconds: float) -> Pending:
        given.append(seconds)
        return submit(self, request, cut, seconds)

    monkeypatch.setattr(Pipeline, "submit", noting)
    return given


def test_a_step_gets_a_head_start_once_the_loader_is_ahead_and_none_while_a_batch_is_late(
    make_set: Callable[..., Path], head_starts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, run, parts = threading.Event(), Pending.run, count()

    def held_back(self: Pending, part: slice, *, refused: bool) -> None:
        if next(parts) == 2:
            assert gate.wait(timeout=60)
        run(self, part, refused=refused)

    with ShardLoader(make_set(34), 4, device="cpu", num_threads=1) as loader:
        batches: Any = iter(loader)
        for _ in batches:
            time.sleep(0.01)  # the step
            until(lambda: all(pending.done() for *_, pending in batches._flow._pending))
        # Three are submitted for the first batch, which is waited for, and one for each after it.
        assert head_starts[:3] == [0.0, 0.0, 0.0]
        assert len(head_starts) == 8
        assert all(0.00125 <= seconds <= 0.02 for seconds in head_starts[3:])
        head_starts.clear()
        monkeypatch.setattr(Pending, "run", held_back)
        batches = iter(loader)
        for _ in range(2):
            next(batches)
            time.sleep(0.01)
        assert head_starts == [0.0] * 4
        gate.set()
        assert sum(1 for _ in batches) == 6
