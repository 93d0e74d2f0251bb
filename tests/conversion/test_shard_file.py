"""Shards and sets come out whole and right, or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import FailingDisk, every_failure
from numpy.typing import NDArray
from pictures import sample_pixels

from shardio.conversion.records import Reject
from shardio.conversion.writing import shard_file as writer_module
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.conversion.writing.shard_file import BLOCK_NBYTES, ShardFileWriter
from shardio.errors import ConvertError
from shardio.format.entries import ShardEntry
from shardio.format.layout import pixels_row
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify
from shardio.system.files import AtomicFile
from shardio.system.pour import set_direct

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


@pytest.mark.parametrize("num_samples", [1, 2, 9])
def test_any_number_of_samples_fits_any_reservation(tmp_path: Path, num_samples: int) -> None:
    for reserve_samples in (0, 1, 2, 3, 8, 9, 10):
        path = tmp_path / f"{reserve_samples}.npy"
        check_shard(path, write_shard(path, num_samples, reserve_samples), num_samples)
    assert len(names(tmp_path)) == 7


@pytest.mark.parametrize("block_samples", [1, 2, 3])
def test_samples_cross_block_boundaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_samples: int) -> None:
    # A block that is no whole number of samples, and one that is smaller than a sample.
    for block_nbytes in (block_samples * NBYTES, block_samples * NBYTES + NBYTES - 1, NBYTES // 2):
        monkeypatch.setattr(writer_module, "BLOCK_NBYTES", block_nbytes)
        for num_samples in range(1, 2 * block_samples + 3):
            for reserve_samples in (0, num_samples, num_samples + 1):
                path = tmp_path / "x.npy"
                check_shard(path, write_shard(path, num_samples, reserve_samples), num_samples)


def _strided(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    large = np.zeros((2 * pixels.shape[0], 3 * pixels.shape[1], pixels.shape[2]), np.uint8)
    large[::2, ::3] = pixels
    return large[::2, ::3]


def _flipped(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]


def _planar(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels.transpose(2, 0, 1).copy().transpose(1, 2, 0)


def _read_only(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    pixels = pixels.copy()
    pixels.flags.writeable = False
    return pixels


@pytest.mark.parametrize("layout", [_strided, _flipped, _planar, np.asfortranarray, _read_only])
def test_pixels_of_any_layout_are_copied_in(
    tmp_path: Path, layout: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
) -> None:
    path = tmp_path / "x.npy"
    with ShardFileWriter(path, pixels_row(SHAPE)) as shard:
        for i in range(4):
            pixels = layout(sample_pixels(i, SHAPE))
            assert shard.append(pixels) == zlib.crc32(sample_pixels(i, SHAPE).tobytes())
            if pixels.flags.writeable:
                pixels[:] = 0  # the writer must have its own copy
        entry = shard.finish()
    check_shard(path, entry, 4)


@pytest.mark.parametrize("shape", [(0, 5, 3), (3, 5), (3, 5, 65537), (3.0, 5, 3)])
def test_a_bad_sample_shape_is_refused_before_a_file_is_made(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must be \(height, width, channels\)") as caught:
        ShardWriter(tmp_path / "out", shape)
    assert repr(shape) in str(caught.value)
    assert names(tmp_path) == []


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
    real, synced = os.fdatasync, threading.Event()

    def fdatasync(descriptor: int) -> None:
        real(descriptor)
        synced.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        check_shard(tmp_path / "x.npy", write_shard(tmp_path / "x.npy", 9, 9), 9)
        assert synced.is_set()
        (tmp_path / "x.npy").unlink()

        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "fdatasync", fail)
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


def page_sample(i: int) -> NDArray[np.uint8]:
    return sample_pixels(i, PAGE_SHAPE)


def write_blocks(path: Path, shape: tuple[int, int, int], kept: list[list[int]], reserve_samples: int) -> ShardEntry:
    """A shard from blocks of which some rows are kept; what comes to row i of block b is sample 100 * b + i."""
    with ShardFileWriter(path, pixels_row(shape), reserve_samples) as shard:
        for number, rows in enumerate(kept):
            block = shard.take_block()
            block[:] = 0xEE
            for row in rows:
                block[row] = sample_pixels(100 * number + row, shape)
            shard.write_block(block, rows)
        return shard.finish()


def check_blocks(path: Path, entry: ShardEntry, shape: tuple[int, int, int], kept: list[list[int]]) -> None:
    samples = [sample_pixels(100 * number + row, shape) for number, rows in enumerate(kept) for row in rows]
    np.testing.assert_array_equal(np.load(path), np.stack(samples))
    data = path.read_bytes()
    assert entry == ShardEntry(path.name, len(data), hashlib.sha256(data).hexdigest(), len(samples), pixels_row(shape))


KEPT = [[0, 1, 2, 3], [0, 2, 3], [], [3], [0, 1], [1, 2], [0, 3], [0, 1, 2, 3]]


@pytest.fixture(params=["page cache", "direct"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether shards of any size are written past the page cache, or none is."""
    direct = bool(request.param == "direct")
    monkeypatch.setattr(writer_module, "_DIRECT_NBYTES", 0 if direct else 1 << 62)
    return direct


