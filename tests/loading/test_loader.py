"""Batches on the CPU: right, for as long as they are held, whatever happens to the iteration."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hold_batches import hold_batches
from numpy.typing import NDArray
from pictures import sample_images, sample_pixels
from storm_close import InterruptedHere, Point

import shardio.loading.gather
import shardio.loading.iterator
import shardio.loading.loader
import shardio.loading.pipeline
import shardio.loading.ring
import shardio.loading.state
import shardio.loading.transform
from shardio.augment import HorizontalFlip
from shardio.augment.chain import Transform
from shardio.errors import LaunchError
from shardio.loading.loader import ShardLoader
from shardio.loading.report import Counts
from shardio.loading.ring import Ring, Slot
from shardio.reading.reader import MappedReader, Request

NUM_SAMPLES = 47
SHAPE = (6, 5, 3)
DEADLINE_SECONDS = 10
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
DRIVEN_BY_THE_CONSUMER = [
    module.__file__
    for module in (
        shardio.loading.loader,
        shardio.loading.iterator,
        shardio.loading.pipeline,
        shardio.loading.state,
        shardio.loading.transform,
    )
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


# The contents of a batch.


@pytest.mark.parametrize("shape", [(6, 5, 3), (1, 1, 1), (4, 4, 4)])
def test_images_are_uint8_in_channels_last_memory(shape: tuple[int, int, int], make_set: Callable[..., Path]) -> None:
    height, width, channels = shape
    with ShardLoader(make_set(9, shape), 4, shuffle=False, device="cpu") as loader:
        for number, batch in enumerate(loader):
            assert len(batch) == 2
            images, labels = batch
            assert images.shape == (4, channels, height, width)
            assert images.dtype == torch.uint8
            assert images.stride() == (height * width * channels, 1, width * channels, channels)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert labels.shape == (4,)
            assert labels.dtype == torch.int64
            assert labels.is_contiguous()
            for i in range(4):
                position = 4 * number + i
                assert np.array_equal(images[i].permute(1, 2, 0).numpy(), sample_pixels(position, shape))
                assert labels[i] == position % 7
        assert number == 1


# How long a batch is valid.


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


# Order.


def test_a_loader_that_was_made_before_its_rank_was_known_is_refused_when_it_is_read(
    loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(4) as loader, loader_of(4, rank=0, world_size=1) as told:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
        message = "torch.distributed says rank 1 of 3: make the loader after"
        with pytest.raises(LaunchError, match=message):
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


def test_asking_for_an_iterator_begins_no_epoch(loader_of: MakeLoader) -> None:
    with loader_of(4) as loader:
        before = loader.state_dict()
        first, second = iter(loader), iter(loader)
        assert first.epoch == second.epoch == 0
        assert len(first) == len(second) == NUM_SAMPLES // 4
        assert loader.state_dict() == before
        next(second)
        next(first)  # the next one that begins has the next epoch, whichever was asked for first
        assert (second.epoch, first.epoch) == (0, 1)
        loader.set_epoch(9)
        third = iter(loader)
        loader.set_epoch(5)
        assert order_of(list(third)) == order_expected(loader, 5)


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

    seen: list[Batch] = []
    with loader_of(4, num_threads=2, transform=hold, tail="short") as loader:
        iterator = iter(loader)
        thread = threading.Thread(target=lambda: seen.extend(iterator))
        thread.start()
        try:
            assert begun.wait(60)
            state = loader.state_dict()
            with pytest.raises(RuntimeError, match="threads"):
                next(iter(loader) if own_iterator else iterator)
            assert loader.state_dict() == state
        finally:
            go_on.set()
            thread.join()
        assert order_of(seen) == order_expected(loader, 0)


def test_threads_that_take_turns_get_each_batch_once(loader_of: MakeLoader) -> None:
    with loader_of(4, num_threads=2) as loader, ThreadPoolExecutor(1) as pool:
        iterator = iter(loader)
        seen = [pool.submit(next, iterator).result() if i % 2 else next(iterator) for i in range(len(loader))]
        assert order_of(seen) == order_expected(loader, 0)


def test_two_iterators_at_once_are_two_epochs(loader_of: MakeLoader, poison: None) -> None:
    with loader_of(4, num_threads=2) as loader:
        one, two = iter(loader), iter(loader)
        batches: list[list[Batch]] = [[], []]
        rng = random.Random(0)
        while len(one) or len(two):
            which = rng.randrange(2)
            batches[which] += islice((one, two)[which], rng.randint(1, 3))
        assert {one.epoch, two.epoch} == {0, 1}
        for iterator, read in zip((one, two), batches, strict=True):
            assert order_of(read) == order_expected(loader, iterator.epoch)
            for batch in read:
                check(batch)


# Arguments.


def test_length_is_that_of_the_epoch_and_of_what_is_left(loader_of: MakeLoader) -> None:
    with loader_of(5, tail="short") as loader:
        assert len(loader) == 10
        iterator = iter(loader)
        for left in range(10, 0, -1):
            assert len(iterator) == left
            next(iterator)
        for _ in range(3):
            assert len(iterator) == 0
            with pytest.raises(StopIteration):
                next(iterator)


def test_transform_makes_of_the_images_what_it_likes_in_the_consuming_thread(loader_of: MakeLoader) -> None:
    calls: list[tuple[int, torch.dtype, threading.Thread]] = []

    def transform(images: torch.Tensor) -> torch.Tensor:
        calls.append((len(images), images.dtype, threading.current_thread()))
        return images.float() / 255

    with loader_of(20, transform=transform, tail="short") as loader:
        for images, labels, indices in loader:
            assert torch.equal(images, EXPECTED[indices].float() / 255)
            assert torch.equal(labels, indices % 7)
    assert calls == [(size, torch.uint8, threading.current_thread()) for size in (20, 20, 7)]


def test_an_error_in_transform_is_the_consumer_s(loader_of: MakeLoader, poison: None) -> None:
    calls = itertools.count(1)

    def transform(images: torch.Tensor) -> torch.Tensor:
        if next(calls) == 4:
            raise ArithmeticError("transform failed")
        return images

    with loader_of(5, transform=transform) as loader:
        seen = []
        with pytest.raises(ArithmeticError, match="transform failed"):  # noqa: PT012
            for batch in loader:
                seen.append(batch)
        assert loader.state_dict()["consumed"] == 3 * 5  # the fourth was not received
        seen += loader
        assert len(seen) == 3 + 9
        for batch in seen:
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


def test_the_state_says_what_the_next_epoch_will_be(loader_of: MakeLoader) -> None:
    def place(loader: ShardLoader) -> tuple[int, int]:
        state = loader.state_dict()
        return state["epoch"], state["consumed"]

    with loader_of(5) as loader:
        next(iter(loader))
        assert place(loader) == (0, 5)
        loader.set_epoch(1)
        assert place(loader) == (1, 0)
        old = iter(loader)
        next(old)
        loader.set_epoch(7)
        next(old)  # it goes on, but the loader was sent elsewhere
        assert place(loader) == (7, 0)
        list(old)
        assert place(loader) == (7, 0)
        state = {**loader.state_dict(), "consumed": 10}
        loader.load_state_dict(state)
        assert place(loader) == (7, 10)
        loader.set_epoch(7)
        assert place(loader) == (7, 10)
        assert iter(loader).epoch == 7
        assert len(iter(loader)) == (NUM_SAMPLES - 10) // 5
        before = iter(loader)
        loader.set_epoch(8)
        assert (before.epoch, len(before)) == (8, NUM_SAMPLES // 5)


def test_stats_count_what_was_delivered(loader_of: MakeLoader) -> None:
    with loader_of(10, tail="short", num_threads=2) as loader:
        before = loader.stats()
        assert before == {
            **vars(Counts()),
            "waited": 0.0,
            "limited_by": "consumer",
            "num_threads": 2,
            "device": "cpu",
            "io": "mmap",
            "io_reason": "the set is in the page cache",
            "roi": False,
            "staging": None,
            "read_nbytes": 0,
            "read_retries": 0,
            "read_ahead_hits": None,
            "slots": 0,
            "slots_free": 0,
        }
        assert not any(vars(Counts()).values())
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


# Errors, and ends of all kinds.


class FailingGather:
    """Takes the place of MappedReader.copy, and raises for the batches that hold a certain sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sample: int | None = None
        self._copy = MappedReader.copy
        monkeypatch.setattr(MappedReader, "copy", lambda *arguments: self.copy(*arguments))

    def copy(self, reader: MappedReader, name: str, indices: NDArray[np.int64], *out: Any) -> None:
        if self.sample in indices:
            raise OSError(5, "the disk is gone")
        self._copy(reader, name, indices, *out)


