"""A loader with a cache gives what one without gives, from the first batch on, however far the copy is."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import until
from disks import failing
from folders import flip
from hooks import call_before
from pictures import sample_pixels

from shardio.augment.transforms import CenterCrop
from shardio.cache import partial_copy
from shardio.cache import partial_set as partialset
from shardio.cache import stage as staging
from shardio.cache.folder import Cache
from shardio.cache.leases import Lease
from shardio.cache.partial_copy import PartialCopy, remove_parts
from shardio.cache.partial_set import PartialSet, PartialTable
from shardio.errors import FormatError, SetNotFoundError
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.kernels.rowcopy import Windows
from shardio.loading.loader import ShardLoader
from shardio.sets.storage import FolderStorage
from shardio.system.opening import FolderHandle

NUM_SAMPLES = 95  # in shards of ten


@pytest.fixture
def src(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def each_row_is_a_block_and_none_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partialset, "_LOOK_SECONDS", -1.0)
    monkeypatch.setattr(partial_copy, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(partial_copy, "_COMING_SECONDS", 0.0)


class Gate:
    """Holds up the copying of shards, not the reading of samples from afar, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.held: list[str] = []
        self.copied: list[str] = []
        self.fetched: list[str] = []
        call_before(monkeypatch, FolderStorage, "read_into", self._note)

    def _note(self, _: FolderStorage, entry: FileEntry, *__: object) -> None:
        if threading.current_thread().name.startswith("shardio-stage"):
            if not entry.file.endswith("-index.npy"):
                self.held.append(entry.file)
                self.opened.wait(60)
            self.copied.append(entry.file)
        else:
            self.fetched.append(entry.file)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def loaded(src: Path, cache: Path | None, **options: Any) -> ShardLoader:
    return ShardLoader(src, 8, device="cpu", return_indices=True, cache=cache, **options)


def read_epoch(loader: ShardLoader) -> list[tuple[torch.Tensor, ...]]:
    batches = list(loader)
    for images, labels, indices in batches:
        for image, label, index in zip(images, labels.tolist(), indices.tolist(), strict=True):
            assert torch.equal(image.permute(1, 2, 0), torch.from_numpy(sample_pixels(index)))
            assert label == index % 7
    return batches


def wait_for(loader: ShardLoader, state: str = "complete") -> ShardLoader:
    until(lambda: loader.stats()["staging"]["state"].startswith(state))
    return loader


