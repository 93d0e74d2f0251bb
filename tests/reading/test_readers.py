"""Every reader gives the bytes of ShardSet.gather, or an error that names what could not be read."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from command import printed_by
from deadlines import until
from folders import drop, flip
from leaks import num_descriptors
from numpy.typing import NDArray
from pictures import sample_pixels

import shardio.format.opening
import shardio.kernels.rowread
import shardio.reading.file_reader
import shardio.reading.mapping
from shardio.changes.change import change
from shardio.errors import FormatError
from shardio.format.entries import FileEntry
from shardio.format.layout import SampleShape
from shardio.kernels import _rowread
from shardio.kernels.rowcopy import Windows
from shardio.reading.file_reader import FileReader
from shardio.reading.layout import SplitLayout
from shardio.reading.mapping import resident_share
from shardio.reading.reader import MappedReader, Reader, Request
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.selection import Selection
from shardio.system.opening import FolderHandle, OpenFile
from shardio.system.pour import aligned_empty, direct_alignment

SMALL = (6, 5, 3)
ENGINES = ["mmap", "pread", "drop", "direct 512", "direct 4096"]
MakeReader = Callable[..., Reader]


def make_reader(shards: ShardSet, engine: str) -> Reader:
    if engine == "mmap":
        return MappedReader(shards)
    if engine.startswith("direct"):
        needed = direct_alignment(shards.path / "train-00000.npy")
        if needed is None or needed > int(engine.split()[1]):
            pytest.skip("O_DIRECT does not work like this here")
        return FileReader(shards, alignment=int(engine.split()[1]))
    return FileReader(shards, drop_behind=engine == "drop")


@pytest.fixture
def reader_of(make_set: Callable[..., Path], closing: ExitStack) -> MakeReader:
    """reader_of(engine, ...): of make_set(...) or a set that is given, closed in the end."""

    def make(engine: str, *of: Any) -> Reader:
        shards = of[0] if isinstance(of[0], ShardSet) else open_shards(make_set(*of))
        return closing.enter_context(contextlib.closing(make_reader(shards, engine)))

    return make


def pixels_of(indices: Iterable[int], shape: SampleShape = SMALL) -> NDArray[np.uint8]:
    return np.stack([sample_pixels(i, shape) for i in indices])


def read(reader: Reader, indices: Sequence[int] | NDArray[np.int64], shape: SampleShape = SMALL) -> NDArray[np.uint8]:
    """Reads into aligned memory, with a margin that must stay as it is."""
    nbytes = int(np.prod(shape))
    memory = aligned_empty((len(indices) * nbytes + 8192,))
    memory.fill(0xEE)
    end = len(indices) * nbytes
    out = memory[:end].reshape(len(indices), *shape)
    reader.copy("", np.asarray(indices, np.int64), out)
    assert (memory[end:] == 0xEE).all()
    return out


def assert_reads(reader: Reader, indices: Sequence[int], shape: SampleShape = SMALL) -> None:
    assert np.array_equal(read(reader, indices, shape), pixels_of(indices, shape))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("shape", "request_nbytes"),
    [(SMALL, 1 << 20), ((64, 64, 1), 1 << 20), ((63, 65, 2), 1 << 20), ((101, 100, 3), 8192), ((96, 128, 1), 8192)],
)
def test_random_batches_of_any_shape_are_right(
    shape: SampleShape, request_nbytes: int, engine: str, reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardio.reading.file_reader, "_REQUEST_NBYTES", request_nbytes)
    monkeypatch.setattr(shardio.reading.file_reader, "_DETOUR_NBYTES", request_nbytes)
    reader = reader_of(engine, 50, shape, 13)
    rng = np.random.default_rng(1)
    pictures = pixels_of(range(50), shape)
    for size in (0, 1, 2, 17, 100):
        batches = [rng.integers(0, 50, size), np.arange(size) % 50, 49 - np.arange(size) % 50]
        batches += [np.sort(rng.integers(0, 50, size)), np.full(size, 49), np.arange(size) * 2 % 50]
        for indices in batches:
            assert np.array_equal(read(reader, indices, shape), pictures[indices])
            unaligned = np.empty(len(indices) * pictures[0].nbytes + 1, np.uint8)[1:].reshape(len(indices), *shape)
            reader.copy("", indices, unaligned)
            assert np.array_equal(unaligned, pictures[indices])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_column_of_the_index_can_be_read(
    engine: str, make_set: Callable[..., Path], reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards(make_set(40, (1, 1, 1)))
    indices = np.array([39, 0, 7, 7, 21])
    for outcome in ("whole", "nothing"):
        monkeypatch.setattr(shardio.kernels.rowread, "_native", Stopping(outcome))
        reader = reader_of(engine, shards)
        for name in shards.index.dtype.names or ():
            expected = shards.index[name][indices]
            np.testing.assert_array_equal(reader.column_of(name, indices), expected, strict=True)
            assert len(reader.column_of(name, indices[:0])) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_eight_threads_at_once_get_their_own_samples(
    engine: str, reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (28, 28, 3)
    monkeypatch.setattr(shardio.system.opening, "most_open", lambda: 2)
    reader = reader_of(engine, 120, shape, 10)
    pictures = pixels_of(range(120), shape)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(5):
            indices = rng.integers(0, 120, rng.integers(0, 40))
            reader.will_read(Request(indices))
            assert np.array_equal(read(reader, indices, shape), pictures[indices])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert reader.counts().nbytes > 0
    assert reader.counts().retries == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hint_never_fails(engine: str, reader_of: MakeReader) -> None:
    reader = reader_of(engine, 20)
    hint: Any
    for hint in ([], [0], [19, 19, 3], [-1, 5, 20], [1 << 62], range(3000), None, "x", [[1, 2]], [0.5]):
        reader.will_read(Request(np.array(hint)))
    assert_reads(reader, [3])


def test_samples_side_by_side_are_one_request(reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of("pread", 30)
    monkeypatch.setattr(os, "preadv", preadv := Mock(wraps=os.preadv))
    read(reader, [12, 3, 13, 5, 11, 4, 4, 20])
    calls = [(offset, len(buffers)) for _, (_, buffers, offset), _ in preadv.mock_calls]
    assert calls == [(4096 + 3 * 90, 3), (4096 + 90, 3), (4096, 1)]


def cold(make_set: Callable[..., Path]) -> ShardSet:
    """Samples of 16 pages, none of them in the page cache."""
    shards = open_shards(make_set(64, (256, 256, 1), 32))
    drop(shards.path)
    if shards.resident_share() != 0.0:
        pytest.skip("this filesystem keeps all files in memory")
    return shards


@pytest.mark.parametrize(("engine", "share"), [("drop", 0), ("direct 4096", 0), ("pread", 0.25), ("mmap", 0.25)])
def test_the_page_cache_gets_what_is_read_and_nothing_around_it_or_nothing(
    engine: str, share: float, make_set: Callable[..., Path], reader_of: MakeReader
) -> None:
    shards = cold(make_set)
    reader = reader_of(engine, shards)
    if engine != "mmap":
        read(reader, [0, 63], (256, 256, 1))  # opens the files: of their headers the kernel reads on
    drop(shards.path)
    read(reader, np.arange(0, 64, 4)[::-1], (256, 256, 1))
    assert shards.resident_share() == share


def test_an_announced_batch_comes_into_the_page_cache_by_itself_and_is_counted(make_set: Callable[..., Path]) -> None:
    shards = cold(make_set)
    reader = MappedReader(shards)
    assert reader.begin_epoch()
    assert reader.min_part_nbytes == 0  # all threads wait for storage
    reader.will_read(Request(np.arange(8)))
    until(lambda: shards.resident_share(np.arange(8)) == 1.0)
    assert shards.resident_share() == 0.125
    read(reader, range(8), (256, 256, 1))
    assert (reader.counts().looked_for, reader.counts().found) == (8, 8)
    read(reader, range(32, 64, 4), (256, 256, 1))  # was not announced
    assert (reader.counts().looked_for, reader.counts().found) == (16, 8)
    reader.will_read(Request(np.arange(64)))
    until(lambda: not reader.begin_epoch())
    assert reader.min_part_nbytes > 0
    read(reader, range(8, 16), (256, 256, 1))
    assert (reader.counts().looked_for, reader.counts().found) == (16, 8)  # nothing is announced


def test_small_rows_are_announced_only_where_one_in_a_hundred_is_missing(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for side, share, announced in [(64, 0.99, False), (64, 0.98, True), (160, 0.998, True), (160, 1.0, False)]:
        monkeypatch.setattr(ShardSet, "resident_share", lambda shards, name="", share=share: share)
        assert MappedReader(open_shards(make_set(2, (side, side, 1)))).begin_epoch() is announced, (side, share)


def test_only_the_lines_that_windows_cross_are_announced(make_set: Callable[..., Path]) -> None:
    """A line has 256 bytes, a page 16 lines, and the pixels begin on a page."""
    shards = cold(make_set)
    windows = Windows.of_one_size(16, 9, np.array([17, 32, 32]), np.array([0, 200, 247]))
    MappedReader(shards).will_read(Request(np.array([40, 3, 3]), windows=windows))
    shard_pages = [rows.reshape(-1, 4096) for rows in shards.mapped().file_rows]

    def in_cache() -> list[int]:
        return [i for i in range(1024) if resident_share(shard_pages[i // 512], np.array([i % 512]))]

    until(lambda: in_cache() == [3 * 16 + 2, 40 * 16 + 1, 40 * 16 + 2])


def test_the_kernel_does_not_tell_of_another_users_files(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards(make_set(20))
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert shards.resident_share() is None
    assert MappedReader(shards).begin_epoch()


@pytest.mark.parametrize("direct", [False, True])
def test_few_files_are_open_at_a_time_and_none_after_the_end(
    direct: bool, make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = shardio.system.opening
    monkeypatch.setattr(opening, "most_open", lambda: 5 * len(opening._LIVE.all()))  # other tests may have files, too
    shards = open_shards(make_set(60, (6, 5, 3), 2))
    before = num_descriptors()
    reader = make_reader(shards, "direct 4096" if direct else "pread")
    for indices in (np.arange(60), np.random.default_rng(0).permutation(60)):
        read(reader, indices)
        assert num_descriptors() == before + 6  # with the set's folder
    reader.close()
    reader.close()
    assert num_descriptors() == before
    with pytest.raises(RuntimeError, match="closed"):
        read(reader, [1])
    reader = make_reader(shards, "pread")
    read(reader, [1])
    del reader
    assert num_descriptors() == before


def test_sets_of_a_mixture_share_64_descriptors(make_set: Callable[..., Path], tmp_path: Path) -> None:
    script = """
