"""The lines of shardio.loading.cuda, run on a simulated device that does its work as late, and in any order, as
it may.

tests/loading/test_gpu.py runs them on a GPU, where there is one.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import simulated_cuda
import torch
from arrays import change_split, some_arrays
from numpy.typing import NDArray
from pictures import sample_images
from simulated_cuda import Event, Simulation, Stream, Tensor

import shardio.loading.cuda
import shardio.loading.loader
import shardio.loading.pipeline
from shardio.augment import (
    ColorJitter,
    Compose,
    Mixup,
    Normalize,
    PerSample,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    ToDtype,
    Views,
)
from shardio.format.layout import RowType
from shardio.loading.cuda import CudaCopier, CudaTransfer, PinnedSlot
from shardio.loading.loader import ShardLoader
from shardio.loading.prefetch import MOST_AHEAD, DevicePrefetch, Tensors
from shardio.loading.report import Counts
from shardio.loading.ring import Ring
from shardio.system.pour import ALIGNMENT

SHAPE = (6, 5, 3)
BATCH = 5
NUM_SAMPLES = 47
NBYTES = BATCH * (int(np.prod(SHAPE)) + 8 + 8)
PICTURES = sample_images(NUM_SAMPLES, SHAPE)
WHOLE = ((BATCH, *SHAPE), np.uint8)
VIEWS = Views([RandomResizedCrop(4), RandomResizedCrop(4), Compose([RandomCrop(3), ColorJitter(0.5)])])


class Part:
    """As of Albumentations: one draw for all that one call is given."""

    __module__ = "albumentations"

    def __call__(self, image: NDArray[np.uint8], **masks: Any) -> dict[str, Any]:
        rows = slice(random.randrange(2), None, 3)
        moved = {name: mask[rows] if name == "mask" else [one[rows] for one in mask] for name, mask in masks.items()}
        return {"image": image[rows] / np.float32(3), **moved}


PER_SAMPLE = Compose([RandomCrop(5), PerSample(Part())])
BOTH = Views([PER_SAMPLE, VIEWS])


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Simulation]:
    """simulate(seed, haste): a device that shardio.loading.cuda takes for CUDA's."""

    def make(seed: int = 0, haste: float = 0.4) -> Simulation:
        simulation = Simulation(seed, haste)
        monkeypatch.setattr(shardio.loading.cuda, "torch", simulation.torch())
        return simulation

    return make


@pytest.fixture
def loader_on(
    simulate: Callable[..., Simulation], monkeypatch: pytest.MonkeyPatch, make_set: Callable[..., Path], poison: None
) -> Iterator[Callable[..., tuple[Simulation, ShardLoader]]]:
    """A simulation and a loader whose batches go there. Its slots are spoiled as soon as they are released."""
    with contextlib.ExitStack() as stack:

        def make(seed: int = 0, haste: float = 0.4, **options: object) -> tuple[Simulation, ShardLoader]:
            simulation = simulate(seed, haste)
            path = make_set(NUM_SAMPLES, SHAPE)
            monkeypatch.setattr(shardio.loading.pipeline, "make_copier", lambda device: CudaCopier("simulated"))  # type: ignore[arg-type]
            with monkeypatch.context() as patch:
                patch.setattr(shardio.loading.loader, "choose_device", lambda *_: torch.device("cuda"))
                loader = ShardLoader(path, BATCH, seed=seed, return_indices=True, **options)  # type: ignore[arg-type]
            monkeypatch.setattr(shardio.loading.pipeline, "make_copier", lambda device: None)
            return simulation, stack.enter_context(loader)

        yield make


def flat(batch: Any) -> list[Any]:
    """Returns the tensors of a batch, in order."""
    if isinstance(batch, Mapping):
        return flat(tuple(batch.values()))
    return [tensor for part in batch for tensor in flat(part)] if isinstance(batch, tuple) else [batch]