def test_training_begins_before_anything_is_copied_and_ends_on_the_copy(src: Path, cache: Path, gate: Gate) -> None:
    with loaded(src, cache) as loader, loaded(src, None) as plain:
        read_epoch(loader)
        assert loader.stats()["io"] == "staged"
        assert loader.stats()["staging"]["shards_here"] == 0
        assert gate.copied == ["train-index.npy"]
        assert len(gate.fetched) == 88
        assert loader.stats()["read_nbytes"] == 88 * 90
        gate.opened.set()
        wait_for(loader)
        assert f"missing shards are read from {src}" in loader.stats()["io_reason"]
        gate.fetched.clear()
        second = read_epoch(loader)
        assert loader.stats()["io"] == "mmap"
        assert not gate.fetched
        next(iter(plain))
        for here, there in zip(second, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
        assert loader.stats()["staging"]["path"] == str(cache / loader.shards.digest)
    gate.copied.clear()
    with loaded(src, cache) as loader:
        read_epoch(loader)
        assert (loader.stats()["staging"]["state"], loader.stats()["io"]) == ("complete", "mmap")
        assert loader.shards.path == cache / loader.shards.digest
    assert not [*gate.copied, *gate.fetched]


def test_a_set_that_is_being_copied_is_pickled_as_its_source_and_then_as_the_copy(
    src: Path, cache: Path, gate: Gate
) -> None:
    with loaded(src, cache) as loader:
        before = pickle.loads(pickle.dumps(loader.shards))
        assert before.path == src
        gate.opened.set()
        wait_for(loader)
        after = pickle.loads(pickle.dumps(loader.shards))
        assert after.path == cache / loader.shards.digest
        assert before.digest == after.digest == loader.shards.digest


def test_shards_are_copied_in_the_order_in_which_they_are_needed(src: Path, cache: Path, gate: Gate) -> None:
    first = [93, 3, 47, *range(20, 25)]
    with loaded(src, cache, shuffle=False, indices=[*first, *range(80, 88)], num_threads=1) as loader:
        until(lambda: len(gate.held) == 4)  # as many as there are threads: each has one
        gate.opened.set()
        wait_for(loader)
    shards = [file for file in gate.held if file.startswith("train-0")]
    assert {*shards[:4]} == {f"train-0000{number}.npy" for number in (9, 0, 4, 2)}
    assert len(shards) == 10


@pytest.mark.parametrize("fault", ["no room", "the cache cannot be made", "its copy cannot be locked"])
def test_without_a_copy_training_goes_on_and_says_so(
    src: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "no room":
        monkeypatch.setattr(Cache, "free_nbytes", lambda cache: 1000)
    elif fault == "the cache cannot be made":
        cache.touch()
    else:
        monkeypatch.setattr(Cache, "lease", failing(errno.EACCES))
    with pytest.warns(RuntimeWarning, match="training continues, .* without a copy: .*(expected room for|Errno)"):
        loader = wait_for(loaded(src, cache), "failed")
    with loader:
        read_epoch(loader)
        read_epoch(loader)
        assert (loader.stats()["io"] == "staged") == (fault == "no room")


def test_samples_that_do_not_fit_on_the_disk_are_not_waited_for(
    src: Path, cache: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_copy, "lock_at_once", failing(errno.ENOSPC))
    with loaded(src, cache) as loader:
        until(lambda: len(gate.held) == 4)  # what the copying threads are held up at
        copy = PartialCopy.find(cache / loader.shards.digest, load_manifest(src))
        assert copy is not None
        coming = int((copy.states == partial_copy.COMING).sum())
        read_epoch(loader)
        left = int((copy.states == partial_copy.COMING).sum())
        gate.opened.set()
    assert left <= coming


def test_what_was_damaged_in_the_copy_is_read_from_the_source_and_copied_again(src: Path, cache: Path) -> None:
    path = Path(staging.stage(src, cache).path)
    damage(path / "train-00003.npy")
    before = {file.name: file.stat().st_ino for file in path.iterdir()}
    with loaded(src, cache, check="sample") as loader, loaded(src, cache, io="pread") as other:
        batches = iter(other)
        next(batches)
        read_epoch(loader)
        assert loader.stats()["read_retries"] > 0
        wait_for(loader)
        assert other.stats()["io_reason"] == "asked for by io='pread'"
        assert len(list(batches)) == 10  # a reader that has the copy open goes on with it
        read_epoch(loader)  # mapped pages stay damaged, and are read from the source again
    after = {file.name: file.stat().st_ino for file in path.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"train-00003.npy"}
    assert (path / "train-00003.npy").read_bytes() == (src / "train-00003.npy").read_bytes()
    with loaded(src, cache, check="sample") as loader:
        read_epoch(loader)
        assert loader.stats()["read_retries"] == 0


def damage(shard: Path) -> None:
    """Damages the second sample of the fourth shard, which is sample 31."""
    with open(shard, "r+b") as file:
        file.seek(4096 + 90)
        file.write(b"other")


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_file_that_lost_its_name_is_read_from_the_source_and_copied_again(src: Path, cache: Path, io: Any) -> None:
    """As a damaged file does, when another process finds it."""
    path = Path(staging.stage(src, cache).path)
    damage(path / "train-00003.npy")
    with loaded(src, cache, io=io, shuffle=False) as loader:
        batches = iter(loader)
        next(batches)  # of the first shard
        (path / "train-00003.npy").unlink()
        assert len(list(batches)) == 10
        read_epoch(loader)
        wait_for(loader)
        read_epoch(loader)
        assert loader.stats()["io"] == io
    assert (path / "train-00003.npy").read_bytes() == (src / "train-00003.npy").read_bytes()


def test_a_damaged_source_costs_the_copy_nothing(src: Path, cache: Path) -> None:
    path = Path(staging.stage(src, cache).path)
    for folder in (src, path):
        damage(folder / "train-00003.npy")
    before = (path / "train-00003.npy").stat()
    with loaded(src, cache, check="sample") as loader:
        with pytest.raises(FormatError, match="sample 31 "):
            list(loader)
        assert loader.stats()["staging"]["state"] == "complete"
    assert (path / "train-00003.npy").stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("train-00003.npy", Path.unlink),
        ("train-00003.npy", lambda path: flip(path, 0)),
        ("train-index.npy", lambda path: flip(path, 4096)),
    ],
    ids=["missing", "header", "label"],
)
def test_a_copy_that_opening_refuses_is_mended_while_training_goes_on(
    src: Path, cache: Path, gate: Gate, file: str, harm: Callable[[Path], object]
) -> None:
    gate.opened.set()
    path = Path(staging.stage(src, cache).path)
    gate.opened.clear()
    harm(path / file)
    with loaded(src, cache) as loader:
        read_epoch(loader)
        gate.opened.set()
        wait_for(loader)
        read_epoch(loader)
        assert loader.stats()["io"] == "mmap"
    assert (path / file).read_bytes() == (src / file).read_bytes()


