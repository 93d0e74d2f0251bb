"""A loader with a cache gives what one without gives, from the first batch on, however far the copy is."""

from __future__ import annotations

import errno
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import until
from disks import failing
from folders import flip
from pictures import sample_pixels

from shardio.augment.transforms import CenterCrop
from shardio.cache import partial_copy
from shardio.cache import partial_set as partialset
from shardio.cache import stage as staging
from shardio.cache.folder import Cache
from shardio.errors import CacheError, FormatError, SetNotFoundError
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.loading.loader import ShardLoader
from shardio.sets.storage import FolderStorage

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
        real = FolderStorage.read_into

        def read_into(storage: FolderStorage, entry: FileEntry, offset: int, buffer: memoryview) -> None:
            if threading.current_thread().name.startswith("shardio-stage"):
                if not entry.file.endswith("-index.npy"):
                    self.held.append(entry.file)
                    self.opened.wait(60)
                self.copied.append(entry.file)
            else:
                self.fetched.append(entry.file)
            real(storage, entry, offset, buffer)

        monkeypatch.setattr(FolderStorage, "read_into", read_into)


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
        assert (
            f"was not complete, or not readable, when reading began: missing shards are read from {src}"
            in loader.stats()["io_reason"]
        )
        gate.fetched.clear()
        second = read_epoch(loader)
        assert loader.stats()["io"] == "mmap"
        assert not gate.fetched
        next(iter(plain))
        for here, there in zip(second, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
        assert loader.stats()["staging"]["path"] == str(cache / loader.shards.digest)


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
        while len(gate.held) < 4:  # as many as there are threads: each has one
            time.sleep(0.001)
        gate.opened.set()
        wait_for(loader)
    shards = [file for file in gate.held if file.startswith("train-0")]
    assert {*shards[:4]} == {f"train-0000{number}.npy" for number in (9, 0, 4, 2)}
    assert len(shards) == 10


def test_a_complete_copy_is_read_as_any_set_and_the_source_is_not(src: Path, cache: Path, gate: Gate) -> None:
    gate.opened.set()
    digest = staging.stage(src, cache).digest
    gate.copied.clear()
    with loaded(src, cache) as loader:
        read_epoch(loader)
        assert loader.stats()["staging"]["state"] == "complete"
        assert loader.stats()["io"] == "mmap"
        assert loader.shards.path == cache / digest
    assert not gate.copied
    assert not gate.fetched


def test_without_room_training_goes_on_and_says_so(src: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "free_nbytes", lambda cache: 1000)
    with pytest.warns(RuntimeWarning, match=r"training continues, .* without a copy: .*expected room for"):
        loader = wait_for(loaded(src, cache), "failed")
    with loader:
        read_epoch(loader)
        read_epoch(loader)
        assert loader.stats()["io"] == "staged"


@pytest.mark.parametrize("fault", ["the cache cannot be made", "its copy cannot be locked"])
def test_without_a_cache_training_goes_on_and_says_so(
    src: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "the cache cannot be made":
        cache.touch()
    else:
        monkeypatch.setattr(Cache, "lease", failing(errno.EACCES))
    with pytest.warns(RuntimeWarning, match="training continues, .* without a copy: .*Errno"):
        loader = loaded(src, cache)
    with loader:
        read_epoch(loader)
        assert loader.stats()["staging"]["state"].startswith("failed")


def test_samples_that_do_not_fit_on_the_disk_are_not_waited_for(
    src: Path, cache: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_copy, "lock_at_once", failing(errno.ENOSPC))
    with loaded(src, cache) as loader:
        while len(gate.held) < 4:  # what the copying threads are held up at
            time.sleep(0.01)
        copy = partial_copy.PartialCopy.find(cache / loader.shards.digest, load_manifest(src))
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
    ("file", "place"),
    [("train-00003.npy", None), ("train-00003.npy", 0), ("train-index.npy", 0), ("train-index.npy", 4096)],
)
def test_a_copy_that_opening_refuses_is_mended_while_training_goes_on(
    src: Path, cache: Path, gate: Gate, file: str, place: int | None
) -> None:
    """At byte 4096 lies the label of sample 0."""
    gate.opened.set()
    path = Path(staging.stage(src, cache).path)
    gate.opened.clear()
    if place is None:
        (path / file).unlink()
    else:
        flip(path / file, place)
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
    real = FolderStorage.read_into

    def away(storage: FolderStorage, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        if threading.current_thread().name.startswith("shardio-gather"):
            raise OSError(errno.EHOSTUNREACH, "the server is away", entry.file)
        real(storage, entry, offset, buffer)

    with loaded(src, cache) as loader:
        monkeypatch.setattr(FolderStorage, "read_into", away)
        with pytest.raises(OSError, match="the server is away"):
            list(loader)
        monkeypatch.setattr(FolderStorage, "read_into", real)
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
        monkeypatch.setattr(partial_copy.PartialCopy, "find", lambda folder, manifest: None)
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


def test_what_cannot_be_opened_leaves_no_lease(src: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(SetNotFoundError, match="expected a split 'test', found train"):
        loaded(src, cache, split="test")
    with pytest.raises(FormatError, match=r"expected 0000.*, found .*: this is not the pinned set"):
        loaded(src, cache, digest="0" * 64)
    with pytest.raises(ValueError, match="digest must be the 64 lower-case"):
        loaded(src, cache, digest="latest")
    with pytest.raises(ValueError, match="io must be one of"):
        loaded(src, cache, io="fast")
    with pytest.raises(ValueError, match="at least one batch"):
        ShardLoader(src, 100, cache=cache, device="cpu")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    with pytest.raises(CacheError, match="precious"):
        loaded(src, tmp_path / "other")
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
