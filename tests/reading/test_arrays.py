"""Arrays beside the pixels, and samples in another order than they are stored in: by every reader."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from arrays import Given, change_split, some_arrays
from folders import flip
from manifests import reseal
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from pictures import sample_pixels
from plain_sets import make_plain_set

from shardio.cache.cached_split import open_source
from shardio.errors import FormatError
from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest_file import load_manifest
from shardio.kernels.resample import Planes
from shardio.kernels.rowcopy import Windows
from shardio.loading.loader import ShardLoader
from shardio.reading import shardset
from shardio.reading.choose import look_at, make_reader
from shardio.reading.mixed import MixedReader, MixedSet
from shardio.reading.reader import GuardedReader, MappedReader, Reader, Request
from shardio.reading.shardset import open_shards
from shardio.system.pour import direct_alignment

COUNT, HEIGHT, WIDTH = 23, 6, 5
SMALL = np.random.default_rng(1).integers(0, 256, (COUNT, 4, 3, 3), dtype=np.uint8)
ARRAYS: dict[str, Given] = {**some_arrays(COUNT, HEIGHT, WIDTH), "small": ("array", SMALL)}
# Rows come twice, and not at all.
ORDER = np.array([5, 22, 5, 0, 19, 1, 1, 7, 20, 21, 3])


@pytest.fixture(scope="module", params=["in order", "in another order"])
def changed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, NDArray[np.int64]]:
    """A set with arrays, and the stored row of each of its samples. No test changes the set."""
    out = make_plain_set(tmp_path_factory.mktemp("changed"), COUNT)
    order = np.arange(COUNT) if request.param == "in order" else ORDER
    change_split(out, ARRAYS, None if request.param == "in order" else order)
    return out, order


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    """A set with arrays, in another order, which a test may damage."""
    change_split(out := make_set(COUNT), ARRAYS, ORDER)
    return out


@pytest.fixture(params=["mmap", "pread", "direct", "staged", "guarded", "mixed"])
def opened(
    changed: tuple[Path, NDArray[np.int64]], request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Reader, NDArray[np.int64]]]:
    """A reader of each kind, and the stored row of each of its samples."""
    (out, order), kind = changed, request.param
    if kind == "direct" and direct_alignment(out / "train-00000.npy") is None:
        pytest.skip("O_DIRECT does not work here")
    source = open_source(out, "train", tmp_path / "cache" if kind == "staged" else None, None)
    shards = source.open([])
    reader = source.make_reader(kind if kind in ("mmap", "pread", "direct") else "auto", len(shards))
    if kind == "guarded":
        reader = GuardedReader(reader, shards, source.make_second())
    if kind == "mixed":
        mixed = MixedSet([shards, shards], shards.classes, (), [None, 6 - np.arange(7)])
        reader, order = MixedReader(mixed, [reader, source.make_reader("pread", len(shards))]), np.tile(order, 2)
    yield reader, order
    reader.close()
    source.close()


@pytest.mark.parametrize("count", [40, 1, 0])
def test_every_reader_reads_pixels_windows_labels_and_arrays_of_any_samples(
    opened: tuple[Reader, NDArray[np.int64]], count: int
) -> None:
    reader, order = opened
    indices = np.random.default_rng(0).integers(0, len(order), count)
    rows, is_second = order[indices], indices >= len(order) / 2
    pictures = np.array([sample_pixels(row) for row in rows], np.uint8).reshape(count, HEIGHT, WIDTH, 3)
    more = {name: np.empty((count, *values.shape[1:]), values.dtype) for name, (_, values) in ARRAYS.items()}
    more["source"] = np.empty(count, np.int64)
    parts = {"arrays": tuple(ARRAYS), "order": np.argsort(is_second, kind="stable")}
    windows = Windows.of_one_size(4, 3, indices % 3, indices % 2)
    whole = Windows.whole(count, HEIGHT, WIDTH)
    for one in [None, whole] if isinstance(reader, GuardedReader) else [None, windows]:
        shape = (4, 3) if one is windows else (HEIGHT, WIDTH)
        memory = SimpleNamespace(
            images=np.empty((count, *shape, 3), np.uint8), labels=np.empty(count, int), indices=np.empty(count, int)
        )
        memory.views, memory.more = (memory.images,), more

        def make(planes: Planes, some: Any, views: Any, shape: Any = shape) -> None:
            strides = planes.stride or shape[1] * 3, 3, 1
            for number, place in zip(some, planes.places, strict=True):
                views[0][number] = as_strided(planes.memory[place:], (*shape, 3), strides)

        request = Request(indices, windows=one, channels=3, make=make, **parts)
        for part in (slice(0, 13), slice(13, None)):
            reader.read(request, memory, part)
        for number, (got, picture) in enumerate(zip(memory.images, pictures, strict=True)):
            np.testing.assert_array_equal(got, picture if one is None else picture[one.part(number)])
        assert np.array_equal(memory.indices, indices)
        relabeled = isinstance(reader, MixedReader) & is_second
        np.testing.assert_array_equal(memory.labels, np.where(relabeled, 6 - rows % 7, rows % 7))
        for name, (_, values) in ARRAYS.items():
            np.testing.assert_array_equal(more[name], values[rows])


def test_the_bytes_of_arrays_that_are_read_count_for_the_choice_of_a_reader(out: Path) -> None:
    shards = open_shards(out)
    assert look_at(shards, 10).nbytes == 10 * 90
    assert look_at(shards, 10, ["small", "clip"]).nbytes == 10 * (36 + 32)


def test_arrays_are_announced_with_their_pixels(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = open_shards(out)
    asked: list[Any] = []
    monkeypatch.setattr(shardset, "will_need", lambda rows, numbers: asked.append((id(rows), numbers.tolist())))
    names, samples = ("", "depth", "clip"), np.array([4, 7])
    MappedReader(shards, names).will_read(Request(samples))
    tables = map(shards.mapped, names)
    assert asked == [(id(table.rows), table.numbers(samples).tolist()) for table in tables]


def test_shards_are_staged_for_more_samples_than_are_stored(make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(COUNT)
    order = np.arange(70) % COUNT
    change_split(out, {"clip": ARRAYS["clip"]}, order)
    source = open_source(out, "train", tmp_path / "cache", None)
    shards = source.open([np.arange(70)])
    values = np.empty((70, 16), np.float16)
    shards.gather_array("clip", np.arange(70), values)
    np.testing.assert_array_equal(values, ARRAYS["clip"][1][order])
    source.close()


def test_a_sample_has_its_arrays_by_name(changed: tuple[Path, NDArray[np.int64]]) -> None:
    out, order = changed
    shards = open_shards(out)
    for row, (image, label) in zip(order.tolist(), shards, strict=True):
        np.testing.assert_array_equal(image, sample_pixels(row))
        assert label == row % 7
    sample = pickle.loads(pickle.dumps(shards[2]))
    assert sample.arrays.keys() == ARRAYS.keys()
    for name, (_, values) in ARRAYS.items():
        np.testing.assert_array_equal(sample.arrays[name], values[order[2]])
        assert sample.arrays[name].dtype == values.dtype
    shards[2].arrays["mask"][...] = 0  # a copy
    np.testing.assert_array_equal(shards[2].arrays["mask"], ARRAYS["mask"][1][order[2]])
    assert "clip=float16 (16,)" in repr(shards[2])


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_row_that_is_not_stored_is_an_error_that_names_it(out: Path, io: Any) -> None:
    for wrong in (COUNT, -1, 1 << 62):
        entry = load_manifest(out).splits["train"].orders[0]
        data = bytearray((out / entry.file).read_bytes())
        data[HEADER_NBYTES + 32 : HEADER_NBYTES + 40] = wrong.to_bytes(8, "little", signed=True)
        reseal(out, entry, bytes(data))
        reader, _ = make_reader(open_shards(out), io, 1)
        with pytest.raises(FormatError, match=rf"order-0.npy: sample 4: .* found {wrong}"):
            reader.copy("", np.array([1, 4]), np.empty((2, 6, 5, 3), np.uint8))
        with pytest.raises(FormatError, match="sample 4"):
            reader.copy("clip", np.array([4]), np.empty((1, 16), np.float16))
        reader.copy("", np.array([1, 3]), np.empty((2, 6, 5, 3), np.uint8))
        reader.close()


@pytest.mark.parametrize(
    ("name", "io"),
    [("train-order-0.npy", "mmap"), ("train-order-0.npy", "pread"), ("train-mask-crc32.npy", "direct")],
)
def test_a_damaged_order_or_checksum_of_an_array_is_an_error(out: Path, name: str, io: Any) -> None:
    if io == "direct" and direct_alignment(out / name) is None:
        pytest.skip("O_DIRECT does not work here")
    flip(out / name, HEADER_NBYTES)
    options: Any = {"io": io, "arrays": ["mask"], "check": "sample"}
    with pytest.raises(FormatError, match=name), ShardLoader(out, 4, device="cpu", **options) as loader:
        list(loader)


def test_an_array_that_was_replaced_before_it_is_first_read_is_an_error(out: Path) -> None:
    shards = open_shards(out)
    path = out / shards.arrays["clip"].files[0].file
    other = shutil.copy(path, out / "other")
    flip(out / "other", HEADER_NBYTES)
    os.replace(other, path)
    with pytest.raises(FormatError, match=f"{path.name}: sha256.*replaced"):
        shards.values_of("clip", np.arange(3))


def test_a_damaged_value_is_found_by_its_crc32(out: Path) -> None:
    shards = open_shards(out)
    entry, offset = shards.mapped("clip").locate_one(4)
    flip(out / entry.file, offset)
    source = open_source(out, "train", None, None)
    inner = source.make_reader("pread", 1)
    guard = GuardedReader(inner, source.open([]), source.make_second())
    with pytest.raises(FormatError, match=rf"{entry.file}: the clip of sample 4 .* at byte {offset}: crc32"):
        guard.copy("clip", np.array([3, 4, 5]), np.empty((3, 16), np.float16))
    guard.close()


def test_another_name_or_array_is_refused(changed: tuple[Path, NDArray[np.int64]]) -> None:
    shards = open_shards(changed[0])
    with pytest.raises(ValueError, match=r"name of an array .*clip, .* found 'masks'"):
        shards.gather_array("masks", np.array([0]), np.empty(1))
    with pytest.raises(ValueError, match=r"`out` must be .* float16"):
        shards.gather_array("clip", np.array([0]), np.empty((1, 16), np.float32))
    with pytest.raises(IndexError):
        shards.gather_array("clip", np.array([99]), np.empty((1, 16), np.float16))
