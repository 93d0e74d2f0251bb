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
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import shardio
from deadlines import until
from folders import contents, flip, hashes, used_nbytes
from hooks import call_before
from pictures import sample_pixels
from places import ROOT

from shardio.cache import filler as filling
from shardio.cache import partial_copy
from shardio.cache import stage as staging
from shardio.cache.cached_split import CachedSplit
from shardio.cache.filler import CopyFiller
from shardio.cache.folder import Cache
from shardio.cache.leases import Lease
from shardio.cache.partial_copy import PartialCopy
from shardio.cache.stage import stage
from shardio.errors import CacheError, ConvertError, FormatError, SetNotFoundError, SpaceError
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.publish import publish
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


@contextmanager
def filler_of(out: Path, cache: Path, **options: Any) -> Iterator[CopyFiller]:
    manifest = load_manifest(out)
    with Cache(cache).lease(manifest.digest) as lease, contextlib.closing(FolderStorage(out)) as storage:
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

    def exchange(*_: Any, **__: Any) -> None:
        copy.rename(cache / "moved")
        copy.symlink_to(other)

    call_before(monkeypatch, holder, step, exchange, once=True)
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
    failed, read, counts = list[Path](), list[int](), list[int]()

    def fail_once(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if "train-00002" in path.name and not failed:
            failed.append(path)
            raise OSError(code, os.strerror(code))

    def note(_: FolderStorage, entry: FileEntry, offset: int, __: memoryview) -> None:
        if entry.file == "train-00002.npy":
            read.append(offset)

    call_before(monkeypatch, os, "fsync", fail_once)
    call_before(monkeypatch, FolderStorage, "read_into", note)
    with filler_of(out, cache, workers=1, on_progress=lambda n, total: counts.append(n)) as filler:
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
    order = list[str]()
    call_before(monkeypatch, AtomicFile, "commit", lambda file, **_: order.append(file.path.name))
    call_before(monkeypatch, PartialCopy, "finish", lambda _, entry: order.append(entry.file))
    shards = load_manifest(out).splits["train"].shards
    with filler_of(out, cache, order=[shards[3], shards[1]], workers=1) as filler:
        assert filler.run()
        assert [entry.file for entry in filler.copied] == order[:-1]
    numbers = [3, 1, 0, 2, 4]
    names = ["train-index.npy", *(f"train-{n:05d}.npy" for n in numbers), "manifest.json"]
    assert order == names


def test_so_many_files_are_copied_at_a_time_as_there_are_workers(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, together = set[int](), threading.Barrier(3)

    def meet(*_: object) -> None:
        threads.add(threading.get_ident())
        together.wait(60)

    call_before(monkeypatch, CopyFiller, "_complete", meet)
    with filler_of(out, cache, workers=3) as filler:
        assert filler.run()
    assert len(threads) == 3


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_source_is_named_and_its_sound_files_are_kept(out: Path, cache: Path) -> None:
    entry = load_manifest(out).splits["train"].shards[1]
    flip(out / entry.file)
    found = hashlib.sha256((out / entry.file).read_bytes()).hexdigest()
    message = rf"{out / entry.file}: sha256: expected {entry.sha256}, found {found}: .*`shardio verify {out}`"
    with pytest.raises(FormatError, match=message):
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
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, times: int, is_exchanged: bool
) -> None:
    real, counts, left = FolderStorage.read_into, list[int](), [None] * times

    def read_into(storage: FolderStorage, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        real(storage, entry, offset, buffer)
        if entry.file == "train-00002.npy" and left:
            left.pop()
            buffer[0] ^= 1
            storage.changed |= {entry.file} if is_exchanged else set()

    monkeypatch.setattr(FolderStorage, "read_into", read_into)
    with filler_of(out, cache, on_progress=lambda nbytes, total: counts.append(nbytes)) as filler:
        assert filler.run()
        assert len(filler.copied) == 6
    assert sum(counts) == load_manifest(out).nbytes
    assert verify(cache / load_manifest(out).digest).ok


def test_one_failure_ends_the_others_soon(out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request_little(monkeypatch, 10)
    failed = threading.Event()

    def fail(_: FolderStorage, entry: FileEntry, offset: int, __: memoryview) -> None:
        if entry.file == "train-00004.npy":
            failed.set()
            raise OSError(errno.EIO, "gone", entry.file)
        assert not failed.is_set() or offset < entry.nbytes - 10
        assert failed.wait(60)
        time.sleep(0.001)  # half a second for a file

    call_before(monkeypatch, FolderStorage, "read_into", fail)
    with filler_of(out, cache, workers=7) as filler, pytest.raises(OSError, match="gone"):
        filler.run()
    assert not list(cache.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("manifest.json", Path.unlink),
        ("manifest.json", lambda path: path.write_text("")),
        ("manifest.json", lambda path: path.write_text("{}")),
        ("train-00001.npy", Path.unlink),
        ("train-00001.npy", lambda path: os.truncate(path, 4100)),
        ("train-00001.npy", lambda path: flip(path, 60)),
        ("train-index.npy", lambda path: flip(path, 4096)),
        ("train-00001.npy", lambda path: path.rename(path.with_name("x")) and path.symlink_to("x")),
    ],
    ids=["no manifest", "empty manifest", "bad manifest", "gone", "cut", "header", "label", "link"],
)
def test_a_file_of_a_copy_that_can_be_seen_to_be_damaged_is_copied_again_and_no_other_file(
    out: Path, cache: Path, name: str, harm: Callable[[Path], object]
) -> None:
    copy = Path(stage(out, cache).path)
    before = inodes(copy)
    harm(copy / name)
    report = stage(out, cache)
    assert (report.num_copied, report.path) == (name != "manifest.json", str(copy))
    assert not (copy / name).is_symlink()
    (copy / "x").unlink(missing_ok=True)
    assert contents(copy) == contents(out)
    assert before.items() - inodes(copy).items() == {(name, before[name])}


def test_damage_in_the_pixels_of_a_copy_is_found_when_all_of_it_is_read(out: Path, cache: Path) -> None:
    copy = Path(stage(out, cache).path)
    for name in ("train-00002.npy", "train-00003.npy"):
        flip(copy / name)
    again = stage(out, cache)
    assert (again.num_copied, again.nbytes_copied) == (0, 0)
    counts: list[tuple[int, int]] = []
    report = stage(out, cache, verify=True, on_progress=lambda *count: counts.append(count))
    assert report.num_copied == 2
    assert sum(nbytes for nbytes, _ in counts) == counts[-1][1] == report.nbytes + report.nbytes_copied
    assert contents(copy) == contents(out)
    assert stage(out, cache, verify=True).num_copied == 0


def test_a_copy_is_no_source_of_itself_and_is_not_moved_away(out: Path, cache: Path, tmp_path: Path) -> None:
    copy = Path(stage(out, cache).path)
    (tmp_path / "link").symlink_to(copy)
    for src in (copy, tmp_path / "link"):
        with pytest.raises(CacheError, match=f"{src.name}: is the copy in this cache itself"):
            stage(src, cache, verify=True)
        with pytest.raises(ConvertError, match=f"{copy.name}: is a copy in a cache"):
            publish(src, tmp_path / "moved", move=True)
    assert contents(copy) == contents(out)
    publish(copy, tmp_path / "copied")


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
    said: list[str] = []
    report = stage(sets[3], cache, on_message=said.append)
    assert report.evicted == (old[1],)
    assert {copy.digest for copy in Cache(cache).copies()} == {old[0], old[2], report.digest}
    assert [text.startswith(f"removed the copy of {sets[1]}, digest {old[1][:16]}, ") for text in said] == [True]


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

    def fail_once(_: PartialCopy, entry: FileEntry, offset: int, data: memoryview) -> None:
        if entry.file == "train-00003.npy" and offset and failures:
            have_room(monkeypatch, used_nbytes(cache) + 100)
            raise failures.pop()

    call_before(monkeypatch, PartialCopy, "write", fail_once)
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
    sizes: list[int] = []

    def fill(descriptor: int, nbytes: int) -> None:
        if len(sizes) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sizes.append(nbytes)

    with monkeypatch.context() as patch:
        call_before(patch, filling, "reserve", fill)
        with pytest.raises(SpaceError, match=r"No space left on device, .*Finished files are kept"):
            stage(out, cache, workers=1)
    (copy,) = Cache(cache).copies()
    assert len(finished(copy.path)) == 3
    assert stage(out, cache).num_copied == 3


# --- at the same time ------------------------------------------------------------------------------------------------


def test_one_copies_and_the_others_wait_and_say_so_once(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, opened = threading.Event(), threading.Event()
    told, progress = list[int | None](), list[int]()

    def hold(*_: object) -> None:
        asked.set()
        opened.wait(60)

    call_before(monkeypatch, FolderStorage, "read_into", hold)
    options: dict[str, Any] = {"on_wait": told.append, "on_progress": lambda n, total: progress.append(n)}
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(stage, out, cache)
        assert asked.wait(60)
        others = [pool.submit(stage, out, cache, **options) for _ in range(3)]
        until(lambda: len(told) == 3)
        time.sleep(3 * filling._POLL_SECONDS)
        assert told == [os.getpid()] * 3
        opened.set()
    assert first.result().num_copied == 6
    assert [other.result().num_copied for other in others] == [0, 0, 0]
    assert (told, progress) == ([os.getpid()] * 3, [])


def test_a_filler_that_is_told_to_stop_ends_soon_and_the_next_goes_on(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()

    def second(_: FolderStorage, entry: FileEntry, *__: object) -> None:
        if entry.file == "train-00001.npy":
            stop.set()

    call_before(monkeypatch, FolderStorage, "read_into", second)
    with filler_of(out, cache, stop=stop, workers=1) as filler:
        assert not filler.run()
        copied = [entry.file for entry in filler.copied]
        assert copied == ["train-index.npy", "train-00000.npy", "train-00001.npy"][: len(copied)]
        (found,) = Cache(cache).copies()
        assert found.nbytes < load_manifest(out).nbytes  # its unfinished files take less than their size
        assert not filler.run()
    assert stage(out, cache).num_copied == 6 - len(copied)


@pytest.mark.parametrize("stops", [False, True])
def test_a_filler_that_waits_for_another_shows_it_in_its_state_and_takes_over_unless_it_is_told_to_stop(
    out: Path, cache: Path, stops: bool
) -> None:
    told, stop = list[str](), threading.Event()
    with Cache(cache).lease(load_manifest(out).digest) as lease, lease.try_filling("") as filling:  # type: ignore[union-attr]

        def wait(process: int | None) -> None:
            told.append(filler.state)
            (stop.set if stops else filling.close)()

        with filler_of(out, cache, on_wait=wait, stop=stop) as filler:
            assert filler.run() is not stops
            assert told == [f"process {os.getpid()} is copying"]
            assert stops or filler.state == f"copying from {out}"


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


def test_stage_says_for_whom_it_waits_and_shows_no_credentials(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def wait(*_: Any, on_wait: Callable[[int | None], None], **__: Any) -> None:
        on_wait(None)
        on_wait(7)
        raise SpaceError("full")

    monkeypatch.setattr(staging, "stage", wait)
    *said, _ = shardio("stage", "https://me:secret@host/set?signature=secret", cache).stderr.splitlines()
    assert said == [
        f"shardio: {who} is copying https://host/set to {cache}: waiting for it"
        for who in ("another process", "process 7")
    ]


def test_a_damaged_file_that_a_training_removes_first_is_copied_again(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(stage(out, cache).path)
    flip(copy / "train-00000.npy")
    call_before(monkeypatch, FileCopier, "find_damaged", lambda *_: (copy / "train-00000.npy").unlink())
    stage(out, cache, verify=True)
    assert hashes(copy) == hashes(out)


def test_evict_says_what_went_and_what_is_in_use(
    make_set: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (stage(make_set(count), cache) for count in (12, 13))
    with Cache(cache).lease(two.digest):
        result = shardio("evict", cache, "--keep", "0")
    assert (result.returncode, result.stderr) == (0, "")
    removed, kept, rest = result.stdout.splitlines()
    assert re.fullmatch(rf"removed the copy of {one.source}, digest {one.digest[:16]}, [\d.]+ kB", removed)
    assert re.fullmatch(rf"kept the copy of {two.source}, .*: in use by process {os.getpid()}", kept)
    assert rest.startswith(f"{cache}: ")
    monkeypatch.setenv("SHARDIO_CACHE", str(cache))
    report = json.loads(shardio("evict", "--keep", "500GB", "--json").stdout)
    assert (report["removed"], report["kept"]) == ([], [])
    assert report["nbytes"] > two.nbytes


def test_ctrl_c_keeps_what_is_finished(out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: FolderStorage, entry: FileEntry, *__: object) -> None:
        if entry.file == "train-00003.npy":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    with monkeypatch.context() as patch:
        call_before(patch, FolderStorage, "read_into", interrupt)
        result = shardio("stage", out, cache, "--workers", "1")
    assert result.returncode == 130
    assert [line for line in result.stderr.splitlines() if line] == [
        f"shardio: finished files are kept in {cache}: the same command resumes the copy",
        "shardio: interrupted",
    ]
    assert not list(cache.rglob("*.tmp"))
    assert stage(out, cache).num_copied <= 3
