"""Reading never writes: a set on a read-only mount works, and nothing in a set's folder is made, changed or locked."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import ROOT, SUPPORT
from plain_sets import make_plain_set, read_in_every_way

from shardio.format.manifest_file import load_manifest
from shardio.loading.loader import ShardLoader

# Reads in every way, in a process of its own that cannot write to the set. Gets the folder, and the user to become.
_READ = """\
import os, shutil, sys
from pathlib import Path
from plain_sets import read_in_every_way
path, user = Path(sys.argv[1]), int(sys.argv[2])
if user:
    # Imports what is imported late: the user may not be able to enter the folders of the package.
    read_in_every_way(shutil.copytree(path, path.with_name("copy")))
    os.chdir("/")
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
try:
    (path / "new").touch()
except OSError:
    pass
else:
    sys.exit("the folder can be written to")
read_in_every_way(path)
print("read")
"""
_NOBODY = 65534


def run(path: Path, *before: str, user: int = 0) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT)))}
    command = [*before, sys.executable, "-B", "-c", _READ, str(path), str(user)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)


# --- places that cannot be written -----------------------------------------------------------------------------------

_AS_ROOT = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
_IN_A_MOUNT_NAMESPACE = ["unshare", *_AS_ROOT, "--mount", "--propagation", "private"]


def test_a_set_on_a_read_only_mount_is_read_in_every_way(make_set: Callable[..., Path]) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*_IN_A_MOUNT_NAMESPACE, "true"], capture_output=True).returncode
    ):
        pytest.skip("this process may make no mount namespace")
    path = make_set(20)
    script = f'mount --bind "{path}" "{path}" && mount -o remount,bind,ro "{path}" && exec "$@"'
    result = run(path, *_IN_A_MOUNT_NAMESPACE, "sh", "-c", script, "sh")
    if "mount:" in result.stderr:
        pytest.skip(f"nothing can be mounted here: {result.stderr.strip()}")
    assert (result.returncode, result.stdout) == (0, "read\n"), result.stderr
    (path / "new").touch()  # the mount was gone with its process


def test_another_users_set_without_write_permission_is_read_in_every_way() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # pytest's folders are for its user alone, and shared with other runs.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        path = make_plain_set(Path(folder), 20)
        path.chmod(0o555)
        for file in path.iterdir():
            file.chmod(0o444)
        result = run(path, user=_NOBODY)
    assert (result.returncode, result.stdout) == (0, "read\n"), result.stderr


# --- what happens in the folder --------------------------------------------------------------------------------------

_EVENTS = {
    0x2: "IN_MODIFY",
    0x4: "IN_ATTRIB",
    0x8: "IN_CLOSE_WRITE",
    0x40: "IN_MOVED_FROM",
    0x80: "IN_MOVED_TO",
    0x100: "IN_CREATE",
    0x200: "IN_DELETE",
    0x400: "IN_DELETE_SELF",
    0x800: "IN_MOVE_SELF",
}
_IN_OPEN = 0x20


@contextlib.contextmanager
def events_in(folder: Path, mask: int) -> Iterator[list[tuple[str, str]]]:
    """(event, name) of what happens in the folder in the meantime, by inotify: complete when the block is left."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(folder), mask) < 0:
        pytest.skip(f"no inotify here: {os.strerror(ctypes.get_errno())}")
    found: list[tuple[str, str]] = []
    try:
        yield found
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 1 << 16):
                while data:
                    _, event, _, length = struct.unpack_from("iIII", data)
                    name = os.fsdecode(data[16 : 16 + length].rstrip(b"\0"))
                    found.append((_EVENTS.get(event & 0xFFF, "IN_OPEN"), name))
                    data = data[16 + length :]
    finally:
        os.close(descriptor)


def test_reading_opens_the_files_of_a_set_and_changes_nothing_in_its_folder(make_set: Callable[..., Path]) -> None:
    """No lock file is looked for, either."""
    path = make_set(20)
    before = status_of(path)
    with events_in(path, sum(_EVENTS) | _IN_OPEN) as events:
        read_in_every_way(path)
    assert {event for event, _ in events} == {"IN_OPEN"}
    assert status_of(path) == before
    files = {"manifest.json"} | {entry.file for entry in load_manifest(path).files}
    assert {name for _, name in events} - {""} == files


def status_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the state of the folder and its files, without the time of the last access, which filesystems change."""
    paths = {"": path, **{file.name: file for file in path.iterdir()}}
    statuses = {name: file.lstat() for name, file in paths.items()}
    return {
        name: (s.st_mode, s.st_ino, s.st_nlink, s.st_uid, s.st_gid, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for name, s in statuses.items()
    }


def test_readers_hold_no_lock_on_any_file(make_set: Callable[..., Path]) -> None:
    path = make_set(20)
    inodes = {file.stat().st_ino for file in path.iterdir()} | {path.stat().st_ino}
    held: list[str] = []
    for io in ("mmap", "pread"):
        with ShardLoader(path, 4, io=io, device="cpu", check="sample") as loader:  # type: ignore[arg-type]
            for _ in loader:
                held += [line for line in Path("/proc/locks").read_text().splitlines() if lock_is_on(line, inodes)]
    assert held == []


def lock_is_on(line: str, inodes: set[int]) -> bool:
    """1: FLOCK  ADVISORY  WRITE 708 00:13:11 0 EOF"""
    words = line.split()
    return words[4] == str(os.getpid()) and int(words[5].rpartition(":")[2]) in inodes


def test_these_tests_would_notice(make_set: Callable[..., Path]) -> None:
    import fcntl

    path = make_set(20)
    before = status_of(path)
    with events_in(path, sum(_EVENTS) | _IN_OPEN) as events:
        with (path / "train-00000.npy").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            inode = os.fstat(file.fileno()).st_ino
            assert any(lock_is_on(line, {inode}) for line in Path("/proc/locks").read_text().splitlines())
        (path / ".lock").touch()
        (path / ".lock").unlink()
        os.utime(path / "manifest.json")
    for event in (
        ("IN_OPEN", "train-00000.npy"),
        ("IN_CREATE", ".lock"),
        ("IN_DELETE", ".lock"),
        ("IN_ATTRIB", "manifest.json"),
    ):
        assert event in events
    assert status_of(path) != before