import os, resource, sys
from shardio import ShardLoader
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sets = {path: 1 for path in sys.argv[1:]}
with ShardLoader(sets, 32, epoch_batches=10, io="pread", device="cpu", num_threads=4, return_indices=True) as loader:
    for images, labels, indices, more in loader:
        for image, index in zip(images, indices.tolist()):
            assert (image == loader.dataset[index][0]).all()
    assert len(os.listdir("/proc/self/fd")) < 55
"""
    out = make_set(60, (6, 5, 3), 2)
    paths = [out]
    for number in range(5):
        paths.append(tmp_path / f"part{number}")
        change(out, paths[-1], drop=Selection(indices=[number]))
    assert printed_by("-c", script, *paths) == ""


def test_without_a_free_descriptor_those_of_other_shards_are_given_back(
    reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch, no_pauses: list[float]
) -> None:
    reader = reader_of("pread", 60, SMALL, 2)
    limit, open_file = num_descriptors() + 3, SplitLayout.open_file

    def limited(layout: SplitLayout, entry: FileEntry, folder: FolderHandle | None = None) -> OpenFile:
        if num_descriptors() >= limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(layout, entry, folder)

    monkeypatch.setattr(SplitLayout, "open_file", limited)
    assert_reads(reader, np.random.default_rng(0).permutation(60).tolist())
    assert reader.counts().retries > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_closing_while_others_read_ends_them_well(
    engine: str, reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardio.system.opening, "most_open", lambda: 2)
    pictures = pixels_of(range(60))
    for _ in range(2):
        reader, started = reader_of(engine, 60, SMALL, 2), threading.Barrier(4)

        def work(_: int, reader: Reader = reader, started: threading.Barrier = started) -> None:
            started.wait(10)
            with contextlib.suppress(RuntimeError):  # closed
                for _ in range(20):
                    assert np.array_equal(read(reader, np.arange(60)[::-1]), pictures[::-1])

        with ThreadPoolExecutor(3) as pool:
            readings = pool.map(work, range(3), timeout=10)
            started.wait(10)
            reader.close()
            list(readings)


class Faults:
    """Stands before os.preadv. Each call takes the next of `plan`, or `rest`: an error to raise, a number of bytes that
    come at most, or None to let it pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan: list[OSError | int | None] = []
        self.rest: OSError | int | None = None
        self.calls = 0
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self)
        monkeypatch.setattr(shardio.kernels.rowread, "_native", Stopping("nothing"))  # which reads without it

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.calls += 1
        fault = self.plan.pop(0) if self.plan else self.rest
        if isinstance(fault, OSError):
            raise fault
        count = self._preadv(descriptor, buffers, offset)
        if fault is None or count <= fault:
            return count
        skip = fault
        for buffer in buffers:  # bytes that did not come are not there either
            np.asarray(buffer)[min(skip, len(buffer)) :] = 0xDD
            skip = max(0, skip - len(buffer))
        return fault


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