def test_a_server_that_is_away_is_an_error_until_it_is_back(
    src: Path, cache: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: FolderStorage, entry: FileEntry, *__: object) -> None:
        if threading.current_thread().name.startswith("shardio-gather"):
            raise OSError(errno.EHOSTUNREACH, "the server is away", entry.file)

    with loaded(src, cache) as loader:
        with monkeypatch.context() as patch:
            call_before(patch, FolderStorage, "read_into", away)
            with pytest.raises(OSError, match="the server is away"):
                list(loader)
        assert len(list(loader)) == 11
        gate.opened.set()


def test_a_copying_thread_that_collects_its_loader_ends_and_gives_the_lease_back(
    src: Path, cache: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, held = FolderStorage.read_into, list[ShardLoader]()

    def collecting(storage: FolderStorage, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        real(storage, entry, offset, buffer)
        if threading.current_thread().name.startswith("shardio-stage-part") and held:
            held.pop()._pipeline._source.close()  # type: ignore[union-attr]  # its finalizer does the same

    monkeypatch.setattr(FolderStorage, "read_into", collecting)
    loader = loaded(src, cache)
    held.append(loader)
    gate.opened.set()
    (thread,) = loader._pipeline._source._staged.threads  # type: ignore[union-attr]
    thread.join(30)
    assert not thread.is_alive()
    assert not [copy for copy in Cache(cache).copies() if copy.in_use]
    loader.close()


def test_what_is_damaged_in_the_source_is_found_while_the_copy_is_made(src: Path, cache: Path, gate: Gate) -> None:
    damage(src / "train-00003.npy")
    with loaded(src, cache, check="sample") as loader:
        with pytest.raises(FormatError, match="sample 31 "):
            list(loader)
        gate.opened.set()


@pytest.mark.parametrize("unfinished_files_are_mapped", [True, False])
@pytest.mark.parametrize("transform", [None, CenterCrop(4)], ids=["whole", "windows"])
def test_a_file_that_was_found_damaged_at_its_source_gives_its_right_samples_and_no_wrong_one(
    src: Path, cache: Path, transform: Any, unfinished_files_are_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(src / "train-00003.npy")
    if not unfinished_files_are_mapped:  # as with rows of more than a block
        monkeypatch.setattr(PartialCopy, "find", lambda folder, manifest: None)
    with pytest.warns(RuntimeWarning, match=r"train-00003.npy: .*`shardio repair`"):
        loader = wait_for(loaded(src, cache, transform=transform), "failed")
    with loader:
        for _ in range(2):
            with pytest.raises(FormatError, match=rf"{src}/train-00003.npy: sample 31 .*`shardio repair`.*`indices=`"):
                list(loader)
    others = [i for i in range(NUM_SAMPLES) if i != 31]
    with pytest.warns(RuntimeWarning, match="repair"):
        loader = wait_for(loaded(src, cache, indices=others), "failed")
    with loader:
        read_epoch(loader)
        read_epoch(loader)
    assert not list(cache.rglob("train-00003.npy"))


def test_what_cannot_be_opened_leaves_no_lease(src: Path, cache: Path) -> None:
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"split": "test"}, SetNotFoundError, "'test', found train"),
        ({"digest": "0" * 64}, FormatError, "not the pinned set"),
        ({"io": "fast"}, ValueError, "io must be"),
        ({"indices": [1]}, ValueError, "at least one batch"),
    ]
    for options, error, told in refused:
        with pytest.raises(error, match=told):
            loaded(src, cache, **options)
    assert not [copy for copy in Cache(cache).copies() if copy.in_use]


