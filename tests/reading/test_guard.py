"""Training on a set that is damaged: an error that names the sample, and no wrong pixel in a batch."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import flip
from numpy.typing import NDArray
from pictures import sample_pixels

from shardio.errors import FormatError
from shardio.format import opening
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.loading.dataset import ShardDataset
from shardio.loading.loader import ShardLoader
from shardio.reading.choose import Io, SplitSource
from shardio.reading.reader import GuardedReader, MappedReader
from shardio.reading.shardset import open_shards
from shardio.system import pour
from shardio.system.pour import direct_alignment

NUM_SAMPLES = 47
PER_SHARD = 10
SHAPE = (6, 5, 3)
NBYTES = 90
IOS: list[Io] = ["mmap", "pread", "direct"]
MakeLoader = Callable[..., ShardLoader]


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES, SHAPE, PER_SHARD)


@pytest.fixture
def loader_of(path: Path, closing: ExitStack) -> MakeLoader:
    """loader_of(io, ...): a loader on the CPU of 47 samples in five shards, closed in the end."""

    def make(io: Io = "mmap", batch_size: int = 8, **options: Any) -> ShardLoader:
        if io == "direct" and direct_alignment(path / "train-00000.npy") is None:
            pytest.skip("O_DIRECT does not work here")
        options = {"device": "cpu", "return_indices": True, "tail": "short", "check": "sample", **options}
        return closing.enter_context(ShardLoader(path, batch_size, io=io, **options))

    return make


def change(path: Path, i: int) -> None:
    """Flips one bit of a sample."""
    flip(path / f"train-{i // PER_SHARD:05d}.npy", 4096 + i % PER_SHARD * NBYTES + i % NBYTES, i % 8)


def read_all(loader: ShardLoader, epochs: int = 1) -> int:
    """Reads every batch, whose pixels and labels must be those of the indices that the order asks for."""
    count = 0
    for _ in range(epochs):
        iterator = iter(loader)
        order = loader._position.sampler.batches(iterator.epoch)
        for (images, labels, indices), asked in zip(iterator, order, strict=True):
            expected = np.stack([sample_pixels(i, SHAPE) for i in asked])
            assert indices.tolist() == asked.tolist()
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), expected)
            assert labels.tolist() == [i % 7 for i in asked]
            count += 1
    return count


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", IOS)
def test_a_changed_sample_is_an_error_where_its_batch_was_due_that_names_it(
    io: Io, path: Path, loader_of: MakeLoader
) -> None:
    change(path, 26)
    loader = loader_of(io, shuffle=False)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(FormatError) as caught:
        next(batches)
    crcs = [zlib.crc32(pixels) for pixels in (sample_pixels(26, SHAPE).tobytes(), stored(path, 26))]
    assert str(caught.value).startswith(
        f"{path / 'train-00002.npy'}: sample 26 (c5/26.png) at byte {4096 + 6 * NBYTES}: crc32: "
        f"expected {crcs[0]:08x}, found {crcs[1]:08x}"
    )
    assert "`shardio verify`" in str(caught.value)
    change(path, 26)  # mended
    assert read_all(loader_of(io, shuffle=False)) == 6


def stored(path: Path, i: int) -> bytes:
    data = (path / f"train-{i // PER_SHARD:05d}.npy").read_bytes()
    return data[4096 + i % PER_SHARD * NBYTES :][:NBYTES]


@pytest.mark.parametrize("io", IOS)
def test_a_single_changed_sample_is_found_wherever_it_is(io: Io, path: Path) -> None:
    if io == "direct" and direct_alignment(path / "train-00000.npy") is None:
        pytest.skip("O_DIRECT does not work here")
    source = SplitSource(path, "train", None)
    guard = GuardedReader(source.make_reader(io, NUM_SAMPLES), source.open([]), source.make_second())
    rng, out = np.random.default_rng(0), np.empty((NUM_SAMPLES, *SHAPE), np.uint8)
    for i in (0, 9, 10, 23, NUM_SAMPLES - 1):
        change(path, i)
        with pytest.raises(FormatError, match=rf"sample {i} \("):
            guard.copy("", rng.permutation(NUM_SAMPLES), out)
        change(path, i)
    guard.close()


def test_without_a_check_pixels_are_delivered_as_they_are(path: Path, loader_of: MakeLoader) -> None:
    change(path, 3)
    images = next(iter(loader_of(check="off", shuffle=False)))[0]
    assert images[3].permute(1, 2, 0).numpy().tobytes() == stored(path, 3)


def test_damage_in_the_index_is_not_trained_on(path: Path, loader_of: MakeLoader) -> None:
    dtype = load_manifest(path).splits["train"].index.dtype
    flip(path / "train-index.npy", 4096 + 5 * dtype.itemsize + dtype.fields["label"][1])  # type: ignore[index]
    for io in IOS:
        with pytest.raises(FormatError, match=r"train-index\.npy: sha256"):
            loader_of(io, check="off")
    with pytest.raises(FormatError, match=r"train-index\.npy: sha256"):
        ShardDataset(path)


@pytest.mark.parametrize("io", ["pread", "direct"])
def test_an_index_that_takes_the_place_of_the_one_that_was_checked_is_checked_too(
    path: Path, loader_of: MakeLoader, io: Io
) -> None:
    loader = loader_of(io)
    index = path / "train-index.npy"
    shutil.copy(index, path / "other")
    flip(path / "other", 4096)
    (path / "other").replace(index)
    with pytest.raises(FormatError, match=r"train-index\.npy: sha256"):
        next(iter(loader))


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_an_index_is_read_once_to_be_checked_however_often_it_is_opened(
    path: Path, loader_of: MakeLoader, io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    check_sha256 = opening.check_sha256

    def count(path: str, entry: FileEntry, found: str) -> None:
        checked.append(entry.file)
        check_sha256(path, entry, found)

    monkeypatch.setattr(opening, "check_sha256", count)
    read_all(loader_of(io))
    assert checked == ["train-index.npy"]


def test_storage_that_fails_while_an_index_is_checked_is_asked_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pour, "RETRY_SECONDS", (0.0, 0.0))
    failures = [None, None]
    preadv = os.preadv

    def fail(*arguments: Any) -> int:
        if failures:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", fail)
    assert len(open_shards(path)) == NUM_SAMPLES
    failures[:] = [None] * 99
    with pytest.raises(OSError, match=r"train-index\.npy"):
        open_shards(path)


# --- a fault that passes ---------------------------------------------------------------------------------------------


def test_a_fault_that_is_gone_when_the_sample_is_read_again_does_no_harm(
    loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = MappedReader.copy

    def spoil(reader: MappedReader, name: str, indices: NDArray[np.int64], out: NDArray[np.uint8], *lines: Any) -> None:
        copy(reader, name, indices, out, *lines)
        for place in np.flatnonzero(np.isin(indices, [3, 30])):
            out[place, 0, 0, 0] ^= 64

    monkeypatch.setattr(MappedReader, "copy", spoil)
    loader = loader_of("mmap")
    read_all(loader, 2)
    assert loader.stats()["read_retries"] == 4
    assert loader.stats()["read_nbytes"] >= 2 * NUM_SAMPLES * NBYTES + 4 * NBYTES


def test_a_sample_is_read_again_past_the_page_cache_where_that_works(path: Path) -> None:
    possible = direct_alignment(path / "train-00000.npy") is not None
    assert SplitSource(path, "train", None).make_second().name == ("direct" if possible else "pread")
