"""Staging: one verified copy per cache, whichever processes ask or die; and the source stays as it was."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import shardio
from folders import contents, flip, hashes, used_nbytes
from pictures import sample_pixels
from places import ROOT

from shardio.cache import filler as filling
from shardio.cache import partial_copy
from shardio.cache import stage as staging
from shardio.cache.cached_split import CachedSplit
from shardio.cache.filler import CopyFiller
from shardio.cache.folder import Cache
from shardio.cache.leases import Lease
from shardio.cache.stage import stage
from shardio.cli.main import cli
from shardio.errors import CacheError, FormatError, SetNotFoundError, SpaceError
from shardio.format.entries import FileEntry
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.storage import FileCopier, FolderStorage
from shardio.sets.verify import verify
from shardio.system.files import AtomicFile


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    """45 samples in five shards."""
    return make_set(45)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def inodes(folder: str | Path) -> dict[str, tuple[int, int]]:
    """Returns inode and time of each file. A new file of the same name may get the same number of an inode."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in Path(folder).iterdir()}


def finished(folder: str | Path) -> dict[str, tuple[int, int]]:
    return {name: inode for name, inode in inodes(folder).items() if not name.startswith(".")}


class Gate(FolderStorage):
    """A source that gives nothing until it is opened. A class, as `stage` makes its own."""

    opened: threading.Event
    asked: threading.Event

    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        self.asked.set()
        assert self.opened.wait(60)
        super().read_into(entry, offset, buffer)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gate]]:
    Gate.opened, Gate.asked = threading.Event(), threading.Event()
    monkeypatch.setattr(staging, "open_storage", Gate)
    yield Gate
    Gate.opened.set()


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    """Makes a call in a thread."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def watched(out: Path, before: Callable[[FileEntry, int], None]) -> FolderStorage:
    """A source that calls before(entry, offset) before each read."""

    class Watched(FolderStorage):
        def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
            before(entry, offset)
            super().read_into(entry, offset, buffer)

    return Watched(out)


@contextmanager
def filler_of(out: Path, cache: Path, storage: FolderStorage | None = None, **options: Any) -> Iterator[CopyFiller]:
    manifest = load_manifest(out)
    storage = storage or FolderStorage(out)
    with Cache(cache).lease(manifest.digest) as lease, contextlib.closing(storage):
        yield CopyFiller(storage, manifest, lease, **options)


def request_little(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Makes requests to the source, and blocks, as short as this."""
    monkeypatch.setattr(filling, "_REQUESTS", (1, nbytes))
    monkeypatch.setattr(partial_copy, "_LEAST_NBYTES", min(nbytes, partial_copy._LEAST_NBYTES))
    monkeypatch.setattr(partial_copy, "_PLAIN_NBYTES", min(nbytes, partial_copy._PLAIN_NBYTES))


