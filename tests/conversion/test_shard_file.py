"""Shards come out whole and right, or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from disks import FailingDisk, every_failure, failing
from pictures import sample_pixels

from shardio.conversion.writing import shard_file as writer_module
from shardio.conversion.writing.shard_file import ShardFileWriter
from shardio.format.entries import ShardEntry
from shardio.format.layout import pixels_row
from shardio.system.pour import direct_alignment

SHAPE = (3, 5, 3)
NBYTES = 45


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def expected_shard(num_samples: int) -> bytes:
    pixels = b"".join(sample_pixels(i, SHAPE).tobytes() for i in range(num_samples))
    text = b"\x93NUMPY\x01\x00\xf6\x0f{'descr': '|u1', 'fortran_order': False, 'shape': (%d, 3, 5, 3), }" % num_samples
    return text + b" " * (4095 - len(text)) + b"\n" + pixels


def write_shard(path: Path, num_samples: int, reserve_samples: int = 0) -> ShardEntry:
    with ShardFileWriter(path, pixels_row(SHAPE), reserve_samples) as shard:
        for i in range(num_samples):
            shard.append(sample_pixels(i, SHAPE))
        return shard.finish()


def check_shard(path: Path, entry: ShardEntry, num_samples: int) -> None:
    data = path.read_bytes()
    assert data == expected_shard(num_samples)
    assert entry == ShardEntry(path.name, len(data), hashlib.sha256(data).hexdigest(), num_samples, pixels_row(SHAPE))


# --- one shard -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_samples", [1, 2, 3])
def test_any_number_of_samples_fits_any_blocks_and_any_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_samples: int
) -> None:
    # A block that is no whole number of samples, and one that is smaller than a sample.
    for block_nbytes in (block_samples * NBYTES, block_samples * NBYTES + NBYTES - 1, NBYTES // 2):
        monkeypatch.setattr(writer_module, "BLOCK_NBYTES", block_nbytes)
        for num_samples in range(1, 2 * block_samples + 3):
            for reserve_samples in (0, 1, num_samples, num_samples + 1, 10):
                path = tmp_path / "x.npy"
                check_shard(path, write_shard(path, num_samples, reserve_samples), num_samples)


def test_pixels_of_any_layout_are_copied_in(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    with ShardFileWriter(path, pixels_row(SHAPE)) as shard:
        for i in range(4):
            pixels = sample_pixels(i, SHAPE)[::-1].transpose(2, 0, 1).copy().transpose(1, 2, 0)[::-1]
            assert shard.append(pixels) == zlib.crc32(sample_pixels(i, SHAPE).tobytes())
            pixels[:] = 0  # the writer must have its own copy
        check_shard(path, shard.finish(), 4)


def test_a_shard_without_samples_is_refused(tmp_path: Path) -> None:
    for reserve_samples in (0, 3):
        with (
            ShardFileWriter(tmp_path / "x.npy", pixels_row(SHAPE), reserve_samples) as shard,
            pytest.raises(ValueError, match=r"x\.npy: a shard needs at least one sample"),
        ):
            shard.finish()
        assert names(tmp_path) == []


@pytest.mark.parametrize("reserve_samples", [5, 9])
def test_a_shard_is_whole_or_absent_whatever_call_fails_and_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserve_samples: int
) -> None:
    monkeypatch.setattr(writer_module, "BLOCK_NBYTES", 2 * NBYTES)
    monkeypatch.setattr("shardio.system.pour.SYNC_NBYTES", 2 * NBYTES)
    path = tmp_path / "x.npy"

    def do(disk: FailingDisk) -> bool:
        path.unlink(missing_ok=True)
        error = None
        with disk.installed():
            try:
                write_shard(path, 5, reserve_samples)
            except OSError as caught:
                error = caught
        assert error is None or (error.errno == disk.code and str(tmp_path) in str(error)), disk
        assert names(tmp_path) in ([], ["x.npy"]), f"{disk}: a temporary file was left"
        if path.exists():
            assert path.read_bytes() == expected_shard(5), disk
        return error is None

    assert every_failure(do) >= 4 * 8


def test_a_short_write_of_the_header_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_pwrite = os.write, os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        return real_pwrite(descriptor, memoryview(data)[:60], offset)

    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, memoryview(data)[:1000]))
    monkeypatch.setattr(os, "pwrite", pwrite)
    for reserve_samples in (0, 12345, 3):
        path = tmp_path / f"{reserve_samples}.npy"
        check_shard(path, write_shard(path, 3, reserve_samples), 3)


def test_long_shards_are_synced_on_the_way_and_an_error_there_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BLOCK_NBYTES", NBYTES)
    monkeypatch.setattr("shardio.system.pour.SYNC_NBYTES", 2 * NBYTES)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    check_shard(tmp_path / "x.npy", write_shard(tmp_path / "x.npy", 9, 9), 9)
    assert synced
    (tmp_path / "x.npy").unlink()
    monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
    for num_samples in (3, 4, 9):
        with pytest.raises(OSError, match="Input/output error"):
            write_shard(tmp_path / "x.npy", num_samples)
        assert names(tmp_path) == []


def test_leaving_waits_for_a_sync_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BLOCK_NBYTES", NBYTES)
    monkeypatch.setattr("shardio.system.pour.SYNC_NBYTES", NBYTES)
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def fdatasync(descriptor: int) -> None:
        begun.set()
        may_end.wait(60)
        os.fstat(descriptor)  # raises if the descriptor was closed meanwhile
        ended.set()

    def fail_halfway() -> None:
        with ShardFileWriter(tmp_path / "x.npy", pixels_row(SHAPE)) as shard:
            for i in range(5):
                shard.append(sample_pixels(i, SHAPE))
            assert begun.wait(60)
            may_end.set()
            raise ValueError("halfway")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(ValueError, match="halfway"):
        fail_halfway()
    assert ended.is_set()
    assert names(tmp_path) == []


# --- blocks ----------------------------------------------------------------------------------------------------------


PAGE_SHAPE = (32, 128, 1)
"""Samples of 4096 bytes."""


def check_blocks(path: Path, shape: tuple[int, int, int], kept: list[list[int]], spare: int = 0) -> None:
    """Writes blocks of which some rows are kept, with room for `spare` more, and checks the shard."""
    samples = [sample_pixels(i, shape) for i in range(sum(map(len, kept)))]
    left = iter(samples)
    with ShardFileWriter(path, pixels_row(shape), len(samples) + spare) as shard:
        for rows in kept:
            block = shard.take_block()
            block[:] = 0xEE
            for row in rows:
                block[row] = next(left)
            shard.write_block(block, rows)
        entry = shard.finish()
    np.testing.assert_array_equal(np.load(path), np.stack(samples))
    data = path.read_bytes()
    assert entry == ShardEntry(path.name, len(data), hashlib.sha256(data).hexdigest(), len(samples), pixels_row(shape))


class Watch:
    """Notes of every os.write whether it went past the page cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: list[bool] = []
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, data: memoryview) -> int:
        self.direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return self._write(descriptor, data)


