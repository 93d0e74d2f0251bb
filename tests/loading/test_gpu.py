"""The loader on a CUDA device, or on the stand-in where there is none: every byte is right while the device lags.

Comparisons are made on the device and looked at only at the end, so that nothing here waits for the device on the
loader's behalf. The consumer's stream sleeps before them: a copy that is not waited for, or memory that is used again
too early, shows as a wrong byte. The stand-in also fails each test that leaves the order of two uses open.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arrays import change_split, some_arrays
from by_hand import Hand, flat
from disks import raising
from interpreters import Interpreter
from numpy.typing import NDArray
from pictures import as_batch, random_pictures, sample_images
from places import SUPPORT
from simulated_cuda import Simulation

import shardio.loading.cuda
from shardio.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    GaussianBlur,
    HorizontalFlip,
    Mixup,
    Normalize,
    PerSample,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    ToDtype,
    Views,
)
from shardio.augment.chain import Transform
from shardio.loading.cuda import CudaCopier, CudaTransfer
from shardio.loading.loader import ShardLoader
from shardio.loading.prefetch import MOST_AHEAD, DevicePrefetch
from shardio.order.sampler import Tail
from shardio.system.pour import ALIGNMENT

pytestmark = pytest.mark.gpu

# Large enough that a copy takes a device some time. The stand-in takes as long as it is told.
NUM_SAMPLES, SHAPE, BATCH = (400, (96, 96, 3), 32) if torch.cuda.is_available() else (50, (8, 8, 3), 4)
NBYTES = BATCH * int(np.prod(SHAPE))
# Images, labels and indices, as torch's allocator rounds them up.
BATCH_NBYTES = NBYTES + 2 * 512
POISON = 0xEE
Batch = tuple[torch.Tensor, ...]
# How soon the stand-in does its work. A device has its own pace.
HASTES = [pytest.param(haste, marks=pytest.mark.gpu(haste=haste)) for haste in (0.0, 0.4, 0.95)]


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES, SHAPE, 150)


def busy(turns: int = 4) -> None:
    """Work of some milliseconds for the current stream."""
    torch.cuda._sleep(turns * 3_000_000)


class Check:
    """Counts wrong bytes on the device. `expected` are the pictures, (N, C, H, W)."""

    def __init__(self) -> None:
        self.expected = sample_images(NUM_SAMPLES, SHAPE).cuda()
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()

    def __call__(self, batch: Batch) -> None:
        images, labels, indices = batch
        # A spoiled slot's index could be out of range, which would end the process.
        self.wrong += ((indices < 0) | (indices >= NUM_SAMPLES)).sum()
        known = indices.clamp(0, NUM_SAMPLES - 1)
        self.wrong += (images != self.expected[known]).sum()
        self.wrong += (labels != known % 7).sum()

    def none_wrong(self) -> bool:
        torch.cuda.synchronize()
        return int(self.wrong) == 0


@pytest.fixture
def check() -> Check:
    return Check()


@pytest.fixture
def hand() -> Hand:
    return Hand(BATCH, SHAPE)


def loader_on_cuda(path: Path, batch_size: int = BATCH, **options: object) -> ShardLoader:
    return ShardLoader(path, batch_size, device="cuda", return_indices=True, **options)  # type: ignore[arg-type]


def test_a_check_that_could_not_fail_would_be_none(check: Check) -> None:
    indices = torch.arange(4, device="cuda")
    images = check.expected[indices].clone()
    images[3, 2, 1, 0] += 1
    check((images, indices % 7, indices))
    assert not check.none_wrong()


def test_the_gpu_of_the_local_rank_is_the_default(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = torch.cuda.device_count()
    for local_rank in range(count + 1):
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(local_rank)}.items():
            monkeypatch.setenv(name, value)
        with ShardLoader(path, BATCH) as loader:
            assert loader.device == torch.device("cuda", local_rank % count)
            images, labels = next(iter(loader))
            assert images.device == labels.device == loader.device


@pytest.mark.parametrize(
    ("tail", "prefetch", "device"),
    [("drop", 0, "cuda"), ("pad", 1, "cuda"), ("short", 4, "cuda"), ("drop", 2, "cuda:1")],
)
def test_batches_are_those_of_the_cpu(path: Path, tail: Tail, prefetch: int, device: str, poison: None) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("only one CUDA device")
    options: dict[str, Any] = {"return_indices": True, "tail": tail}
    cpu = ShardLoader(path, BATCH, device="cpu", **options)
    with cpu, ShardLoader(path, BATCH, device=device, prefetch=prefetch, **options) as cuda:
        assert cuda.device == torch.device("cuda", int(device == "cuda:1"))
        assert cuda.stats()["device"] == str(cuda.device)
        for _ in range(2):
            assert torch.cuda.current_device() == 0
            pairs = []
            for ours, theirs in zip(cuda, cpu, strict=True):
                busy(1)
                pairs += zip(ours, theirs, strict=True)
            for one, other in pairs:
                assert (one.device, one.dtype, one.stride()) == (cuda.device, other.dtype, other.stride())
                assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("haste", HASTES)
@pytest.mark.parametrize(("prefetch", "num_threads"), [(0, 1), (2, 4), (5, 1)])
def test_every_byte_arrives_whenever_the_device_gets_to_it(
    path: Path, prefetch: int, num_threads: int, haste: float, poison: None, check: Check, hand: Hand
) -> None:
    with loader_on_cuda(path, prefetch=prefetch, num_threads=num_threads, tail="short") as loader:
        for number in range(3):
            for batch in loader:
                busy(1)
                # Read late, and dropped before it is read: only the stream knows that it is still wanted.
                check(batch)
                if number == 1:
                    for tensor in batch:
                        tensor.zero_()
                    del tensor
                del batch
                hand.write_and_look(number)
    assert check.none_wrong()
    assert hand.all_right()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_copy_that_is_far_behind_its_host_brings_every_byte(
    path: Path, prefetch: int, poison: None, check: Check
) -> None:
    with loader_on_cuda(path, prefetch=prefetch) as loader:
        copies = loader._pipeline._copier._stream  # type: ignore[union-attr]
        behind = 0
        for _ in range(3):
            for batch in loader:
                check(batch)  # the consumer's stream has nothing else to wait for
                behind += not torch.cuda.current_stream().query()
                with torch.cuda.stream(copies):
                    busy(2)  # before the copies that come next
                del batch
    assert check.none_wrong()
    assert behind > len(loader)  # or nothing has been shown


@pytest.mark.parametrize("seed", range(4))
def test_the_stream_may_change_before_every_call(seed: int, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, streams = random.Random(seed), [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]

    def on_any_stream(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: object) -> object:
            torch.cuda.set_stream(rng.choice(streams))
            busy(1)
            return call(*arguments)

        return called

    for owner, name in ((CudaCopier, "reserve"), (CudaTransfer, "start"), (CudaTransfer, "hand_over")):
        monkeypatch.setattr(owner, name, on_any_stream(getattr(owner, name)))
    whole = hand.whole
    with torch.cuda.stream(streams[0]):
        for value in range(40):
            hand.start(value, *rng.choice([[whole], [whole], [((BATCH, 2, 2, 3), np.float32)], [whole, whole]]))
            hand.write_and_look(value)
            hand.look(hand.prefetch.take(), value)
        hand.prefetch.close()
    assert hand.all_right()


def test_leaving_epochs_early_leaves_no_memory_behind(path: Path, poison: None, check: Check) -> None:
    def use() -> None:
        with loader_on_cuda(path) as loader:
            for turn in range(10):
                for number, batch in enumerate(loader):
                    busy(1)
                    check(batch)
                    if number == turn % 5:
                        break
            for batch in loader:
                check(batch)

    use()  # memory that CUDA itself allocates at first use
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    use()
    assert check.none_wrong()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu(haste=0.0)
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_a_host_that_runs_ahead_is_held_back_and_memory_of_dropped_batches_returns(path: Path, prefetch: int) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    steps: list[torch.cuda.Event] = []
    unfinished: list[int] = []
    with loader_on_cuda(path, prefetch=prefetch) as loader:
        for _ in range(5):
            for batch in loader:
                assert len(batch) == 3
                unfinished.append(sum(not step.query() for step in steps))
                busy()
                steps.append(torch.cuda.current_stream().record_event())
                del batch
        # Started and not yet taken; reserved; in the caller's hands.
        assert torch.cuda.max_memory_allocated() - before <= (max(1, prefetch) + 1 + 1) * BATCH_NBYTES
        assert loader.stats()["slots"] <= loader._pipeline._ring.capacity
    assert max(unfinished) <= MOST_AHEAD + prefetch + 2
    assert sum(map(bool, unfinished)) > 2 * len(loader)  # or nothing has been shown
    assert torch.cuda.memory_allocated() == before


def test_slots_are_pinned(hand: Hand) -> None:
    slot = hand.copier.new_slot(BATCH, SHAPE)
    images, numbers = slot.parts(BATCH)
    for tensor, array in ((images, slot.images), (numbers[0], slot.labels), (numbers[1], slot.indices)):
        assert tensor.is_pinned()
        assert tensor.data_ptr() == array.ctypes.data
        assert tensor.nbytes == array.nbytes
    assert slot.images.ctypes.data % ALIGNMENT == 0


def test_memory_that_begins_on_a_page_is_taken_as_it_is(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def empty(shape: tuple[int, ...] | int, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        nbytes = torch.zeros(shape, dtype=dtype).nbytes
        asked.append(nbytes)
        raw = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + nbytes].view(dtype).view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    hand.copier.new_slot(BATCH, SHAPE)
    assert asked == [NBYTES, 2 * BATCH * 8]


@pytest.mark.parametrize(
    ("owner", "name", "call"), [(CudaTransfer, "wait", "close"), (torch.cuda, "current_stream", "take")]
)
def test_an_interrupt_while_copies_are_waited_for_or_a_batch_is_taken_endangers_no_memory(
    owner: Any, name: str, call: str, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(10)
    for value in (1, 2, 3):
        hand.start(value)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            getattr(hand.prefetch, call)()
    gc.collect()
    if call == "take":
        with monkeypatch.context() as patch:
            patch.setattr(DevicePrefetch, "reclaim", lambda self, most_copying: None)
            hand.prefetch.close()
    hand.write_and_look(0, 1, 2, 3)
    del hand.prefetch
    hand.write_and_look(0, 1, 2, 3)
    assert hand.all_right()


@pytest.mark.parametrize("copied", [0, 1])
def test_an_interrupt_while_starting_a_copy_endangers_no_memory(
    copied: int, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, calls = shardio.loading.cuda._copy, []

    def interrupted(memory: torch.Tensor, pinned: torch.Tensor) -> None:
        copy(memory, pinned)
        calls.append(None)
        if len(calls) > copied:
            raise KeyboardInterrupt

    with torch.cuda.stream(hand.copier._stream):
        busy(10)
    with monkeypatch.context() as patch:
        patch.setattr(shardio.loading.cuda, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hand.start(1)
    gc.collect()  # the frames that the exception has kept, and the memory that was reserved in them
    hand.prefetch.close()
    hand.write_and_look(0, 1, 2, 3)
    assert hand.all_right()


def test_torch_keeps_the_memory_of_a_slot_that_is_dropped_while_it_is_copied(hand: Hand) -> None:
    for value in range(20):
        slot = hand.copier.new_slot(BATCH, SHAPE)
        for array in (slot.images, slot.labels, slot.indices):
            array.fill(value)
        busy()
        transfer = hand.copier.reserve(slot)
        transfer.start(slot, BATCH)
        del slot, array
        others = [hand.copier.new_slot(BATCH, SHAPE) for _ in range(2)]
        for other in others:
            other.images.fill(POISON)
            other.labels.fill(-POISON)
            other.indices.fill(-POISON)
        hand.look(transfer.hand_over(), value)
    assert hand.all_right()


def test_a_batch_that_was_late_is_copied_during_the_step_before_it(hand: Hand) -> None:
    hand.start(1)
    hand.look(hand.prefetch.take(), 1)
    torch.cuda.synchronize()
    busy(200)
    step = torch.cuda.Event()
    step.record()
    hand.start(2)  # when it was due
    second = hand.prefetch._transfers[0]
    deadline = time.monotonic() + 60
    while not second.done() and time.monotonic() < deadline:
        pass
    assert second.done()
    assert not step.query()
    hand.look(hand.prefetch.take(), 2)
    hand.start(3)
    is_done = hand.prefetch._transfers[0].done()
    assert step.query() or not is_done  # its memory may be the first batch's
    hand.prefetch.close()
    assert hand.all_right()


def test_copying_is_timed_on_the_device(path: Path) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seen = [0.0]
    with loader_on_cuda(path) as loader:
        assert loader.stats()["copy_seconds"] == 0.0
        begin.record()
        for _ in range(5):
            for _ in loader:
                busy()
            seen.append(loader.stats()["copy_seconds"])
        end.record()
    torch.cuda.synchronize()
    assert seen == sorted(set(seen))
    # The wait for the steps, which is nearly all of the time, does not count. No bus carries 500 GB/s.
    assert 4 * len(loader) * NBYTES / 500e9 < seen[-1] < begin.elapsed_time(end) / 1000 / 2


def test_batches_may_be_asked_for_inside_and_outside_of_inference_mode_in_turn(path: Path, check: Check) -> None:
    with loader_on_cuda(path) as loader:
        iterator = iter(loader)
        for number in range(len(loader)):
            with torch.inference_mode(number % 3 != 1):
                batch = next(iterator)
            assert not any(tensor.is_inference() for tensor in batch)  # the caller may use them outside
            check(batch)
    assert check.none_wrong()


def test_loaders_of_a_device_share_one_stream_for_copies() -> None:
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    streams = {CudaCopier(device)._stream for _ in range(40) for device in devices}
    assert sorted(stream.device.index for stream in streams) == list(range(len(devices)))


def test_slots_are_on_the_host_whatever_the_default_device_is(path: Path) -> None:
    with loader_on_cuda(path) as loader, torch.device("cuda"):
        images, _, _ = next(iter(loader))
        assert images.device == loader.device


@pytest.mark.parametrize("ending", ["", "del iterator, loader"])
def test_an_interpreter_ends_in_the_middle_of_copies_without_a_word(
    path: Path, ending: str, cuda: Simulation | None, start: Callable[..., Interpreter]
) -> None:
    script = f"""