def test_closing_ends_the_copying_at_once_and_the_next_loader_goes_on(src: Path, cache: Path, gate: Gate) -> None:
    loader = loaded(src, cache)
    next(iter(loader))
    threading.Timer(0.2, gate.opened.set).start()  # a piece that is being read is read to its end
    loader.close()
    assert loader.stats()["staging"]["state"] == "stopped"
    assert load_manifest(src) != _copied(cache)
    with loaded(src, cache) as loader:
        wait_for(loader)
    assert load_manifest(src) == _copied(cache)


def test_a_source_that_does_not_answer_is_left_and_the_lease_lasts_until_it_does(
    src: Path, cache: Path, gate: Gate
) -> None:
    loader = loaded(src, cache)
    next(iter(loader))
    with pytest.warns(RuntimeWarning, match=f"{src}: no answer from the storage"):
        loader.close()
    assert [copy.in_use for copy in Cache(cache).copies()] == [True]
    gate.opened.set()
    until(lambda: not any(thread.name.startswith("shardio") for thread in threading.enumerate()))
    assert [copy.in_use for copy in Cache(cache).copies()] == [False]


SCRIPT = """
import sys, threading, time
from shardio.loading.loader import ShardLoader
from shardio.sets.storage import FolderStorage
real = FolderStorage.read_into
def slow(self, entry, offset, buffer):
    if threading.current_thread().name.startswith("shardio-stage") and "index" not in entry.file:
        while threading.main_thread().is_alive():
            time.sleep(0.01)
    real(self, entry, offset, buffer)
FolderStorage.read_into = slow
loader = ShardLoader(sys.argv[1], 8, device="cpu", cache=sys.argv[2])
next(iter(loader))
"""


def test_a_script_that_ends_does_not_wait_for_the_copy(src: Path, cache: Path) -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT, src, cache], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert _copied(cache) is None
    assert not [path for path in cache.rglob("train-0*.npy") if path.stat().st_size == 0]
    with loaded(src, cache) as loader:
        wait_for(loader)
        read_epoch(loader)


def _copied(cache: Path) -> object:
    folder = next(path for path in cache.iterdir() if path.is_dir())
    try:
        return load_manifest(folder)
    except SetNotFoundError:
        return None


# --- the set that is read meanwhile ----------------------------------------------------------------------------------


@pytest.fixture
def storage(src: Path) -> Iterator[FolderStorage]:
    with closing(FolderStorage(src)) as storage:
        yield storage


