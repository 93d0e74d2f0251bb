"""Reading never writes: a set on a read-only mount works, and nothing in a set's folder is made, changed or locked."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from command import printed_by
from plain_sets import make_plain_set

from shardio.format.manifest_file import load_manifest

# Reads in every way, as a user who cannot write to the set. Prints which of its files are opened, what else is done
# there, and what of this a lock, a new file and a removal are, which must be noticed.
_READ = """\
import contextlib, fcntl, json, os, shutil, sys
from pathlib import Path
from plain_sets import read_in_every_way
path = Path(sys.argv[1])
# Imports what is imported late: the user may not be able to enter the folders of the package.
read_in_every_way(shutil.copytree(path, path.with_name("copy")))
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

os.chdir("/")
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.addaudithook(watch)
read_in_every_way(path)
print(json.dumps([sorted(opened), changes]))
with open(path / "train-00000.npy", "rb") as file:
    fcntl.flock(file, fcntl.LOCK_SH)
for change in (lambda new: open(new, "x"), os.remove):
    with contextlib.suppress(OSError):
        change(path / "new")
print(json.dumps(changes))
"""


def test_a_set_without_write_permission_is_read_in_every_way_and_nothing_else_is_done() -> None:
    def status() -> list[tuple[str, int, int]]:
        files = sorted([path, *path.iterdir()])
        return [(file.name, file.lstat().st_ino, file.lstat().st_ctime_ns) for file in files]

    # pytest's folders are for its user alone, and shared with other runs.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        path = make_plain_set(Path(folder), 20)
        for file in path.iterdir():
            file.chmod(0o444)
        path.chmod(0o555)
        before = status()
        (opened, changes), noticed = map(json.loads, printed_by("-c", _READ, path).splitlines())
        assert status() == before
        assert opened == sorted({"manifest.json", *(entry.file for entry in load_manifest(path).files)})
    assert (changes, noticed) == ([], ["fcntl.flock", "open", "os.remove"])