@pytest.mark.parametrize(("failing_step", "prefetch", "num_threads"), [(0, 0, 1), (1, 2, 4), (4, 0, 2), (8, 2, 1)])
def test_an_error_while_gathering_is_raised_where_its_batch_was_due(
    failing_step: int,
    prefetch: int,
    num_threads: int,
    loader_of: MakeLoader,
    poison: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = FailingGather(monkeypatch)
    with loader_of(5, num_threads=num_threads, prefetch=prefetch) as loader:
        failing.sample = order_expected(loader, 0)[failing_step][2]
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(failing_step)]
        with pytest.raises(OSError, match="the disk is gone"):
            next(iterator)
        assert len(iterator) == 0
        assert list(iterator) == []  # it has ended, as a generator would
        failing.sample = None
        seen += loader
        assert order_of(seen) == order_expected(loader, 0)[:failing_step] + order_expected(loader, 1)
        for batch in seen:
            check(batch)


def test_a_closed_loader_refuses_to_go_on(loader_of: MakeLoader, poison: None) -> None:
    loader = loader_of(5)
    ended, iterator = iter(loader), iter(loader)
    assert len(list(ended)) == 9
    held = [next(iterator), next(iterator)]
    assert not loader.closed
    loader.close()
    assert loader.closed
    loader.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this ShardLoader was closed"):
            next(iterator)
    with pytest.raises(RuntimeError, match="this ShardLoader was closed"):
        next(iter(loader))
    assert loader.closed
    assert list(ended) == []
    for batch in held:
        check(batch)


