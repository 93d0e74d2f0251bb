"""A cache: a held copy stays, whatever else happens, and only files that shardio put there are removed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from command import printed_by
from deadlines import must_not_block, until
from disks import failing
from hooks import call_before
from places import CHAOS

from shardio.cache import folder as module
from shardio.cache import leases
from shardio.cache.folder import Cache
from shardio.errors import CacheError, SpaceError
from shardio.format.entries import FileEntry
from shardio.format.layout import MARKER_NAME
from shardio.system.machine import is_shared

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def put_copy(cache: Cache, digest: str, nbytes: int = 1000, used: float = 0, complete: bool = True) -> Path:
    """Something of the size of a copy, last used at that time."""
    with cache.lease(digest) as lease:
        lease.path.mkdir()
        (lease.path / "train-00000.npy").write_bytes(bytes(nbytes))
        if complete:
            (lease.path / "manifest.json").write_bytes(b"")
    os.utime(cache.folder / f"{digest}.lock", (used, used))
    return lease.path


def digests(cache: Cache) -> set[str]:
    return {copy.digest for copy in cache.copies()}


IMPORTS = "import os, sys, time\nfrom shardio.cache.folder import Cache"
HOLD = "import fcntl\nfile = open(sys.argv[1])\nfcntl.flock(file, fcntl.LOCK_EX)"


@contextmanager
def another_process(code: str, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code` and then waits; it has printed a line when the block begins."""
    code = f"{IMPORTS}\n{code}\nprint(flush=True)\ntime.sleep(60)"
    command = [sys.executable, "-c", code, *map(str, words)]
    # A group of its own, so that those it has forked end with it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a marker without content"])
