"""Publishing into a shared root: the whole set or nothing, never over anything, readable by those who should."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command import printed_by
from deadlines import must_not_block
from disks import failing
from folders import contents, flip
from hooks import call_before

from shardio.errors import ConvertError, FormatError, SetNotFoundError, SpaceError
from shardio.format.manifest_file import load_manifest
from shardio.sets import new_folder
from shardio.sets import publish as publisher
from shardio.sets.new_folder import find_left_overs, sweep_beside
from shardio.sets.publish import publish
from shardio.sets.verify import verify
from shardio.system import files
from shardio.system.files import _machine


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    return make_set(25)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_a_copy_has_the_bytes_of_the_set_and_leaves_it_alone(out: Path, root: Path) -> None:
    before, seen = contents(out), list[tuple[int, int]]()
    report = publish(out, root / "small", on_progress=lambda nbytes, total: seen.append((nbytes, total)))
    assert contents(out) == contents(root / "small") == before
    manifest = load_manifest(out)
    assert (report.path, report.digest, report.renamed) == (str(root / "small"), manifest.digest, False)
    assert (report.num_files, report.nbytes, report.readable_by) == (len(before), manifest.nbytes, "all")
    assert sum(nbytes for nbytes, _ in seen) == manifest.nbytes
    assert os.listdir(root) == ["small"]


def test_a_move_within_a_filesystem_is_a_rename(out: Path, root: Path) -> None:
    before = contents(out)
    inodes = {path.name: path.stat().st_ino for path in out.iterdir()}
    (out / f".train-00000.npy.{_machine()}-0123456789abcdef.tmp").write_bytes(b"left by a killed process")
    report = publish(out, root / "small", move=True)
    assert report.renamed
    assert contents(root / "small") == before
    assert {path.name: path.stat().st_ino for path in (root / "small").iterdir()} == inodes
    assert not out.exists()
    assert os.listdir(root) == ["small"]


def test_a_move_to_another_filesystem_is_a_copy_that_then_removes_the_set(
    out: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(out)
    monkeypatch.setattr(publisher, "_can_be_renamed", lambda source, root: False)
    (out / "notes.txt").write_text("mine")
    assert not publish(out, root / "small", move=True).renamed
    assert contents(root / "small") == before
    assert os.listdir(out) == ["notes.txt"]


@pytest.mark.parametrize("renameat2", [True, False])
def test_a_move_from_one_mount_of_a_filesystem_to_another_is_a_copy_too(
    out: Path, root: Path, monkeypatch: pytest.MonkeyPatch, renameat2: bool
) -> None:
    before = contents(out)
    real, real_rename = new_folder.rename_without_replacing, Path.rename

    def rename(folder: Path, target: Path) -> Path:
        if folder == out:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(folder), None, str(target))
        return real_rename(folder, target)

    def rename_without_replacing(folder: Path, target: Path) -> bool:
        if folder == out and renameat2:
            rename(folder, target)
        return renameat2 and real(folder, target)

    monkeypatch.setattr(new_folder, "rename_without_replacing", rename_without_replacing)
    monkeypatch.setattr(Path, "rename", rename)
    assert not publish(out, root / "small", move=True).renamed
    assert contents(root / "small") == before
    assert os.listdir(root) == ["small"]
    assert not out.exists()


@pytest.mark.parametrize("move", [True, False])
def test_a_folder_whose_names_cannot_be_synced_as_it_may_not_be_read_is_no_failure(
    out: Path, root: Path, monkeypatch: pytest.MonkeyPatch, move: bool
) -> None:
    real = files.open_folder
    monkeypatch.setattr(files, "open_folder", lambda path: failing(errno.EACCES)(path) if path == root else real(path))
    assert publish(out, root / "small", move=move).renamed is move
    assert verify(root / "small").ok


def test_what_does_not_belong_to_the_set_is_not_taken_along(out: Path, root: Path) -> None:
    before = contents(out)
    (out / ".convert").mkdir()
    (out / ".convert" / "plan.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConvertError, match=r"found '\.convert': remove it, or publish a copy"):
        publish(out, root / "small", move=True)
    assert os.listdir(root) == []
    publish(out, root / "small")
    assert contents(root / "small") == before
    assert (out / "notes.txt").exists()


@pytest.mark.parametrize("when", ["before", "before a move", "at the last moment", "without renameat2"])
@pytest.mark.parametrize("there", ["set", "file", "empty folder", "dangling link"])
def test_what_exists_is_never_replaced(
    out: Path, root: Path, monkeypatch: pytest.MonkeyPatch, there: str, when: str
) -> None:
    target = root / "small"
    put: dict[str, Callable[[], object]] = {
        "set": lambda: shutil.copytree(out, target),
        "file": target.touch,
        "empty folder": target.mkdir,
        "dangling link": lambda: target.symlink_to("nowhere"),
    }
    if when.startswith("before"):
        put[there]()
    else:
        call_before(monkeypatch, publisher, "rename_new", lambda *_: put[there]())
    if when == "without renameat2":
        monkeypatch.setattr(new_folder, "rename_without_replacing", lambda folder, target: False)
    before = contents(out)
    with pytest.raises(ConvertError, match="small: expected nothing there"):
        publish(out, target, move=when == "before a move")
    assert contents(out) == before
    assert os.listdir(root) == ["small"]


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode", "readable_by"),
    [(0o022, 0o644, 0o755, "all"), (0o027, 0o640, 0o750, "group"), (0o077, 0o600, 0o700, "owner")],
)
def test_permissions_are_those_of_new_files_whatever_they_were(
    out: Path, root: Path, move: bool, umask: int, file_mode: int, folder_mode: int, readable_by: str
) -> None:
    for path in out.iterdir():
        path.chmod(0o400)
    out.chmod(0o700)
    os.umask(umask)
    assert publish(out, root / "small", move=move).readable_by == readable_by
    assert modes(root / "small") == {file_mode}
    assert stat.S_IMODE((root / "small").stat().st_mode) == folder_mode


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("setgid", [False, True])
def test_the_group_is_that_which_the_root_hands_on(out: Path, root: Path, move: bool, setgid: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a folder to any group")
    os.chown(root, -1, 4321)
    root.chmod(0o2775 if setgid else 0o775)
    before = out.stat().st_gid
    publish(out, root / "small", move=move)
    groups = {path.stat().st_gid for path in (root / "small", *(root / "small").iterdir())}
    assert groups == {4321 if setgid else before}
    assert bool((root / "small").stat().st_mode & stat.S_ISGID) == setgid
    assert modes(root / "small") == {0o644}


def test_a_set_whose_permissions_are_anothers_to_change_is_not_moved(
    out: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "chmod", failing(errno.EPERM))
    publish(out, root / "as-new", move=True)  # nothing need be changed
    os.umask(0o027)
    with pytest.raises(ConvertError, match=r"as-new: .*permissions .* publish a copy"):
        publish(root / "as-new", root / "other", move=True)
    assert os.listdir(root) == ["as-new"]


def test_damage_is_found_while_copying_and_nothing_is_published(out: Path, root: Path) -> None:
    shard = out / "train-00001.npy"
    flip(shard)
    with pytest.raises(FormatError, match=r"train-00001.npy: sha256: expected .*`shardio verify"):
        publish(out, root / "small")
    os.truncate(shard, 5000)
    for move in (False, True):
        with pytest.raises(FormatError, match=r"train-00001.npy: expected \d+ bytes, as the manifest says, found 5000"):
            publish(out, root / "small", move=move)
    assert os.listdir(root) == []
    assert (out / "manifest.json").exists()


def test_places_that_cannot_be_are_refused(out: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, told in (
        *((root / name, "expected ROOT/NAME, where NAME has letters") for name in (".hidden", "a b", "a:b", "-x")),
        (root / "missing" / "small", "expected a folder for the new set 'small', found none"),
        (out / "small", "outside of the set"),
    ):
        for move in (False, True):
            with pytest.raises(ConvertError, match=told):
                publish(out, target, move=move)
    usage = shutil.disk_usage(root)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
        with pytest.raises(SpaceError, match=r"expected room for [\d,]+ bytes, found 10 bytes free"):
            publish(out, root / "small")
    (out / "manifest.json").unlink()
    (out / ".convert").mkdir()
    for move in (False, True):
        with pytest.raises(SetNotFoundError, match="was not finished"):
            publish(out, root / "small", move=move)
    assert os.listdir(root) == []


def test_a_full_disk_leaves_nothing(out: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.sets.storage.reserve", failing(errno.ENOSPC))
    with pytest.raises(OSError, match=r"No space left on device: '/"):
        publish(out, root / "small")
    assert os.listdir(root) == []


def left_over(root: Path, machine: str, age: float = 0.0) -> tuple[Path, Path]:
    """Leaves lock and folder of a killed publisher on that machine, last written to so long ago."""
    lock = root / f".large.{machine}-0123456789abcdef.tmp"
    folder = lock.with_name(lock.name + ".d")
    folder.mkdir()
    lock.touch()
    (folder / "train-00000.npy").touch()
    for path in (folder / "train-00000.npy", folder, lock):
        os.utime(path, (time.time() - age, time.time() - age))
    return lock, folder


@pytest.mark.parametrize(
    ("machine", "age", "has_locks", "abandoned"),
    [
        ("", 0, True, True),
        ("", 0, False, False),
        ("", 1000, False, True),  # before the machine started
        ("0badcafe", 1000, True, False),
        ("0badcafe", 1000, False, False),
        ("0badcafe", 90_000, True, True),
    ],
)
def test_what_killed_publishers_left_is_swept_as_soon_as_it_is_known_to_be_theirs(
    out: Path, root: Path, monkeypatch: pytest.MonkeyPatch, machine: str, age: float, has_locks: bool, abandoned: bool
) -> None:
    lock, folder = left_over(root, machine or _machine(), age)
    monkeypatch.setattr("shardio.system.files._boot_time", lambda: time.time() - 500)
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    if age > 86_400:
        os.utime(folder / "train-00000.npy")  # the lock is old, but its holder copies
        assert [left.abandoned for left in find_left_overs(root)] == [False]
        os.utime(folder / "train-00000.npy", (time.time() - age,) * 2)
    assert [(left.path, left.abandoned) for left in find_left_overs(root)] == [(str(folder), abandoned)]
    publish(out, root / "small")
    assert folder.exists() == lock.exists() == (not abandoned)


def test_what_living_publishers_and_others_write_is_not_swept(out: Path, root: Path) -> None:
    lock, folder = left_over(root, _machine())
    with lock.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        publish(out, root / "b")
        assert lock.exists()
        assert (folder / "train-00000.npy").exists()
    lock.unlink()  # swept halfway
    others = [root / ".theirs.tmp", root / ".theirs.tmp.d", root / ".theirs.12345678-0123456789abcdef.tmp.d.x"]
    for path in others:
        path.mkdir()
    publish(out, root / "c")
    assert not folder.exists()
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("elsewhere"), Path.mkdir])
def test_what_is_no_lock_of_a_publisher_is_left_alone_and_not_waited_for(
    out: Path, root: Path, put: Callable[[Path], None]
) -> None:
    (root / "elsewhere").write_bytes(b"precious")
    lock, folder = left_over(root, _machine())
    lock.unlink()
    put(lock)
    with must_not_block():
        publish(out, root / "small")
    assert os.path.lexists(lock)
    assert folder.exists()
    assert (root / "elsewhere").read_bytes() == b"precious"


@pytest.mark.parametrize("target", ["taken", "gone/name", "new"])
@pytest.mark.parametrize("rest", ["both", "lock", "folder"])
def test_what_a_loss_of_power_left_is_swept_by_any_next_call(out: Path, root: Path, rest: str, target: str) -> None:
    publish(out, root / "taken")  # this was finished when the power went off
    lock, folder = left_over(root, _machine())
    if rest == "lock":
        shutil.rmtree(folder)
    if rest == "folder":
        lock.unlink()
    with contextlib.nullcontext() if target == "new" else pytest.raises(ConvertError):
        publish(out, root / target)
    assert (lock.exists() or folder.exists()) == (target == "gone/name")


def test_what_may_not_be_removed_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, folder = left_over(root, _machine())

    with monkeypatch.context() as patch:  # for root there are no permissions
        patch.setattr(Path, "unlink", failing(errno.EACCES))
        patch.setattr(os, "unlink", failing(errno.EACCES))
        sweep_beside(root / "small")
    assert lock.exists()
    assert [left.path for left in find_left_overs(root)] == [str(folder)]


def test_one_of_many_publishers_of_one_name_wins(out: Path, root: Path) -> None:
    barrier = threading.Barrier(6)

    def run(_: int) -> str:
        barrier.wait()
        try:
            return publish(out, root / "small").path
        except ConvertError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(run, range(6)))
    assert outcomes.count(str(root / "small")) == 1
    assert sum("expected nothing there" in outcome for outcome in outcomes) == 5
    assert os.listdir(root) == ["small"]
    assert verify(root / "small").ok


KILL = """
import itertools, os, shutil, sys
from pathlib import Path
from change_sets import call_apart
from faulty_disk import Fault
from shardio.format.manifest_file import load_manifest
from shardio.sets import publish as publisher
from shardio.sets.verify import verify