@pytest.mark.parametrize("shape", [PAGE_SHAPE, (32, 64, 1), SHAPE])
@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("direct_nbytes", [0, 1 << 62], ids=["direct", "page cache"])
def test_rows_kept_of_blocks_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_nbytes: int, shape: tuple[int, int, int], spare: int
) -> None:
    monkeypatch.setattr(writer_module, "_DIRECT_NBYTES", direct_nbytes)
    monkeypatch.setattr(writer_module, "BLOCK_NBYTES", 4 * int(np.prod(shape)))
    kept = [[0, 1, 2, 3], [0, 2, 3], [], [3], [0, 1], [1, 2], [0, 3], [0, 1, 2, 3]]
    check_blocks(tmp_path / "x.npy", shape, kept, spare)


def test_whole_pages_go_past_the_page_cache_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_blocks(tmp_path / "x.npy", PAGE_SHAPE, [[0]])
    if direct_alignment(tmp_path / "x.npy") is None:
        pytest.skip("no O_DIRECT here")
    monkeypatch.setattr(writer_module, "_DIRECT_NBYTES", 0)
    for shape, kept, expected in (
        (PAGE_SHAPE, [[0, 1], [1], [0, 1]], [True, True, True]),
        ((32, 64, 1), [[0, 1], [0, 1], [1], [0, 1]], [True, True, False, False]),
        (SHAPE, [[0, 1], [0, 1]], [False, False]),
    ):
        monkeypatch.setattr(writer_module, "BLOCK_NBYTES", 2 * int(np.prod(shape)))
        with pytest.MonkeyPatch.context() as patch:
            watch = Watch(patch)
            check_blocks(tmp_path / "x.npy", shape, kept)
            assert watch.direct == [False, *expected], shape  # the header first


def test_small_shards_and_network_filesystems_use_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def directs() -> list[bool]:
        with pytest.MonkeyPatch.context() as patch:
            watch = Watch(patch)
            check_blocks(tmp_path / "x.npy", PAGE_SHAPE, [[0]])
        return watch.direct

    assert directs() == [False, False]
    monkeypatch.setattr(writer_module, "_DIRECT_NBYTES", 0)
    assert directs() == [False, direct_alignment(tmp_path / "x.npy") is not None]
    monkeypatch.setattr(writer_module, "filesystem_kind", lambda path: "nfs4")
    assert directs() == [False, False]


def test_a_filesystem_without_o_direct_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, argument)

    monkeypatch.setattr(writer_module, "_DIRECT_NBYTES", 0)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    check_blocks(tmp_path / "x.npy", PAGE_SHAPE, [[0, 1]])


@pytest.mark.parametrize("most", [1, 512, 4097, 1 << 20])
def test_a_disk_that_takes_other_pieces_than_pages_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Short writes, and EINVAL for whatever does not suit a disk of blocks of 64 kB."""
    monkeypatch.setattr(writer_module, "_DIRECT_NBYTES", 0)
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        data = memoryview(data)[:most]
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and len(data) % (1 << 16):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    check_blocks(tmp_path / "x.npy", PAGE_SHAPE, [list(range(16)), [0, 1, 2], [5]])


@pytest.mark.parametrize(
    ("shape", "count"),
    [((256, 256, 3), 43), ((224, 224, 3), 56), ((1, 1, 1), 8 << 20), ((3000, 1000, 3), 1), ((65, 65, 3), 662)],
)
def test_blocks_are_of_8_mib_or_more_and_of_whole_pages_where_that_costs_little(
    tmp_path: Path, shape: tuple[int, int, int], count: int
) -> None:
    with ShardFileWriter(tmp_path / "x.npy", pixels_row(shape)) as shard:
        block = shard.take_block()
    assert block.shape == (count, *shape)
    assert block.ctypes.data % 4096 == 0
    assert block.flags.c_contiguous