class Check:
    """Work of the consumer: the batch is looked at when the device gets to it."""

    def __init__(self, simulation: Simulation) -> None:
        self.seen: list[int] = []
        self._launch = simulation.launch

    def __call__(self, batch: tuple[Tensor, ...]) -> None:
        self._launch(self._look, *batch)

    def _look(self, images: torch.Tensor, labels: torch.Tensor, indices: torch.Tensor) -> None:
        assert torch.equal(images, PICTURES[indices])
        assert torch.equal(labels, indices % 7)
        self.seen += indices.tolist()


def write_and_look(simulation: Simulation, nbytes: int, value: int) -> None:
    """A tensor of the consumer's own: written, looked at later, and dropped before either has happened."""
    tensor = simulation.empty((nbytes,), dtype=torch.uint8, device="simulated")
    simulation.launch(lambda memory: memory.fill_(value), tensor)
    for _ in range(3):
        simulation.launch(lambda memory: None, tensor)

    def look(memory: torch.Tensor) -> None:
        assert (memory == value).all(), "something else has written here"

    simulation.launch(look, tensor)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("haste", [0.0, 0.4, 0.95])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_every_byte_arrives_whenever_the_device_gets_to_it(
    prefetch: int, haste: float, seed: int, loader_on: Callable[..., tuple[Simulation, ShardLoader]]
) -> None:
    simulation, loader = loader_on(seed, haste, prefetch=prefetch, tail="short")
    check = Check(simulation)
    expected = []
    for epoch in range(3):
        expected += [i for batch in loader._position.sampler.batches(epoch) for i in batch.tolist()]
        for number, batch in enumerate(loader):
            check(batch)
            del batch
            for tensor in PICTURES[:BATCH].nbytes, BATCH * 8:
                write_and_look(simulation, tensor, number)
    simulation.synchronize()
    assert check.seen == expected


