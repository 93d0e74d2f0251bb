"""An opened set is exactly what was written; a folder that is anything else is refused with a reason."""

from __future__ import annotations

import copy
import gc
import itertools
import mmap
import os
import pickle
import re
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import must_not_block
from numpy.typing import NDArray
from pictures import sample_pixels

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import FormatError, SetNotFoundError
from shardio.format.entries import IndexEntry, ShardEntry, SplitEntry
from shardio.format.layout import HEADER_NBYTES, SampleShape, index_dtype, pixels_row
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest
from shardio.kernels.rowcopy import Windows
from shardio.reading.mapping import RowMapping
from shardio.reading.shardset import Sample, open_shards
from shardio.sets.rows import write_index


def maps_of(folder: Path) -> int:
    """How many files of the folder are mapped into this process."""
    return sum(f" {folder}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors_of(folder: Path) -> list[str]:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [path for path in links if os.path.islink(path) and os.readlink(path).startswith(str(folder))]


@pytest.mark.parametrize(
    ("count", "shape", "per_shard"),
    [(1, (1, 1, 1), 1), (2, (3, 5, 1), 1), (7, (7, 11, 3), 3), (11, (16, 16, 16), 4), (12, (64, 65, 1), 5)],
)
def test_a_set_is_the_sequence_of_its_samples(
    make_set: Callable[..., Path], count: int, shape: SampleShape, per_shard: int
) -> None:
    shards = open_shards(make_set(count, shape, per_shard))
    assert len(shards) == count
    for i in range(-count, count):
        sample = shards[i]
        assert isinstance(sample, Sample)
        np.testing.assert_array_equal(sample.image, sample_pixels(i % count, shape), strict=True)
        assert (sample.label, type(sample.label)) == (i % count % 7, int)
    assert len(shards.mapped().file_rows) == -(-count // per_shard)


def test_iteration_and_slices_are_those_of_a_list(make_set: Callable[..., Path]) -> None:
    shards = open_shards(make_set(7, samples_per_shard=3))
    assert [label for _, label in shards] == [label for _, label in reversed(shards)][::-1] == list(range(7))
    bounds = [None, -9, -7, -1, 0, 3, 7, 9]
    for start, stop in itertools.product(bounds, bounds):
        for step in (None, 1, 2, -1, -3):
            assert [label for _, label in shards[start:stop:step]] == list(range(7))[start:stop:step]
    for i, (image, _) in enumerate(shards[2:5]):
        np.testing.assert_array_equal(image, sample_pixels(i + 2))
    with pytest.raises(ValueError, match="zero"):
        shards[::0]


def test_an_index_is_an_integer_of_a_sample(make_set: Callable[..., Path]) -> None:
    shards = open_shards(make_set(7))
    index: Any
    for index in (np.int64(3), np.uint8(3), np.array(3)):
        assert shards[index].label == 3
    for index in (1.0, 1.5, "1", None, [1], (1, 2), np.array([1, 2])):
        with pytest.raises(TypeError, match=r"integer|scalar"):
            shards[index]
    for index in (7, -8, 10**30):
        with pytest.raises(IndexError, match=rf"index {index} is out of range: expected -7 to 6 for 7 samples"):
            shards[index]


def test_a_copy_is_the_same_set_opened_anew_and_no_other_of_the_same_path(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_set(7)
    monkeypatch.chdir(path.parent)
    shards = open_shards(Path(path.name))
    data = pickle.dumps(shards)
    assert len(data) < 1000  # no pixels
    monkeypatch.chdir("/")
    for again in (copy.copy(shards), copy.deepcopy(shards), pickle.loads(data)):
        assert again is not shards
        assert (again.digest, again.split, len(again)) == (shards.manifest.digest, "train", 7)
        assert np.array_equal(again[3].image, sample_pixels(3))
    shutil.rmtree(path)
    shutil.move(make_set(8), path)
    with pytest.raises(FormatError, match="this is not the pinned set"):
        pickle.loads(data)


def test_what_is_written_to_a_sample_or_by_torch_to_the_index_changes_no_other(make_set: Callable[..., Path]) -> None:
    shards = open_shards(out := make_set(23))
    files = {path: path.read_bytes() for path in out.iterdir()}
    for image in (shards[0].image, shards[3:5][0].image):
        torch.from_numpy(image).add_(1)
    for array in (shards.index, *shards.mapped().file_rows):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    column = shards.index["crc32"].view(np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that the array is read-only
        torch.from_numpy(column).add_(1)
    assert {path: path.read_bytes() for path in files} == files
    assert np.array_equal(shards[0].image, sample_pixels(0))
    assert open_shards(out).index["crc32"].tolist() == (column - 1).view(np.uint32).tolist()


def test_labels_are_a_read_only_copy_made_once(make_set: Callable[..., Path]) -> None:
    labels = (shards := open_shards(make_set(23))).labels
    assert labels is shards.labels
    assert (labels.dtype, labels.flags.c_contiguous, labels.flags.writeable) == (np.int64, True, False)
    assert not np.shares_memory(labels, shards.index)
    assert labels.tolist() == [i % 7 for i in range(23)]


def test_a_pinned_set_opens_by_its_digest_or_the_beginning_of_it_and_no_other_does(
    make_set: Callable[..., Path],
) -> None:
    digest = open_shards(make_set(7)).digest
    for length in (12, 64):
        assert open_shards(make_set(7), digest=digest[:length]).digest == digest
    for pinned in ("0" * 12, "f" * 64):
        with pytest.raises(FormatError, match=f"digest: expected {pinned}, found {digest}"):
            open_shards(make_set(7), digest=pinned)


@pytest.mark.parametrize("pinned", [4, "", "abcdef01234", "A" * 12, "a" * 65, "a" * 12 + "\n"])
def test_what_is_no_digest_is_a_mistake_of_the_caller(pinned: Any, make_set: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="digest must be") as caught:
        open_shards(make_set(7), digest=pinned)
    assert not isinstance(caught.value, FormatError)


def test_columns_of_some_samples_are_copies_of_the_index(make_set: Callable[..., Path]) -> None:
    shards = open_shards(make_set(23))
    column = shards.column_of("key", np.array([22, 0]))
    assert column.tolist() == [b"c1/22.png", b"c0/0.png"]
    column[:] = b"x"
    assert shards.index["key"][0] == b"c0/0.png"
    with pytest.raises(ValueError, match=r"one of label, key, .*, crc32; found 'size'"):
        shards.column_of("size", np.array([22]))


WIDE = np.arange(70).reshape(35, 2)


@pytest.mark.parametrize(
    "indices",
    [
        *(np.array([34, 0, 9, 10, 34, 20], dtype) for dtype in ("i1", "u2", "i8", "u8", ">i8")),
        *(WIDE[:17, 0], WIDE[::-2, 0][:5], np.arange(35)[::-3], [3, 1, 2], (5,)),
    ],
    ids=str,
)
def test_gather_takes_integers_of_any_type_and_layout(make_set: Callable[..., Path], indices: Any) -> None:
    shards = open_shards(make_set(70))
    out = np.empty((len(indices), 6, 5, 3), np.uint8)
    shards.gather(indices, out)
    np.testing.assert_array_equal(out, [sample_pixels(int(i)) for i in indices])


def marked(*shape: int, dtype: Any = np.uint8) -> NDArray[Any]:
    return np.full(shape, 77, dtype)


OUT, READ_ONLY = marked(2, 6, 5, 3), marked(2, 6, 5, 3)
READ_ONLY.flags.writeable = False
NO_INDICES = np.zeros(0, np.int64)


@pytest.mark.parametrize(
    ("indices", "out", "error", "words"),
    [
        *(
            (np.array(bad), OUT[: len(bad)], IndexError, f"from 0 to 6; found {min(bad)} to {max(bad)}")
            for bad in ([7, 0], [0, -1], [-(1 << 63)], [(1 << 64) - 1])
        ),
        *(
            (bad, OUT, ValueError, f"indices must be one-dimensional integers; found {bad.dtype} of shape {bad.shape}")
            for bad in (np.array([0.0, 1.0]), np.array([True, False]), np.array([[0, 1]]), np.array(3))
        ),
        *(
            (np.array([1, 2]), bad, ValueError, f"uint8 of shape (2, 6, 5, 3); found {bad.dtype} of shape {bad.shape}")
            for bad in (marked(3, 6, 5, 3), marked(2, 90), marked(2, 6, 5, 3, dtype=np.int8), marked(4, 6, 5, 3)[::2])
        ),
        (np.ma.array([1, 2]), OUT, ValueError, "indices must be an array without a mask"),
        (np.array([1, 2]), READ_ONLY, ValueError, "read-only"),
        (NO_INDICES, OUT[:1], ValueError, "of shape (0, 6, 5, 3); found uint8 of shape (1, 6, 5, 3)"),
    ],
)
def test_what_cannot_be_gathered_is_refused_before_anything_is_copied(
    make_set: Callable[..., Path], indices: NDArray[Any], out: NDArray[Any], error: type[Exception], words: str
) -> None:
    shards = open_shards(make_set(7, samples_per_shard=3))
    shards.gather(NO_INDICES, np.zeros((0, 6, 5, 3), np.uint8))
    before = out.copy()
    with pytest.raises(error, match=re.escape(words)):
        shards.gather(indices, out)
    np.testing.assert_array_equal(out, before)
    if not words.endswith(str(out.shape)) and "read-only" not in words:
        with pytest.raises(error, match=re.escape(words)):
            shards.labels_of(indices)


@pytest.mark.parametrize(
    ("indices", "error"),
    [
        *((np.array(bad), ValueError) for bad in ([True, False, True], [1.5], [[1]])),
        *((np.array(bad), IndexError) for bad in ([-1], [3], [2**63 + 2])),
        (np.ma.masked_equal([1, 2], 1), ValueError),
    ],
    ids=str,
)
def test_source_sizes_are_of_samples_that_exist(indices: Any, error: type[Exception], tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", (2, 2, 3), squashed=True) as writer:
        for i in range(3):
            writer.append(np.zeros((2, 2, 3), np.uint8), i, source_size=(20 + i, 30 + i))
    shards = open_shards(tmp_path / "set")
    assert np.array_equal(shards.source_sizes(np.array([2, 0], np.uint8)), [[22, 32], [20, 30]])  # type: ignore[arg-type]
    with pytest.raises(error, match="indices"):
        shards.source_sizes(indices)


def test_no_descriptor_stays_open_and_mappings_go_with_the_last_array_that_uses_them(
    make_set: Callable[..., Path],
) -> None:
    out = make_set(35)
    shards = open_shards(out)
    image, index = shards.mapped().file_rows[3][4].reshape(6, 5, 3), shards.index
    part = image[1:, ::2]
    del shards, image
    gc.collect()
    assert (maps_of(out), descriptors_of(out)) == (5, [])
    np.testing.assert_array_equal(part, sample_pixels(34)[1:, ::2])
    assert index["key"][34] == b"c6/34.png"
    del part
    gc.collect()
    assert maps_of(out) == 1
    assert index["label"].tolist() == [i % 7 for i in range(35)]
    del index
    gc.collect()
    assert maps_of(out) == 0


def test_a_removed_set_stays_readable_while_it_is_open(make_set: Callable[..., Path]) -> None:
    out = make_set(35)
    shards = open_shards(out)
    shutil.rmtree(out)
    gathered = np.empty((35, 6, 5, 3), np.uint8)
    shards.gather(np.arange(35), gathered)
    np.testing.assert_array_equal(gathered, [sample_pixels(i) for i in range(35)])


def test_opening_reads_headers_and_not_samples(tmp_path: Path) -> None:
    """Shards of a TiB on paper: opening that took time or memory with the samples would not come back."""
    shape, count = (65536, 1024, 1), 1 << 14
    entry = shard_entry(0, count, shape)
    with (tmp_path / entry.file).open("wb") as file:
        file.write(entry.row.file_header(count))
        file.truncate(entry.nbytes)
    index = write_index(tmp_path, "train", np.zeros(count, index_dtype(4)))
    commit_manifest(tmp_path, Manifest(shape, (), {"train": SplitEntry(count, index, (entry,))}))
    with must_not_block():
        shards = open_shards(tmp_path)
        assert len(shards) == count
        assert not shards[count - 1].image[-1, -1].any()


def test_an_unknown_split_is_named_with_those_there_are(make_set: Callable[..., Path]) -> None:
    for split, meant in (("val", ""), ("", ""), ("TRAIN", ""), ("../train", ": did you mean train?")):
        with pytest.raises(SetNotFoundError, match=re.escape(f"expected a split {split!r}, found train{meant}") + "$"):
            open_shards(make_set(7), split)


def opening_fails(out: Path, name: str) -> str:
    """The FormatError of open_shards, which must name the file. See also nothing_is_left_of."""
    with must_not_block(), pytest.raises(FormatError) as caught:
        open_shards(out)
    assert str(caught.value).startswith(f"{out / name}: ")
    return str(caught.value)


def nothing_is_left_of(out: Path) -> bool:
    gc.collect()
    return descriptors_of(out) == [] and maps_of(out) == 0


@pytest.mark.parametrize("name", ["train-00002.npy", "train-index.npy"])
def test_a_file_of_another_size_or_with_a_flipped_bit_in_its_header_is_refused(
    make_set: Callable[..., Path], name: str
) -> None:
    out = make_set(25)
    data = (out / name).read_bytes()
    for size in (0, 10, 4096, len(data) - 1, len(data) + 90):
        (out / name).write_bytes((data + bytes(8192))[:size])
        assert f"expected {len(data)} bytes, as the manifest says, found {size}" in opening_fails(out, name)
    for at in (*range(0, 4096, 97), 4095):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        (out / name).write_bytes(damaged)
        assert f"at byte {at}, found {bytes(damaged[at : min(at + 16, 4096)])!r}" in opening_fails(out, name)
    assert nothing_is_left_of(out)
    (out / name).write_bytes(data)
    assert len(open_shards(out)) == 25


def shard_entry(number: int, count: int, shape: SampleShape) -> ShardEntry:
    row = pixels_row(shape)
    return ShardEntry(f"train-{number:05d}.npy", row.file_nbytes(count), "0" * 64, count, row)


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        ((1, 1, 1), [1 << 48]),
        ((65535, 65535, 65535), [1]),
        # All files together have 2**64 bytes, which are 0 when they are counted in 64 bits; and a little more.
        ((65536, 65536, 65536), [31] * 2048),
        ((65536, 65536, 65536), [31] * 2049),
        # The same, but the rest in 64 bits is so small that the kernel would grant it.
        ((37753, 59535, 57249), [1] * 35),
    ],
    ids=["2**48", "odd", "2**64", "more than 2**64", "2**64 and 34 GiB"],
)
def test_a_set_larger_than_memory_addresses_is_refused_by_its_files(
    tmp_path: Path, shape: SampleShape, counts: list[int]
) -> None:
    total, shards = sum(counts), tuple(shard_entry(*pair, shape) for pair in enumerate(counts))
    index = IndexEntry("train-index.npy", HEADER_NBYTES + total * index_dtype(4).itemsize, "0" * 64, 4)
    commit_manifest(tmp_path, Manifest(shape, (), {"train": SplitEntry(total, index, shards)}))
    for entry in (index, shards[0]):
        (tmp_path / entry.file).write_bytes(b"short")
    error = opening_fails(tmp_path, "train-00000.npy")
    assert f"expected {shards[0].nbytes} bytes, as the manifest says, found 5" in error
    assert nothing_is_left_of(tmp_path)


def test_a_mapping_that_the_limit_of_address_space_forbids_is_an_error_with_the_limit_and_a_way_out() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), before[1]))
    try:
        with pytest.raises(OSError, match=r'ulimit -v.* io="pread"'):
            RowMapping([1 << 20], 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_mapping_is_never_larger_than_the_addresses_behind_it() -> None:
    """Places of 65,536 files that add up to 2**64 + 2**28 bytes: counted in 64 bits, 256 MiB would be reserved."""
    row_nbytes = (1 << 36) + 1
    with pytest.raises((OSError, ValueError, OverflowError)):
        RowMapping([1] * 65536, row_nbytes)


def test_a_shard_set_gathers_windows_and_refuses_those_that_are_not_inside(make_set: Callable[..., Path]) -> None:
    shards = open_shards(make_set(43, (21, 17, 3)))
    indices = np.array([5, 42, 5])
    windows = Windows.of_one_size(5, 4, np.array([0, 3, 16]), np.array([13, 0, 2]))
    out = np.zeros((3, 5, 4, 3), np.uint8)
    shards.gather(indices, out, windows)
    for image, i, top, left in zip(out, indices, windows.tops, windows.lefts, strict=True):
        assert np.array_equal(image, sample_pixels(int(i), (21, 17, 3))[top : top + 5, left : left + 4])
    out[:] = 7
    for tops, lefts in (([0, 3, 17], [0, 0, 0]), ([0, 0, 0], [0, -1, 0]), ([0, 0], [0, 0, 0]), ([0, 0, 0], [14, 0, 0])):
        with pytest.raises(IndexError, match=r"inside images of 21 x 17|as many tops"):
            shards.gather(indices, out, Windows.of_one_size(5, 4, np.array(tops), np.array(lefts)))
    assert (out == 7).all()
    several = Windows(windows.tops, windows.lefts, np.array([1, 2, 3]), np.array([4, 3, 1]))
    packed = np.zeros(3 * (4 + 6 + 3), np.uint8)
    shards.gather(indices, packed, several)
    expected = [sample_pixels(int(i), (21, 17, 3))[several.part(k)].reshape(-1) for k, i in enumerate(indices)]
    assert np.array_equal(packed, np.concatenate(expected))
    for wrong, some in ((out, several), (np.zeros((3, 5, 5, 3), np.uint8), windows)):
        with pytest.raises(ValueError, match="`out` must"):
            shards.gather(indices, wrong, some)
