"""The consumer's step goes first: a batch for which there is time is begun a little later, and no other is."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from deadlines import in_time
from numpy.typing import NDArray
from pictures import sample_pixels

from shardio import ShardLoader
from shardio.loading.gather import GatherThreads, Pending, head_start_seconds
from shardio.loading.iterator import LoaderIterator
from shardio.loading.pipeline import Pipeline
from shardio.loading.ring import Slot, new_slot
from shardio.reading.reader import Reader, Request

HOUR = 3600.0


def test_a_head_start_is_a_small_share_of_the_step_and_never_long() -> None:
    for step_seconds in [0.0, *(10.0**power for power in np.arange(-9, 9, 0.125)), math.inf]:
        seconds = head_start_seconds(step_seconds)
        assert 0.0 <= seconds <= min(step_seconds / 8, 0.02)
        # A consumer that only takes batches is given none, one that trains is.
        assert (seconds > 0.0) == (step_seconds >= 0.008)


class StandIn(Reader):
    """Notes when its parts are begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[float] = []

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Any = None) -> None:
        self.begun.append(time.perf_counter())
        out[:] = 7


def submitted(threads: GatherThreads, reader: StandIn, seconds: float) -> Pending:
    slot = new_slot(9, (6, 5, 3))
    return threads.submit(reader, Request(np.arange(9)), slot, seconds)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_no_part_is_begun_before_the_head_start_is_over(num_threads: int) -> None:
    threads, reader = GatherThreads(num_threads), StandIn()
    earliest = time.perf_counter() + 0.05
    pending = submitted(threads, reader, 0.05)
    while not pending.done():
        time.sleep(0.001)
    assert len(reader.begun) == num_threads
    assert min(reader.begun) >= earliest
    threads.close()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_a_batch_that_is_waited_for_is_begun_at_once_in_all_its_parts(num_threads: int) -> None:
    threads, reader = GatherThreads(num_threads), StandIn()
    pending = submitted(threads, reader, HOUR)
    slot = in_time(pending.wait)
    assert (slot.images == 7).all()
    assert len(reader.begun) == num_threads
    threads.close()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_a_batch_that_is_abandoned_gives_its_slot_back_at_once(num_threads: int) -> None:
    threads, reader = GatherThreads(num_threads), StandIn()
    given_back: list[Slot] = []
    is_back = threading.Event()
    pending = submitted(threads, reader, HOUR)
    pending.abandon(lambda slot: (given_back.append(slot), is_back.set())[0])
    assert is_back.wait(timeout=30)
    assert len(given_back) == 1
    assert reader.begun == []
    in_time(threads.close)


@pytest.fixture
def head_starts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those of all batches that are submitted, in their order."""
    given: list[float] = []
    submit = Pipeline.submit

    def noting(self: Pipeline, request: Request, cut: Any, seconds: float) -> Pending:
        given.append(seconds)
        return submit(self, request, cut, seconds)

    monkeypatch.setattr(Pipeline, "submit", noting)
    return given


def until_all_are_ready(batches: LoaderIterator) -> None:
    flow: Any = batches._flow
    while not all(pending.done() for *_, pending in flow._pending):
        time.sleep(0.001)


def test_a_step_gets_a_head_start_once_the_loader_is_ahead(
    make_set: Callable[..., Path], head_starts: list[float]
) -> None:
    with ShardLoader(make_set(34), 4, device="cpu", shuffle=False, return_indices=True) as loader:
        batches = cast(LoaderIterator, iter(loader))
        for number, (images, _, indices) in enumerate(batches):
            assert np.array_equal(images[0].permute(1, 2, 0).numpy(), sample_pixels(int(indices[0])))
            assert number * 4 == indices[0]
            time.sleep(0.01)  # the step
            until_all_are_ready(batches)
    # Three are submitted for the first batch, which is waited for, and one for each after it.
    assert head_starts[:3] == [0.0, 0.0, 0.0]
    assert len(head_starts) == 8
    assert all(0.00125 <= seconds <= 0.02 for seconds in head_starts[3:])


def test_a_batch_is_begun_at_once_while_another_is_late(
    make_set: Callable[..., Path], head_starts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    run = Pending.run
    count = itertools.count()

    def held_back(self: Pending, part: slice, *, refused: bool) -> None:
        if next(count) == 2:
            assert gate.wait(timeout=60)
        run(self, part, refused=refused)

    monkeypatch.setattr(Pending, "run", held_back)
    with ShardLoader(make_set(34), 4, device="cpu", num_threads=1) as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
            time.sleep(0.01)
        assert head_starts == [0.0] * 4
        gate.set()
        assert sum(1 for _ in batches) == 6


def test_a_consumer_that_only_takes_batches_is_given_none(
    make_set: Callable[..., Path], head_starts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its steps take no time at all, whatever this machine does meanwhile.
    monkeypatch.setattr("shardio.loading.report.Meter.step_seconds", lambda self: 1e-5)
    with ShardLoader(make_set(34), 4, device="cpu") as loader:
        for _ in range(3):
            for _ in loader:
                pass
    assert head_starts == [0.0] * 24
