"""What only the stand-in for CUDA shows: when slots return, the order of events, copies and waits; and the stand-in.

tests/loading/test_gpu.py has what is also true on a device.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated_cuda
import torch
from by_hand import Hand
from numpy.typing import NDArray
from simulated_cuda import Simulation, Stream

import shardio.loading.cuda
import shardio.reading.mapped_table
from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop
from shardio.augment.program import Program
from shardio.loading.loader import ShardLoader
from shardio.loading.prefetch import MOST_AHEAD

BATCH, SHAPE = 4, (6, 5, 3)
STANDARD = Compose([RandomResizedCrop(4), HorizontalFlip(), Normalize("imagenet")])


@pytest.fixture
def simulate(closing: ExitStack) -> Callable[..., Simulation]:
    """simulate(seed, haste): a device for the rest of the test."""
    return lambda *options, **named: closing.enter_context(Simulation(*options, **named))


@pytest.fixture
def simulation(simulate: Callable[..., Simulation]) -> Simulation:
    return simulate(haste=0.0)


@pytest.fixture
def hand(simulation: Simulation) -> Hand:
    return Hand(BATCH, SHAPE)


@pytest.mark.parametrize(("transform", "size"), [(None, 6 * 5), (STANDARD, 4 * 4)], ids=["none", "standard"])
def test_pixels_are_written_to_a_slot_and_copied_to_the_device_once_and_nothing_else_is_waited_for(
    transform: Any,
    size: int,
    make_set: Callable[..., Path],
    simulate: Callable[..., Simulation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, written = 30, []
    copy_rows, make = shardio.reading.mapped_table.copy_rows, Program.make

    def counted_copy(rows: NDArray[np.uint8], numbers: NDArray[np.int64], *others: Any, **named: Any) -> int:
        if rows.shape[1] == np.prod(SHAPE):  # and not of the index
            written.append(len(numbers) * rows.shape[1])
        return copy_rows(rows, numbers, *others, **named)

    def counted_make(self: Program, pixels: Any, some: NDArray[np.int64], outs: list[NDArray[Any]]) -> None:
        written.extend(out[some].nbytes for out in outs)
        make(self, pixels, some, outs)

    path = make_set(count * BATCH, SHAPE, 1000)
    options: dict[str, Any] = {"seed": 1, "io": "mmap", "transform": transform, "return_indices": True}
    monkeypatch.setattr(shardio.reading.mapped_table, "copy_rows", counted_copy)
    monkeypatch.setattr(Program, "make", counted_make)
    simulation = simulate()
    with ShardLoader(path, BATCH, device="cuda", **options) as loader:
        assert sum(1 for _ in loader) == count
    pixels = count * BATCH * size * 3
    constants = 0 if transform is None else 1
    assert sum(written) == pixels
    assert simulation.copied_nbytes == pixels + count * BATCH * 2 * 8 + constants * 2 * 3 * 4
    assert simulation.copies == 2 * count + constants
    # Constants are copied once in a process. The rest are waits for copies, which return slots.
    assert simulation.waits - Counter(event=count) == Counter({"copy from the host": constants} if constants else {})
    assert not simulation.unordered


@pytest.mark.parametrize("call", ["wait_event", "record_stream"])
def test_a_loader_that_leaves_out_a_call_is_noticed(
    call: str, make_set: Callable[..., Path], simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Stream if call == "wait_event" else simulated_cuda.DeviceTensor
    streams = [simulation.default, Stream(simulation)]
    with ShardLoader(make_set(40, SHAPE), BATCH, device="cuda") as loader:
        for is_left_out in (False, True):
            if is_left_out:
                monkeypatch.setattr(owner, call, lambda *_: None)
            batches = iter(loader)
            for number in range(len(loader)):
                with torch.cuda.stream(streams[number % 2]):
                    images, _ = next(batches)
                    images.sum()
                    del images
            assert bool(simulation.unordered) == is_left_out


def test_the_device_s_wait_for_copies_counts_and_its_steps_do_not(simulation: Simulation, hand: Hand) -> None:
    """The consumer's stream waits for the first copy. The second one is done before the step that comes before it."""
    simulation.slow = hand.copier._stream  # type: ignore[assignment]
    hand.start(1)
    hand.look(hand.prefetch.take(), 1)
    simulation.synchronize()
    hand.prefetch.reclaim(0)
    waited = hand.counts.stall_seconds
    assert waited > 0.0
    simulation.slow = simulation.default
    hand.start(2)
    hand.look(hand.prefetch.take(), 2)
    simulation.synchronize()
    hand.prefetch.close()
    assert hand.counts.stall_seconds == waited
    assert hand.all_right()


def test_the_consumer_waits_for_its_own_batch_only(simulation: Simulation, hand: Hand) -> None:
    """Events are used again with their slots: once a copy is known to be done, they may belong to a later one."""
    hand.start(1)
    simulation.synchronize()
    hand.prefetch.reclaim(0)
    held = True
    simulation.launch(lambda: None, when=lambda: not held)
    hand.start(2)
    hand.start(3)  # it goes into memory that it waits for
    assert hand.ring.num_made == 2
    hand.look(hand.prefetch.take(), 1)
    held = False
    assert all(when() for when, _ in simulation.default.queue)
    hand.look(hand.prefetch.take(), 2)
    hand.look(hand.prefetch.take(), 3)
    hand.prefetch.close()
    assert hand.all_right()