FILE_ENGINES = [engine for engine in ENGINES if engine != "mmap"]
TRANSIENT = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT]


@pytest.fixture(params=FILE_ENGINES)
def opened(request: pytest.FixtureRequest, make_set: Callable[..., Path], reader_of: MakeReader) -> tuple[Path, Reader]:
    """A set of 20 samples, ten in a shard, and its reader."""
    path = make_set(20)
    return path, reader_of(request.param, 20)


def test_an_error_that_passes_is_not_seen(opened: tuple[Path, Reader], faults: Faults, no_pauses: list[float]) -> None:
    _, reader = opened
    faults.plan = [failure(errno.EIO), None, failure(errno.ESTALE), failure(errno.ETIMEDOUT)]
    assert_reads(reader, [13, 2, 19, 5])
    assert reader.counts().retries == len(no_pauses) == 3
    assert sum(no_pauses) < 1


@pytest.mark.parametrize("code", [*TRANSIENT, errno.EACCES])
def test_an_error_that_stays_is_raised_and_names_what_could_not_be_read(
    code: int, opened: tuple[Path, Reader], faults: Faults, no_pauses: list[float]
) -> None:
    path, reader = opened
    faults.calls, faults.rest = 0, failure(code)
    with pytest.raises(type(failure(code)), match=rf"sample 17 .*byte {4096 + 7 * 90} ") as caught:
        read(reader, [17, 18])
    assert caught.value.errno == code
    assert caught.value.filename == str(path / "train-00001.npy")
    assert f"attempts: {faults.calls}" in str(caught.value)
    assert faults.calls == (4 if code in TRANSIENT else 1)
    assert len(no_pauses) == faults.calls - 1
    faults.rest = 0  # a read that never ends
    with pytest.raises(OSError, match=r"only 0 of \d+ bytes came: reading sample 17"):
        read(reader, [17])
    faults.rest = None
    assert_reads(reader, [17, 18])


