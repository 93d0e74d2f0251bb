"""The loader on a real CUDA device: every byte right while the device lags far behind the host.

Comparisons are made on the device and looked at only at the end, so that nothing here waits for the device on the
loader's behalf. Kernels that take long are put before them in the consumer's stream: a copy that is not waited for, or
memory that is used again too early, shows as a wrong byte. The order of the calls is tried more thoroughly, without a
GPU, in tests/loading/test_cuda.py.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import as_batch, random_pictures, sample_images

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
from shardio.loading.cuda import CudaCopier, CudaTransfer, PinnedSlot
from shardio.loading.loader import ShardLoader
from shardio.loading.prefetch import MOST_AHEAD, DevicePrefetch, Tensors, Transfer
from shardio.loading.ring import Ring, Slot
from shardio.order.sampler import Tail
from shardio.system.pour import ALIGNMENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_SAMPLES = 400
SHAPE = (96, 96, 3)
BATCH = 32
NBYTES = BATCH * int(np.prod(SHAPE))
# Images, labels and indices, as torch's allocator rounds them up.
BATCH_NBYTES = NBYTES + 2 * 512
POISON = 0xEE
Batch = tuple[torch.Tensor, ...]


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES, SHAPE, 150)


class Busy:
    """Work of some milliseconds for the current stream."""

    def __init__(self) -> None:
        self._matrix = torch.randn(4096, 4096, device="cuda")
        self._result = torch.empty_like(self._matrix)

    def __call__(self, turns: int = 4) -> None:
        for _ in range(turns):
            torch.mm(self._matrix, self._matrix, out=self._result)


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


@pytest.fixture(scope="module", autouse=True)
def cuda_is_up() -> None:
    """CUDA opens its descriptors at first use, and keeps them: not a leak of any test."""
    for number in range(torch.cuda.device_count()):
        with torch.cuda.device(number):
            Busy()(1)
            pinned = torch.zeros(8, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                copy = pinned.to("cuda", non_blocking=True)
                torch.cuda.Event().record()
            torch.cuda.synchronize()
            assert int((copy != 0).sum()) == 0


@pytest.fixture
def busy() -> Busy:
    return Busy()


@pytest.fixture
def check() -> Check:
    return Check()


def loader_on_cuda(path: Path, batch_size: int = BATCH, **options: object) -> ShardLoader:
    return ShardLoader(path, batch_size, device="cuda", return_indices=True, **options)  # type: ignore[arg-type]


def test_a_check_that_could_not_fail_would_be_none(check: Check) -> None:
    indices = torch.arange(4, device="cuda")
    images = check.expected[indices].clone()
    check((images, indices % 7, indices))
    assert check.none_wrong()
    images[3, 2, 1, 0] += 1
    check((images, indices % 7, indices))
    assert not check.none_wrong()


def test_batches_are_on_the_device_in_channels_last_memory(path: Path) -> None:
    with loader_on_cuda(path) as loader:
        assert loader.device == torch.device("cuda", torch.cuda.current_device())
        assert loader.stats()["device"] == str(loader.device)
        images, labels, indices = next(iter(loader))
        assert {tensor.device for tensor in (images, labels, indices)} == {loader.device}
        assert (images.dtype, labels.dtype, indices.dtype) == (torch.uint8, torch.int64, torch.int64)
        assert images.shape == (BATCH, SHAPE[2], *SHAPE[:2])
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_the_gpu_of_the_local_rank_is_the_default(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = torch.cuda.device_count()
    for local_rank in range(count + 1):
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(local_rank)}.items():
            monkeypatch.setenv(name, value)
        with ShardLoader(path, BATCH) as loader:
            assert loader.device == torch.device("cuda", local_rank % count)
            images, labels = next(iter(loader))
            assert images.device == labels.device == loader.device


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="only one CUDA device")
def test_a_device_that_is_not_the_current_one_gets_every_byte(path: Path, poison: None) -> None:
    cpu = ShardLoader(path, BATCH, device="cpu", return_indices=True)
    with cpu, ShardLoader(path, BATCH, device="cuda:1", return_indices=True) as cuda, torch.cuda.device(0):
        for ours, theirs in zip(cuda, cpu, strict=True):
            assert torch.cuda.current_device() == 0
            for one, other in zip(ours, theirs, strict=True):
                assert one.device == torch.device("cuda", 1)
                assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
@pytest.mark.parametrize("tail", ["drop", "pad", "short"])
def test_batches_are_those_of_the_cpu(path: Path, tail: Tail, prefetch: int, poison: None, busy: Busy) -> None:
    cpu = ShardLoader(path, BATCH, device="cpu", return_indices=True, tail=tail)
    with cpu, loader_on_cuda(path, tail=tail, prefetch=prefetch) as cuda:
        assert len(cpu) == len(cuda)
        for _ in range(3):
            pairs = []
            for ours, theirs in zip(cuda, cpu, strict=True):
                busy(1)
                pairs.append((ours, theirs))
            for ours, theirs in pairs:
                for one, other in zip(ours, theirs, strict=True):
                    assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_device_behind_its_host_gets_every_byte(
    path: Path, num_threads: int, poison: None, busy: Busy, check: Check
) -> None:
    with loader_on_cuda(path, num_threads=num_threads) as loader:
        for _ in range(5):
            for batch in loader:
                busy()
                # Read late, and dropped before it is read: only the stream knows that it is still wanted.
                check(batch)
                del batch
    assert check.none_wrong()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_copy_that_is_far_behind_its_host_brings_every_byte(
    path: Path, prefetch: int, poison: None, busy: Busy, check: Check
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


def test_the_stream_may_change_from_batch_to_batch(path: Path, poison: None, busy: Busy) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    checks = [Check() for _ in streams]
    with loader_on_cuda(path) as loader:
        for _ in range(2):
            iterator = iter(loader)
            for number in range(len(loader)):
                with torch.cuda.stream(streams[number % 3]):
                    batch = next(iterator)
                    busy(2)
                    checks[number % 3](batch)
                    del batch
    assert all(one.none_wrong() for one in checks)


def test_a_batch_may_be_written_to(path: Path, check: Check) -> None:
    with loader_on_cuda(path) as loader:
        for _ in range(2):
            for batch in loader:
                check(batch)
                for tensor in batch:
                    tensor.zero_()
    assert check.none_wrong()


def test_leaving_epochs_early_leaves_no_memory_behind(path: Path, poison: None, busy: Busy, check: Check) -> None:
    def use() -> None:
        with loader_on_cuda(path) as loader:
            for turn in range(40):
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


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_memory_of_a_dropped_batch_returns_though_the_device_is_far_behind(
    path: Path, prefetch: int, busy: Busy
) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    behind = 0
    with loader_on_cuda(path, prefetch=prefetch) as loader:
        for _ in range(5):
            for batch in loader:
                assert len(batch) == 3
                behind += not torch.cuda.current_stream().query()
                busy()
                del batch
        # Started and not yet taken; reserved; in the caller's hands.
        assert torch.cuda.max_memory_allocated() - before <= (prefetch + 1 + 1) * BATCH_NBYTES
    assert behind > 2 * len(loader)  # or nothing has been shown
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_the_host_is_held_back_after_a_bounded_number_of_steps(path: Path, prefetch: int, busy: Busy) -> None:
    steps: list[torch.cuda.Event] = []
    most = 0
    with loader_on_cuda(path, prefetch=prefetch) as loader:
        for _ in range(3):
            for _ in loader:
                most = max(most, sum(not step.query() for step in steps))
                busy()
                steps.append(torch.cuda.Event())
                steps[-1].record()
        assert loader.stats()["slots"] <= loader._pipeline._ring.capacity
    assert 1 <= most <= MOST_AHEAD + prefetch + 2


def test_slots_are_pinned_and_used_again(path: Path, poison: None, busy: Busy, check: Check) -> None:
    slots: list[Slot] = []
    with loader_on_cuda(path, prefetch=2) as loader:
        make = loader._pipeline._ring._make

        def counted() -> Slot:
            slots.append(make())
            return slots[-1]

        loader._pipeline._ring._make = counted
        for _ in range(6):
            for batch in loader:
                busy(1)
                check(batch)
    assert check.none_wrong()
    for slot in slots:
        assert isinstance(slot, PinnedSlot)
        images, numbers = slot.tensors
        for tensor, array in ((images, slot.images), (numbers[0], slot.labels), (numbers[1], slot.indices)):
            assert tensor.is_pinned()
            assert tensor.data_ptr() == array.ctypes.data
        assert slot.images.ctypes.data % ALIGNMENT == 0
    assert len(slots) <= loader._pipeline._ring.capacity


def test_a_slot_is_released_only_when_its_copy_is_done(
    path: Path, monkeypatch: pytest.MonkeyPatch, busy: Busy, check: Check
) -> None:
    released = 0
    release = Ring.release

    with loader_on_cuda(path) as loader:
        transfers: dict[int, Transfer] = {}
        start = CudaTransfer.start

        def noting(transfer: CudaTransfer, slot: Slot, size: int) -> None:
            start(transfer, slot, size)
            transfers[id(slot)] = transfer

        def looking(ring: Ring, slot: Slot) -> None:
            nonlocal released
            released += 1
            assert transfers.pop(id(slot)).done()
            release(ring, slot)

        monkeypatch.setattr(CudaTransfer, "start", noting)
        monkeypatch.setattr(Ring, "release", looking)
        for _ in range(3):
            for batch in loader:
                busy(1)
                check(batch)
        assert released == 3 * len(loader)
    assert check.none_wrong()


class Counts:
    copy_seconds = 0.0


class Hand:
    """DevicePrefetch without a loader, of batches that are filled with one value."""

    def __init__(self) -> None:
        self.copier = CudaCopier(torch.device("cuda", torch.cuda.current_device()))
        self.ring = Ring(8, lambda: self.copier.new_slot(BATCH, SHAPE))
        self.counts = Counts()
        self.prefetch = DevicePrefetch(self.copier, self.ring, self.counts)
        self._right: list[torch.Tensor] = []

    def filled(self, value: int) -> Slot:
        slot = self.ring.acquire()
        for array in (slot.images, slot.labels, slot.indices):
            array.fill(value)
        return slot

    def start(self, value: int) -> None:
        self.prefetch.start(self.filled(value), BATCH)

    def look(self, tensors: Tensors | list[torch.Tensor], value: int) -> None:
        # Batches end with a dict, which is empty here.
        self._right += [(tensor == value).all() for tensor in tensors if isinstance(tensor, torch.Tensor)]

    def all_right(self) -> bool:
        torch.cuda.synchronize()
        return len(self._right) > 0 and all(map(bool, self._right))


@pytest.fixture
def hand() -> Hand:
    return Hand()


def tensors_of_our_own(count: int, value: int) -> list[torch.Tensor]:
    """Tensors as large as the images of a batch, so that they get the memory of batches that were dropped."""
    return [torch.full((BATCH, *SHAPE), value, dtype=torch.uint8, device="cuda") for _ in range(count)]


def test_closing_waits_for_copies_before_slots_may_be_written(hand: Hand, poison: None, busy: Busy) -> None:
    for _ in range(5):
        busy(10)
        for value in range(4):
            hand.start(value)
        taken = [hand.prefetch.take() for _ in range(2)]
        hand.prefetch.close()
        for value, batch in enumerate(taken):
            hand.look(batch, value)
    assert hand.all_right()
    assert hand.ring.num_free == hand.ring.num_made == 4


def test_a_batch_that_was_never_taken_is_not_copied_into_memory_of_others(
    hand: Hand, busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A Ctrl-C would cut short the wait like this. Only the order of streams, and torch, protect the slots' memory.
    monkeypatch.setattr(DevicePrefetch, "reclaim", lambda self, most_copying: None)
    for turn in range(20):
        prefetch = DevicePrefetch(hand.copier, hand.ring, hand.counts)
        busy()
        for _ in range(3):
            prefetch.start(hand.filled(200), BATCH)
        prefetch.close()
        del prefetch
        ours = tensors_of_our_own(6, turn)
        busy()
        hand.look(ours, turn)
        del ours
    assert hand.all_right()


def test_torch_keeps_the_memory_of_a_slot_that_is_dropped_while_it_is_copied(hand: Hand, busy: Busy) -> None:
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


def test_a_batch_that_was_late_is_copied_during_the_step_before_it(hand: Hand, busy: Busy) -> None:
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
    hand.prefetch.close()
    assert hand.all_right()


def test_a_batch_taken_on_another_stream_keeps_its_memory_until_that_is_done(hand: Hand, busy: Busy) -> None:
    other = torch.cuda.Stream()
    for turn in range(20):
        hand.start(200)
        with torch.cuda.stream(other):
            batch = hand.prefetch.take()
            busy()
            hand.look(batch, 200)
            del batch
        ours = tensors_of_our_own(4, turn)
        hand.look(ours, turn)
        del ours
    hand.prefetch.close()
    assert hand.all_right()


def test_copying_is_timed_on_the_device(path: Path, busy: Busy) -> None:
    with loader_on_cuda(path) as loader:
        assert loader.stats()["copy_seconds"] == 0.0
        start = time.perf_counter()
        for _ in range(5):
            for _ in loader:
                busy()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        # The wait for the steps, which is nearly all of the time, does not count. No bus carries 500 GB/s.
        assert 5 * len(loader) * NBYTES / 500e9 < loader.stats()["copy_seconds"] < seconds / 2


def test_slots_are_on_the_host_whatever_the_default_device_is(path: Path) -> None:
    with loader_on_cuda(path) as loader, torch.device("cuda"):
        images, _, _ = next(iter(loader))
        assert images.device == loader.device


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "del iterator, loader", "loader.close()"])
def test_an_interpreter_ends_in_the_middle_of_copies_without_a_word(path: Path, ending: str) -> None:
    script = f"""
