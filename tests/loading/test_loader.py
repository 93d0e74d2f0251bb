"""Batches on the CPU: right, for as long as they are held, whatever happens to the iteration."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import in_time, until
from hold_batches import hold_batches
from numpy.typing import NDArray
from pictures import as_batch, sample_images, sample_pixels
from simulated_cuda import Simulation
from storm_close import InterruptedHere, Point

from shardio import loading
from shardio.augment import HorizontalFlip
from shardio.augment.chain import Transform
from shardio.errors import LaunchError
from shardio.loading.loader import ShardLoader
from shardio.loading.report import Counts
from shardio.loading.ring import Ring, Slot
from shardio.reading.reader import MappedReader, Request

NUM_SAMPLES = 47
SHAPE = (6, 5, 3)
Batch = tuple[torch.Tensor, ...]
MakeLoader = Callable[..., ShardLoader]


@pytest.fixture
def loader_of(make_set: Callable[..., Path]) -> MakeLoader:
    """loader_of(batch_size, ...): a loader on the CPU of 47 samples in five shards."""

    def make(batch_size: int, num_samples: int = NUM_SAMPLES, **options: Any) -> ShardLoader:
        options = {"device": "cpu", "return_indices": True, **options}
        return ShardLoader(make_set(num_samples, SHAPE), batch_size, **options)

    return make


EXPECTED = sample_images(NUM_SAMPLES, SHAPE)

# The modules that the consumer's calls run, without those below.
FOLDER = Path(loading.__file__).parent
DRIVEN_BY_THE_CONSUMER = [
    str(FOLDER / f"{name}.py") for name in ("loader", "iterator", "pipeline", "state", "transform")
]


def check(batch: Batch, expected: torch.Tensor = EXPECTED) -> None:
    images, labels, indices = batch
    assert torch.equal(images, expected[indices])
    assert torch.equal(labels, indices % 7)


def order_of(batches: list[Batch]) -> list[list[int]]:
    return [indices.tolist() for _, _, indices in batches]


def order_expected(loader: ShardLoader, epoch: int) -> list[list[int]]:
    return [indices.tolist() for indices in loader._position.sampler.batches(epoch)]


def test_a_slow_consumer_that_keeps_some_batches_sees_no_wrong_byte() -> None:
    assert hold_batches(300, seed=1) == []


def test_a_slot_that_is_taken_too_soon_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lend(ring: Ring, slot: Slot, size: int) -> NDArray[np.uint8]:
        ring.release(slot)
        return slot.images[:size]

    monkeypatch.setattr(Ring, "lend", lend)
    assert any("comparisons failed" in problem for problem in hold_batches(60, seed=1))


def gather_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardio")}


@pytest.mark.parametrize("shape", [(6, 5, 3), (1, 1, 1)])
def test_images_are_uint8_in_channels_last_memory(shape: tuple[int, int, int], make_set: Callable[..., Path]) -> None:
    height, width, channels = shape
    with ShardLoader(make_set(9, shape), 4, shuffle=False, device="cpu") as loader:
        for number, (images, labels) in enumerate(loader):
            assert images.shape == (4, channels, height, width)
            assert images.dtype == torch.uint8
            assert images.stride() == (height * width * channels, 1, width * channels, channels)
            assert images.is_contiguous(memory_format=torch.channels_last)
            positions = range(4 * number, 4 * number + 4)
            assert torch.equal(images, as_batch(np.stack([sample_pixels(i, shape) for i in positions])))
            assert torch.equal(labels, torch.tensor([i % 7 for i in positions]))
        assert number == 1


@pytest.fixture
def a_slot_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for a small batch."""
    monkeypatch.setattr("shardio.loading.pipeline._MOST_PER_SLOT", 1)