def test_leaving_the_with_block_closes_also_after_an_error(loader_of: MakeLoader) -> None:
    with loader_of(5) as loader:
        assert not loader.closed
    assert loader.closed
    with pytest.raises(ArithmeticError, match="mine"), loader_of(5) as loader:  # noqa: PT012
        next(iter(loader))
        raise ArithmeticError("mine")
    assert loader.closed
    assert not gather_threads()


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

    files = (
        *DRIVEN_BY_THE_CONSUMER,
        shardio.loading.gather.__file__,
        shardio.loading.ring.__file__,
        threading.__file__,
    )

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename in self.files:
            # That of a finalizer arrives in the main thread alone: see test_freed.py.
            if any(caller.f_code.co_name == "finalize" for caller, _ in traceback.walk_stack(frame)):
                return
            super()._on_event(frame, event, argument)


def consume(loader: ShardLoader, interrupt: InterruptAt, held: list[Batch]) -> BaseException | None:
    try:
        interrupt(lambda: held.extend(islice(loader, 2)))
    except BaseException as error:
        return error
    return None


def test_an_interrupt_anywhere_arrives_and_leaves_the_loader_usable(loader_of: MakeLoader, poison: None) -> None:
    point, fired = 0, True
    while fired:
        loader = loader_of(12, prefetch=1, num_threads=2)
        outcome: list[BaseException | None] = []
        held: list[Batch] = []
        interrupt = InterruptAt(point)

        def work(loader: ShardLoader, interrupt: InterruptAt, held: list[Batch], outcome: list[Any]) -> None:
            outcome.append(consume(loader, interrupt, held))
            held += loader

        thread = threading.Thread(target=work, args=(loader, interrupt, held, outcome), daemon=True)
        thread.start()
        thread.join(DEADLINE_SECONDS)
        closer = threading.Thread(target=loader.close, daemon=True)
        closer.start()
        closer.join(DEADLINE_SECONDS)
        for stuck in gather_threads():
            stuck.name = "for ever"  # so that this test fails, and not those that come after it
        assert not thread.is_alive(), f"interrupted at point {point}, the next epoch hangs"
        assert not closer.is_alive(), f"interrupted at point {point}, closing hangs"
        fired = interrupt.fired
        assert [type(error) for error in outcome] == [InterruptedHere if fired else type(None)], (point, outcome)
        assert len(held) in range(3, 6)
        for batch in held:
            check(batch)
        point += 1
    assert point > 50
