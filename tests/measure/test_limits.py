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
from unittest import mock

import numpy as np
import pytest
import torch
from disks import raising
from numpy.typing import NDArray
from pictures import sample_pixels
from simulated_cuda import Simulation

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


def test_memcpy_moves_one_large_block_of_whole_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_NBYTES", 1000)
    with closing(limits.memcpy(90)) as steps:
        assert list(islice(steps, 3)) == [11, 11, 11]
    with closing(limits.memcpy(5000)) as steps:
        assert next(steps) == 1


def test_take_copies_random_samples_into_aligned_slots_in_turn(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards(make_set(25))
    pictures = {sample_pixels(i).tobytes() for i in range(25)}
    make, slots = limits.aligned_empty, []

    def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        slots.append(make(shape))
        return slots[-1]

    monkeypatch.setattr(limits, "aligned_empty", aligned_empty)
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
    monkeypatch.setattr(limits, "_DIRECT_STEP_NBYTES", 3 * 4096)
    monkeypatch.setattr(limits, "_MAX_FILES", 2)  # of three: it opens only these
    calls: list[tuple[str, str, int, int, bytes]] = []
    preadv = os.preadv

    def read(descriptor: int, buffers: list[Any], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        calls.append((threading.current_thread().name, name, direct, offset, bytes(buffers[0])))
        return count

    monkeypatch.setattr(os, "preadv", read)
    with closing(limits.direct_reads(paged, 0)) as steps:
        assert list(islice(steps, 50)) == [3] * 50
        while len({thread for thread, *_ in calls}) < limits.DIRECT_THREADS:
            next(steps)
        opened = {Path(os.path.realpath(link)).name for link in Path("/proc/self/fd").iterdir()}
    assert "train-00002.npy" not in opened
    assert {name for _, name, *_ in calls} == {"train-00000.npy", "train-00001.npy"}
    assert len(calls) >= 150
    for _, name, direct, offset, found in calls:
        number = int(name.split("-")[1].split(".")[0]) * 10 + (offset - 4096) // 4096
        assert (direct, found) == (os.O_DIRECT, sample_pixels(number, PAGES).tobytes())
    assert len({found for *_, found in calls}) > 15


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
    monkeypatch.setattr(function, raising(error))
    with closing(limits.direct_reads(paged, 0)) as steps, pytest.raises(type(error), match=match):
        next(steps)


def test_a_truncated_file_is_an_error(paged: ShardSet) -> None:
    for shard in paged.path.glob("train-0*.npy"):
        os.truncate(shard, 4096 + 512)
    with closing(limits.direct_reads(paged, 0)) as steps, pytest.raises(OSError, match="expected 4096 bytes"):
        next(steps)


def test_why_there_are_no_direct_reads_is_said(make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shards = open_shards(make_set(12))
    monkeypatch.setattr(limits, "alignment_of", lambda shards: 512)
    assert limits.why_no_direct_reads(shards) == "samples of 90 bytes are not whole sectors of 512 bytes"
    assert limits.why_no_direct_reads(open_shards(make_set(12, PAGES))) is None
    monkeypatch.setattr(limits, "alignment_of", lambda shards: None)
    monkeypatch.setattr(limits, "filesystem_kind", lambda path: "oldfs")
    assert limits.why_no_direct_reads(shards) == "O_DIRECT does not work on oldfs"
    monkeypatch.setattr(limits, "filesystem_kind", lambda path: "")
    assert limits.why_no_direct_reads(shards) == "O_DIRECT does not work on this filesystem"


def test_pinned_copies_are_of_whole_batches_in_turn_and_finished_at_every_step() -> None:
    with Simulation() as device, mock.patch.object(device, "copy_in", wraps=device.copy_in) as copy_in:
        images = 0
        with closing(limits.pinned_copies(torch.device("cuda:0"), 8, 90)) as steps:
            for count in islice(steps, 3):
                images += count
                assert not any(stream.queue for stream in device.streams)
                assert (device.copies, device.copied_nbytes) == (images // 8, images * 90)
        assert device.waits == {"synchronize": 3}  # the host also waits for memory that is not pinned
    sources = [call.args[1].data_ptr() for call in copy_in.call_args_list]
    assert len(set(sources)) == limits.SLOTS_IN_TURN
    assert sources[limits.SLOTS_IN_TURN :] == sources[: -limits.SLOTS_IN_TURN]
