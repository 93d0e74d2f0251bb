"""A set that is read while its files come gives what the whole set gives, wherever each sample is read from."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from folders import flip
from numpy.typing import NDArray
from pictures import sample_pixels

from shardio.cache import partial_set as partialset
from shardio.cache.partial_copy import PartialCopy, remove_parts
from shardio.cache.partial_set import PartialSet, PartialTable
from shardio.errors import FormatError, SetNotFoundError
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.kernels.rowcopy import Windows
from shardio.reading.shardset import open_shards
from shardio.sets.storage import FolderStorage
from shardio.system.opening import FolderHandle

NUM_SAMPLES = 47  # in shards of ten


@dataclass
class Copy:
    """Files that tests put there."""

    path: Path

    def has(self, entry: FileEntry) -> bool:
        return (self.path / entry.file).exists()


class CountingStorage(FolderStorage):
    """Notes the reads from afar."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[tuple[str, int]] = []

    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        self.reads.append((entry.file, len(buffer)))
        super().read_into(entry, offset, buffer)


@pytest.fixture
def src(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES)


@pytest.fixture
def storage(src: Path) -> Iterator[CountingStorage]:
    storage = CountingStorage(src)
    yield storage
    storage.close()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    (tmp_path / "copy").mkdir()
    return Copy(tmp_path / "copy")


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partialset, "_LOOK_SECONDS", -1.0)


def opened(storage: FolderStorage, copy: Copy) -> PartialSet:
    return PartialSet(storage, storage.load_manifest(), "train", copy)


def shard_files(src: Path) -> list[str]:
    return [shard.file for shard in load_manifest(src).splits["train"].shards]


def assert_whole(shards: PartialSet, rng: np.random.Generator) -> None:
    indices = rng.permutation(NUM_SAMPLES)
    out = np.empty((NUM_SAMPLES, 6, 5, 3), np.uint8)
    shards.gather(indices, out)
    for index, image in zip(indices.tolist(), out, strict=True):
        assert np.array_equal(image, sample_pixels(index)), index
    assert shards.labels_of(indices).tolist() == [i % 7 for i in indices.tolist()]
    windows = Windows.of_one_size(3, 2, rng.integers(0, 4, NUM_SAMPLES), rng.integers(0, 4, NUM_SAMPLES))
    cut = np.empty((NUM_SAMPLES, 3, 2, 3), np.uint8)
    shards.gather(indices, cut, windows)
    for index, top, left, image in zip(indices.tolist(), windows.tops, windows.lefts, cut, strict=True):
        assert np.array_equal(image, sample_pixels(index)[top : top + 3, left : left + 2]), index


def test_every_state_of_the_copy_gives_the_same_samples(src: Path, storage: CountingStorage, copy: Copy) -> None:
    rng = np.random.default_rng(1)
    shards = opened(storage, copy)
    assert_whole(shards, rng)
    for file in rng.permutation(shard_files(src)):
        shutil.copyfile(src / file, copy.path / file)
        storage.reads.clear()
        assert_whole(shards, rng)
        assert file not in [name for name, _ in storage.reads]
    assert not storage.reads
    assert not shards.look()


def test_only_the_lines_of_a_window_are_read_from_afar(storage: CountingStorage, copy: Copy) -> None:
    shards = opened(storage, copy)
    storage.reads.clear()
    shards.gather(
        np.array([12]), np.empty((1, 2, 5, 3), np.uint8), Windows.of_one_size(2, 5, np.array([3]), np.array([0]))
    )
    assert storage.reads == [("train-00001.npy", 2 * 5 * 3)]


def test_it_is_a_sequence_of_samples_like_any_other(src: Path, storage: CountingStorage, copy: Copy) -> None:
    shutil.copyfile(src / "train-00002.npy", copy.path / "train-00002.npy")
    shards, whole = opened(storage, copy), open_shards(src)
    assert len(shards) == NUM_SAMPLES
    assert shards.digest == whole.digest
    for index in [*range(-NUM_SAMPLES, NUM_SAMPLES)]:
        assert np.array_equal(shards[index].image, whole[index].image)
        assert shards[index].label == whole[index].label
    assert [sample.label for sample in shards[3:30:4]] == [sample.label for sample in whole[3:30:4]]
    with pytest.raises(IndexError):
        shards[NUM_SAMPLES]
    assert np.array_equal(shards.labels, whole.labels)
    for file in shard_files(src):
        shutil.copyfile(src / file, copy.path / file)
    assert not shards.look()
    for here, there in zip(shards.mapped().file_rows, whole.mapped().file_rows, strict=True):
        assert np.array_equal(here, there)


def test_an_index_that_is_there_is_not_fetched(src: Path, storage: CountingStorage, copy: Copy) -> None:
    shutil.copyfile(src / "train-index.npy", copy.path / "train-index.npy")
    opened(storage, copy)
    assert not storage.reads


def test_an_index_that_was_damaged_is_refused(src: Path, storage: CountingStorage, copy: Copy) -> None:
    flip(src / "train-index.npy", 5000)
    with pytest.raises(FormatError, match=r"train-index.npy: sha256: expected .*, found .*verify"):
        opened(storage, copy)
    with pytest.raises(SetNotFoundError, match="expected a split 'test', found train"):
        PartialSet(storage, storage.load_manifest(), "test", copy)


def test_a_storage_that_fails_names_the_sample(
    storage: CountingStorage, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = opened(storage, copy)

    def refuse(entry: FileEntry, offset: int, buffer: memoryview) -> None:
        raise OSError(errno.EIO, "reading failed", storage.path_of(entry))

    monkeypatch.setattr(storage, "read_into", refuse)
    with pytest.raises(OSError, match=r"sample 31: reading failed: '.*train-00003.npy'"):
        shards.gather(np.array([31]), np.empty((1, 6, 5, 3), np.uint8))


def test_threads_read_while_shards_come(src: Path, storage: CountingStorage, copy: Copy) -> None:
    shards = opened(storage, copy)
    errors: list[BaseException] = []
    done = threading.Event()

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not done.is_set():
                assert_whole(shards, rng)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for file in shard_files(src):
        # A filler copies like this: under another name first.
        shutil.copyfile(src / file, copy.path / ".half")
        os.rename(copy.path / ".half", copy.path / file)
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert not shards.look()


def test_a_look_of_another_thread_that_finds_the_copy_just_finished_disturbs_no_reader(
    src: Path, storage: CountingStorage, copy: Copy
) -> None:
    manifest = load_manifest(src)
    with FolderHandle(copy.path) as folder:
        PartialCopy.begin(folder, manifest, manifest.files)
        shards = opened(storage, copy)
        remove_parts(folder)
    table = shards.mapped()
    assert isinstance(table, PartialTable)
    assert table._map_unfinished() is None
    assert table._partial is not None
    assert_whole(shards, np.random.default_rng(1))


def test_what_is_copied_is_not_asked_for_at_every_batch(
    src: Path, storage: CountingStorage, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = opened(storage, copy)
    looks: list[NDArray[np.bool_]] = []
    monkeypatch.setattr(partialset, "_LOOK_SECONDS", 1000.0)
    monkeypatch.setattr(shards, "look", lambda: looks.append(shards._is_away))
    for _ in range(3):
        shards.gather(np.array([0]), np.empty((1, 6, 5, 3), np.uint8))
    assert not looks
