"""The limits move whole samples that are really there, nothing else, and nothing after they are closed."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import sample_pixels

import shardio.measure.limits
from shardio.measure import limits
from shardio.reading.shardset import ShardSet, open_shards

PAGES = (64, 64, 1)
"""The shape of samples of a page, which O_DIRECT can read anywhere."""


@pytest.fixture
def paged(make_set: Callable[..., Path]) -> ShardSet:
    shards = open_shards(make_set(30, PAGES, 10))
    if why_not := limits.why_no_direct_reads(shards):
        pytest.skip(why_not)
    return shards


class Reads:
    """Notes every os.preadv and its file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[str] = set()
        self.files: set[str] = set()
        self.flags: set[int] = set()
        self.samples: list[tuple[str, int, bytes]] = []
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor: int, buffers: list[Any], offset: int) -> int:
        count = self._preadv(descriptor, buffers, offset)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        self.threads.add(threading.current_thread().name)
        self.flags.add(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        self.samples.append((name, offset, bytes(buffers[0])))
        self.files.add(name)
        return count


def test_memcpy_moves_one_large_block_of_whole_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.measure.limits, "BLOCK_NBYTES", 1000)
    with closing(limits.memcpy(90)) as steps:
        assert list(islice(steps, 3)) == [11, 11, 11]
    with closing(limits.memcpy(5000)) as steps:
        assert next(steps) == 1


def test_take_copies_random_samples_into_aligned_slots_in_turn(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards(make_set(25))
    pictures = {sample_pixels(i).tobytes() for i in range(25)}
    make, slots = shardio.measure.limits.aligned_empty, []

    def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        slots.append(make(shape))
        return slots[-1]

    monkeypatch.setattr(shardio.measure.limits, "aligned_empty", aligned_empty)
    taken = []
    for seed in (3, 3, 4):
        slots.clear()
        with closing(limits.take(shards, 8, seed)) as steps:
            assert list(islice(steps, limits.SLOTS_IN_TURN)) == [8] * limits.SLOTS_IN_TURN
        assert len(slots) == limits.SLOTS_IN_TURN
        assert {row.tobytes() for slot in slots for row in slot} <= pictures
        taken.append(b"".join(slot.tobytes() for slot in slots))
    assert taken[0] == taken[1] != taken[2]


def test_direct_reads_are_of_whole_samples_past_the_page_cache_by_all_threads(
    paged: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardio.measure.limits, "_DIRECT_STEP_NBYTES", 3 * 4096)
    reads = Reads(monkeypatch)
    with closing(limits.direct_reads(paged, 0)) as steps:
        assert list(islice(steps, 50)) == [3] * 50
        while len(reads.threads) < limits.DIRECT_THREADS:
            next(steps)
    assert reads.flags == {os.O_DIRECT}
    assert len(reads.samples) >= 150
    for name, offset, found in reads.samples:
        number = int(name.split("-")[1].split(".")[0]) * 10 + (offset - 4096) // 4096
        assert found == sample_pixels(number, PAGES).tobytes()
    assert len({found for _, _, found in reads.samples}) > 20


def test_direct_reads_of_many_files_open_only_some(paged: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.measure.limits, "_MAX_FILES", 2)
    reads = Reads(monkeypatch)
    with closing(limits.direct_reads(paged, 0)) as steps:
        for _ in range(20):
            next(steps)
        opened = {Path(os.path.realpath(link)).name for link in Path("/proc/self/fd").iterdir()}
    assert reads.files == {"train-00000.npy", "train-00001.npy"}
    assert "train-00002.npy" not in opened


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        ("os.preadv", OSError(errno.EIO, "Input/output error"), r"train-0000\d.npy"),
        ("shardio.measure.limits.aligned_empty", MemoryError("none left"), "none left"),
    ],
)
def test_an_error_in_a_thread_arrives_with_the_name_of_the_file(
    paged: ShardSet, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception, match: str
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(function, fail)
    with closing(limits.direct_reads(paged, 0)) as steps, pytest.raises(type(error), match=match):
        next(steps)


def test_a_truncated_file_is_an_error(paged: ShardSet) -> None:
    for shard in paged.path.glob("train-0*.npy"):
        os.truncate(shard, 4096 + 512)
    with closing(limits.direct_reads(paged, 0)) as steps, pytest.raises(OSError, match="of 4096 bytes came"):
        next(steps)


def test_why_there_are_no_direct_reads_is_said(make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shards = open_shards(make_set(12))
    monkeypatch.setattr(shardio.measure.limits, "alignment_of", lambda shards: 512)
    assert limits.why_no_direct_reads(shards) == "samples of 90 bytes are not whole sectors of 512 bytes"
    assert limits.why_no_direct_reads(open_shards(make_set(12, PAGES))) is None
    monkeypatch.setattr(shardio.measure.limits, "alignment_of", lambda shards: None)
    monkeypatch.setattr(shardio.measure.limits, "filesystem_kind", lambda path: "oldfs")
    assert limits.why_no_direct_reads(shards) == "O_DIRECT does not work on oldfs"
    monkeypatch.setattr(shardio.measure.limits, "filesystem_kind", lambda path: "")
    assert limits.why_no_direct_reads(shards) == "O_DIRECT does not work on this filesystem"


class FakeTarget:
    """Memory of a device that copies when it is waited for, and not before."""

    def __init__(self) -> None:
        self.unfinished: list[torch.Tensor] = []
        self.sources: list[int] = []
        self.finished = 0

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.unfinished.append(source)
        self.sources.append(source.data_ptr())

    def synchronize(self, device: torch.device) -> None:
        self.finished += len(self.unfinished)
        self.unfinished.clear()


def test_pinned_copies_are_of_whole_batches_in_turn_and_finished_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FakeTarget()
    pinned: list[torch.Tensor] = []
    places: list[object] = []

    def pinned_empty(shape: tuple[int, ...]) -> torch.Tensor:
        pinned.append(torch.empty(shape, dtype=torch.uint8))
        return pinned[-1]

    def device_empty(shape: tuple[int, ...], device: torch.device) -> FakeTarget:
        places.extend((shape, device))
        return target

    monkeypatch.setattr(shardio.measure.limits, "pinned_empty", pinned_empty)
    monkeypatch.setattr(shardio.measure.limits, "device_empty", device_empty)
    monkeypatch.setattr(torch.cuda, "synchronize", target.synchronize)
    device = torch.device("cuda:1")
    images = 0
    with closing(limits.pinned_copies(device, 8, 90)) as steps:
        for count in islice(steps, 3):
            images += count
            assert not target.unfinished
            assert images == target.finished * 8
    assert places == [(8, 90), device]
    assert {tensor.shape for tensor in pinned} == {(8, 90)}
    assert len(pinned) == len(set(target.sources[: limits.SLOTS_IN_TURN])) == limits.SLOTS_IN_TURN


def test_on_the_cpu_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "synchronize")
    limits.synchronize(torch.device("cpu"))