class Watch:
    """Notes of every os.write whether it went past the page cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: list[bool] = []
        self.nbytes: list[int] = []
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, data: memoryview) -> int:
        self.direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        self.nbytes.append(len(data))
        return self._write(descriptor, data)


def supports_direct(folder: Path) -> bool:
    with AtomicFile(folder / "probe") as file:
        try:
            set_direct(file.descriptor)
        except OSError:
            return False
        return True


@pytest.mark.parametrize("shape", [PAGE_SHAPE, (32, 64, 1), SHAPE])
@pytest.mark.parametrize("spare", [0, 3])
def test_rows_kept_of_blocks_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, shape: tuple[int, int, int], spare: int
) -> None:
    monkeypatch.setattr(writer_module, "BLOCK_NBYTES", 4 * int(np.prod(shape)))
    reserve_samples = sum(map(len, KEPT)) + spare
    entry = write_blocks(tmp_path / "x.npy", shape, KEPT, reserve_samples)
    check_blocks(tmp_path / "x.npy", entry, shape, KEPT)


def test_whole_pages_go_past_the_page_cache_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not supports_direct(tmp_path):
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
            entry = write_blocks(tmp_path / "x.npy", shape, kept, sum(map(len, kept)))
            assert watch.direct == [False, *expected], shape  # the header first
        check_blocks(tmp_path / "x.npy", entry, shape, kept)


def test_small_shards_and_network_filesystems_use_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def directs() -> list[bool]:
        with pytest.MonkeyPatch.context() as patch:
            watch = Watch(patch)
            write_blocks(tmp_path / "x.npy", PAGE_SHAPE, [[0]], 1)
        return watch.direct

    assert directs() == [False, False]
    monkeypatch.setattr(writer_module, "_DIRECT_NBYTES", 0)
    assert directs() == [False, supports_direct(tmp_path)]
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
    entry = write_blocks(tmp_path / "x.npy", PAGE_SHAPE, [[0, 1]], 2)
    check_blocks(tmp_path / "x.npy", entry, PAGE_SHAPE, [[0, 1]])


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
    kept = [list(range(16)), [0, 1, 2], [5]]
    entry = write_blocks(tmp_path / "x.npy", PAGE_SHAPE, kept, 20)
    check_blocks(tmp_path / "x.npy", entry, PAGE_SHAPE, kept)


def test_writes_have_the_size_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    watch = Watch(monkeypatch)
    shape = (100, 110, 3)
    with ShardFileWriter(tmp_path / "x.npy", pixels_row(shape), 1200) as shard:
        for i in range(1200):
            shard.append(np.full(shape, i % 251, np.uint8))
        shard.finish()
    assert sum(watch.nbytes) == 4096 + 1200 * 33_000
    header, *blocks, rest = watch.nbytes
    assert header == 4096
    assert len(blocks) == 4
    # 33,000 bytes are 8 pages and a bit: 1,024 samples would make whole pages, which are more than a block should be.
    assert all(BLOCK_NBYTES <= nbytes < BLOCK_NBYTES + 33_000 for nbytes in blocks)
    assert rest < BLOCK_NBYTES


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


def test_memory_is_bounded_by_two_blocks_beside_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BLOCK_NBYTES", 4096)
    with ShardFileWriter(tmp_path / "x.npy", pixels_row(PAGE_SHAPE), 100) as shard:
        seen = set()
        mine = [shard.take_block(), shard.take_block()]
        for _ in range(98):
            seen.add(mine[0].ctypes.data)
            shard.write_block(mine.pop(0), [0])
            mine.append(shard.take_block())
        assert 3 <= len(seen) <= 4


# --- a whole set -----------------------------------------------------------------------------------------------------


def test_a_set_has_the_shards_samples_and_checksums_that_its_manifest_says(make_set: Callable[..., Path]) -> None:
    out = make_set(25, samples_per_shard=10)
    manifest = load_manifest(out)
    split = manifest.splits["train"]
    assert [shard.num_samples for shard in split.shards] == [10, 10, 5]
    assert [shard.file for shard in split.shards] == [f"train-0000{n}.npy" for n in range(3)]
    entries = [split.index, *split.shards]
    assert names(out) == sorted(["manifest.json", *(entry.file for entry in entries)])
    for entry in entries:
        data = (out / entry.file).read_bytes()
        assert entry.nbytes == len(data), entry.file
        assert entry.sha256 == hashlib.sha256(data).hexdigest(), entry.file
    shards = open_shards(out)
    for i, (image, label) in enumerate(shards):
        np.testing.assert_array_equal(image, sample_pixels(i))
        assert label == i % 7
        assert shards.index["key"][i] == b"c%d/%d.png" % (i % 7, i)
        assert shards.index["crc32"][i] == zlib.crc32(sample_pixels(i).tobytes())


@pytest.mark.parametrize("samples_per_shard", [1, 2, 5])
def test_shards_are_cut_when_they_are_full(tmp_path: Path, samples_per_shard: int) -> None:
    for num_samples in (1, 2, 5, 6):
        for spare in (0, NBYTES - 1, *((-1, -4096) if samples_per_shard == 1 else ())):  # at least one
            out = tmp_path / f"{num_samples}-{spare}"
            nbytes = 4096 + samples_per_shard * NBYTES + spare
            with ShardWriter(out, SHAPE, shard_nbytes=nbytes) as writer:
                for i in range(num_samples):
                    writer.append(sample_pixels(i, SHAPE), 0)
            counts = [shard.num_samples for shard in load_manifest(out).splits["train"].shards]
            whole, rest = divmod(num_samples, samples_per_shard)
            assert counts == [samples_per_shard] * whole + [rest] * (rest > 0)


def test_interleaved_splits_stay_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    splits = ("train", "val", "test-v2")
    with ShardWriter(out, SHAPE, classes=["a", "b"], shard_nbytes=4096 + 2 * NBYTES) as writer:
        for i in range(14):
            writer.append(sample_pixels(i, SHAPE), i % 2, split=splits[min(i % 4, 2)], key=f"k{i}")
    manifest = load_manifest(out)
    assert set(manifest.splits) == set(splits)
    for split in splits:
        wanted = [i for i in range(14) if splits[min(i % 4, 2)] == split]
        shards = open_shards(out, split)
        assert shards.index["key"].tolist() == [b"k%d" % i for i in wanted]
        assert shards.labels.tolist() == [i % 2 for i in wanted]
        for sample, i in zip(shards, wanted, strict=True):
            np.testing.assert_array_equal(sample.image, sample_pixels(i, SHAPE))
    assert verify(out).ok


def test_default_keys_are_the_numbers_in_the_split(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ShardWriter(out, SHAPE, shard_nbytes=4096 + 2 * NBYTES) as writer:
        for i in range(11):
            writer.append(sample_pixels(i, SHAPE), 0, split="val" if i % 3 == 0 else "train")
        writer.append(sample_pixels(0, SHAPE), 0, key="own")
        writer.append(sample_pixels(0, SHAPE), 0)
    assert open_shards(out).index["key"].tolist() == [*(b"%d" % i for i in range(7)), b"own", b"8"]
    assert open_shards(out, "val").index["key"].tolist() == [b"%d" % i for i in range(4)]
    assert set(open_shards(out).index["source_height"]) == {SHAPE[0]}
    assert set(open_shards(out).index["source_width"]) == {SHAPE[1]}


@pytest.mark.parametrize("length", [188, 190, 200])
def test_what_is_published_under_a_long_split_name_can_be_opened(tmp_path: Path, length: int) -> None:
    """File names have room for 200 characters, and they are longer than the split's."""
    split = "s" * length
    try:
        with ShardWriter(tmp_path / "out", SHAPE) as writer:
            writer.append(sample_pixels(0, SHAPE), 0, split=split)
    except ValueError as error:
        message = str(error)
        assert length > 188, message
    else:
        assert len(open_shards(tmp_path / "out", split)) == 1