def test_taking_a_batch_returns_the_slots_of_finished_copies_and_counts_their_seconds(
    simulation: Simulation, hand: Hand
) -> None:
    for value in range(4):
        hand.start(value)
    transfers: list[Any] = list(hand.prefetch._transfers)
    simulation.wait_until(lambda: transfers[1]._end.mark.passed)
    assert (hand.ring.num_free, hand.counts.copy_seconds) == (0, 0.0)
    hand.look(hand.prefetch.take(), 0)
    assert (hand.ring.num_free, transfers[2].done()) == (2, False)
    assert hand.counts.copy_seconds == sum(one.seconds for one in transfers) > 0.0
    hand.prefetch.close()
    assert hand.ring.num_free == 4
    assert hand.counts.copy_seconds == sum(one.seconds for one in transfers)


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_a_host_that_runs_ahead_is_held_back_at_the_oldest_copy_of_those_taken(
    ahead: int, simulation: Simulation, hand: Hand
) -> None:
    for number in range(40):
        hand.start(number)  # which never waits
        assert simulation.waits == Counter(event=max(0, number - ahead - MOST_AHEAD))
        if number >= ahead:
            hand.look(hand.prefetch.take(), number - ahead)
    assert hand.ring.num_made <= ahead + MOST_AHEAD + 1
    hand.prefetch.close()
    assert hand.all_right()


@pytest.mark.parametrize("seed", range(4))
def test_every_copy_reads_its_own_batch_whenever_it_is_made(
    seed: int, simulate: Callable[..., Simulation], poison: None
) -> None:
    rng, simulation, hand = random.Random(seed), simulate(seed), Hand(BATCH, SHAPE)
    started: deque[tuple[int, int]] = deque()
    for number in range(300):
        action = rng.random()
        if action < 0.5 and len(started) < 4:
            value, size = number % 200, rng.randint(0, BATCH)
            hand.prefetch.start(hand.filled(value), size)
            started.append((value, size))
        elif action < 0.8 and started:
            tensors, (value, size) = hand.prefetch.take(), started.popleft()
            assert len(tensors.labels) == size
            hand.look(tensors, value)
        elif action < 0.9:
            hand.prefetch.reclaim(rng.randint(0, 9))
        else:
            simulation.step()
        assert len(hand.prefetch) == len(started)
    for _ in range(2):
        hand.prefetch.close()
    assert (len(hand.prefetch), hand.ring.num_free) == (0, hand.ring.num_made)
    assert hand.all_right()
    assert not simulation.unordered


def test_a_batch_is_copied_in_pieces(simulation: Simulation, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.loading.cuda, "_PIECE_NBYTES", 64)
    hand.start(5)
    hand.look(hand.prefetch.take(), 5)
    pixels = int(np.prod((BATCH, *SHAPE)))
    assert simulation.copies == -(-pixels // 64) + 1
    assert simulation.copied_nbytes == pixels + 2 * 8 * BATCH
    assert hand.all_right()
    hand.prefetch.close()


# The stand-in itself.


def test_what_a_device_refuses_is_refused(simulation: Simulation) -> None:
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    assert there.device == torch.device("cuda", 0)
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(there)
    for other in (here, torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="same device"):
            there + other
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a single number may be the host's


@pytest.mark.parametrize(
    ("why", "call"),
    [
        ("aten::_local_scalar_dense", lambda there: there.sum().item()),
        ("aten::equal", lambda there: torch.equal(there, there)),
        ("aten::nonzero", torch.nonzero),
        ("aten::index.Tensor", lambda there: there[there > 0]),
        ("copy to the host", lambda there: there.tolist()),
        ("copy from the host", lambda there: there.copy_(torch.ones(3), non_blocking=True)),
        ("copy from the host", lambda there: torch.ones(3).pin_memory().to("cuda")),
        ("synchronize", lambda there: torch.cuda.synchronize()),
    ],
)
def test_a_wait_of_the_host_is_counted(why: str, call: Callable[[Any], object], simulation: Simulation) -> None:
    there = torch.full((3,), 2.0, device="cuda")
    there[1] = 5.0
    there[torch.zeros(1, dtype=torch.int64, device="cuda")] += 1
    pinned = torch.ones(3, pin_memory=True).to("cuda", non_blocking=True)
    assert len(torch.stack([there, pinned])) == 2
    assert not simulation.waits
    call(there)
    assert simulation.waits == {why: 1}


def test_streams_run_in_a_random_order(simulate: Callable[..., Simulation]) -> None:
    orders = set()
    for seed in range(5):
        simulation, order = simulate(seed), list[tuple[int, int]]()
        for which, stream in enumerate((simulation.default, Stream(simulation))):
            with torch.cuda.stream(stream):
                for number in range(4):
                    simulation.launch(partial(order.append, (which, number)))
        simulation.synchronize()
        assert sorted(order, key=lambda one: one[0]) == [(which, number) for which in range(2) for number in range(4)]
        orders.add(tuple(order))
    assert len(orders) == 5


def test_a_wait_for_ever_is_noticed(simulation: Simulation) -> None:
    simulation.launch(lambda: None, when=lambda: False)
    with pytest.raises(AssertionError, match="cannot happen"):
        simulation.default.record_event().synchronize()


@pytest.mark.parametrize(
    ("double", "real"), [(simulated_cuda.Stream, torch.cuda.Stream), (simulated_cuda.Event, torch.cuda.Event)]
)
def test_the_stand_in_is_called_as_torch_is(double: type, real: type) -> None:
    methods = [name for name, value in vars(double).items() if inspect.isfunction(value) and name[0] != "_"]
    assert methods
    for name in methods:
        ours = list(inspect.signature(getattr(double, name)).parameters)
        theirs = inspect.signature(getattr(real, name)).parameters
        assert ours == list(theirs)[: len(ours)], name
        assert all(theirs[more].default is not inspect.Parameter.empty for more in list(theirs)[len(ours) :]), name
    assert {"enable_timing", "blocking"} <= inspect.signature(torch.cuda.Event.__new__).parameters.keys()