# --- a cache of several users ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holder", "step"),
    [
        (Lease, "try_filling"),
        (filling, "remove_temporaries"),
        (filling, "link_from_others"),
        (FileCopier, "find_damaged"),
        (FileCopier, "each"),
        (AtomicFile, "commit"),
        (filling, "commit_manifest"),
    ],
)
def test_a_set_that_takes_the_place_of_the_copys_folder_is_not_changed(
    make_set: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch, holder: Any, step: str
) -> None:
    out, other = make_set(45), make_set(60)
    for name in (".theirs.tmp", "train-00000.npy.new"):
        (other / name).write_bytes(b"theirs")
    before, copy = inodes(other), cache / load_manifest(out).digest
    make_whole(out, cache, without="train-00001.npy")
    real = getattr(holder, step)

    def exchange(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(holder, step, real)
        copy.rename(cache / "moved")
        copy.symlink_to(other)
        return real(*args, **options)

    monkeypatch.setattr(holder, step, exchange)
    with pytest.raises(CacheError, match=copy.name):
        stage(out, cache, verify=True)
    assert inodes(other) == before
    assert copy.is_symlink()


def make_whole(out: Path, cache: Path, without: str) -> None:
    """Stages a set, and removes its manifest and one other file of the copy."""
    copy = Path(stage(out, cache).path)
    for name in ("manifest.json", without):
        (copy / name).unlink()


def test_under_a_sticky_bit_only_the_owner_of_a_begun_copy_goes_on_with_it(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_whole(out, cache, without="train-00001.npy")
    real, copy = os.fstat, (cache / load_manifest(out).digest).stat()

    def of_another_user(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        return os.stat_result((*found[:4], 4321, *found[5:])) if os.path.samestat(found, copy) else found

    monkeypatch.setattr(os, "fstat", of_another_user)
    cache.chmod(0o1777)
    with pytest.raises(PermissionError, match="another user"):
        stage(out, cache)
    cache.chmod(0o2775)
    assert stage(out, cache).num_copied == 1


# --- a source that is gone -------------------------------------------------------------------------------------------


def test_a_complete_copy_of_a_set_that_is_gone_is_named(out: Path, cache: Path, make_set: Callable[..., Path]) -> None:
    with pytest.raises(SetNotFoundError) as caught:
        stage(out / "missing", cache)
    assert "digest=" not in str(caught.value)
    digest = stage(out, cache).digest
    stage(make_set(30), cache)
    make_whole(other := make_set(60), cache, without="train-00001.npy")  # which has no complete copy
    for moved in (out, other):
        moved.rename(moved.with_name("moved"))
        with pytest.raises(SetNotFoundError, match="does not exist") as caught:
            stage(moved, cache)
        assert (f"{cache} has a complete copy" in str(caught.value)) == (moved == out)
        assert (f"digest='{digest[:12]}'" in str(caught.value)) == (moved == out)
        moved.with_name("moved").rename(moved)
    (out / "manifest.json").write_bytes(b"")
    with pytest.raises(FormatError, match=f"manifest.json: .*digest='{digest[:12]}'"):
        stage(out, cache)
    assert stage(out, cache, digest=digest[:12]).digest == digest
    with pytest.raises(FormatError) as caught_error:
        stage(out, cache, digest="0" * 12)
    assert digest[:12] not in str(caught_error.value)


# --- a copy ----------------------------------------------------------------------------------------------------------


def test_a_copy_has_the_bytes_of_the_source_which_is_left_as_it_was(out: Path, cache: Path) -> None:
    before = contents(out), out.stat().st_mtime_ns, inodes(out)
    report = stage(out, cache)
    assert contents(Path(report.path)) == before[0]
    assert (contents(out), out.stat().st_mtime_ns, inodes(out)) == before
    manifest = load_manifest(out)
    assert Path(report.path) == cache / manifest.digest
    assert (report.digest, report.source, report.nbytes) == (manifest.digest, str(out), manifest.nbytes)
    assert (report.num_files, report.num_copied, report.nbytes_copied, report.evicted) == (6, 6, manifest.nbytes, ())
    shards = open_shards(report.path)
    assert all(np.array_equal(shards[i].image, sample_pixels(i)) for i in range(45))
    (copy,) = Cache(cache).copies()
    assert (copy.complete, copy.in_use, copy.source) == (True, False, str(out))


def test_what_is_there_is_not_copied_again(out: Path, cache: Path) -> None:
    first = stage(out, cache)
    found = inodes(first.path)
    again = stage(out, cache)
    assert (again.num_copied, again.nbytes_copied, again.path) == (0, 0, first.path)
    (Path(first.path) / "manifest.json").unlink()
    shard = Path(first.path) / "train-00003.npy"
    shard.unlink()
    assert stage(out, cache).num_copied == 1
    now = inodes(first.path)
    assert {name for name in found if found[name] == now[name]} == found.keys() - {"manifest.json", shard.name}


@pytest.mark.parametrize(("piece", "num_samples"), [(7, 1), (1000, 45), (5000, 45), (1 << 20, 45)])
def test_pieces_of_any_size_give_the_same_bytes(
    make_set: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch, piece: int, num_samples: int
) -> None:
    out = make_set(num_samples)
    request_little(monkeypatch, piece)
    counts: list[tuple[int, int]] = []
    report = stage(out, cache, on_progress=lambda nbytes, total: counts.append((nbytes, total)))
    assert contents(Path(report.path)) == contents(out)
    assert sum(nbytes for nbytes, _ in counts) == report.nbytes
    assert {total for _, total in counts} == {report.nbytes}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_file_that_cannot_be_synced_is_named_and_thrown_away_with_all_that_was_received(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """After ENOSPC the same call makes room and tries again, after EIO the next call does."""
    real, failed, read, counts = os.fsync, list[Path](), list[int](), list[int]()

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if "train-00002" in path.name and not failed:
            failed.append(path)
            raise OSError(code, os.strerror(code))
        real(descriptor)

    def note(entry: FileEntry, offset: int) -> None:
        if entry.file == "train-00002.npy":
            read.append(offset)

    monkeypatch.setattr(os, "fsync", fsync)
    with filler_of(out, cache, watched(out, note), workers=1, on_progress=lambda n, total: counts.append(n)) as filler:
        if code == errno.EIO:
            with pytest.raises(OSError, match=r"Input/output error: '.*/cache/.*train-00002\.npy"):
                filler.run()
            assert not [*cache.rglob("manifest.json"), *cache.rglob("*train-00002.npy*")]
        assert filler.run()
    assert read == [0, 0]
    assert sum(counts) == filler.manifest.nbytes
    assert contents(filler.lease.path) == contents(out)


def test_indexes_come_first_then_what_is_wanted_and_the_manifest_last(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, finish, order = AtomicFile.commit, partial_copy.PartialCopy.finish, []

    def committed(self: AtomicFile, *, replace: bool = True) -> None:
        order.append(self.path.name)
        commit(self, replace=replace)

    def named(self: partial_copy.PartialCopy, entry: FileEntry) -> str:
        order.append(entry.file)
        return finish(self, entry)

    monkeypatch.setattr(AtomicFile, "commit", committed)
    monkeypatch.setattr(partial_copy.PartialCopy, "finish", named)
    shards = load_manifest(out).splits["train"].shards
    with filler_of(out, cache, order=[shards[3], shards[1]], workers=1) as filler:
        assert filler.run()
        assert [entry.file for entry in filler.copied] == order[:-1]
    numbers = [3, 1, 0, 2, 4]
    names = ["train-index.npy", *(f"train-{n:05d}.npy" for n in numbers), "manifest.json"]
    assert order == names


def test_no_more_files_are_read_at_a_time_than_there_are_workers(out: Path, cache: Path) -> None:
    lock, reading, most, workers = threading.Lock(), 0, 0, 3
    together = threading.Event()

    class Counting(FolderStorage):
        def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
            nonlocal reading, most
            with lock:
                reading += 1
                most = max(most, reading)
            if most == workers:
                together.set()
            assert together.wait(60)
            super().read_into(entry, offset, buffer)
            with lock:
                reading -= 1

    with filler_of(out, cache, Counting(out), workers=workers) as filler:
        assert filler.run()
    assert most == workers


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_source_is_named_and_its_sound_files_are_kept(out: Path, cache: Path) -> None:
    entry = load_manifest(out).splits["train"].shards[1]
    flip(out / entry.file)
    found = hashlib.sha256((out / entry.file).read_bytes()).hexdigest()
    message = (
        f"{out / entry.file}: sha256: expected {entry.sha256}, found {found}: the source is damaged; "
        f"`shardio verify {out}`"
    )
    with pytest.raises(FormatError, match=re.escape(message)):
        stage(out, cache, workers=1)
    (copy,) = Cache(cache).copies()
    assert not copy.complete
    kept = finished(copy.path)
    assert {"train-index.npy", "train-00000.npy"} <= set(kept)
    assert entry.file not in kept
    flip(out / entry.file)
    report = stage(out, cache)
    assert report.num_copied == 6 - len(kept)
    assert inodes(report.path).items() >= kept.items()


@pytest.mark.parametrize(("times", "is_exchanged"), [(1, False), (4, True)], ids=["on the way", "exchanged meanwhile"])
def test_what_was_damaged_on_the_way_or_exchanged_meanwhile_is_read_again(
    out: Path, cache: Path, times: int, is_exchanged: bool
) -> None:
    class Flaky(FolderStorage):
        failed = 0

        def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
            super().read_into(entry, offset, buffer)
            if entry.file == "train-00002.npy" and self.failed < times:
                self.failed += 1
                buffer[0] ^= 1
                self.changed |= {entry.file} if is_exchanged else set()

    counts = []
    with filler_of(out, cache, Flaky(out), on_progress=lambda nbytes, total: counts.append(nbytes)) as filler:
        assert filler.run()
        assert len(filler.copied) == 6
    assert sum(counts) == load_manifest(out).nbytes
    assert verify(cache / load_manifest(out).digest).ok


def test_one_failure_ends_the_others_soon(out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request_little(monkeypatch, 10)
    failed = threading.Event()

    def fail(entry: FileEntry, offset: int) -> None:
        if entry.file == "train-00004.npy":
            failed.set()
            raise OSError(errno.EIO, "gone", entry.file)
        assert not failed.is_set() or offset < entry.nbytes - 10
        assert failed.wait(60)
        time.sleep(0.001)  # half a second for a file

    with filler_of(out, cache, watched(out, fail), workers=7) as filler, pytest.raises(OSError, match="gone"):
        filler.run()
    assert not list(cache.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("manifest.json", lambda path: path.write_text("")),
        ("manifest.json", lambda path: path.write_text("{}")),
        ("train-00001.npy", lambda path: os.truncate(path, 4100)),
        ("train-00001.npy", lambda path: flip(path, 60)),
        ("train-index.npy", lambda path: flip(path, 4096)),
        ("train-00001.npy", lambda path: path.rename(path.with_name("x")) and path.symlink_to("x")),
    ],
    ids=["empty manifest", "bad manifest", "cut", "header", "label", "link"],
)
def test_a_file_of_a_copy_that_can_be_seen_to_be_damaged_is_copied_again(
    out: Path, cache: Path, name: str, harm: Callable[[Path], object]
) -> None:
    copy = Path(stage(out, cache).path)
    harm(copy / name)
    assert stage(out, cache).num_copied == (name != "manifest.json")
    assert not (copy / name).is_symlink()
    (copy / "x").unlink(missing_ok=True)
    assert contents(copy) == contents(out)


def test_damage_in_the_pixels_of_a_copy_is_found_when_all_of_it_is_read(out: Path, cache: Path) -> None:
    copy = Path(stage(out, cache).path)
    for name in ("train-00002.npy", "train-00003.npy"):
        flip(copy / name)
    assert stage(out, cache).num_copied == 0
    counts: list[tuple[int, int]] = []
    report = stage(out, cache, verify=True, on_progress=lambda *count: counts.append(count))
    assert report.num_copied == 2
    assert sum(nbytes for nbytes, _ in counts) == counts[-1][1] == report.nbytes + report.nbytes_copied
    assert contents(copy) == contents(out)
    assert stage(out, cache, verify=True).num_copied == 0


def test_another_set_in_the_place_of_a_copy_is_neither_changed_nor_read(
    make_set: Callable[..., Path], cache: Path
) -> None:
    out, other = make_set(45), make_set(60)
    copy = cache / load_manifest(out).digest
    Path(stage(other, cache).path).rename(copy)
    before = inodes(copy)
    with pytest.raises(CacheError, match=f"{copy}: expected a copy"):
        stage(out, cache)
    with contextlib.closing(CachedSplit(out, cache, "train")) as split, pytest.raises(CacheError, match=copy.name):
        split.open()
    assert inodes(copy) == before


# --- room ------------------------------------------------------------------------------------------------------------


def test_a_pinned_set_is_the_only_one_taken_and_its_complete_copy_needs_no_source(out: Path, cache: Path) -> None:
    digest = load_manifest(out).digest
    with pytest.raises(FormatError, match=f"digest: expected {'a' * 64}, found {digest}"):
        stage(out, cache, digest="a" * 64)
    with pytest.raises(ValueError, match="digest must be the 64 lower-case hexadecimal digits"):
        stage(out, cache, digest="a" * 11)
    with pytest.raises(ValueError, match="workers must be at least 1; found 0"):
        stage(out, cache, workers=0)
    assert stage(out, cache, digest=digest[:12]).num_copied == 6
    shutil.rmtree(out)
    assert [stage(out, cache, digest=digest[:count]).num_copied for count in (12, 63, 64)] == [0, 0, 0]
    for other in (None, "a" * 12):
        with pytest.raises(SetNotFoundError):
            stage(out, cache, digest=other)


def have_room(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """A filesystem of so many bytes, which holds nothing but copies."""
    monkeypatch.setattr(Cache, "free_nbytes", lambda self: nbytes - used_nbytes(self.folder))


def test_unused_copies_make_room(make_set: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [make_set(count) for count in (20, 21, 22, 23)]
    old = [stage(one, cache).digest for one in sets[:3]]
    have_room(monkeypatch, used_nbytes(cache) + 1000)
    for used, digest in enumerate((old[1], old[0], old[2])):
        os.utime(cache / f"{digest}.lock", (used, used))
    report = stage(sets[3], cache)
    assert report.evicted == (old[1],)
    assert {copy.digest for copy in Cache(cache).copies()} == {old[0], old[2], report.digest}


@pytest.mark.parametrize("keeps", ["a lease", "another user"])
def test_too_little_room_names_its_holders_and_evicts_nothing_in_vain(
    make_set: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch, keeps: str
) -> None:
    unused, kept, large = (make_set(n, samples_per_shard=m) for n, m in ((12, 10), (40, 9), (60, 8)))
    stage(unused, cache)
    digest = stage(kept, cache).digest
    nbytes = {copy.digest: copy.nbytes for copy in Cache(cache).copies()}
    have_room(monkeypatch, sum(nbytes.values()) + 700)
    words = f"found 700 free, {sum(nbytes.values()) - nbytes[digest]:,} in copies that are not in use"
    with contextlib.ExitStack() as stack:
        if keeps == "a lease":
            stack.enter_context(Cache(cache).lease(digest))
            holder = f"in use: {digest[:16]} ({kept}), {nbytes[digest]:,} bytes by process {os.getpid()}"
        else:
            monkeypatch.setattr(Cache, "may_remove", lambda self, digest: digest != load_manifest(kept).digest)
            holder = f"{nbytes[digest]:,} in unused copies that only other users may remove; in use: no other copy"
        with pytest.raises(SpaceError, match=re.escape(words)) as caught:
            stage(large, cache)
    assert holder in str(caught.value)
    assert {copy.digest for copy in Cache(cache).copies()} == nbytes.keys()


def test_room_that_another_has_taken_meanwhile_is_made_once_more_and_what_is_given_up_halfway_is_no_progress(
    make_set: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, evictable = make_set(45), stage(make_set(20, samples_per_shard=9), cache).digest
    counts, failures = list[int](), [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    real = partial_copy.PartialCopy.write

    def failing(self: partial_copy.PartialCopy, entry: FileEntry, offset: int, data: memoryview) -> None:
        if entry.file == "train-00003.npy" and offset and failures:
            have_room(monkeypatch, used_nbytes(cache) + 100)
            raise failures.pop()
        real(self, entry, offset, data)

    monkeypatch.setattr(partial_copy.PartialCopy, "write", failing)
    request_little(monkeypatch, 500)
    report = stage(out, cache, workers=1, on_progress=lambda nbytes, total: counts.append(nbytes))
    assert min(counts) < 0
    assert report.evicted == (evictable,)
    assert (report.num_copied, sum(counts)) == (6, report.nbytes)
    assert not failures
    assert contents(Path(report.path)) == contents(out)


def test_a_disk_that_fills_while_it_is_copied_to_is_too_little_room_and_finished_files_are_kept(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = filling.reserve, [None] * 3

    def reserve(descriptor: int, nbytes: int) -> None:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        real(descriptor, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(filling, "reserve", reserve)
        with pytest.raises(SpaceError, match=r"No space left on device, .*Finished files are kept"):
            stage(out, cache, workers=1)
    (copy,) = Cache(cache).copies()
    assert len(finished(copy.path)) == 3
    assert stage(out, cache).num_copied == 3


# --- at the same time ------------------------------------------------------------------------------------------------


def test_one_copies_and_the_others_wait_and_say_so_once(
    out: Path, cache: Path, gate: type[Gate], start: Callable[..., Future[Any]]
) -> None:
    told: list[int | None] = []
    progress: list[int] = []
    first = start(stage, out, cache)
    assert gate.asked.wait(60)
    others = [
        start(stage, out, cache, on_wait=told.append, on_progress=lambda n, total: progress.append(n)) for _ in range(3)
    ]
    while len(told) < 3:
        time.sleep(0.01)
    time.sleep(3 * filling._POLL_SECONDS)
    assert told == [os.getpid()] * 3
    gate.opened.set()
    assert first.result(60).num_copied == 6
    assert [other.result(60).num_copied for other in others] == [0, 0, 0]
    assert (told, progress) == ([os.getpid()] * 3, [])


def test_a_filler_that_is_told_to_stop_ends_soon_and_the_next_goes_on(out: Path, cache: Path) -> None:
    stop = threading.Event()

    def second(entry: FileEntry, offset: int) -> None:
        if entry.file == "train-00001.npy":
            stop.set()

    with filler_of(out, cache, watched(out, second), stop=stop, workers=1) as filler:
        assert not filler.run()
        copied = [entry.file for entry in filler.copied]
        assert copied == ["train-index.npy", "train-00000.npy", "train-00001.npy"][: len(copied)]
        (found,) = Cache(cache).copies()
        assert found.nbytes < load_manifest(out).nbytes  # its unfinished files take less than their size
        assert not filler.run()
    assert stage(out, cache).num_copied == 6 - len(copied)


def test_a_filler_that_takes_over_from_another_shows_it_in_its_state(out: Path, cache: Path) -> None:
    told: list[str] = []
    with Cache(cache).lease(load_manifest(out).digest) as lease:
        filling = lease.try_filling("")
        assert filling is not None

        def wait(process: int | None) -> None:
            told.append(filler.state)
            filling.close()

        with filler_of(out, cache, on_wait=wait) as filler:
            assert filler.run()
            assert told == [f"process {os.getpid()} is copying"]
            assert filler.state == f"copying from {out}"


def test_a_filler_that_waits_can_be_told_to_stop(
    out: Path, cache: Path, gate: type[Gate], start: Callable[..., Future[Any]]
) -> None:
    first = start(stage, out, cache)
    assert gate.asked.wait(60)
    stop, waiting = threading.Event(), threading.Event()
    with filler_of(out, cache, stop=stop, on_wait=lambda who: waiting.set()) as filler:
        other = start(filler.run)
        assert waiting.wait(60)
        stop.set()
        assert other.result(60) is False
    gate.opened.set()
    first.result(60)


def test_files_are_there_for_others_as_soon_as_they_are_copied(out: Path, cache: Path) -> None:
    manifest: Manifest = load_manifest(out)
    shards = manifest.splits["train"].shards
    with Cache(cache).lease(manifest.digest) as reader:
        seen: list[list[bool]] = []

        def look(entry: FileEntry, offset: int) -> None:
            number = next((number for number, shard in enumerate(shards) if shard == entry), 0)
            deadline = time.monotonic() + 10  # the last file is still being hashed
            while not all(reader.has(shard) for shard in shards[:number]) and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append([reader.has(shard) for shard in shards])

        with filler_of(out, cache, watched(out, look), workers=1) as filler:
            assert filler.run()
        assert seen[1:6] == [[number < copied for number in range(5)] for copied in range(5)]


def test_the_job_that_the_document_shows_holds_its_copy(out: Path, cache: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^((?:    .*\n|\n)*    from shardio import Cache.*\n(?:    .*\n|\n)*)", page, re.MULTILINE)
    for shown, here in (
        ("/data/imagenet-256", str(out)),
        ("/nvme/shardio", str(cache)),
        ("batch_size=256", "batch_size=9"),
        ("...", "job(loader, Cache)"),
    ):
        assert shown in block
        block = block.replace(shown, here)

    def job(loader: Any, cache_class: type[Cache]) -> None:
        assert len(list(loader)) == 5
        assert cache_class(cache).evict(keep=0).kept

    exec(textwrap.dedent(block), {"job": job})
    assert Cache(cache).evict(keep=0).removed


# --- the command line ------------------------------------------------------------------------------------------------


def test_stage_prints_the_path_of_the_copy_and_nothing_else(out: Path, cache: Path) -> None:
    digest = load_manifest(out).digest
    result = shardio("stage", out, cache)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{cache / digest}\n", "")
    report = json.loads(shardio("stage", out, cache, "--json", "--verify", "--workers", "2").stdout)
    assert (report["path"], report["num_copied"]) == (str(cache / digest), 0)
    assert report["nbytes"] == load_manifest(out).nbytes


def test_stage_says_for_whom_it_waits_and_shows_no_credentials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    def wait(*_: Any, on_wait: Callable[[int | None], None], **__: Any) -> None:
        on_wait(None)
        on_wait(7)
        raise SpaceError

    monkeypatch.setattr(staging, "stage", wait)
    with suppress(SpaceError):
        cli.main(["stage", "https://me:secret@host/set?signature=secret", str(cache)], standalone_mode=False)
    assert capsys.readouterr().err.splitlines() == [
        f"shardio: {who} is copying https://host/set to {cache}: waiting for it"
        for who in ("another process", "process 7")
    ]


def test_a_damaged_file_that_a_training_removes_first_is_copied_again(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(stage(out, cache).path)
    find_damaged = FileCopier.find_damaged
    flip(copy / "train-00000.npy")

    def removed(*arguments: Any) -> Any:
        (copy / "train-00000.npy").unlink()
        return find_damaged(*arguments)

    monkeypatch.setattr(FileCopier, "find_damaged", removed)
    stage(out, cache, verify=True)
    assert hashes(copy) == hashes(out)


def test_evict_says_what_went_and_what_is_in_use(make_set: Callable[..., Path], cache: Path) -> None:
    one, two = (stage(make_set(count), cache) for count in (12, 13))
    with Cache(cache).lease(two.digest):
        result = shardio("evict", cache, "--keep", "0")
    assert (result.returncode, result.stderr) == (0, "")
    removed, kept, rest = result.stdout.splitlines()
    assert re.fullmatch(rf"removed the copy of {one.source}, digest {one.digest[:16]}, [\d.]+ kB", removed)
    assert re.fullmatch(rf"kept the copy of {two.source}, .*: in use by process {os.getpid()}", kept)
    assert rest.startswith(f"{cache}: ")
    report = json.loads(shardio("evict", cache, "--keep", "500GB", "--json").stdout)
    assert (report["removed"], report["kept"]) == ([], [])
    assert report["nbytes"] > two.nbytes


def test_evict_takes_the_cache_from_the_environment_and_says_what_is_no_cache(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, found in ((cache, "nothing"), (out, "a folder with 'manifest.json' and without ")):
        monkeypatch.setenv("SHARDIO_CACHE", str(place))
        result = shardio("evict", "--keep", "0")
        assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
        assert f"expected a cache made by `shardio stage` or a loader, found {found}" in result.stderr
        assert str(place) in result.stderr
    stage(out, cache)
    assert shardio("evict", cache, "--keep", "0").stdout.startswith(f"removed the copy of {out}, ")


def test_stage_says_what_it_evicted(
    make_set: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_set(22), make_set(20)
    digest = stage(one, cache).digest
    have_room(monkeypatch, used_nbytes(cache) + 1000)
    said: list[str] = []
    stage(two, cache, on_message=said.append)
    (text,) = said
    assert re.fullmatch(rf"removed the copy of {one}, digest {digest[:16]}, [\d.]+ kB from {cache}, to make room", text)


def test_ctrl_c_keeps_what_is_finished(out: Path, cache: Path) -> None:
    code = """
import sys, threading
from shardio.cli import main as cli
from shardio.cache import filler as filling
from shardio.cache import stage as staging
from shardio.sets.storage import FileCopier, FolderStorage
class Slow(FolderStorage):
    def read_into(self, entry, offset, buffer):
        if entry.file == "train-00003.npy":
            print("slow", flush=True)
            threading.Event().wait(0.5)
        super().read_into(entry, offset, buffer)
staging.open_storage = Slow
sys.argv = ["shardio", "stage", *sys.argv[1:], "--workers", "1"]
cli.main()
"""
    command = [sys.executable, "-c", code, str(out), str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "slow\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [line for line in stderr.splitlines() if line] == [
        f"shardio: finished files are kept in {cache}: the same command resumes the copy",
        "shardio: interrupted",
    ]
    assert not list(cache.rglob("*.tmp"))
    assert stage(out, cache).num_copied <= 3
