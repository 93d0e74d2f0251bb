"""The rules between host and device, kept with a copier whose copies happen when the test says so.

Such a double cannot show that the consumer's stream and the copies wait for each other where they must, and that the
slots are pinned so that copies do not stop the host. tests/loading/test_gpu.py shows that, on a GPU or a stand-in.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import sample_images

import shardio.loading.pipeline
from shardio.format.layout import RowType, SampleShape
from shardio.loading.loader import ShardLoader
from shardio.loading.prefetch import MOST_AHEAD, DevicePrefetch, Tensors
from shardio.loading.report import Counts
from shardio.loading.ring import Ring, Slot, new_slot
from shardio.reading.reader import Request

NOT_COPIED = 0xAA
SECONDS = 0.25


def finish_some(seed: int) -> Callable[[FakeCopier], None]:
    """Returns a function that finishes some copies of a copier, as time that passes would."""
    rng = random.Random(seed)

    def let_time_pass(copier: FakeCopier) -> None:
        while copier.unfinished and rng.random() < 0.4:
            copier.finish_oldest()

    return let_time_pass


class FakeTransfer:
    """A copy that is made by `finish`, from what the slot holds at that time."""

    def __init__(self, stream: FakeCopier, slot: Slot) -> None:
        self.stream = stream
        self.seconds = self.stall_seconds = 0.0
        self.finished = False

    def start(self, slot: Slot, size: int) -> None:
        self.slot = slot
        self.size = size
        self.number = self.stream.note_start(self)
        views = [np.empty_like(view[:size]) for view in slot.views]
        for view in views:
            view.view(np.uint8).fill(NOT_COPIED)
        self.views = tuple(torch.from_numpy(view).permute(0, 3, 1, 2) for view in views)
        more = {name: torch.from_numpy(np.zeros_like(array[:size])) for name, array in slot.more.items()}
        images = self.views if len(views) > 1 else self.views[0]
        self.tensors = Tensors(images, torch.full((size,), -1), torch.full((size,), -1), more)

    def finish(self) -> None:
        assert not self.finished
        self.finished = True
        self.seconds = SECONDS
        for tensor, array in (
            *((view.permute(0, 2, 3, 1), array) for view, array in zip(self.views, self.slot.views, strict=True)),
            (self.tensors.labels, self.slot.labels),
            (self.tensors.indices, self.slot.indices),
            *((tensor, self.slot.more[name]) for name, tensor in self.tensors.more.items()),
        ):
            tensor.copy_(torch.from_numpy(array[: self.size]))

    def done(self) -> bool:
        self.stream.let_time_pass()
        return self.finished

    def wait(self) -> None:
        self.stream.log.append(f"wait {self.number}")
        while not self.finished:
            self.stream.finish_oldest()

    def hand_over(self) -> Tensors:
        self.stream.log.append(f"hand over {self.number}")
        return self.tensors


class FakeCopier:
    """One stream: its copies are made one after the other, in the order in which they were started."""

    def __init__(self, let_time_pass: Callable[[FakeCopier], None] = lambda copier: None) -> None:
        self.unfinished: deque[FakeTransfer] = deque()
        self.started = 0
        self.reserved: list[weakref.ref[FakeTransfer]] = []
        self.log: list[str] = []
        self._let_time_pass = let_time_pass

    def new_slot(self, batch_size: int, sample_shape: SampleShape, more: Mapping[str, RowType]) -> Slot:
        return new_slot(batch_size, sample_shape, more)

    def reserve(self, slot: Slot) -> FakeTransfer:
        transfer = FakeTransfer(self, slot)
        self.reserved.append(weakref.ref(transfer))
        return transfer

    def note_start(self, transfer: FakeTransfer) -> int:
        self.log.append(f"start {self.started}")
        self.started += 1
        self.unfinished.append(transfer)
        return self.started - 1

    def finish_oldest(self) -> None:
        self.unfinished.popleft().finish()

    def synchronize(self) -> None:
        while self.unfinished:
            self.finish_oldest()

    def let_time_pass(self) -> None:
        self._let_time_pass(self)


SHAPE = (2, 3, 3)
BATCH = 4
POISON = 0xEE


class AuditedRing(Ring):
    """Knows the owner of each slot, and spoils every slot that comes back."""

    def __init__(self, capacity: int = 4) -> None:
        super().__init__(capacity, lambda: new_slot(BATCH, SHAPE))
        self.out: list[Slot] = []
        self.released: list[Slot] = []

    def acquire(self) -> Slot:
        slot = super().acquire()
        assert all(slot is not other for other in self.out), "one slot for two owners"
        self.out.append(slot)
        return slot

    def release(self, slot: Slot) -> None:
        self.out.remove(slot)
        self.released.append(slot)
        slot.images.fill(POISON)
        slot.labels.fill(-POISON)
        slot.indices.fill(-POISON)
        super().release(slot)


def filled(ring: Ring, value: int) -> Slot:
    slot = ring.acquire()
    slot.images.fill(value % 150)
    slot.labels.fill(value)
    slot.indices.fill(value + 1)
    return slot


def holds(tensors: Tensors, value: int, size: int) -> bool:
    return (
        tensors.images.shape == (size, SHAPE[2], *SHAPE[:2])
        and bool((tensors.images == value % 150).all())
        and tensors.labels.tolist() == [value] * size
        and tensors.indices.tolist() == [value + 1] * size
    )


def test_taking_a_batch_returns_the_slots_of_finished_copies_and_counts_their_seconds() -> None:
    copier, ring, counts = FakeCopier(), AuditedRing(), Counts()
    prefetch = DevicePrefetch(copier, ring, counts)
    slots = [filled(ring, number) for number in range(4)]
    for slot in slots:
        prefetch.start(slot, BATCH)
    copier.finish_oldest()
    copier.finish_oldest()
    assert ring.released == []
    assert counts.copy_seconds == 0.0
    prefetch.take()
    assert ring.released == slots[:2]
    assert counts.copy_seconds == 2 * SECONDS
    prefetch.close()
    assert counts.copy_seconds == 4 * SECONDS


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_a_host_that_runs_ahead_is_held_back_at_the_oldest_copy_of_those_taken(ahead: int) -> None:
    copier, ring = FakeCopier(), AuditedRing(capacity=8)
    prefetch = DevicePrefetch(copier, ring, Counts())
    taken = []
    for number in range(40):
        prefetch.start(filled(ring, number), BATCH)  # which never waits
        assert len([entry for entry in copier.log if entry.startswith("wait")]) == max(0, len(taken) - MOST_AHEAD)
        if number >= ahead:
            taken.append(prefetch.take())
        assert len(copier.unfinished) <= ahead + MOST_AHEAD
        assert len(ring.out) <= ahead + MOST_AHEAD
    waits = [int(entry.split()[1]) for entry in copier.log if entry.startswith("wait")]
    assert waits == list(range(len(taken) - MOST_AHEAD))
    taken += [prefetch.take() for _ in range(ahead)]
    prefetch.close()
    assert all(holds(tensors, number, BATCH) for number, tensors in enumerate(taken))


@pytest.mark.parametrize("seed", range(4))
def test_every_copy_reads_its_own_batch_whenever_it_is_made(seed: int) -> None:
    rng = random.Random(seed)
    copier, ring = FakeCopier(finish_some(seed)), AuditedRing(capacity=3)
    prefetch = DevicePrefetch(copier, ring, Counts())
    started: deque[tuple[int, int]] = deque()
    taken: list[tuple[Tensors, int, int]] = []
    for number in range(300):
        action = rng.random()
        if action < 0.5:
            size = rng.randint(0, BATCH)
            prefetch.start(filled(ring, number), size)
            started.append((number, size))
        elif action < 0.8 and started:
            taken.append((prefetch.take(), *started.popleft()))
            assert len(copier.unfinished) <= len(started) + MOST_AHEAD, f"{seed=} {number=}"
        elif action < 0.9:
            prefetch.reclaim(rng.randint(0, 9))
        elif copier.unfinished:
            copier.finish_oldest()
        assert len(prefetch) == len(started), f"{seed=} {number=}"
    prefetch.close()
    prefetch.close()
    assert (len(prefetch), len(copier.unfinished), ring.out) == (0, 0, []), seed
    assert len(ring.released) == copier.started, seed
    # Batches that were never taken are handed over, too: they may be dropped.
    assert [entry for entry in copier.log if "hand" in entry] == [f"hand over {i}" for i in range(copier.started)]
    assert all(ref() is None for ref in copier.reserved[-1:]), "what was reserved is given up"
    assert len(taken) > 50, seed
    for tensors, number, size in taken:
        assert holds(tensors, number, size), f"{seed=} {number=}"


# The loader around it: the same iteration that a GPU would see, on the double.

LOADER_SHAPE = (6, 5, 3)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("gathered_ahead", "prefetch"), [(False, 0), (True, 0), (False, 2), (True, 2), (True, 4)])
def test_an_error_while_gathering_for_the_device_is_raised_where_its_batch_was_due(
    gathered_ahead: bool, prefetch: int, make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = FakeCopier(finish_some(1))
    expected = sample_images(47, LOADER_SHAPE)
    monkeypatch.setattr(shardio.loading.pipeline, "make_copier", lambda device: copier)
    options: dict[str, Any] = {"num_threads": 1, "shuffle": False, "prefetch": prefetch, "return_indices": True}
    with ShardLoader(make_set(47, LOADER_SHAPE), 5, device="cpu", **options) as loader:
        reader = loader._pipeline.reader
        copy = reader.copy

        def failing(name: str, indices: np.ndarray, *out: Any) -> None:
            if 17 in indices:
                raise OSError(5, "the disk is gone")
            copy(name, indices, *out)

        def all_gathered() -> None:
            """One thread serves batches in order: when this one is there, so are those that were asked for before."""
            loader._pipeline._threads.submit(reader, Request(np.array([0])), new_slot(1, LOADER_SHAPE)).wait()

        monkeypatch.setattr(reader, "copy", failing)
        iterator = iter(loader)
        seen = []
        with pytest.raises(OSError, match="the disk is gone"):  # noqa: PT012
            while True:
                if gathered_ahead:
                    all_gathered()
                seen.append(next(iterator))
        assert not copier.unfinished
        assert len(seen) == 3
        assert list(iterator) == []
        all_gathered()
        assert loader.stats()["slots"] == loader.stats()["slots_free"]
        monkeypatch.setattr(reader, "copy", copy)
        seen += loader
        copier.synchronize()
        assert len(seen) == 3 + 9
        for images, labels, indices in seen:
            assert torch.equal(images, expected[indices])
            assert torch.equal(labels, indices % 7)