def test_the_longest_keys_the_largest_numbers_and_any_bytes_are_taken(tmp_path: Path) -> None:
    keys: list[bytes | str] = [b"\xff\xfe", b"a\0b", b" ", b"x" * 65532, "\u00fc/\U0001f600"]
    labels = [0, -1, (1 << 63) - 1, -(1 << 63), 7]
    with ShardWriter(tmp_path / "out", SHAPE) as writer:
        for key, label in zip(keys, labels, strict=True):
            writer.append(sample_pixels(0, SHAPE), label, key=key, source_size=((1 << 32) - 1, 1))
    shards = open_shards(tmp_path / "out")
    assert shards.index["key"].tolist() == [key.encode() if isinstance(key, str) else key for key in keys]
    assert shards.labels.tolist() == labels
    assert set(shards.index["source_height"]) == {(1 << 32) - 1}
    assert shards.classes == ()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        *(
            ({"image": pixels}, ValueError, f"uint8 pixels .*found {pixels.dtype}")
            for pixels in (
                np.zeros((3, 5), np.uint8),
                np.zeros((3, 5, 1), np.uint8),
                np.zeros((1, 3, 5, 3), np.uint8),
                np.zeros(SHAPE, np.int8),
                np.zeros(SHAPE, bool),
            )
        ),
        *(({"label": label}, TypeError, "label must be an integer") for label in (0.5, 1.0, "1", None, np.float32(1))),
        *(({"label": label}, ValueError, f"label .*{label}$") for label in (1 << 63, -(1 << 63) - 1)),
        *(({"key": key}, ValueError, "key must not end in a NUL byte") for key in (b"a\0", "a\0", b"\0")),
        *(({"key": b"x" * n}, ValueError, f"key .*found {n}") for n in (65_533, 65_537, 1_000_000)),
        *(({"source_size": (5, n)}, ValueError, f"source_size .*{n}") for n in (-1, 1 << 32)),
        *(({"source_size": (n, 5)}, ValueError, f"source_size .*{n}") for n in (-1, 1 << 32, 7.5)),
        *(({"split": split}, ValueError, "split must match") for split in ("", "../x", "a/b", ".hidden", "x" * 201)),
    ],
)
def test_a_refused_sample_adds_nothing_to_the_set(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with ShardWriter(tmp_path / "out", SHAPE) as writer:
        for i in range(2):
            with pytest.raises(kind, match=words) as caught:
                writer.append(**{"image": sample_pixels(9, SHAPE), "label": 9, **arguments})
            assert len(str(caught.value)) < 1000
            writer.append(sample_pixels(i, SHAPE), i)
    assert names(tmp_path / "out") == ["manifest.json", "train-00000.npy", "train-index.npy"]
    assert open_shards(tmp_path / "out").labels.tolist() == [0, 1]
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"classes": ["cat", "dog", "cat"]}, ValueError, "distinct"),
        *(
            ({"classes": ["a", "b"], which: wrong}, kind, f"{which} must .*, found .*{found}")
            for which in ("classes", "class_names")
            for wrong, kind, found in (
                ([0, 1], TypeError, "0"),
                ([b"a", b"b"], TypeError, "b'a'"),
                (["a", "\ud800"], ValueError, "ud800"),
            )
        ),
    ],
)
def test_classes_that_no_manifest_can_hold_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        ShardWriter(tmp_path / "out", SHAPE, **arguments)
    assert not (tmp_path / "out").exists()


