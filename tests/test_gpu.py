"""The loader on a real CUDA device: every byte right while the device lags far behind the host.

Comparisons are made on the device and looked at only at the end, so that nothing here waits for the device on the
loader's behalf. Kernels that take long are put before them in the consumer's stream: a copy that is not waited for, or
memory that is used again too early, shows as a wrong byte.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import sample_pixels
from numpy.typing import NDArray

from shardio.loader import ShardLoader
from shardio.prefetch import DevicePrefetch
from shardio.ring import Ring, Slot
from shardio.sampler import Tail

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_SAMPLES = 400
SHAPE = (96, 96, 3)
BATCH = 32
POISON = 0xEE
Batch = tuple[torch.Tensor, ...]


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES, SHAPE, 150)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is spoiled as soon as it is released: a copy that still reads it copies that."""
    release = Ring.release

    def spoil(ring: Ring, slot: Slot) -> None:
        slot.images.fill(POISON)
        slot.labels.fill(-POISON)
        slot.indices.fill(-POISON)
        release(ring, slot)

    monkeypatch.setattr(Ring, "release", spoil)


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
        pictures = np.stack([sample_pixels(i, SHAPE) for i in range(NUM_SAMPLES)])
        self.expected = torch.from_numpy(pictures).permute(0, 3, 1, 2).cuda()
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()

    def __call__(self, batch: Batch) -> None:
        images, labels, indices = batch
        # An index of a spoiled slot would end the process.
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


def test_batches_on_another_stream_get_every_byte(path: Path, poison: None, busy: Busy, check: Check) -> None:
    stream = torch.cuda.Stream()
    with loader_on_cuda(path) as loader:
        for _ in range(3):
            busy(20)  # of the default stream, which has nothing to do with the batches
            with torch.cuda.stream(stream):
                for batch in loader:
                    busy(2)
                    check(batch)
                    del batch
            stream.synchronize()
    assert check.none_wrong()


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


def test_batches_that_are_held_stay_as_they_are(path: Path, poison: None, busy: Busy, check: Check) -> None:
    with loader_on_cuda(path) as loader:
        held = [batch for _ in range(3) for batch in loader]
        busy()
        for batch in loader:
            check(batch)
    for batch in held:
        check(batch)
    assert check.none_wrong()


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

    use()  # what CUDA itself allocates at first use
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    use()
    assert check.none_wrong()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_an_epoch_needs_device_memory_for_a_bounded_number_of_batches(path: Path, busy: Busy, check: Check) -> None:
    nbytes = BATCH * int(np.prod(SHAPE))
    with loader_on_cuda(path, prefetch=2) as loader:
        for batch in loader:
            check(batch)
        del batch
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        most = 0
        for _ in range(3):
            for batch in loader:
                busy(1)
                # Of the loader: what is started and not taken, and what is being copied.
                most = max(most, torch.cuda.memory_allocated() - before)
                del batch
    assert most < 12 * (nbytes + 2 * 512 + 2 * 8 * BATCH)


def test_slots_are_pinned_and_used_again(path: Path, poison: None, busy: Busy, check: Check) -> None:
    slots: list[Slot] = []
    with loader_on_cuda(path, prefetch=2) as loader:
        make = loader._ring._make

        def counted() -> Slot:
            slots.append(make())
            return slots[-1]

        loader._ring._make = counted
        for _ in range(6):
            for batch in loader:
                busy(1)
                check(batch)
    assert check.none_wrong()
    for slot in slots:
        for array in (slot.images, slot.labels, slot.indices):
            assert torch.from_numpy(array).is_pinned()
        assert slot.images.ctypes.data % 64 == 0
    assert len(slots) < 6 * len(loader)


def test_a_slot_is_released_only_when_its_copy_is_done(
    path: Path, monkeypatch: pytest.MonkeyPatch, busy: Busy, check: Check
) -> None:
    released = 0
    release = Ring.release

    with loader_on_cuda(path) as loader:
        copier = loader._copier
        assert copier is not None
        transfers = {}
        start = copier.start

        def noting(slot: Slot, size: int) -> object:
            transfers[id(slot)] = start(slot, size)
            return transfers[id(slot)]

        def looking(ring: Ring, slot: Slot) -> None:
            nonlocal released
            released += 1
            assert transfers.pop(id(slot)).done()
            release(ring, slot)

        monkeypatch.setattr(copier, "start", noting)
        monkeypatch.setattr(Ring, "release", looking)
        for _ in range(3):
            for batch in loader:
                busy(1)
                check(batch)
        assert released == 3 * len(loader)
    assert check.none_wrong()


def test_transform_runs_on_the_device(path: Path, busy: Busy) -> None:
    def transform(images: torch.Tensor) -> torch.Tensor:
        busy(1)
        return images.float().mean(dim=(1, 2, 3))

    means = torch.tensor([sample_pixels(i, SHAPE).mean() for i in range(NUM_SAMPLES)], dtype=torch.float64)
    with loader_on_cuda(path, transform=transform) as loader:
        for values, _, indices in list(loader):
            assert values.is_cuda
            assert torch.allclose(values.double().cpu(), means[indices.cpu()], atol=1e-2)


@pytest.fixture
def failing_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ShardLoader, int], None]]:
    def fail(loader: ShardLoader, sample: int) -> None:
        gather = loader.shards.gather

        def failing(indices: NDArray[np.int64], *how: Any) -> None:
            if sample in indices:
                raise OSError(5, "the disk is gone")
            gather(indices, *how)

        monkeypatch.setattr(loader.shards, "gather", failing)

    yield fail
    monkeypatch.undo()


def test_an_error_while_gathering_leaves_earlier_batches_right(
    path: Path, failing_at: Callable[[ShardLoader, int], None], busy: Busy, check: Check
) -> None:
    with loader_on_cuda(path, shuffle=False) as loader:
        failing_at(loader, 5 * BATCH + 3)
        iterator = iter(loader)
        for batch in islice(iterator, 5):
            busy(1)
            check(batch)
        with pytest.raises(OSError, match="the disk is gone"):
            next(iterator)
        assert list(iterator) == []
    assert check.none_wrong()


def test_closing_waits_for_copies_before_slots_may_be_written(path: Path, poison: None, check: Check) -> None:
    with loader_on_cuda(path) as loader:
        copier = loader._copier
        assert copier is not None
        prefetch = DevicePrefetch(copier, loader._ring)
        for first in range(0, 4 * BATCH, BATCH):
            slot = loader._ring.acquire()
            indices = np.arange(first, first + BATCH)
            loader.shards.gather(indices, slot.images)
            slot.labels[:] = indices % 7
            slot.indices[:] = indices
            prefetch.start(slot, BATCH)
        taken = [prefetch.take() for _ in range(2)]
        prefetch.close()
        for batch in taken:
            check(batch)
    assert check.none_wrong()