@pytest.mark.parametrize("engine", FILE_ENGINES)
@pytest.mark.parametrize("shape", [SMALL, (64, 64, 1)])
def test_whatever_comes_in_pieces_is_put_together(
    shape: SampleShape, engine: str, reader_of: MakeReader, faults: Faults, no_pauses: list[float]
) -> None:
    reader = reader_of(engine, 20, shape)
    rng = np.random.default_rng(0)
    for most in (1, 89, 90, 513, 4096, 9000):
        for indices in ([13], [13, 14, 15], [3, 4, 5, 19, 2, 7], rng.integers(0, 20, 30).tolist()):
            faults.plan = [most, most, None, most, 2 * most, 3 * most, None, None, most]
            assert_reads(reader, indices, shape)


def test_a_stale_file_is_opened_again(opened: tuple[Path, Reader], faults: Faults, no_pauses: list[float]) -> None:
    path, reader = opened
    shard = path / "train-00001.npy"
    data = shard.read_bytes()
    read(reader, [13])
    shard.unlink()
    faults.plan = [failure(errno.ESTALE)]
    with pytest.raises(FormatError, match=r"train-00001\.npy: .* found nothing"):
        read(reader, [13])
    shard.write_bytes(data)
    assert_reads(reader, [13])


def test_a_shard_that_is_cut_while_it_is_open_is_an_error_and_no_signal(opened: tuple[Path, Reader]) -> None:
    path, reader = opened
    read(reader, [13])
    whole = (path / "train-00001.npy").stat().st_size
    for nbytes in (whole - 1, whole - 91, 4096, 10, 0):
        os.truncate(path / "train-00001.npy", nbytes)
        with pytest.raises(FormatError, match=rf"train-00001\.npy: expected {whole} bytes.*found {nbytes} bytes"):
            read(reader, [19])
        assert_reads(reader, [7])