import sys
import torch
from shardio import ShardLoader
loader = ShardLoader(sys.argv[1], {BATCH}, device="cuda")
iterator = iter(loader)
matrix = torch.randn(4096, 4096, device="cuda")
for _ in range(3):
    batch = next(iterator)
    for _ in range(20):
        matrix @ matrix
{ending}
"""
    command = [sys.executable, "-c", script, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert not {"Traceback", "Exception", "terminate", "CUDA"} & set(ended.stderr.replace(":", " ").split())


# --- augmentation ----------------------------------------------------------------------------------------------------

MADE_BEFORE: dict[str, Transform] = {
    "gray levels": Compose([RandomResizedCrop(64), ColorJitter(0.4), HorizontalFlip()]),
    "normalized": Compose([RandomResizedCrop(64), HorizontalFlip(), Normalize("imagenet"), ToDtype(torch.bfloat16)]),
    "views": Compose([RandomCrop(90), Views([RandomResizedCrop(64), Compose([CenterCrop(32), GaussianBlur(9)])])]),
    "per sample": Compose([RandomCrop(90), PerSample(lambda image: image.flip(1)), Normalize("imagenet")]),
    "erased": Compose([RandomResizedCrop(64), RandomErasing(1.0, value=7)]),
}


@pytest.mark.parametrize("name", MADE_BEFORE)
def test_the_loaders_augmented_batches_on_the_gpu_are_those_on_the_cpu(path: Path, name: str, busy: Busy) -> None:
    options: dict[str, Any] = {"seed": 5, "transform": MADE_BEFORE[name], "tail": "short"}
    with loader_on_cuda(path, **options) as there, ShardLoader(path, BATCH, device="cpu", **options) as here:
        for _ in range(2):
            for (found, labels), (expected, same) in zip(there, here, strict=True):
                busy(1)
                views = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
                for one, other in views:
                    assert one.is_contiguous(memory_format=torch.channels_last)
                    torch.testing.assert_close(one.cpu(), other, rtol=2**-7 if one.is_floating_point() else 0, atol=0)
                assert torch.equal(labels.cpu(), same)


def test_images_on_a_gpu_are_refused_by_what_the_cpu_does() -> None:
    with pytest.raises(ValueError, match="cuda"):
        RandomResizedCrop(64)(torch.zeros(2, 3, 96, 96, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("mix", [Mixup(10), CutMix(10, per_sample=True)], ids=["mixed", "cut"])
def test_a_transform_on_the_device_is_not_waited_for(mix: Transform, busy: Busy) -> None:
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


@pytest.mark.parametrize("partner", ["roll", "flip"])
def test_the_gpu_mixes_as_the_cpu_does(partner: Any) -> None:
    images = as_batch(random_pictures(np.random.default_rng(7), BATCH, 40, 51))
    labels = torch.arange(BATCH) % 10
    for mix in (Mixup(10, per_sample=True, partner=partner), CutMix(10, per_sample=True, partner=partner)):
        transform = Compose([Normalize("imagenet"), ToDtype(torch.bfloat16), mix])
        (expected, targets), (found, there) = (
            transform(images, labels, seed=1),
            transform(images.cuda(), labels.cuda(), seed=1),
        )
        assert isinstance(expected, torch.Tensor)
        assert isinstance(found, torch.Tensor)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(there.cpu(), targets)


@pytest.mark.parametrize("value", [0.0, (1, 2, 3), "random", "color"])
def test_the_gpu_erases_as_the_cpu_does(value: Any) -> None:
    images = torch.randint(0, 256, (BATCH, 3, 40, 50), dtype=torch.uint8)
    transform = Compose([Normalize("imagenet"), RandomErasing(0.7, value=value, count=(1, 3))])
    expected, found = transform(images, seed=1), transform(images.cuda(), seed=1)
    assert isinstance(expected, torch.Tensor)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_a_step_in_a_graph_has_the_losses_of_one_that_is_not(path: Path) -> None:
    def losses(*, captured: bool) -> torch.Tensor:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 7)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        transform = Compose([RandomResizedCrop(64), HorizontalFlip(), Normalize("imagenet")])
        found = []
        with ShardLoader(path, BATCH, device="cuda", seed=5, transform=transform) as loader:
            images, labels = [tensor.clone() for tensor in next(iter(loader))]
            loss = torch.zeros((), device="cuda")

            def step() -> None:
                optimizer.zero_grad()
                found = torch.nn.functional.cross_entropy(model(images), labels)
                found.backward()
                optimizer.step()
                loss.copy_(found.detach())

            run: Callable[[], object] = step
            if captured:
                before = {name: value.clone() for name, value in model.state_dict().items()}
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(3):
                        step()
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                model.load_state_dict(before)
                run = graph.replay
            loader.set_epoch(0)
            for _ in range(2):
                for batch in loader:
                    images.copy_(batch[0])
                    labels.copy_(batch[1])
                    run()
                    found.append(loss.clone())
        return torch.stack(found).cpu()

    found = losses(captured=True)
    assert len(found.unique()) > len(found) // 2
    torch.testing.assert_close(found, losses(captured=False), rtol=1e-4, atol=1e-4)