@pytest.fixture
def copy(src: Path, cache: Path) -> Iterator[Lease]:
    """A copy, into which tests put files."""
    with Cache(cache).lease(load_manifest(src).digest) as lease:
        lease.path.mkdir()
        yield lease


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The files that are read from afar, and how many bytes of each."""
    reads: list[tuple[str, int]] = []
    call_before(
        monkeypatch, FolderStorage, "read_into", lambda _, entry, *rest: reads.append((entry.file, len(rest[1])))
    )
    return reads


def opened(storage: FolderStorage, copy: Lease) -> PartialSet:
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


def test_every_state_of_the_copy_gives_the_same_samples(
    src: Path, storage: FolderStorage, copy: Lease, reads: list[tuple[str, int]]
) -> None:
    rng = np.random.default_rng(1)
    shards = opened(storage, copy)
    assert_whole(shards, rng)
    for file in rng.permutation(shard_files(src)):
        shutil.copyfile(src / file, copy.path / file)
        reads.clear()
        assert_whole(shards, rng)
        assert file not in [name for name, _ in reads]
    assert not reads
    assert not shards.look()
    shutil.copyfile(src / "train-index.npy", copy.path / "train-index.npy")
    assert_whole(opened(storage, copy), rng)
    assert not reads


def test_only_the_lines_of_a_window_are_read_from_afar(
    storage: FolderStorage, copy: Lease, reads: list[tuple[str, int]]
) -> None:
    shards = opened(storage, copy)
    reads.clear()
    shards.gather(
        np.array([12]), np.empty((1, 2, 5, 3), np.uint8), Windows.of_one_size(2, 5, np.array([3]), np.array([0]))
    )
    assert reads == [("train-00001.npy", 2 * 5 * 3)]


def test_an_index_that_was_damaged_is_refused(src: Path, storage: FolderStorage, copy: Lease) -> None:
    flip(src / "train-index.npy", 5000)
    with pytest.raises(FormatError, match=r"train-index\.npy: sha256"):
        opened(storage, copy)


def test_a_storage_that_fails_names_the_sample(
    storage: FolderStorage, copy: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = opened(storage, copy)

    def refuse(entry: FileEntry, offset: int, buffer: memoryview) -> None:
        raise OSError(errno.EIO, "reading failed", storage.path_of(entry))

    monkeypatch.setattr(storage, "read_into", refuse)
    with pytest.raises(OSError, match=r"sample 31: reading failed: '.*train-00003.npy'"):
        shards.gather(np.array([31]), np.empty((1, 6, 5, 3), np.uint8))


def test_threads_read_while_shards_come(src: Path, storage: FolderStorage, copy: Lease) -> None:
    shards = opened(storage, copy)
    done = threading.Event()

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not done.is_set():
            assert_whole(shards, rng)

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, seed) for seed in range(4)]
        for file in shard_files(src):
            # A filler copies like this: under another name first.
            shutil.copyfile(src / file, copy.path / ".half")
            os.rename(copy.path / ".half", copy.path / file)
        done.set()
        for reader in readers:
            reader.result()
    assert not shards.look()


def test_a_look_of_another_thread_that_finds_the_copy_just_finished_disturbs_no_reader(
    src: Path, storage: FolderStorage, copy: Lease
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
    src: Path, storage: FolderStorage, copy: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = opened(storage, copy)
    looks: list[PartialTable] = []
    monkeypatch.setattr(partialset, "_LOOK_SECONDS", 1000.0)
    monkeypatch.setattr(PartialTable, "look", lambda table: looks.append(table))
    for _ in range(3):
        shards.gather(np.array([0]), np.empty((1, 6, 5, 3), np.uint8))
    assert not looks
    monkeypatch.setattr(partialset, "_LOOK_SECONDS", -1.0)
    shards.gather(np.array([0]), np.empty((1, 6, 5, 3), np.uint8))
    assert looks
