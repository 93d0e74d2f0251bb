"""Training on a set that is damaged: an error that names the sample, and no wrong pixel in a batch."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from folders import flip
from numpy.typing import NDArray
from pictures import sample_pixels

from shardio.errors import FormatError
from shardio.format import opening
from shardio.format.manifest_file import load_manifest
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


def place_of(i: int) -> int:
    return 4096 + i % PER_SHARD * NBYTES


def change(path: Path, i: int) -> None:
    """Flips one bit of a sample."""
    flip(path / f"train-{i // PER_SHARD:05d}.npy", place_of(i) + i % NBYTES, i % 8)


def read_all(loader: ShardLoader) -> None:
    """Reads an epoch, which must have the pixels and labels of every sample."""
    seen: list[int] = []
    for images, labels, indices in loader:
        seen += indices.tolist()
        assert np.array_equal(images.permute(0, 2, 3, 1), [sample_pixels(i, SHAPE) for i in indices.tolist()])
        assert torch.equal(labels, indices % 7)
    assert sorted(seen) == list(range(NUM_SAMPLES))


def test_a_changed_sample_is_an_error_where_its_batch_was_due(path: Path, loader_of: MakeLoader) -> None:
    change(path, 26)
    batches = iter(loader_of(shuffle=False))
    for _ in range(3):
        next(batches)
    with pytest.raises(FormatError, match="sample 26"):
        next(batches)
    assert len(list(loader_of(check="off", shuffle=False))) == 6


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
def test_a_single_changed_sample_is_found_and_named_wherever_it_is(io: Io, path: Path) -> None:
    if io == "direct" and direct_alignment(path / "train-00000.npy") is None:
        pytest.skip("O_DIRECT does not work here")
    source = SplitSource(path, "train", None)
    guard = GuardedReader(source.make_reader(io, NUM_SAMPLES), source.open([]), source.make_second())
    rng, out = np.random.default_rng(0), np.empty((NUM_SAMPLES, *SHAPE), np.uint8)
    for i in (0, 9, 10, 23, NUM_SAMPLES - 1):
        change(path, i)
        place = rf"{path}/train-{i // PER_SHARD:05d}.npy: sample {i} \(c{i % 7}/{i}.png\) at byte {place_of(i)}"
        crc = zlib.crc32(sample_pixels(i, SHAPE))
        with pytest.raises(FormatError, match=f"{place}: crc32: expected {crc:08x}, found "):
            guard.copy("", rng.permutation(NUM_SAMPLES), out)
        change(path, i)
    guard.copy("", np.arange(NUM_SAMPLES), out)
    guard.close()


def test_damage_in_the_index_is_not_trained_on(path: Path, loader_of: MakeLoader) -> None:
    dtype = load_manifest(path).splits["train"].index.dtype
    flip(path / "train-index.npy", 4096 + 5 * dtype.itemsize + dtype.fields["label"][1])  # type: ignore[index]
    for opens in (partial(loader_of, "pread", check="off"), partial(open_shards, path)):
        with pytest.raises(FormatError, match=r"train-index\.npy: sha256"):
            opens()


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
def test_an_index_is_read_once_to_be_checked_however_often_it_is_opened(loader_of: MakeLoader, io: Io) -> None:
    with mock.patch.object(opening, "check_sha256", wraps=opening.check_sha256) as check:
        read_all(loader_of(io))
    assert [call.args[1].file for call in check.call_args_list] == ["train-index.npy"]


def test_storage_that_fails_while_an_index_is_checked_is_asked_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pour, "RETRY_SECONDS", (0.0, 0.0))
    failure = OSError(errno.EIO, os.strerror(errno.EIO))
    twice = itertools.chain([failure] * 2, itertools.repeat(mock.DEFAULT))
    with mock.patch.object(os, "preadv", side_effect=twice, wraps=os.preadv):
        assert len(open_shards(path)) == NUM_SAMPLES
    with mock.patch.object(os, "preadv", side_effect=failure), pytest.raises(OSError, match=r"train-index\.npy"):
        open_shards(path)


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
    read_all(loader)
    assert loader.stats()["read_retries"] == 2
    assert loader.stats()["read_nbytes"] >= (NUM_SAMPLES + 2) * NBYTES


def test_a_sample_is_read_again_past_the_page_cache_where_that_works(path: Path) -> None:
    possible = direct_alignment(path / "train-00000.npy") is not None
    assert SplitSource(path, "train", None).make_second().name == ("direct" if possible else "pread")