def test_the_first_lease_makes_the_cache(cache: Cache, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    if there == "nothing":
        with pytest.raises(FileNotFoundError, match="cache"):
            cache.evict(keep=0)
    else:
        cache.folder.mkdir()
    if there == "an empty folder":
        with pytest.raises(CacheError, match="found an empty folder"):
            cache.copies()
    elif there == "a marker without content":  # its maker was killed; what else lies there came later
        for name in (MARKER_NAME, "stray"):
            (cache.folder / name).touch()
    monkeypatch.chdir(cache.folder.parent)
    relative = Cache("cache")
    monkeypatch.chdir("/")
    with relative.lease(A) as lease:
        assert "shardio evict" in (cache.folder / MARKER_NAME).read_text()
        assert lease.path == cache.folder / A
        assert not lease.path.exists()
        assert not lease.is_complete()
        assert lease.manifest() is None
    assert cache.copies() == []


def test_a_folder_that_holds_anything_else_is_refused_and_not_touched(cache: Cache) -> None:
    (cache.folder / A).mkdir(parents=True)
    for use in (lambda: cache.lease(A), lambda: cache.evict(keep=0), cache.copies):
        with pytest.raises(CacheError, match=f"'{A}' and without {MARKER_NAME}; choose another folder"):
            use()  # type: ignore[operator]
    assert os.listdir(cache.folder) == [A]


def test_a_filesystem_that_nodes_share_is_refused(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse = "glusterfs ceph-fuse juicefs sshfs s3fs gcsfuse rclone beegfs"
    for kind in ("lustre", "nfs4", *(f"fuse.{name}" for name in fuse.split())):
        monkeypatch.setattr(module, "filesystem_kind", lambda path, kind=kind: kind)
        with pytest.raises(CacheError, match=f"expected a folder on a disk of this machine, found one on {kind}"):
            cache.lease(A)
    assert not cache.folder.exists()
    for kind in ("ext4", "tmpfs", "overlay", "", "fuse.fuse-overlayfs", "fuse", "fuseblk", "virtiofs", "9p"):
        assert not is_shared(kind)


@pytest.mark.parametrize(
    "digest", ["", "a" * 63, "a" * 65, "A" * 64, "a" * 63 + "/", "../" + "a" * 61, "a" * 64 + "\n"]
)
def test_only_digests_name_copies(cache: Cache, digest: str) -> None:
    with pytest.raises(ValueError, match="digest must be 64 lower-case hexadecimal digits"):
        cache.lease(digest)
    assert not cache.folder.exists()


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_lease_dies_with_its_process(cache: Cache) -> None:
    put_copy(cache, A)
    with another_process(f"lease = Cache(sys.argv[1]).lease({A!r})", cache.folder) as process:
        report = cache.evict(keep=0)
        (kept,) = report.kept
        assert (report.removed, kept.in_use, kept.processes) == ((), True, (process.pid,))
        assert report.nbytes == kept.nbytes == 1000
        process.send_signal(signal.SIGKILL)
        process.wait()
    (copy,) = cache.copies()
    assert (copy.in_use, copy.processes) == (False, ())
    assert [copy.digest for copy in cache.evict(keep=0).removed] == [A]
    assert os.listdir(cache.folder) == [MARKER_NAME]


def test_a_forked_process_keeps_the_lease_that_its_parent_has_closed(cache: Cache) -> None:
    put_copy(cache, A)
    code = "lease = Cache(sys.argv[1]).lease(sys.argv[2])\nif os.fork():\n    lease.close()\n    os.wait()\nelse:"
    code += "\n    time.sleep(0.1)\n    assert not Cache(sys.argv[1]).evict(keep=0).removed\n    os._exit(0)"
    with another_process(code, cache.folder, A):
        assert cache.evict(keep=0).removed


def test_a_holder_keeps_its_lock_from_growing_old_and_makes_it_anew(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_copy(cache, A, used=1000)
    monkeypatch.setattr(leases, "KEEP_SECONDS", 0.01)
    lock = cache.folder / f"{A}.lock"
    with cache.lease(A):
        for path in (lock, cache.folder / MARKER_NAME):
            os.utime(path, (1000, 1000))
            until(lambda path=path: path.stat().st_mtime > 1000)
        lock.unlink()
        until(lambda: lock.exists() and cache.copies()[0].processes == (os.getpid(),))
        monkeypatch.setattr(leases, "KEEP_SECONDS", 0.0)
        assert [copy.in_use for copy in cache.evict(keep=0).kept] == [True]
    assert cache.evict(keep=0).removed


@pytest.mark.parametrize(
    "look", [Cache.copies, lambda cache: cache.evict(keep=0), lambda cache: cache.lease(A).close()]
)
def test_a_copy_whose_lock_was_removed_is_evicted_two_periods_after_the_first_look(
    cache: Cache, look: Callable[[Cache], Any]
) -> None:
    put_copy(cache, A)
    lock = cache.folder / f"{A}.lock"
    lock.unlink()
    look(cache)
    for periods in (0, 1.9):
        then = time.time() - periods * leases.KEEP_SECONDS
        os.utime(lock, (then, then))
        with pytest.raises(SpaceError):
            cache.make_room(B, cache.free_nbytes() + 1)
        (kept,) = cache.evict(keep=0).kept
        assert (kept.in_use, "made anew" in kept.problem) == (True, True)
    os.utime(lock, (then - leases.KEEP_SECONDS, then - leases.KEEP_SECONDS))
    assert cache.evict(keep=0).removed


def test_a_copy_is_evicted_at_once_if_the_maker_of_its_lock_was_killed_before_it_wrote_into_it(cache: Cache) -> None:
    with cache.lease(A) as lease:
        (cache.folder / f"{A}.lock").write_bytes(b"")
        lease.open_folder()
        (lease.path / "train-00000.npy").write_bytes(bytes(1000))
    assert cache.evict(keep=0).removed


def test_a_whole_copy_on_a_read_only_filesystem_is_used_without_lock_files(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for digest in (A, B):
        put_copy(cache, digest, complete=digest == A)
        (cache.folder / f"{digest}.lock").unlink()

    def read_only(path: Path, flags: int, mode: int = 0o777) -> None:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    call_before(monkeypatch, os, "open", read_only)
    with cache.lease(A) as lease:
        lease.keep()
        assert lease.is_complete()
    with pytest.raises(OSError, match=rf"Read-only.*{B}\.lock"):
        cache.lease(B)


def test_a_lock_file_that_was_removed_between_its_opening_and_its_lock_is_opened_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_copy(cache, A)
    calls: list[int] = []

    def note(descriptor: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            assert Cache(cache.folder).evict(keep=0).removed

    call_before(monkeypatch, fcntl, "flock", note)
    with cache.lease(A) as lease:
        monkeypatch.undo()
        assert calls.count(fcntl.LOCK_SH | fcntl.LOCK_NB) == 2
        lease.path.mkdir()
        assert not cache.evict(keep=0).removed


def test_a_copy_is_used_last_when_its_lease_begins_and_when_it_ends(cache: Cache) -> None:
    put_copy(cache, A, used=1000)
    assert cache.copies()[0].last_used == 1000
    lease = cache.lease(A)
    assert cache.copies()[0].last_used > 1000
    os.utime(cache.folder / f"{A}.lock", (2000, 2000))
    lease.close()
    ended = cache.copies()[0].last_used
    assert ended > 2000
    lease.close()
    assert cache.copies()[0].last_used == ended


def test_a_file_is_there_when_it_is_a_regular_one_of_the_right_size(cache: Cache) -> None:
    put_copy(cache, A, nbytes=1000)
    with cache.lease(A) as lease:
        assert lease.has(FileEntry("train-00000.npy", 1000, ""))
        assert not lease.has(FileEntry("train-00000.npy", 1001, ""))
        assert not lease.has(FileEntry("train-00001.npy", 1000, ""))
        (lease.path / "link.npy").symlink_to("train-00000.npy")
        assert not lease.has(FileEntry("link.npy", len("train-00000.npy"), ""))


def test_one_at_a_time_fills_a_copy_and_says_from_where(cache: Cache) -> None:
    with cache.lease(A) as lease, cache.lease(A) as other:
        assert lease.filler() is None
        filling = lease.try_filling("/data/set")
        assert filling is not None
        assert lease.filler() == os.getpid()
        assert other.try_filling("/elsewhere") is None
        lease.path.mkdir()
        assert [copy.source for copy in cache.copies()] == ["/data/set"]
        filling.close()
        filling.close()
        with other.try_filling("s3://bucket/set") as filling:  # type: ignore[union-attr]
            assert [copy.source for copy in cache.copies()] == ["s3://bucket/set"]
        assert lease.filler() is None


def test_a_forked_process_does_not_keep_others_from_filling(cache: Cache) -> None:
    with cache.lease(A) as lease:
        code = "lease = Cache(sys.argv[1]).lease(sys.argv[2])\nfilling = lease.try_filling('')\nif os.fork():"
        code += "\n    filling.close()\nelse:\n    time.sleep(60)"
        with another_process(code, cache.folder, A):
            filling = lease.try_filling("")
            assert filling is not None
            filling.close()


def test_a_lock_that_another_user_makes_at_the_same_moment_is_opened(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.lease(B).close()
    flags_of_lock: list[int] = []

    def late(path: Path, flags: int, mode: int = 0o777) -> None:
        if not str(path).endswith(f"{A}.lock"):
            return
        flags_of_lock.append(flags)
        if len(flags_of_lock) == 1:
            Path(path).write_bytes(b"")
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if flags & os.O_CREAT and not flags & os.O_EXCL:  # fs.protected_regular does that
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    call_before(monkeypatch, os, "open", late)
    cache.lease(A).close()
    assert len(flags_of_lock) == 3


def test_locks_of_a_copy_that_was_not_begun_stay_only_while_they_are_held(cache: Cache) -> None:
    with cache.lease(A) as lease, lease.try_filling(""):  # type: ignore[union-attr]
        assert set(os.listdir(cache.folder)) == {MARKER_NAME, f"{A}.lock", f"{A}.fill"}
    assert os.listdir(cache.folder) == [MARKER_NAME]
    with cache.lease(A) as other:
        with cache.lease(A) as lease, lease.try_filling(""):  # type: ignore[union-attr]
            pass
        assert set(os.listdir(cache.folder)) == {MARKER_NAME, f"{A}.lock", f"{A}.fill"}
        with other.try_filling(""):  # type: ignore[union-attr]
            other.path.mkdir()
    assert set(os.listdir(cache.folder)) == {MARKER_NAME, A, f"{A}.lock", f"{A}.fill"}


# --- what another user has put there ---------------------------------------------------------------------------------


PUT: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "symbolic link": lambda path: path.symlink_to("precious"),
    "folder": Path.mkdir,
    "second name": lambda path: path.hardlink_to(path.with_name("precious")),
}


@pytest.fixture
def precious(cache: Cache) -> Iterator[None]:
    """A file of another user, which stays as it is."""
    cache.lease(A).close()
    path = cache.folder / "precious"
    path.write_bytes(b"precious")
    yield
    assert path.read_bytes() == b"precious"


@pytest.mark.usefixtures("precious")
@pytest.mark.parametrize("kind", ["FIFO", "symbolic link", "folder"])
def test_what_is_no_lock_is_refused_by_name_and_keeps_no_other_copy_from_use(cache: Cache, kind: str) -> None:
    path, other = put_copy(cache, A), put_copy(cache, B)
    lock = cache.folder / f"{A}.lock"
    lock.unlink()
    for place in (lock, cache.folder / f"{C}.lock", cache.folder / f".{C}.0123.evicted"):
        PUT[kind](place)
    words = f"{A}.lock: expected a regular file, found a {kind}: .* Remove it, or choose"
    with must_not_block():
        with pytest.raises(CacheError, match=words):
            cache.lease(A)
        cache.sweep()
        cache.lease(B).close()
        found = {copy.digest: copy for copy in cache.copies()}
        assert found.keys() == {A, B}
        assert (found[A].in_use, found[B].in_use, found[B].problem) == (True, False, "")
        assert re.search(words, found[A].problem)
        report = cache.evict(keep=0)
    assert [copy.digest for copy in report.removed] == [B]
    assert [re.search(words, copy.problem) is not None for copy in report.kept] == [True]
    assert path.exists()
    assert not other.exists()


@pytest.mark.usefixtures("precious")
@pytest.mark.parametrize("kind", PUT)
def test_what_is_no_fill_file_is_refused_and_the_copy_can_be_used_and_evicted(cache: Cache, kind: str) -> None:
    put_copy(cache, A)
    PUT[kind](cache.folder / f"{A}.fill")
    with must_not_block():
        with cache.lease(A) as lease, pytest.raises(CacheError, match=rf"{A}\.fill: expected a regular file, found"):
            lease.try_filling("")
        assert [(copy.source, copy.problem) for copy in cache.copies()] == [("", "")]
        assert [copy.digest for copy in cache.evict(keep=0).removed] == [A]
    assert cache.copies() == []


@pytest.mark.usefixtures("precious")
@pytest.mark.parametrize("kind", ["FIFO", "symbolic link"])
def test_what_is_no_folder_is_no_copy_and_nothing_is_written_through_it(cache: Cache, kind: str) -> None:
    put_copy(cache, B)
    PUT[kind](cache.folder / A)
    with must_not_block(), pytest.raises(CacheError, match=f"{A}: expected the folder of a copy, found a {kind}"):
        cache.lease(A)
    assert digests(cache) == {B}
    assert [copy.digest for copy in cache.evict(keep=0).removed] == [B]
    assert os.path.lexists(cache.folder / A)


@pytest.mark.parametrize("step", ["rename", "_remove_trash"])
def test_a_link_that_takes_the_place_of_a_copy_while_it_is_evicted_leads_to_no_other_folder(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    other, path = tmp_path / "other", put_copy(cache, A)
    other.mkdir()
    (other / "precious").touch()

    def exchange(source: Path, *_: object) -> None:
        source.rename(tmp_path / "moved")
        source.symlink_to(other)

    call_before(monkeypatch, Path if step == "rename" else module, step, exchange, once=True)
    assert [copy.digest for copy in cache.evict(keep=0).removed] == [A]
    assert not path.exists()
    assert os.listdir(other) == ["precious"]


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"source": ' + b" " * (1 << 20) + b'"x"}', b'{"source": 1}', b"\xff"]
)
def test_a_source_that_cannot_be_read_is_unknown(cache: Cache, content: bytes) -> None:
    put_copy(cache, A)
    (cache.folder / f"{A}.fill").write_bytes(content)
    assert [copy.source for copy in cache.copies()] == [""]


def test_a_lock_that_another_process_keeps_is_waited_for_no_longer_than_an_evictor_needs_and_ctrl_c_ends_that(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_LEASE_SECONDS", 0.05)
    put_copy(cache, A)
    with another_process(HOLD, cache.folder / f"{A}.lock") as process:
        message = rf"process \({process.pid}\).*{A}\.lock"
        with must_not_block(), pytest.raises(TimeoutError, match=message):
            cache.lease(A)
        script = f"{IMPORTS}\nprint(flush=True)\nCache(sys.argv[1]).lease(sys.argv[2])"
        command = [sys.executable, "-c", script, str(cache.folder), A]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
            assert waiting.stdout is not None
            waiting.stdout.readline()
            waiting.send_signal(signal.SIGINT)
            assert b"KeyboardInterrupt" in waiting.communicate(timeout=20)[1]
    cache.lease(A).close()


# --- what is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel_tells", [True, False])
def test_copies_are_told_with_their_size_and_state(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, kernel_tells: bool
) -> None:
    if not kernel_tells:
        monkeypatch.setattr(module, "holders_of", lambda status: ())
    put_copy(cache, A, 500, used=10)
    put_copy(cache, B, 700, used=20, complete=False)
    with cache.lease(B):
        found = {copy.digest: copy for copy in cache.copies()}
    assert found.keys() == {A, B}
    a, b = found[A], found[B]
    assert (a.path, a.nbytes, a.complete, a.last_used) == (str(cache.folder / A), 500, True, 10)
    assert (a.in_use, a.processes) == (False, ())
    assert (b.nbytes, b.complete, b.in_use) == (700, False, True)
    assert b.processes == ((os.getpid(),) if kernel_tells else ())


def test_a_process_that_waits_for_a_lock_does_not_hold_it(tmp_path: Path) -> None:
    status = os.stat(tmp_path)
    key = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    (tmp_path / "locks").write_text(
        f"1: FLOCK  ADVISORY  READ  15 {key} 0 EOF\n"
        f"1: -> FLOCK  ADVISORY  WRITE 13 {key} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 14 {key} 0 EOF\n"
        f"3: FLOCK  ADVISORY  READ  12 {key} 0 EOF\n"
        f"4: FLOCK  ADVISORY  READ  11 {key}0 0 EOF\n"
    )
    assert leases.holders_of(status, tmp_path) == (12, 15)
    assert leases.holders_of(status, tmp_path / "nowhere") == ()


# --- eviction --------------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes_first_and_no_more_than_need_be(cache: Cache) -> None:
    for digest, used in ((A, 30), (B, 10), (C, 20)):
        put_copy(cache, digest, 1000, used)
    report = cache.evict(keep=2500)
    assert [copy.digest for copy in report.removed] == [B]
    assert (report.nbytes, report.kept) == (2000, ())
    assert not cache.evict(keep=2000).removed
    with cache.lease(C):
        os.utime(cache.folder / f"{C}.lock", (20, 20))
        report = cache.evict(keep=1000)
    assert ([copy.digest for copy in report.removed], [copy.digest for copy in report.kept]) == ([A], [C])


def test_copies_go_until_so_many_bytes_are_free(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    for digest, used in ((A, 30), (B, 10), (C, 20)):
        put_copy(cache, digest, 1000, used)
    status = os.statvfs(cache.folder)
    assert 0 < cache.free_nbytes() <= status.f_blocks * status.f_frsize
    monkeypatch.setattr(Cache, "free_nbytes", lambda self: 5000 - 1000 * len(self.copies()))
    assert not cache.evict(free=2000).removed
    assert [copy.digest for copy in cache.evict(free=3500).removed] == [B, C]
    with pytest.raises(ValueError, match="`keep` and `free`"):
        cache.evict()


def test_nothing_else_in_the_folder_is_removed(cache: Cache) -> None:
    put_copy(cache, A)
    for name in ("notes.txt", ".hidden", "a" * 63, f"{A}.bak", f"x{B}.lock"):
        (cache.folder / name).write_bytes(b"mine")
    (cache.folder / "imagenet").mkdir()
    left = set(os.listdir(cache.folder)) - {A, f"{A}.lock"}
    cache.evict(keep=0)
    assert set(os.listdir(cache.folder)) == left


def test_what_a_killed_evictor_left_is_swept_but_not_what_a_living_one_is_at(cache: Cache) -> None:
    put_copy(cache, A)
    left, busy = (cache.folder / f".{digest}.0123.evicted" for digest in (A, B))
    for path in (left, busy):
        path.mkdir()
        (path / "train-00000.npy").write_bytes(b"x")
    descriptor = os.open(busy, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        cache.sweep()
        assert not left.exists()
        assert (busy / "train-00000.npy").exists()
    finally:
        os.close(descriptor)
    cache.evict(keep=10**9)
    assert not busy.exists()
    assert digests(cache) == {A}


def test_a_look_at_the_copies_does_not_keep_them(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    put_copy(cache, A)
    descriptor = os.open(cache.folder / f"{A}.lock", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # `copies` does that for a moment
    monkeypatch.setattr(leases.time, "sleep", lambda seconds: os.close(descriptor))
    assert cache.evict(keep=0).removed


def test_a_copy_that_another_process_has_just_evicted_is_gone(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    put_copy(cache, A)
    copies = cache.copies()
    cache.evict(keep=0)
    monkeypatch.setattr(Cache, "copies", lambda self: copies)
    assert [copy.digest for copy in cache.evict(keep=-1).removed] == [A]
    assert os.listdir(cache.folder) == [MARKER_NAME]


@pytest.mark.parametrize("suffix", [".lock", ".fill"])
def test_locks_without_a_copy_are_swept_unless_they_are_held(cache: Cache, suffix: str) -> None:
    cache.lease(A).close()
    (cache.folder / f"{A}{suffix}").touch()
    with cache.lease(B):
        cache.sweep()
        assert set(os.listdir(cache.folder)) == {MARKER_NAME, f"{B}.lock"}
    cache.sweep()
    assert os.listdir(cache.folder) == [MARKER_NAME]


@pytest.mark.parametrize(("code", "is_error"), [(errno.EACCES, False), (errno.EIO, True)])
def test_a_copy_is_gone_once_it_is_renamed_though_not_all_of_it_can_be_removed(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, code: int, is_error: bool
) -> None:
    put_copy(cache, A)

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", failing(code))
        if is_error:
            with pytest.raises(OSError, match=r"\.evicted"):
                cache.evict(keep=0)
        else:
            report = cache.evict(keep=0)
            assert ([copy.digest for copy in report.removed], report.kept) == ([A], ())
    assert cache.copies() == []
    cache.sweep()
    assert os.listdir(cache.folder) == [MARKER_NAME]


# --- processes that stage, read and evict at once, and are killed ----------------------------------------------------


def test_processes_that_stage_and_evict_at_once_make_one_copy_and_lose_none(tmp_path: Path) -> None:
    words = ("--rounds", "6", "--processes", "10", "--seed", "1", "--folder", tmp_path)
    printed = printed_by(CHAOS / "race_stage.py", *words)
    assert printed.endswith("\n6 rounds of staging, 6 of eviction, 0 violations\n")
    counts = re.findall(r"(\d+) (?:files copied|processes served|killed|copies evicted)", printed)
    assert len(counts) == 4
    assert "0" not in counts
    assert not list(tmp_path.iterdir())


CARELESS = """
import fcntl, os, time
import race_stage
from shardio.cache import filler, folder, leases, partial_copy
from shardio.system import opening
def unlocked(*some):
    return opening.open_file(os.devnull, os.O_RDONLY)
def take(paths):
    lock = paths.open_lock()
    time.sleep(0.01)  # or it would take more rounds
    fcntl.flock(lock.fileno(), fcntl.LOCK_SH)
    return lock
def spoil(self, entry, finish=partial_copy.PartialCopy.finish):
    found = finish(self, entry)
    if found == entry.sha256:
        with opening.open_file(self._folder / entry.file, os.O_RDWR) as file:
            os.pwrite(file.fileno(), b"spoiled", 0)
    return found
{fault}
counts = race_stage.race_stagings(48, 16, seed=3, say=lambda line: None, until_noticed={noticed!r})
print("".join(text + "\\n" for text in counts.violations))
"""


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        ("leases.CopyPaths.lock_alone = unlocked", "a process ended with"),
        ("leases._lock_shared = take", "a process ended with"),  # a lock on a file that is gone
        ("leases.Lease.try_filling = unlocked", "the copy was completed|a process ended with"),
        ("partial_copy.part_of = lambda folder, entry: folder / entry.file", "files that were there were copied again"),
        ("partial_copy.PartialCopy.finish = spoil", "the copy has other bytes than the source"),
        ("filler.remove_parts = lambda folder: None", "left after the next start: .*blocks"),
        ("folder._remove_trash = lambda path: None", "left when all could be evicted: .*evicted"),
        ("leases.CopyPaths.remove_locks = lambda self: None", "left when all could be evicted: .*lock"),
    ],
)
def test_a_cache_that_is_not_careful_is_noticed(fault: str, noticed: str) -> None:
    # Processes must meet, or be killed, at the right moment: that takes a few rounds, and by chance many.
    printed = printed_by("-c", CARELESS.format(fault=fault, noticed=noticed))
    assert re.search(noticed, printed), printed
    # These errors would be mistakes in the code of the fault.
    assert not re.search("AttributeError|NameError|TypeError", printed), printed
