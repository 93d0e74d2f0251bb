"""Gathering, copies and steps overlap, by the rules of DevicePrefetch: a calculation of when each of them begins.

Nothing is copied, and no clock is looked at. The host takes no time for what it does; the gather threads, the side
stream and the consumer's stream each do one thing after the other; a wait ends at once when what it waits for is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
import torch

from shardio.format.layout import RowType, SampleShape
from shardio.loading.prefetch import DevicePrefetch, Tensors
from shardio.loading.ring import Ring, Slot

NUM_BATCHES = 400
EMPTY = Slot(np.empty((1, 1, 1, 1), np.uint8), np.empty(1, np.int64), np.empty(1, np.int64))
NOTHING = Tensors(torch.empty(0), torch.empty(0), torch.empty(0))


class Times:
    """When the host, the side stream and the consumer's stream are through with what they were given."""

    def __init__(self, copy: float) -> None:
        self.copy = copy
        self.host = self.side = self.consumer = 0.0


class TimedTransfer:
    seconds = stall_seconds = 0.0

    def __init__(self, times: Times) -> None:
        self.times = times
        self.free = times.consumer

    def start(self, slot: Slot, size: int) -> None:
        self.end = self.times.side = max(self.times.host, self.times.side, self.free) + self.times.copy

    def done(self) -> bool:
        return self.end <= self.times.host

    def wait(self) -> None:
        self.times.host = max(self.times.host, self.end)

    def hand_over(self) -> Tensors:
        self.times.consumer = max(self.times.consumer, self.end)
        return NOTHING


class TimedCopier:
    def __init__(self, times: Times) -> None:
        self.times = times

    def new_slot(self, batch_size: int, sample_shape: SampleShape, more: Mapping[str, RowType]) -> Slot:
        return EMPTY

    def reserve(self, slot: Slot) -> TimedTransfer:
        return TimedTransfer(self.times)


class Counts:
    copy_seconds = stall_seconds = 0.0


def seconds_per_batch(gather: float, copy: float, prefetch: int, reserve_ahead: bool = True) -> float:
    """Runs the loop of shardio.loading.iterator.LoaderIterator with steps of 1.0."""
    times = Times(copy)
    ring = Ring(1, lambda: EMPTY)
    device = DevicePrefetch(TimedCopier(times), ring, Counts())
    gathered = 0.0
    pending: deque[float] = deque()

    def gather_ahead(number: int) -> None:
        nonlocal gathered
        while len(pending) <= prefetch and number + len(device) + len(pending) < NUM_BATCHES:
            gathered = max(gathered, times.host) + gather
            pending.append(gathered)

    def start() -> None:
        times.host = max(times.host, pending.popleft())
        if not reserve_ahead:
            device._reserved = None
        device.start(EMPTY, 1)

    for number in range(NUM_BATCHES):
        gather_ahead(number)
        if not device:
            start()
        device.take()
        while pending and pending[0] <= times.host and len(device) < max(1, prefetch):
            start()
        gather_ahead(number + 1)
        times.consumer = max(times.consumer, times.host) + 1.0
    device.close()
    return times.consumer / NUM_BATCHES


GATHER = [0.1, 0.5, 0.8, 0.95, 0.99, 1.0, 1.01, 1.05, 1.2, 2.0]
COPY = [0.01, 0.05, 0.1, 0.5, 0.9, 1.0, 1.5]


@pytest.mark.parametrize("prefetch", [1, 2, 3, 4, 8])
def test_the_slowest_of_gathering_copying_and_the_step_is_the_rate(prefetch: int) -> None:
    for gather, copy in product(GATHER, COPY):
        slowest = max(gather, copy, 1.0)
        beginning = (prefetch + 2) * (gather + copy + 1.0) / NUM_BATCHES
        assert slowest * 0.99 <= seconds_per_batch(gather, copy, prefetch) <= slowest + beginning, (gather, copy)


def test_without_prefetch_copies_overlap_with_the_step_before() -> None:
    for copy in (0.01, 0.1, 0.5, 0.9):
        assert seconds_per_batch(0.1, copy, 0) < 1.01


def test_memory_that_is_reserved_only_when_it_is_needed_costs_steps() -> None:
    """Why it is reserved one batch ahead. If this fails, that is of no use any more."""
    for prefetch, least in ((0, 1.09), (1, 1.05), (2, 1.03)):
        lost = max(seconds_per_batch(gather, 0.1, prefetch, False) / max(gather, 1.0) for gather in GATHER)
        assert least < lost < 1.11