@pytest.mark.parametrize("transform", [None, HorizontalFlip(0.0)], ids=["stored", "made by a transform"])
def test_slots_are_reused_when_batches_are_dropped_and_freed_beyond_the_capacity(
    transform: Transform | None, loader_of: MakeLoader, living_slots: Callable[[], int], a_slot_for_each_batch: None
) -> None:
    with loader_of(4, prefetch=2, transform=transform) as loader:
        assert loader.stats()["roi"] is (transform is not None)
        held = [batch for _ in range(5) for batch in loader]
        for batch in held:
            check(batch)
        del batch
        assert living_slots() >= loader.stats()["slots"] == len(held)
        assert loader.stats()["slots_free"] == 0
        held.clear()
        assert living_slots() <= loader._pipeline._ring.capacity
        assert loader.stats()["slots_free"] == 4  # as many as a steady loop needs; the others were freed
        for _ in range(5):
            for batch in loader:
                check(batch)
                # Slots ahead of the consumer, at work, in its hands, and the one before, which it still holds.
                assert living_slots() <= loader._pipeline._ring.capacity + 1


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_small_batches_share_a_slot_which_returns_with_the_last_of_them(tail: str, loader_of: MakeLoader) -> None:
    with loader_of(4, tail=tail, num_threads=3) as loader:
        for epoch in range(3):
            held = list(loader)
            assert order_of(held) == order_expected(loader, epoch)
            for batch in held:
                check(batch)
                # What is saved or sent takes no bytes of its neighbors with it.
                assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in batch)
            assert loader.stats()["slots"] == 2
            last = held[-1]
            held.clear()
            del batch
            assert loader.stats()["slots_free"] == 1
            check(last)
            del last
            assert loader.stats()["slots_free"] == 2


def test_a_loader_that_was_made_before_its_rank_was_known_is_refused_when_it_is_read(
    loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(4) as loader, loader_of(4, rank=0, world_size=1) as told:
        for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 3}.items():
            monkeypatch.setattr(torch.distributed, name, partial(int, value))
        with pytest.raises(LaunchError, match="rank 1 of 3: make the loader after"):
            iter(loader)
        assert len(list(told)) == NUM_SAMPLES // 4