@pytest.mark.parametrize("engine", FILE_ENGINES)
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("the link is moved", ""),
        ("the folder is renamed", ""),
        ("the same set is copied over it", ""),
        ("the files are touched", ""),
        ("a shard is replaced", "replaced"),
        ("another set is copied over it", "replaced"),
        ("a shard becomes a link", "train-00001.npy: .* a symbolic link"),
        ("a shard becomes smaller", "train-00001.npy: expected 4996 bytes.*found 4906"),
    ],
)
def test_a_reader_reads_the_set_that_was_opened_and_no_other(
    what: str,
    error: str,
    engine: str,
    make_set: Callable[..., Path],
    reader_of: MakeReader,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(shardio.system.opening, "most_open", lambda: 1)
    path, link = make_set(20), tmp_path / "current"
    same, other = (Path(shutil.copytree(path, tmp_path / name)) for name in ("same", "other"))
    for number in (0, 1):
        flip(other / f"train-{number:05d}.npy", 4096 + 3 * 90)
        os.utime(other / f"train-{number:05d}.npy")
    link.symlink_to(path)
    reader = reader_of(engine, open_shards(link))
    if what == "the link is moved":
        link.unlink()
        link.symlink_to(other)
    elif what == "the folder is renamed":
        path.rename(tmp_path / "old")
        other.rename(path)
    elif what == "a shard is replaced":
        (other / "train-00001.npy").replace(path / "train-00001.npy")
    elif what == "a shard becomes smaller":
        (make_set(20, SMALL, 9) / "train-00001.npy").replace(path / "train-00001.npy")
    elif what == "a shard becomes a link":
        (path / "train-00001.npy").rename(path / "other")
        (path / "train-00001.npy").symlink_to("other")
    elif what == "the files are touched":
        for file in path.iterdir():
            os.utime(file)
    else:
        shutil.rmtree(path)
        (same if what.startswith("the same") else other).rename(path)
    with pytest.raises(FormatError, match=error) if error else contextlib.nullcontext():
        for _ in range(2):
            assert_reads(reader, [3, 13])


def test_a_reader_reads_the_open_files_of_a_set_that_was_deleted_and_names_others(
    opened: tuple[Path, Reader],
) -> None:
    path, reader = opened
    read(reader, [3])
    shutil.rmtree(path)
    assert_reads(reader, [7])
    with pytest.raises(FormatError, match=r"train-00001\.npy: .* found nothing"):
        read(reader, [13])


def test_a_filesystem_that_numbers_files_anew_costs_one_file_to_be_hashed(
    make_set: Callable[..., Path], reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardio.system.opening, "most_open", lambda: 1)
    path = make_set(40)
    reader = reader_of("pread", 40)
    sha256 = Mock(wraps=shardio.format.opening._sha256)
    monkeypatch.setattr(shardio.format.opening, "_sha256", sha256)
    for shard in path.glob("train-0*.npy"):
        shutil.copy2(shard, path / "copy")
        (path / "copy").replace(shard)
    for _ in range(2):
        assert_reads(reader, [3, 13, 23])
    assert sha256.call_count == 1


def test_what_is_wrong_with_the_index_is_an_error_where_labels_were_wanted(
    opened: tuple[Path, Reader], faults: Faults, no_pauses: list[float]
) -> None:
    path, reader = opened
    expected = reader.column_of("label", np.arange(20))
    faults.rest = failure(errno.EIO)
    with pytest.raises(OSError, match="the label of sample 7 ") as caught:
        reader.column_of("label", np.array([7]))
    assert caught.value.filename == str(path / "train-index.npy")
    with pytest.raises(OSError, match="the crc32 of sample 19 "):
        reader.column_of("crc32", np.array([19]))
    faults.rest = None
    faults.plan = [failure(errno.EIO), failure(errno.ESTALE)]
    assert np.array_equal(reader.column_of("label", np.arange(20)), expected)
    os.truncate(path / "train-index.npy", 4200)
    with pytest.raises(FormatError, match=r"train-index\.npy: expected .* found 4200"):
        reader.column_of("label", np.array([0, 19]))


def test_what_o_direct_demands_is_found_by_trying(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    path = make_set(20) / "train-00000.npy"
    found = direct_alignment(path)
    assert found in (None, 512, 4096)
    faults.plan = [failure(errno.EINVAL)]  # the filesystem wants larger sectors
    assert direct_alignment(path) == (found and 4096)
    faults.rest = failure(errno.EINVAL)  # the flag is taken, but no read
    assert direct_alignment(path) is None
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    faults.rest = None
    assert direct_alignment(path) is None
    assert direct_alignment(path / "nothing") is None


@pytest.mark.parametrize("shape", [(64, 64, 1), (64, 64, 3)])
def test_memory_that_no_disk_may_write_to_is_filled_by_a_detour(
    shape: SampleShape, reader_of: MakeReader, faults: Faults
) -> None:
    reader = reader_of("direct 4096", 20, shape)
    faults.plan = [None, failure(errno.EFAULT)]
    for indices in ([3, 13, 4, 5], [19, 3, 3]):
        assert_reads(reader, indices, shape)
    assert reader.counts().retries == 0
    for engine in ("pread", "direct 4096"):
        reader = reader_of(engine, 20, shape)
        faults.rest = failure(errno.EFAULT)
        with pytest.raises(OSError, match="reading sample 3 at byte") as caught:
            read(reader, [3], shape)
        assert caught.value.errno == errno.EFAULT
        faults.rest = None


class Stopping:
    """The native calls, which do only a part of what they are asked for."""

    def __init__(self, outcome: str) -> None:
        self.outcome, self.rng = outcome, random.Random(outcome)

    def most(self, count: int) -> int:
        return {"whole": count, "nothing": 0}.get(self.outcome, self.rng.randint(0, count))

    def read_rows(self, descriptor: int, offsets: Any, places: Any, *others: Any) -> int:
        most = self.most(len(offsets))
        return _rowread.read_rows(descriptor, offsets[:most], places[:most], *others)

    def read_windows(self, descriptor: int, windows: NDArray[np.int64], *others: Any) -> int:
        return _rowread.read_windows(descriptor, windows[: self.most(len(windows))], *others)


@pytest.fixture(params=["whole", "nothing", "stops"])
def outcome(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.kernels.rowread, "_native", Stopping(request.param))


@pytest.mark.usefixtures("outcome")
@pytest.mark.parametrize("engine", FILE_ENGINES)
def test_what_the_native_call_leaves_is_read_one_by_one(engine: str, reader_of: MakeReader) -> None:
    shape = (64, 64, 1)  # 4096 bytes: direct can put them where they belong
    reader, rng = reader_of(engine, 60, shape), random.Random(engine)
    for _ in range(5):
        indices = rng.sample(range(0, 60, 2), rng.randint(1, 30))  # no two side by side
        before = reader.counts().nbytes
        assert_reads(reader, indices, shape)
        assert reader.counts().nbytes - before == len(indices) * 4096


@pytest.mark.parametrize(
    "change",
    [
        *({"offsets": offsets} for offsets in (np.array([0, -1]), np.zeros(3, np.int8))),
        *({"places": np.array(places)} for places in ([0, -1], [0, 11], [0])),
        *({"nbytes": nbytes} for nbytes in (2**62, 0, -1)),
        {"out": bytes(20)},
    ],
)
def test_the_native_call_refuses_what_would_leave_its_memory(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with open(tmp_path / "file", "rb") as file:
        good = {"offsets": np.array([50, 7]), "places": np.array([0, 10]), "nbytes": 10, "out": np.zeros(20, np.uint8)}
        assert _rowread.read_rows(file.fileno(), *good.values(), False) == 2
        assert good["out"].tolist() == [*range(50, 60), *range(7, 17)]
        out = good["out"] = np.full(20, 9, np.uint8)
        with pytest.raises((IndexError, ValueError, TypeError, BufferError)):
            _rowread.read_rows(file.fileno(), *{**good, **change}.values(), True)
        assert (out == 9).all()
        for offsets, done in (([50, 95], 1), ([95, 50], 0), ([2**62, 0], 0)):  # beyond the end of the file
            assert _rowread.read_rows(file.fileno(), np.array(offsets), good["places"], 10, out, False) == done
        _rowread.end_with(flag := bytearray(1))
        flag[0] = 1
        assert _rowread.read_rows(file.fileno(), *good.values(), False) == 0
        _rowread.end_with(bytearray())
    assert _rowread.read_rows(-1, good["offsets"], good["places"], 10, out, False) == 0


@pytest.mark.usefixtures("outcome")
@pytest.mark.parametrize("engine", FILE_ENGINES)
def test_windows_that_the_native_call_leaves_are_read_one_by_one(engine: str, reader_of: MakeReader) -> None:
    shape = (64, 64, 3)  # of which eight lines are three sectors of 512 bytes
    reader = reader_of(engine, 60, shape)
    rng = np.random.default_rng(FILE_ENGINES.index(engine))
    lines = reader.whole_lines
    assert (lines * 64 * 3 % (int(engine.split()[1]) if engine.startswith("direct") else 1), 64 % lines) == (0, 0)
    for whole in (False, True) * 4:
        indices = rng.integers(0, 60, 12)
        tops, ends = np.sort(rng.integers(0, 64 // lines + 1, (2, 12)), axis=0) * lines
        tops = np.where(tops == ends, 0, tops)
        ends = np.maximum(ends, tops + lines)
        widths = np.full(12, 64) if whole else rng.integers(1, 65, 12)
        windows = Windows(tops, rng.integers(0, 65 - widths), ends - tops, widths)
        out = aligned_empty((int(windows.num_pixels.sum()) * 3,))
        reader.copy_windows(indices, windows, out)
        expected = [sample_pixels(i, shape)[windows.part(k)].reshape(-1) for k, i in enumerate(indices.tolist())]
        assert np.array_equal(out, np.concatenate(expected))


@pytest.mark.parametrize(
    "window",
    [
        *((start, 2, 5, 0) for start in (-1, 2**62 + 1)),
        *((0, lines, 5, 0) for lines in (0, 2**62)),
        *((0, 2, nbytes, 0) for nbytes in (0, 11)),
        *((0, 2, 5, place) for place in (-1, 11)),
        (0, 3, 7, 0),
        (9, 9, 1, 0),  # more than there is room for
    ],
)
def test_the_native_call_refuses_windows_that_would_leave_its_memory(window: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    good = np.array([[50, 2, 5, 0], [7, 1, 10, 10]])
    room, out = np.zeros(80, np.uint8), np.full(20, 9, np.uint8)
    with open(tmp_path / "file", "rb") as file:
        read = partial(_rowread.read_windows, file.fileno())
        with pytest.raises(IndexError):
            read(np.array([good[0], window]), 10, 1, room, out, True)
        for stride, alignment in ((0, 1), (-1, 1), (10, 0), (10, -1)):
            with pytest.raises(ValueError, match="stride"):
                read(good, stride, alignment, room, out, True)
        with pytest.raises(ValueError, match="four numbers"):
            read(good.reshape(-1)[:7], 10, 1, room, out, True)
        assert (out == 9).all()
        for alignment in (1, 8):
            assert read(good, 10, alignment, room, out, False) == 2
            assert out.tolist() == [*range(50, 55), *range(60, 65), *range(7, 17)]
        assert read(np.array([[95, 1, 5, 0], [95, 2, 5, 10]]), 10, 1, room, out, False) == 1  # beyond the end
    assert _rowread.read_windows(-1, good, 10, 1, room, out, False) == 0
