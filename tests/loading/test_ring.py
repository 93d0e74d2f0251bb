"""A slot comes back when the last array or tensor over it dies: never before, and always then."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import in_time
from disks import raising
from numpy.typing import NDArray

from shardio.loading.ring import Ring, Slot, new_slot
from shardio.system.pour import ALIGNMENT

SHAPE = (4, 3, 2)
BATCH = 5
POISON = 0xEE


class PoisonRing(Ring):
    """Spoils every slot that it hands out or gets back, so that a test that still holds it will see."""

    def acquire(self) -> Slot:
        slot = super().acquire()
        slot.images.fill(POISON)
        return slot

    def release(self, slot: Slot) -> None:
        slot.images.fill(POISON)
        super().release(slot)


def make_ring(capacity: int = 4) -> Ring:
    return PoisonRing(capacity, lambda: new_slot(BATCH, SHAPE))


# Ways to hold a batch. Each is called with the lent array, which the test then forgets.
HOLDERS: dict[str, Callable[[NDArray[np.uint8]], Any]] = {
    "an array view": lambda array: array[1:3, ::2],
    "an array of another dtype": lambda array: array.view(np.int8),
    "memoryview": memoryview,
    "np.frombuffer": lambda array: np.frombuffer(array, np.uint8),
    "torch.from_numpy": torch.from_numpy,
    "torch.from_dlpack": torch.from_dlpack,
    "torch.frombuffer": lambda array: torch.frombuffer(array, dtype=torch.uint8),
    "permute": lambda array: torch.from_numpy(array).permute(0, 3, 1, 2),
    "unbind": lambda array: torch.from_numpy(array).unbind()[-1],
    "untyped_storage": lambda array: torch.from_numpy(array).untyped_storage(),
    "numpy of the tensor": lambda array: torch.from_numpy(array).numpy(),
    "a closure": lambda array: lambda: array,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_slot_returns_when_the_last_holder_dies(holder: str) -> None:
    ring = make_ring()
    slot = ring.acquire()
    slot.images.fill(7)
    array = ring.lend(slot, BATCH)
    held = HOLDERS[holder](array)
    del array
    assert ring.acquire() is not slot
    assert (slot.images == 7).all()
    del held
    # Reference counting alone does it, without a garbage collection.
    assert ring.acquire() is slot


def test_the_slot_of_an_empty_batch_returns_like_any_other() -> None:
    ring = make_ring()
    slot = ring.acquire()
    held = torch.from_numpy(ring.lend(slot, 0)).permute(0, 3, 1, 2)
    assert held.shape == (0, SHAPE[2], *SHAPE[:2])
    assert ring.acquire() is not slot
    del held
    assert ring.acquire() is slot


def test_a_batch_in_a_reference_cycle_returns_when_the_cycle_is_collected() -> None:
    ring = make_ring()
    slot = ring.acquire()
    gc.disable()
    try:
        cycle: list[Any] = [torch.from_numpy(ring.lend(slot, BATCH))]
        cycle.append(cycle)
        del cycle
        assert ring.acquire() is not slot
    finally:
        gc.enable()
    gc.collect()
    assert ring.acquire() is slot


def test_slots_never_have_two_owners_among_threads(in_threads: Callable[..., None]) -> None:
    ring = make_ring(capacity=3)
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(800):
            slot = ring.acquire()
            slot.images.fill(number)
            tensor = torch.from_numpy(ring.lend(slot, BATCH))
            del slot
            if not bool((tensor == number).all()):
                wrong.append(f"thread {number}, turn {turn}")
            del tensor

    in_threads(work, 4)
    assert wrong == []


@pytest.mark.parametrize("capacity", [0, 1, 2, 5])
def test_capacity_bounds_the_slots_that_wait_for_reuse(capacity: int) -> None:
    made: list[weakref.ref[Slot]] = []

    def make() -> Slot:
        slot = new_slot(BATCH, SHAPE)
        made.append(weakref.ref(slot))
        return slot

    ring = Ring(capacity, make)
    for _ in range(3):
        slots = [ring.acquire() for _ in range(8)]
        batches = [ring.lend(slot, BATCH) for slot in slots]
        del slots
        batches.clear()
        assert sum(ref() is not None for ref in made) == capacity
    assert len(made) == 8 + 2 * (8 - capacity)


def test_an_error_while_a_slot_is_made_is_told_alone() -> None:
    with pytest.raises(MemoryError, match="no room for a slot") as caught:
        Ring(2, raising(MemoryError("no room for a slot"))).acquire()
    # The text has no "during handling of" an empty deque.
    assert caught.value.__context__ is None


def test_slots_that_came_back_are_used_before_new_ones_are_made_and_the_last_first() -> None:
    ring = make_ring()
    first, second = ring.acquire(), ring.acquire()
    for _ in range(50):
        ring.release(first)
        ring.release(second)
        assert ring.acquire() is second
        assert ring.acquire() is first
    assert ring.num_made == 2


def test_a_batch_outlives_its_ring_and_keeps_no_other_slot_alive() -> None:
    ring = make_ring()
    held, other = ring.acquire(), ring.acquire()
    held.images.fill(9)
    tensor = torch.from_numpy(ring.lend(held, BATCH))
    ring.release(other)
    refs = [weakref.ref(ring), weakref.ref(other)]
    slot = weakref.ref(held)
    del ring, held, other
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert bool((tensor == 9).all())
    tensor.fill_(11)
    assert bool((tensor == 11).all())
    del tensor
    assert slot() is None


def test_the_images_of_a_slot_are_where_o_direct_may_read_them() -> None:
    assert all(new_slot(size, (5, 7, 3)).images.ctypes.data % ALIGNMENT == 0 for size in range(1, 9))


def test_a_release_from_a_collection_in_the_middle_of_acquire_works() -> None:
    cycles: list[Any] = []

    def make() -> Slot:
        cycles.clear()
        gc.collect()  # returns the batch below while acquire is under way
        return new_slot(BATCH, SHAPE)

    ring = PoisonRing(4, make)

    def work() -> None:
        slot = ring.acquire()
        cycle: list[Any] = [ring.lend(slot, BATCH)]
        cycle.append(cycle)
        cycles.append(cycle)
        del cycle
        assert ring.acquire() is not slot
        assert cycles == []
        assert ring.acquire() is slot

    in_time(work)


class Interrupted(Exception):
    """The exception that the signal handler below raises, as Ctrl-C's raises KeyboardInterrupt."""


def test_an_interrupt_while_a_batch_dies_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    swallowed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: swallowed.append(unraisable.exc_type))
    # C's own raise(): unlike signal.raise_signal it leaves it to the interpreter when to call the handler.
    raise_signal = ctypes.CDLL(None)["raise"]
    ring = Ring(4, lambda: new_slot(BATCH, SHAPE))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        # A tensor that is not the ring's shows that this way of interrupting works.
        for make_batch in (lambda: torch.zeros(3), lambda: torch.from_numpy(ring.lend(ring.acquire(), BATCH))):
            holder = deque([make_batch()], maxlen=1)
            # Signal and death of the batch within one call into C: no Python code of this test runs in between.
            with pytest.raises(Interrupted):
                holder.extend(map(raise_signal, [signal.SIGUSR1]))
            assert swallowed == []
    finally:
        signal.signal(signal.SIGUSR1, before)
