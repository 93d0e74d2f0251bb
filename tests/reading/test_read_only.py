"""Reading never writes: a set on a read-only mount works, and nothing in a set's folder is made, changed or locked."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from command import printed_by
from plain_sets import make_plain_set

from shardio.format.manifest_file import load_manifest

# Reads in every way, in a process of its own that cannot write to the set. Gets the folder, and the user to become.
_READ = """\
import os, shutil, sys
from pathlib import Path
from plain_sets import read_in_every_way
path, user = Path(sys.argv[1]), int(sys.argv[2])
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


# --- places that cannot be written -----------------------------------------------------------------------------------


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
        assert printed_by("-c", _READ, path, _NOBODY) == "read\n"


# --- what happens in the folder --------------------------------------------------------------------------------------

_WATCH = """\
import fcntl, json, os, shutil, sys
from pathlib import Path
from plain_sets import read_in_every_way
path = Path(sys.argv[1])
read_in_every_way(shutil.copytree(path, path.with_name("copy")))  # imports what is imported late
CHANGES = {f"os.{call}" for call in "chmod chown link mkdir remove rename rmdir symlink truncate utime".split()}
opened, changes = set(), []

def watch(event, arguments):
    if event in ("fcntl.flock", "fcntl.lockf") or event in CHANGES and str(arguments[0]).startswith(str(path)):
        changes.append(event)
    elif event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        folder, name = os.path.split(os.fsdecode(arguments[0]))
        if folder in ("", str(path)):
            opened.add(name)
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                changes.append(event)

sys.addaudithook(watch)
"""


def watched(path: Path, code: str) -> tuple[set[str], list[str]]:
    """Returns the names in the folder `path` that the code opens, and what it does there besides reading."""
    printed = printed_by("-c", f"{_WATCH}{code}\nprint(json.dumps([sorted(opened), changes]))", path)
    opened, changes = json.loads(printed)
    return set(opened), changes


def test_reading_opens_the_files_of_a_set_and_locks_and_changes_none(make_set: Callable[..., Path]) -> None:
    """No lock file is looked for, either."""
    path = make_set(20)
    before = status_of(path)
    opened, changes = watched(path, "read_in_every_way(path)")
    assert opened == {"manifest.json"} | {entry.file for entry in load_manifest(path).files}
    assert changes == []
    assert status_of(path) == before


def test_these_tests_would_notice(make_set: Callable[..., Path]) -> None:
    code = """
with open(path / "train-00000.npy", "rb") as file:
    fcntl.flock(file, fcntl.LOCK_SH)
open(path / ".lock", "x").close()
os.utime(path)
"""
    assert watched(make_set(20), code)[1] == ["fcntl.flock", "open", "os.utime"]


def status_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the state of the folder and its files, without the time of the last access, which filesystems change."""
    paths = {"": path, **{file.name: file for file in path.iterdir()}}
    statuses = {name: file.lstat() for name, file in paths.items()}
    return {
        name: (s.st_mode, s.st_ino, s.st_nlink, s.st_uid, s.st_gid, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for name, s in statuses.items()
    }