original, folder = map(Path, sys.argv[1:])
source, target, killed, published = folder / "source", folder / "root" / "set", 0, 0
for move, crossing in ((False, False), (True, False), (True, True)):
    publisher._can_be_renamed = lambda source, root: not crossing
    for at in itertools.count(1, 5):
        shutil.copytree(original, source)
        fault = Fault(at, ("kill", "kill halfway")[at % 2])
        count, aborted = call_apart(lambda: publisher.publish(source, target, move=move), folder, original, fault)
        assert not aborted, aborted
        whole = target if target.exists() else source
        assert verify(whole, digest=load_manifest(original).digest).ok, f"torn or lost: {fault}"
        assert not list(target.glob(".*")), "temporaries inside"
        killed, published = killed + (not count), published + target.exists()
        for path in (source, target):
            shutil.rmtree(path, ignore_errors=True)
        if count:  # it was over before
            break
publisher.publish(original, target)
assert os.listdir(target.parent) == ["set"], os.listdir(target.parent)
print(killed, published)
"""


def test_a_publisher_killed_at_any_call_leaves_the_whole_set_or_none(
    make_set: Callable[..., Path], tmp_path: Path, root: Path
) -> None:
    killed, published = map(int, printed_by("-c", KILL, make_set(15), tmp_path).split())
    assert killed > 30
    assert published >= 3