def test_labels_must_be_classes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", SHAPE, classes=["cat", "dog"]) as writer:
        for label in (0, 1, np.int64(1), np.uint8(0)):
            writer.append(sample_pixels(0, SHAPE), label)  # type: ignore[arg-type]
        for label in (-1, 2, 1 << 63, -(1 << 63) - 1):
            with pytest.raises(ValueError, match=rf"label must be from 0 to 1, found {label}$"):
                writer.append(sample_pixels(0, SHAPE), label)
    assert open_shards(tmp_path / "out").labels.tolist() == [0, 1, 1, 0]


def test_no_samples_are_no_set(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConvertError) as caught, ShardWriter(out, SHAPE):
        pass
    assert str(caught.value) == f"{out}: expected at least one sample, found none, so nothing is published"
    assert not out.exists()


@pytest.mark.parametrize(
    ("num_samples", "error", "there"),
    [(0, ValueError("x"), False), (1, KeyboardInterrupt(), True), (4, ValueError("x"), True), (5, OSError(), False)],
)
def test_an_exception_publishes_nothing_and_leaves_what_was_there(
    tmp_path: Path, num_samples: int, error: BaseException, there: bool
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()

    def fail_halfway() -> None:
        with ShardWriter(out, SHAPE, shard_nbytes=4096 + 2 * NBYTES) as writer:
            for i in range(num_samples):
                for split in ("train", "val"):
                    writer.append(sample_pixels(i, SHAPE), 0, split=split)
            raise error

    with pytest.raises(type(error)):
        fail_halfway()
    assert names(tmp_path) == (["out"] if there else [])
    assert not list(tmp_path.glob("out/*"))
    # The folder can be used again.
    with ShardWriter(out, SHAPE) as writer:
        writer.append(sample_pixels(0, SHAPE), 0)
    assert verify(out).ok


def write_small_set(out: Path) -> None:
    with ShardWriter(out, SHAPE, classes=["a", "b"], shard_nbytes=4096 + 2 * NBYTES) as writer:
        for i in range(3):
            writer.append(sample_pixels(i, SHAPE), i % 2)
        writer.append(sample_pixels(3, SHAPE), 0, split="val")


def test_a_set_is_published_or_the_folder_is_empty_whatever_call_fails(tmp_path: Path) -> None:
    numbers = iter(range(10_000))
    left: list[str] = []

    def do(disk: FailingDisk) -> bool:
        out = tmp_path / str(next(numbers))
        out.mkdir()
        error = None
        with disk.installed():
            try:
                write_small_set(out)
            except OSError as caught:
                error = caught
        assert error is None or error.errno == disk.code, disk
        if (out / "manifest.json").exists():
            assert verify(out).ok, disk
            assert len(open_shards(out)) == 3
        elif names(out):
            left.append(f"{disk}: {names(out)}")
        return error is None

    # Three shards, two indexes, rejects and manifest, each with six calls at the least.
    assert every_failure(do) >= 4 * 7 * 6
    assert not left, left


@pytest.mark.parametrize("name", ["manifest.json", "train-00000.npy", ".hidden", "notes.txt", "folder"])
def test_a_folder_with_anything_in_it_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(ConvertError) as caught:
        ShardWriter(tmp_path, SHAPE)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: expected no folder or an empty folder, found {name!r} in it"), message
    assert "write to a new folder" in message
    assert names(tmp_path) == [name]


def test_what_a_killed_writer_left_is_no_obstacle_and_changes_no_byte(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / ".train-00000.npy.0123456789abcdef.tmp").write_bytes(b"half")
    for name in ("one", "two"):
        write_small_set(tmp_path / name)
    assert names(tmp_path / "one") == names(tmp_path / "two")
    for name in names(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_the_folder_is_made_with_its_parents_and_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    write_small_set(tmp_path / "a" / "b" / "c")
    assert verify(tmp_path / "a" / "b" / "c").ok
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(FileExistsError, match="file"):
        ShardWriter(tmp_path / "file", SHAPE)
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.parametrize("key", [b"n01/a.JPEG", b"\xff\xfe", "\u00fc".encode(), b'"\\\n'])
def test_rejects_are_lines_of_ascii_json(key: bytes) -> None:
    line = Reject("train", key, "damaged", "a sentence with \u00fc\n").to_line()
    assert line.isascii()
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    document = json.loads(line)
    assert set(document) == {"split", "key", "reason", "detail"}
    assert os.fsencode(document["key"]) == key
    assert document["detail"] == "a sentence with \u00fc\n"