@pytest.mark.parametrize("seed", range(10))
def test_the_stream_may_change_before_every_call(
    seed: int, simulate: Callable[..., Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(seed, 0.2)
    hand, rng = Hand(simulation), random.Random(seed)
    streams = [simulation.default, Stream(simulation), Stream(simulation)]

    def on_any_stream(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: object) -> object:
            simulation.current = rng.choice(streams)
            return call(*arguments)

        return called

    for owner, name in ((CudaCopier, "reserve"), (CudaTransfer, "start"), (CudaTransfer, "hand_over")):
        monkeypatch.setattr(owner, name, on_any_stream(getattr(owner, name)))
    whole = int(np.prod((BATCH, *SHAPE)))
    for value in range(60):
        hand.start(value, *rng.choice([[WHOLE], [WHOLE], [((BATCH, 2, 2, 3), np.float32)], [WHOLE, WHOLE]]))
        for nbytes in (whole, BATCH * 48):
            write_and_look(simulation, nbytes, value)
        hand.look(hand.prefetch.take(), value)
    hand.prefetch.close()
    simulation.synchronize()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_memory_of_a_dropped_batch_returns_though_the_device_is_far_behind(
    prefetch: int, loader_on: Callable[..., tuple[Simulation, ShardLoader]]
) -> None:
    simulation, loader = loader_on(haste=0.0, prefetch=prefetch)
    check = Check(simulation)
    for _ in range(5):
        for batch in loader:
            check(batch)
            del batch
    # Started and not yet taken; reserved; in the caller's hands.
    assert simulation.most_allocated <= (max(1, prefetch) + 1 + 1) * NBYTES
    assert simulation.allocated == 0
    simulation.synchronize()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_the_host_is_held_back_after_a_bounded_number_of_steps(
    prefetch: int, loader_on: Callable[..., tuple[Simulation, ShardLoader]]
) -> None:
    simulation, loader = loader_on(haste=0.0, prefetch=prefetch, weights=[1.0] * NUM_SAMPLES, epoch_batches=30)
    done: list[int] = []
    most = 0
    for number, batch in enumerate(loader):
        most = max(most, number - len(done))
        simulation.launch(lambda images: done.append(1), batch[0])
    assert 2 <= most <= MOST_AHEAD + prefetch + 2
    assert loader.stats()["slots"] <= loader._pipeline._ring.capacity
    simulation.synchronize()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("arrays", [[], ["mask", "clip", "depth"]], ids=["images", "masks"])
@pytest.mark.parametrize(
    "transform", [VIEWS, PER_SAMPLE, Views([PER_SAMPLE, VIEWS])], ids=["views", "function", "both"]
)
def test_what_a_transform_makes_arrives_as_on_the_cpu(
    transform: Any,
    arrays: list[str],
    prefetch: int,
    loader_on: Callable[..., tuple[Simulation, ShardLoader]],
    make_set: Callable[..., Path],
) -> None:
    change_split(path := make_set(NUM_SAMPLES, SHAPE), some_arrays(NUM_SAMPLES, *SHAPE[:2]))
    options: dict[str, Any] = {"transform": transform, "arrays": arrays, "tail": "short"}
    simulation, loader = loader_on(3, 0.3, prefetch=prefetch, num_threads=2, **options)
    seen: list[list[torch.Tensor]] = []
    expected = []
    with ShardLoader(path, BATCH, device="cpu", seed=3, return_indices=True, **options) as cpu:
        for changed in (transform, None, Views([RandomCrop(5), transform]), RandomCrop(2), transform):
            cpu.transform = loader.transform = changed
            expected += [flat(batch) for batch in cpu]
            for batch in loader:
                simulation.launch(lambda *values: seen.append([value.clone() for value in values]), *flat(batch))
                del batch
            next(unfinished := iter(loader))
            del unfinished
            loader.set_epoch(cpu.state_dict()["epoch"])
    simulation.synchronize()
    for found, batch in zip(seen, expected, strict=True):
        for one, other in zip(found, batch, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def as_bfloat16(image: torch.Tensor) -> torch.Tensor:
    return image.bfloat16()


@pytest.mark.parametrize(
    "transform",
    [
        PerSample(as_bfloat16),
        Compose([ToDtype(torch.bfloat16), PerSample(torch.clone), RandomErasing(1.0)]),
        Views([PerSample(torch.clone), PerSample(as_bfloat16)]),
        Views([Normalize(0.5, 0.5), Compose([ToDtype(torch.float32), RandomErasing(1.0)])]),
        Compose([PerSample(torch.clone), Views([RandomCrop(5), Compose([RandomCrop(4), PerSample(as_bfloat16)])])]),
    ],
    ids=["of bfloat16", "from bfloat16", "views", "views of whole images", "then views"],
)
def test_what_functions_of_one_image_make_arrives_as_on_the_cpu(
    transform: Any, loader_on: Callable[..., tuple[Simulation, ShardLoader]], make_set: Callable[..., Path]
) -> None:
    simulation, loader = loader_on(3, transform=transform, tail="short")
    seen: list[list[torch.Tensor]] = []
    with ShardLoader(
        make_set(NUM_SAMPLES, SHAPE), BATCH, device="cpu", seed=3, transform=transform, tail="short"
    ) as cpu:
        expected = [flat(batch) for batch in cpu]
    # What the end of the transform makes on a device, the stand-in cannot show: the batch as it arrives is looked at.
    step, started = loader._pipeline.transform, []
    call = type(step).__call__

    def on_the_cpu(self: Any, tensors: Any, *others: Any) -> Any:
        started.append((tensors, others))
        return tensors.images, None, {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(step), "__call__", on_the_cpu)
        for _ in loader:
            tensors, others = started.pop()
            values = flat((tensors.images, tensors.labels, tensors.indices))

            def finish(*values: torch.Tensor, others: Any = others, more: Any = tensors.more) -> None:
                *views, labels, indices = (value.clone() for value in values)
                images = tuple(views) if len(views) > 1 else views[0]
                made, targets, _ = call(step, Tensors(images, labels, indices, {}), *others)
                seen.append([*flat(made), targets])

            simulation.launch(finish, *values)
            del tensors, values
        simulation.synchronize()
    for found, batch in zip(seen, expected, strict=True):
        for one, other in zip(found, batch, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_on_the_host_is_raised_when_its_batch_is_due(
    prefetch: int, loader_on: Callable[..., tuple[Simulation, ShardLoader]]
) -> None:
    calls: list[None] = []

    def fail(image: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 2 * BATCH + 3:
            raise OSError("this sample")
        return image

    simulation, loader = loader_on(transform=PerSample(fail), prefetch=prefetch)
    batches = iter(loader)
    for _ in range(2):
        images, *_ = next(batches)
        simulation.launch(lambda value: None, images)
        assert batches._flow is not None
        while not all(pending.done() for _, pending in batches._flow._pending):
            time.sleep(0.001)
    del images
    with pytest.raises(OSError, match="this sample"):
        next(batches)
    del batches
    simulation.synchronize()
    assert loader.stats()["slots"] == loader.stats()["slots_free"]


@pytest.mark.parametrize("transform", [RandomCrop(3), PER_SAMPLE], ids=["crop", "function"])
def test_mixup_before_what_only_the_cpu_does_is_refused_on_a_gpu(
    transform: Any, loader_on: Callable[..., tuple[Simulation, ShardLoader]]
) -> None:
    _, loader = loader_on(transform=Compose([Mixup(7), transform]))
    with pytest.raises(ValueError, match="Mixup"):
        next(iter(loader))


# DevicePrefetch by hand, where the order of events matters.


class Hand:
    def __init__(self, simulation: Simulation, more: Mapping[str, RowType] = MappingProxyType({})) -> None:
        self.simulation = simulation
        self.copier = CudaCopier("simulated")  # type: ignore[arg-type]
        self.ring = Ring(8, lambda: self.copier.new_slot(BATCH, SHAPE, more))
        self.counts = Counts()
        self.prefetch = DevicePrefetch(self.copier, self.ring, self.counts)

    def start(self, value: int, *results: tuple[tuple[int, ...], Any]) -> None:
        """Starts to copy whole pictures, or other views."""
        slot = self.ring.acquire()
        slot.lay_out(*(results or [WHOLE]))
        for array in (*slot.views, slot.labels, slot.indices):
            array.fill(value)
        self.prefetch.start(slot, BATCH)

    def look(self, tensors: Tensors, value: int, when: Callable[[], bool] = lambda: True) -> None:
        def run(*values: torch.Tensor) -> None:
            assert all((one == value).all() for one in values)

        self.simulation.launch(run, *flat(tensors), when=when)


@pytest.fixture
def hand(simulate: Callable[..., Simulation]) -> Hand:
    return Hand(simulate(haste=0.0))


def test_a_batch_that_was_late_is_copied_during_the_step_before_it(hand: Hand) -> None:
    stepping = True
    hand.start(1)
    hand.look(hand.prefetch.take(), 1, when=lambda: not stepping)
    hand.start(2)  # when it was due
    second = hand.prefetch._transfers[0]
    while hand.simulation.step():
        pass
    assert second.done()  # type: ignore[attr-defined]
    hand.look(hand.prefetch.take(), 2)
    hand.start(3)
    third = hand.prefetch._transfers[0]
    while hand.simulation.step():
        pass
    assert not third.done()  # its memory may be that of the first
    stepping = False
    hand.prefetch.close()
    hand.simulation.synchronize()


def test_copying_is_timed_without_what_it_waits_for(hand: Hand) -> None:
    for _ in range(500):
        hand.simulation.launch(lambda: None)
    hand.start(1)
    hand.prefetch.take()
    assert hand.counts.copy_seconds == 0.0
    hand.prefetch.close()
    assert 0.003 <= hand.counts.copy_seconds < 0.05  # two copies and an event, and what else came between them
    hand.simulation.synchronize()


def test_the_device_s_wait_for_copies_counts_and_its_steps_do_not(hand: Hand) -> None:
    """The consumer's stream waits for the first copy. The second one is done before the step that comes before it."""
    simulation = hand.simulation
    simulation.slow = simulation.streams[1]
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


def test_copy_seconds_are_those_of_all_iterators(loader_on: Callable[..., tuple[Simulation, ShardLoader]]) -> None:
    simulation, loader = loader_on(haste=1.0)
    assert loader.stats()["copy_seconds"] == 0.0
    seen = []
    for _ in range(3):
        assert len(list(loader)) == len(loader)
        seen.append(loader.stats()["copy_seconds"])
    assert seen[0] >= len(loader) * 0.004
    assert seen == sorted(set(seen))
    simulation.synchronize()


def test_the_consumer_waits_for_its_own_batch_only(hand: Hand) -> None:
    """Events are used again with their slots: once a copy is known to be done, they may belong to a later one."""
    hand.start(1)
    hand.simulation.synchronize()
    hand.prefetch.reclaim(0)
    held = True
    hand.simulation.launch(lambda: None, when=lambda: not held)
    hand.start(2)
    hand.start(3)  # it goes into memory that it waits for
    assert hand.ring.num_made == 2
    hand.look(hand.prefetch.take(), 1)
    held = False
    queue = hand.simulation.default.queue
    assert len([run for when, run in queue if not when()]) == 0
    hand.look(hand.prefetch.take(), 2)
    hand.look(hand.prefetch.take(), 3)
    hand.prefetch.close()
    hand.simulation.synchronize()


def test_a_batch_that_is_never_taken_is_not_copied_into_memory_of_others(hand: Hand) -> None:
    hand.simulation.slow = hand.copier._stream
    for value in (1, 2, 3):
        hand.start(value)
    hand.prefetch.close()
    for value in range(4):
        write_and_look(hand.simulation, PICTURES[:BATCH].nbytes, value)
    hand.simulation.synchronize()
    assert hand.ring.num_free == hand.ring.num_made


def test_an_interrupt_while_waiting_for_copies_endangers_no_memory(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    hand.simulation.slow = hand.copier._stream
    for value in (1, 2, 3):
        hand.start(value)
    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hand.prefetch.close()
    for value in range(4):
        write_and_look(hand.simulation, PICTURES[:BATCH].nbytes, value)
    del hand.prefetch
    for value in range(4):
        write_and_look(hand.simulation, PICTURES[:BATCH].nbytes, value)
    hand.simulation.synchronize()


def test_an_interrupt_while_a_batch_is_taken_endangers_no_memory(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(device: object) -> Stream:
        raise KeyboardInterrupt

    hand.simulation.slow = hand.copier._stream
    hand.start(1)
    with monkeypatch.context() as patch:
        patch.setattr(shardio.loading.cuda.torch.cuda, "current_stream", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hand.prefetch.take()
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(DevicePrefetch, "reclaim", lambda self, most_copying: None)
        hand.prefetch.close()
    del hand.prefetch
    for value in range(4):
        write_and_look(hand.simulation, PICTURES[:BATCH].nbytes, value)
    hand.simulation.synchronize()


@pytest.mark.parametrize("copied", [0, 1])
def test_an_interrupt_while_starting_a_copy_endangers_no_memory(
    copied: int, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Tensor.copy_
    calls = 0

    def interrupted(tensor: Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        nonlocal calls
        calls += 1
        copy(tensor, source, non_blocking)
        if calls > copied:
            raise KeyboardInterrupt

    hand.simulation.slow = hand.copier._stream
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hand.start(1)
    gc.collect()  # the frames that the exception has kept, and the memory that was reserved in them
    hand.prefetch.close()
    for value in range(4):
        write_and_look(hand.simulation, PICTURES[:BATCH].nbytes, value)
        write_and_look(hand.simulation, 2 * BATCH * 8, value)
    hand.simulation.synchronize()


def test_a_batch_may_have_other_views_than_the_one_before_it(simulate: Callable[..., Simulation]) -> None:
    hand = Hand(simulate(haste=0.0), {"mask": RowType("|u1", (7,))})
    rng = np.random.default_rng(0)
    small, floats = ((BATCH, 3, 2, 3), np.uint8), ((BATCH, 4, 6, 3), np.float32)
    for results in ([WHOLE], [small], [small, floats], [floats], [WHOLE, small, WHOLE], [WHOLE]):
        slot = hand.ring.acquire()
        slot.lay_out(*results)
        for array in (*slot.views, slot.more["mask"]):
            array.view(np.uint8)[...] = rng.integers(0, 100, array.view(np.uint8).shape)
        for name in ["moved/0", "moved/1"][: len(results) - 1]:
            slot.put(name, rng.integers(0, 100, (BATCH, len(name), len(results))))
        slot.labels.fill(7)
        expected = [torch.from_numpy(array[: BATCH - 1].copy()) for array in (*slot.views, *slot.more.values())]
        hand.prefetch.start(slot, BATCH - 1)
        tensors = hand.prefetch.take()
        names = tuple(slot.more)
        hand.ring.acquire().memory.fill(0xEE)
        assert tuple(tensors.more) == names
        assert len(tensors.labels) == BATCH - 1
        seen: list[torch.Tensor] = []
        hand.simulation.launch(lambda *values, to=seen: to.extend(values), *flat((tensors.images, tensors.more)))
        del tensors
        hand.simulation.synchronize()
        images = [value.permute(0, 2, 3, 1) for value in seen[: len(results)]]
        for found, value in zip([*images, *seen[len(results) :]], expected, strict=True):
            assert found.dtype == value.dtype
            assert torch.equal(found, value)
    hand.prefetch.close()
    hand.simulation.synchronize()


def test_an_array_that_was_put_into_a_slot_is_forgotten_with_the_batch(hand: Hand) -> None:
    slot = hand.copier.new_slot(BATCH, SHAPE, {"mask": RowType("|u1", (7,))})
    slot.put("mask", np.full((BATCH, 3), 9, np.uint8))
    slot.lay_out(WHOLE)
    slot.more["mask"].fill(7)
    mask = slot.parts(BATCH)[2]
    assert mask.shape == (BATCH, 7)
    assert (mask == 7).all()


def test_loaders_of_a_device_share_one_stream_for_copies(simulate: Callable[..., Simulation]) -> None:
    simulation = simulate()
    copiers = [CudaCopier("simulated") for _ in range(40)]  # type: ignore[arg-type]
    assert {copier._stream for copier in copiers} == {simulation.streams[1]}
    assert CudaCopier("another")._stream is simulation.streams[2]  # type: ignore[arg-type]


def test_a_batch_is_copied_in_pieces(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.loading.cuda, "_PIECE_NBYTES", 64)
    copied: list[int] = []
    copy = simulated_cuda.Tensor.copy_

    def note(tensor: simulated_cuda.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        copied.append(source.nbytes)
        copy(tensor, source, non_blocking)

    monkeypatch.setattr(simulated_cuda.Tensor, "copy_", note)
    hand.start(5)
    hand.look(hand.prefetch.take(), 5)
    hand.simulation.synchronize()
    pixels = int(np.prod((BATCH, *SHAPE)))
    assert max(copied) == 64
    assert sum(copied) == pixels + 2 * 8 * BATCH
    hand.prefetch.close()


# Slots, and where they lie.


def test_slots_begin_on_a_page_and_their_arrays_are_their_tensors(hand: Hand) -> None:
    slot = hand.copier.new_slot(BATCH, SHAPE)
    assert isinstance(slot, PinnedSlot)
    images, numbers = slot.parts(BATCH)
    for tensor, array in ((images, slot.images), (numbers[0], slot.labels), (numbers[1], slot.indices)):
        assert array.ctypes.data == tensor.data_ptr()
        assert array.size == tensor.numel()
        array.fill(77)
        assert (tensor == 77).all()
    assert slot.images.ctypes.data % ALIGNMENT == 0
    assert slot.images.dtype == np.uint8
    assert slot.labels.dtype == slot.indices.dtype == np.int64


def test_memory_that_begins_on_a_page_is_taken_as_it_is(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def empty(shape: tuple[int, ...] | int, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        nbytes = torch.empty(shape, dtype=dtype).nbytes
        asked.append(nbytes)
        raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + nbytes].view(dtype).view(shape)

    monkeypatch.setattr(shardio.loading.cuda.torch, "empty", empty)
    hand.copier.new_slot(BATCH, SHAPE)
    assert asked == [BATCH * int(np.prod(SHAPE)), 2 * BATCH * 8]


# The double itself.


def test_the_double_notices_memory_that_is_used_again_too_early() -> None:
    simulation = Simulation(haste=0.0)
    other = Stream(simulation)
    tensor = simulation.empty((8,), dtype=torch.uint8, device="simulated")
    simulation.slow = other
    other.wait_stream(simulation.default)
    with simulation.stream(other):
        simulation.launch(lambda memory: None, tensor)
    del tensor  # without record_stream
    write_and_look(simulation, 8, 1)
    with pytest.raises(AssertionError, match="after it had been used by a later one"):
        simulation.synchronize()


def test_the_double_keeps_memory_for_the_streams_that_were_recorded() -> None:
    simulation = Simulation(haste=0.0)
    other = Stream(simulation)
    tensor = simulation.empty((8,), dtype=torch.uint8, device="simulated")
    other.wait_stream(simulation.default)
    with simulation.stream(other):
        simulation.launch(lambda memory: None, tensor)
    tensor.record_stream(other)
    del tensor
    write_and_look(simulation, 8, 1)
    assert simulation.most_allocated == 16
    simulation.synchronize()
    write_and_look(simulation, 8, 2)
    assert simulation.most_allocated == 16
    simulation.synchronize()


def test_the_double_notices_a_wait_for_ever() -> None:
    simulation = Simulation()
    simulation.launch(lambda: None, when=lambda: False)
    event = simulation.default.record_event()
    with pytest.raises(AssertionError, match="cannot happen"):
        event.synchronize()


@pytest.mark.parametrize(
    ("double", "real"), [(simulated_cuda.Stream, torch.cuda.Stream), (simulated_cuda.Event, torch.cuda.Event)]
)
def test_the_double_is_called_as_torch_is(double: type, real: type) -> None:
    methods = [name for name, value in vars(double).items() if inspect.isfunction(value) and name[0] != "_"]
    assert methods
    for name in methods:
        ours = list(inspect.signature(getattr(double, name)).parameters)
        theirs = inspect.signature(getattr(real, name)).parameters
        assert ours == list(theirs)[: len(ours)], name
        assert all(theirs[more].default is not inspect.Parameter.empty for more in list(theirs)[len(ours) :]), name
    assert {"enable_timing", "blocking"} <= inspect.signature(torch.cuda.Event.__new__).parameters.keys()
    for name in ("current_stream", "stream"):
        assert len(inspect.signature(getattr(torch.cuda, name)).parameters) == 1


@pytest.mark.parametrize("haste", [0.0, 0.4, 0.95])
def test_batches_may_be_asked_for_inside_and_outside_of_inference_mode_in_turn(
    loader_on: Callable[..., tuple[Simulation, ShardLoader]], haste: float
) -> None:
    simulation, loader = loader_on(haste=haste)
    check = Check(simulation)
    iterator = iter(loader)
    for number in range(len(loader)):
        with torch.inference_mode(number % 3 != 1):
            images, labels, indices = next(iterator)
        assert not images.value.is_inference()  # as the caller may use it outside
        check((images, labels, indices))
    simulation.synchronize()
    assert len(check.seen) == len(loader) * BATCH