def test_a_rank_by_variables_alone_is_told_once_at_the_first_batch(
    loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with loader_of(4) as loader:
        batches = iter(loader)
        with pytest.warns(RuntimeWarning, match="by RANK and WORLD_SIZE") as told:
            next(batches)
        assert told[0].filename == __file__
        assert len([*batches, *loader]) == 2 * len(loader) - 1


@pytest.mark.parametrize(("rank", "tail", "is_told"), [(0, "short", True), (1, "short", False), (0, "pad", False)])
def test_a_loader_that_will_give_its_rank_an_empty_batch_says_so_when_opened_or_loaded(
    rank: int, tail: str, is_told: bool, loader_of: MakeLoader
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with loader_of(15, rank=rank, world_size=3, tail=tail) as loader:  # 2 of 47 samples are left for 3 ranks
            assert [len(batch[0]) for batch in loader] == [15, {"pad": 15, "short": rank}[tail]]
            state = {**loader.state_dict(), "epoch": 0}
            loader.load_state_dict({**state, "consumed": 1})  # 1 of 46
            assert len(list(loader)[1][0]) == (15 if tail == "pad" else 0)
    assert [one.filename for one in told] == [__file__] * (is_told + (tail == "short"))
    assert all("num_padded" in str(one.message) and "sums" in str(one.message) for one in told)


@pytest.mark.parametrize(("world_size", "start"), [(1, 30), (3, 0), (7, 30)])
def test_the_repeats_of_a_padded_epoch_can_be_told(world_size: int, start: int, loader_of: MakeLoader) -> None:
    with loader_of(1) as whole:
        expected = sum(order_of(list(whole)), [])[start:]  # noqa: RUF017
    fresh: list[int] = []
    for rank in range(world_size):
        with loader_of(10, tail="pad", rank=rank, world_size=world_size) as loader:
            loader.load_state_dict({**loader.state_dict(), "consumed": start})
            for step, (_, _, indices) in enumerate(loader, start=1):
                assert len(indices) == 10
                assert not loader.num_padded or step == -(-len(expected) // (10 * world_size))
                fresh += indices[: len(indices) - loader.num_padded].tolist()
    assert sorted(fresh) == sorted(expected)


@pytest.mark.parametrize("own_iterator", [False, True])
def test_a_second_thread_at_the_same_time_is_an_error_and_takes_no_batch(
    loader_of: MakeLoader, own_iterator: bool
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(images: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go_on.wait(60)
        return images

    with loader_of(4, num_threads=2, transform=hold, tail="short") as loader, ThreadPoolExecutor(1) as pool:
        iterator = iter(loader)
        seen = pool.submit(list, iterator)
        try:
            assert begun.wait(60)
            state = loader.state_dict()
            with pytest.raises(RuntimeError, match="threads"):
                next(iter(loader) if own_iterator else iterator)
            assert loader.state_dict() == state
        finally:
            go_on.set()
        assert order_of(seen.result()) == order_expected(loader, 0)


def test_threads_that_take_turns_get_each_batch_once(loader_of: MakeLoader) -> None:
    with loader_of(4, num_threads=2) as loader, ThreadPoolExecutor(1) as pool:
        iterator = iter(loader)
        seen = [pool.submit(next, iterator).result() if i % 2 else next(iterator) for i in range(len(loader))]
        assert order_of(seen) == order_expected(loader, 0)


def test_two_iterators_at_once_are_two_epochs(loader_of: MakeLoader, poison: None) -> None:
    with loader_of(4, num_threads=2) as loader:
        for epoch, read in enumerate(zip(*zip(loader, loader, strict=True), strict=True)):
            assert order_of(list(read)) == order_expected(loader, epoch)
            for batch in read:
                check(batch)


@pytest.mark.parametrize("event", ["line", "return"])
def test_an_interrupt_anywhere_in_next_leaves_a_true_state(
    event: str, loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts at every line that `next` runs. A batch can be lost only after it was counted."""
    monkeypatch.setattr("shardio.loading.pipeline._MOST_PER_SLOT", 2)  # the third batch is the first of a slot
    lost = at = 0
    with loader_of(5, tail="short", num_threads=1) as loader:
        expected = order_expected(loader, 0)
        while True:
            loader.set_epoch(0)
            iterator = iter(loader)
            received = order_of([next(iterator), next(iterator)])
            events = 0

            def trace(frame: FrameType, kind: str, argument: object, at: int = at) -> Any:
                nonlocal events
                if frame.f_code.co_filename not in DRIVEN_BY_THE_CONSUMER:
                    return None
                if kind == event:
                    events += 1
                    if events == at + 1:
                        raise KeyboardInterrupt
                return trace

            sys.settrace(trace)
            try:
                received += order_of([next(iterator)])
            except KeyboardInterrupt:
                sys.settrace(None)
            else:
                sys.settrace(None)
                break
            state = loader.state_dict()
            counted = state["consumed"] // 5
            assert counted in (len(received), len(received) + 1)
            lost += counted - len(received)
            assert order_of(list(iterator)) in ([], expected[counted:]), at
            loader.load_state_dict(state)
            assert order_of(list(loader)) == expected[counted:], at
            at += 1
    assert at > 8
    assert lost <= 4


def test_a_profile_shows_the_stages(loader_of: MakeLoader) -> None:
    with (
        loader_of(20, transform=lambda images: images + 1) as loader,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        list(loader)
    names = [event.name for event in profile.events()]
    assert names.count("shardio.wait") == names.count("shardio.transform") == len(loader)


def test_stats_count_what_was_delivered(loader_of: MakeLoader) -> None:
    with loader_of(10, tail="short", num_threads=2) as loader:
        before = loader.stats()
        words = {"limited_by": "consumer", "num_threads": 2, "device": "cpu", "io": "mmap"}
        words |= {"io_reason": "the set is in the page cache"}
        zeros = {*vars(Counts()), "waited", "roi", "staging", "read_nbytes", "read_retries", "read_ahead_hits"}
        zeros |= {"slots", "slots_free"}
        assert before.keys() == {*words, *zeros}
        assert {name: before[name] for name in words} == words
        assert not any(before[name] for name in zeros)
        for _ in range(2):
            list(loader)
        next(iter(loader))
        stats = loader.stats()
        assert (stats["batches"], stats["images"]) == (11, 2 * NUM_SAMPLES + 10)
        assert stats["nbytes"] == stats["images"] * int(np.prod(SHAPE))
        assert stats["read_nbytes"] >= stats["nbytes"]  # batches that were read ahead count, too
        assert stats["gather_seconds"] > 0
        assert stats["wait_seconds"] >= stats["first_wait_seconds"] > 0
        assert stats["loop_seconds"] >= stats["wait_seconds"]
        assert before["batches"] == 0  # a copy, not a window


@pytest.mark.parametrize(("device", "gathered_ahead"), [("cpu", False), ("cuda", False), ("cuda", True)])
@pytest.mark.parametrize(("failing_step", "prefetch", "num_threads"), [(0, 0, 1), (1, 2, 4), (4, 0, 2), (8, 2, 1)])
def test_an_error_while_gathering_is_raised_where_its_batch_was_due(
    failing_step: int,
    prefetch: int,
    num_threads: int,
    device: str,
    gathered_ahead: bool,
    loader_of: MakeLoader,
    poison: None,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = MappedReader.copy

    def failing(reader: MappedReader, name: str, indices: NDArray[np.int64], *out: Any) -> None:
        if sample in indices:
            raise OSError(5, "the disk is gone")
        copy(reader, name, indices, *out)

    def are_gathered() -> bool:
        return not iterator._flow or all(pending.done() for *_, pending in iterator._flow._pending)

    monkeypatch.setattr(MappedReader, "copy", failing)
    if device == "cuda":
        closing.enter_context(Simulation(1))
    with loader_of(5, device=device, num_threads=num_threads, prefetch=prefetch) as loader:
        sample: int | None = order_expected(loader, 0)[failing_step][2]
        iterator: Any = iter(loader)
        seen: list[Batch] = []
        with pytest.raises(OSError, match="the disk is gone"):  # noqa: PT012
            while True:
                if gathered_ahead:
                    until(are_gathered)
                seen.append(next(iterator))
        assert len(seen) == failing_step
        assert len(iterator) == 0
        assert list(iterator) == []  # it has ended, as a generator would
        if device == "cuda":
            until(lambda: loader.stats()["slots"] == loader.stats()["slots_free"])
        sample = None
        seen += loader
        seen = [tuple(tensor.cpu() for tensor in batch) for batch in seen]
        assert order_of(seen) == order_expected(loader, 0)[:failing_step] + order_expected(loader, 1)
        for batch in seen:
            check(batch)


def test_a_closed_loader_refuses_to_go_on(loader_of: MakeLoader, poison: None) -> None:
    loader = loader_of(5)
    ended, iterator = iter(loader), iter(loader)
    assert len(list(ended)) == 9
    held = [next(iterator), next(iterator)]
    with pytest.raises(ArithmeticError, match="mine"), loader:  # noqa: PT012
        assert not loader.closed
        raise ArithmeticError("mine")
    assert loader.closed
    assert not gather_threads()
    loader.close()
    for refused in (iterator, iterator, iter(loader)):
        with pytest.raises(RuntimeError, match="this ShardLoader was closed"):
            next(refused)
    assert list(ended) == []
    for batch in held:
        check(batch)


def test_an_iterator_keeps_its_loader_at_work(loader_of: MakeLoader) -> None:
    iterator = iter(loader_of(5))
    gc.collect()
    assert len(gather_threads()) > 0
    for batch in iterator:
        check(batch)
    del iterator
    assert not gather_threads()


def test_an_iterator_that_is_dropped_returns_every_slot(
    loader_of: MakeLoader, living_slots: Callable[[], int], a_slot_for_each_batch: None
) -> None:
    with loader_of(3, num_threads=1, prefetch=2) as loader:
        ring = loader._pipeline._ring
        iterator = iter(loader)
        batch = next(iterator)
        # One thread serves batches in order: when this one is there, so are those that the iterator asked for.
        loader._pipeline._threads.submit(
            loader._pipeline.reader, Request(np.arange(3)), marker := ring.acquire()
        ).wait()
        assert living_slots() == 1 + 2 + 1  # the batch, two ahead of it, and the marker
        del iterator, batch
        assert living_slots() == 4  # no slot was thrown away,
        slots = [ring.acquire() for _ in range(3)]
        assert living_slots() == 4  # and none had to be made
        assert marker not in slots


# Interrupts. A handler runs when a Python function is entered or a C function has returned; so does a profile function.


class InterruptAt(Point):
    """Interrupts shardio's reading half and threading."""

    files = (*DRIVEN_BY_THE_CONSUMER, str(FOLDER / "gather.py"), str(FOLDER / "ring.py"), threading.__file__)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename in self.files:
            # That of a finalizer arrives in the main thread alone: see test_freed.py.
            if any(caller.f_code.co_name == "finalize" for caller, _ in traceback.walk_stack(frame)):
                return
            super()._on_event(frame, event, argument)


def use(loader: ShardLoader, interrupt: InterruptAt) -> tuple[bool, list[Batch]]:
    """Returns whether an interrupt of an epoch's first batches arrived, and these batches and all of the next epoch."""
    held: list[Batch] = []
    try:
        interrupt(lambda: held.extend(islice(loader, 2)))
    except InterruptedHere:
        arrived = True
    else:
        arrived = False
    return arrived, [*held, *loader]


def test_an_interrupt_anywhere_arrives_and_leaves_the_loader_usable(loader_of: MakeLoader, poison: None) -> None:
    for point in itertools.count():
        loader, interrupt = loader_of(12, prefetch=1, num_threads=2), InterruptAt(point)
        arrived, held = in_time(partial(use, loader, interrupt))
        in_time(loader.close)
        assert arrived == interrupt.fired, point
        assert len(held) in range(3, 6)
        for batch in held:
            check(batch)
        if not arrived:
            break
    assert point > 50