import sys
import torch
sys.path.insert(0, {str(SUPPORT)!r})
from shardio import ShardLoader
if {cuda is not None}:
    from simulated_cuda import Simulation
    Simulation().__enter__()
loader = ShardLoader(sys.argv[1], {BATCH}, device="cuda")
iterator = iter(loader)
for _ in range(3):
    batch = next(iterator)
    torch.cuda._sleep(100_000_000)
{ending}
"""
    process = start(script, path)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, ""), err
    assert not {"Traceback", "Exception", "terminate", "CUDA"} & set(err.replace(":", " ").split())


class Part:
    """As of Albumentations: one draw for all that one call is given."""

    __module__ = "albumentations"

    def __call__(self, image: NDArray[np.uint8], **masks: Any) -> dict[str, Any]:
        rows = slice(random.randrange(2), None, 3)
        moved = {name: mask[rows] if name == "mask" else [one[rows] for one in mask] for name, mask in masks.items()}
        return {"image": image[rows] / np.float32(3), **moved}


def as_bfloat16(image: torch.Tensor) -> torch.Tensor:
    return image.bfloat16()


VIEWS = Views([RandomResizedCrop(4), RandomResizedCrop(4), Compose([RandomCrop(3), ColorJitter(0.5)])])
PART = Compose([RandomCrop(5), PerSample(Part())])
SMALL = Compose([RandomCrop(4), PerSample(as_bfloat16)])
MOVING_MASKS: dict[str, Transform] = {"views": VIEWS, "function": PART, "both": Views([PART, VIEWS])}
MADE: dict[str, Transform] = {
    **MOVING_MASKS,
    "gray levels": Compose([RandomResizedCrop(4), ColorJitter(0.4), HorizontalFlip()]),
    "normalized": Compose([RandomResizedCrop(4), HorizontalFlip(), Normalize("imagenet"), ToDtype(torch.bfloat16)]),
    "views of a crop": Compose([RandomCrop(5), Views([RandomResizedCrop(4), CenterCrop(4), GaussianBlur(3)])]),
    "then normalized": Compose([RandomCrop(5), PerSample(lambda image: image.flip(1)), Normalize("imagenet")]),
    "erased": Compose([RandomResizedCrop(4), RandomErasing(1.0, value=7)]),
    "of bfloat16": PerSample(as_bfloat16),
    "from bfloat16": Compose([ToDtype(torch.bfloat16), PerSample(torch.clone), RandomErasing(1.0)]),
    "two functions": Views([PerSample(torch.clone), PerSample(as_bfloat16)]),
    "whole images": Views([Normalize(0.5, 0.5), Compose([ToDtype(torch.float32), RandomErasing(1.0)])]),
    "then views": Compose([PerSample(torch.clone), Views([RandomCrop(5), SMALL])]),
}


@pytest.mark.parametrize(
    ("name", "arrays"), [*((name, []) for name in MADE), *((name, ["mask", "clip", "depth"]) for name in MOVING_MASKS)]
)
def test_what_a_transform_makes_arrives_as_on_the_cpu(
    name: str, arrays: list[str], make_set: Callable[..., Path]
) -> None:
    change_split(path := make_set(47, (6, 5, 3)), some_arrays(47, 6, 5))
    options: dict[str, Any] = {"seed": 3, "arrays": arrays, "tail": "short", "return_indices": True}
    transform, seen = MADE[name], []
    cpu = ShardLoader(path, 5, device="cpu", **options)
    with cpu, ShardLoader(path, 5, device="cuda", num_threads=2, **options) as loader:
        others = [None, Views([RandomCrop(5), transform]), RandomCrop(4), transform]
        for changed in [transform, *(others if name in MOVING_MASKS else [])]:
            cpu.transform = loader.transform = changed
            for found, expected in zip(loader, cpu, strict=True):
                busy(1)
                seen.append((found, expected))
            next(unfinished := iter(loader))
            del unfinished
            loader.set_epoch(cpu.state_dict()["epoch"])
        for found, expected in seen:
            assert all(view.is_contiguous(memory_format=torch.channels_last) for view in flat(found[0]))
            for one, other in zip(flat(found), flat(expected), strict=True):
                assert (one.is_cuda, one.dtype) == (True, other.dtype)
                rtol = 2**-7 if one.dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(one.cpu(), other, rtol=rtol * one.is_floating_point(), atol=0)


@pytest.mark.parametrize("transform", [RandomCrop(3), PART], ids=["crop", "function"])
def test_mixup_before_what_only_the_cpu_does_is_refused_on_a_gpu(path: Path, transform: Transform) -> None:
    with loader_on_cuda(path, transform=Compose([Mixup(7), transform])) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match="Mixup"):
            next(batches)


def test_images_on_a_gpu_are_refused_by_what_the_cpu_does() -> None:
    with pytest.raises(ValueError, match="cuda"):
        RandomResizedCrop(64)(torch.zeros(2, 3, 96, 96, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("mix", [Mixup(10), CutMix(10, per_sample=True)], ids=["mixed", "cut"])
def test_a_transform_on_the_device_is_not_waited_for(mix: Transform) -> None:
    """The host gives the device the work of several batches while that is still busy with what came before."""
    images = torch.zeros(BATCH, 3, 96, 96, dtype=torch.uint8, device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(BATCH, device="cuda") % 10
    transform = Compose([Normalize("imagenet"), ToDtype(torch.float16), mix, RandomErasing(value=7)])
    made, _ = transform(images, labels, seed=0)  # copies its constants
    assert isinstance(made, torch.Tensor)
    assert made.is_contiguous(memory_format=torch.channels_last)
    torch.cuda.synchronize()
    busy(100)
    before = torch.cuda.current_stream().record_event()
    for seed in range(5):
        transform(images, labels, seed=seed)
    assert not before.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("last", "dtype"),
    [
        *((mix(10, per_sample=True, partner=to), torch.bfloat16) for mix in (Mixup, CutMix) for to in ("roll", "flip")),
        *((RandomErasing(0.7, value=of, count=(1, 3)), torch.float32) for of in (0.0, (1, 2, 3), "random", "color")),
    ],
)
def test_the_gpu_mixes_and_erases_as_the_cpu_does(last: Transform, dtype: torch.dtype) -> None:
    images = as_batch(random_pictures(np.random.default_rng(7), BATCH, 40, 51))
    labels = torch.arange(BATCH) % 10
    transform = Compose([Normalize("imagenet"), ToDtype(dtype), last])
    expected, targets = transform(images, labels, seed=1)
    found, there = transform(images.cuda(), labels.cuda(), seed=1)
    assert isinstance(expected, torch.Tensor)
    assert isinstance(found, torch.Tensor)
    assert found.is_contiguous(memory_format=torch.channels_last)
    close = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=close, atol=close)
    torch.testing.assert_close(there.cpu(), targets)


def test_a_step_in_a_graph_sees_every_batch(path: Path) -> None:
    """As docs/guide/train.md has it."""
    transform = Compose([RandomResizedCrop(64), HorizontalFlip(), Normalize("imagenet")])
    weights, loss = torch.rand(3 * 64 * 64, 7, device="cuda"), torch.zeros((), device="cuda")

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(images.flatten(1) @ weights, labels)

    found, expected = [], []
    with ShardLoader(path, BATCH, device="cuda", seed=5, transform=transform) as loader:
        images, labels = [tensor.clone() for tensor in loader.peek()]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            loss_of(images, labels)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss.copy_(loss_of(images, labels))
        for batch in loader:
            images.copy_(batch[0])
            labels.copy_(batch[1])
            graph.replay()
            found.append(loss.clone())
            expected.append(loss_of(*batch))
    assert len(torch.stack(expected).unique()) == len(expected)
    torch.testing.assert_close(torch.stack(found).cpu(), torch.stack(expected).cpu(), rtol=1e-4, atol=1e-4)
