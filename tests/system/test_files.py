"""Files appear whole or not at all, whatever fails; files that others made are opened with suspicion."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from deadlines import must_not_block
from disks import FailingDisk, every_failure, failing
from leaks import num_descriptors

from shardio.errors import ConvertError, FormatError
from shardio.system.files import (
    AtomicFile,
    _machine,
    fsync_folder,
    make_folder,
    remove_folder,
    remove_temporaries,
    reserve,
    sweep_temporaries,
    target_of,
    write_all,
    write_atomic,
    write_output,
)
from shardio.system.opening import naming, open_file, open_regular, open_untrusted, read_untrusted


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, b"old"])
def test_nothing_is_visible_before_commit_and_all_of_it_after(tmp_path: Path, old: bytes | None) -> None:
    path = tmp_path / "x.npy"
    if old is not None:
        path.write_bytes(old)
    before = names(tmp_path)
    with open(path if old else os.devnull, "rb") as reader:
        for error in (None, ValueError("x"), KeyboardInterrupt(), SystemExit(3)):  # leaves without a commit
            with contextlib.nullcontext() if error is None else pytest.raises(type(error)), AtomicFile(path) as file:
                write_all(file.descriptor, b"half of it")
                assert all(target_of(name) for name in names(tmp_path) if name != "x.npy")
                if error is not None:
                    raise error
            assert names(tmp_path) == before
            assert old is None or path.read_bytes() == old
        with AtomicFile(path) as file:
            write_all(file.descriptor, b"new content")
            file.commit()
            assert path.read_bytes() == b"new content"
        assert names(tmp_path) == ["x.npy"]
        assert reader.read() == (old or b"")


def test_without_replace_whatever_has_the_name_is_in_the_way(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", b"first", replace=False)
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    for name in ("x", "dangling"):
        with pytest.raises(FileExistsError, match=name):
            write_atomic(tmp_path / name, b"second", replace=False)
    assert (tmp_path / "x").read_bytes() == b"first"
    assert names(tmp_path) == ["dangling", "x"]


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "x").symlink_to(tmp_path / "target")
    write_atomic(tmp_path / "x", b"new")
    assert not (tmp_path / "x").is_symlink()
    assert (tmp_path / "x").read_bytes() == b"new"
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with AtomicFile(path) as one, AtomicFile(path) as two:
        write_all(one.descriptor, b"one")
        write_all(two.descriptor, b"second")
        two.commit()
        assert path.read_bytes() == b"second"
        one.commit()
        assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["x"]


def test_permissions_are_those_of_an_ordinary_file(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        write_atomic(tmp_path / "x", b"")
    finally:
        os.umask(previous)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_content_is_durable_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    events: list[str] = []
    real_write, real_fsync = os.write, os.fsync

    def write(descriptor: int, data: bytes) -> int:
        events.append("write")
        return real_write(descriptor, data)

    def fsync(descriptor: int) -> None:
        what = "folder" if os.path.samestat(os.fstat(descriptor), tmp_path.stat()) else "file"
        events.append(f"fsync {what}, {'published' if path.exists() else 'hidden'}")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", fsync)
    write_atomic(path, b"abc")
    assert events == ["write", "fsync file, hidden", "fsync folder, published"]


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_parts_are_joined_and_short_writes_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, memoryview(data)[:most]))
    table = np.arange(20, dtype="<u4").reshape(4, 5)
    write_atomic(tmp_path / "x", b"0123456789", memoryview(b""), table.data)
    assert (tmp_path / "x").read_bytes() == b"0123456789" + table.tobytes()
    write_atomic(tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.parametrize(("old", "replace"), [(None, True), (b"the old content", True), (None, False)])
def test_whatever_call_fails_the_content_is_old_or_new_and_the_error_names_the_file(
    tmp_path: Path, old: bytes | None, replace: bool
) -> None:
    """A close that fails too, while the file is discarded, must not hide the error that came first."""
    path = tmp_path / "x"
    parts = (b"new " * 10, b"content " * 10)
    new = b"".join(parts)
    failed_calls: set[str] = set()

    def do(disk: FailingDisk) -> bool:
        path.unlink(missing_ok=True)
        if old is not None:
            path.write_bytes(old)
        found: OSError | None = None
        with disk.installed():
            try:
                write_atomic(path, *parts, replace=replace)
            except OSError as error:
                found = error
        assert found is None or (found.errno == disk.code and str(tmp_path) in str(found)), f"{disk}: {found}"
        failed_calls.update(disk.failed)
        content = path.read_bytes() if path.exists() else None
        assert content in (old, new), disk
        assert content == new or found is not None, disk
        assert names(tmp_path) in ([], ["x"]), f"{disk}: a temporary file was left"
        return found is None

    # The least is: open, two writes, two fsyncs and the rename or link, for two errors, once and for good.
    assert every_failure(do) >= 4 * 6
    assert failed_calls >= {"open", "write", "fsync", "rename" if replace else "link", "close"}


def test_a_failing_fstat_leaves_no_temporary_and_no_descriptor(tmp_path: Path) -> None:
    descriptors = num_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstat", failing(errno.ESTALE))
        with pytest.raises(OSError) as caught:
            write_atomic(tmp_path / "x", b"new")
    assert caught.value.errno == errno.ESTALE
    assert names(tmp_path) == []
    assert num_descriptors() == descriptors


def test_reserve_allocates_and_passes_a_full_disk_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AtomicFile(tmp_path / "x") as file:
        reserve(file.descriptor, 10_000)
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            monkeypatch.setattr(os, "posix_fallocate", failing(code))
            with pytest.raises(OSError) as caught:
                reserve(file.descriptor, 20_000)
            assert caught.value.errno == code
        for code in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # the filesystem cannot
            monkeypatch.setattr(os, "posix_fallocate", failing(code))
            reserve(file.descriptor, 20_000)
        monkeypatch.delattr(os, "posix_fallocate")
        reserve(file.descriptor, 20_000)
        assert os.fstat(file.descriptor).st_size == 10_000


@pytest.mark.parametrize(("code", "limit"), [(errno.EFBIG, "ulimit -f"), (errno.EMFILE, "ulimit -n")])
def test_an_error_names_the_file_and_the_limit(code: int, limit: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"{limit}.*{tmp_path}"), naming(tmp_path), naming("a"):
        raise OSError(code, os.strerror(code))


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [0, 1, 2])
def test_the_names_of_folders_that_are_made_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    folders = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    for folder in folders[:there]:
        folder.mkdir()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    make_folder(folders[2])
    assert folders[2].is_dir()
    assert synced == [str(folder.parent) for folder in folders[there:]]
    make_folder(folders[2])  # the process that made it may have been killed in between
    assert synced[-1] == str(folders[1])


def test_an_interrupted_removal_of_a_folder_raises_the_interrupt_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before, old = num_descriptors(), signal.signal(signal.SIGALRM, signal.default_int_handler)
    for number in range(1, 41):
        (tmp_path / "a" / "b").mkdir(parents=True)
        for name in range(100):
            (tmp_path / "a" / str(name)).touch()
        with contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, number * 1e-4)
            remove_folder(tmp_path / "a")
            time.sleep(0.02)
        remove_folder(tmp_path / "a")  # the interrupt may have come before it began
        assert not (tmp_path / "a").exists()
    signal.signal(signal.SIGALRM, old)
    assert num_descriptors() == before


def test_a_folder_in_one_that_may_not_be_read_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    make_folder(tmp_path / "a")
    assert (tmp_path / "a").is_dir()


def test_what_is_missing_or_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, found in (("file", "a file"), ("dangling", "a symbolic link that leads nowhere")):
        with pytest.raises(FileExistsError, match=f"{found}: .*{name}"):
            make_folder(tmp_path / name)
    with pytest.raises(NotADirectoryError, match="file"):
        make_folder(tmp_path / "file" / "a")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_atomic(tmp_path / "nowhere" / "x", b"")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fsync_folder(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_synced_is_no_error_unless_its_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    make_folder(tmp_path / "new")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError) as caught:
        make_folder(tmp_path / "newer")
    assert caught.value.filename == str(tmp_path)


# --- outputs of commands ---------------------------------------------------------------------------------------------


def test_an_output_that_is_a_link_keeps_the_link_and_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, content in (("there", b"old"), ("not there", None)):
        target, link = tmp_path / "folder" / name, tmp_path / name
        if content is not None:
            target.write_bytes(content)
        link.symlink_to(target)
        write_output(link, b"new")
        assert link.is_symlink()
        assert target.read_bytes() == b"new"
    assert names(tmp_path / "folder") == ["not there", "there"]


def test_an_output_that_is_a_fifo_or_a_device_is_written_to(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    device, terminal = os.openpty()
    (tmp_path / "device").symlink_to(os.ttyname(terminal))
    for path, reader in ((fifo, os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)), (tmp_path / "device", device)):
        before = path.lstat()
        write_output(path, b"new")
        with os.fdopen(reader, "rb", buffering=0) as found:
            assert b"".join(found.read(1) for _ in b"new") == b"new"
        assert os.path.samestat(path.lstat(), before)
    os.close(terminal)
    assert names(tmp_path) == ["device", "fifo"]


def test_a_folder_and_the_own_standard_output_are_no_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        write_output(tmp_path, b"new")
    path, real = tmp_path / "log", os.fstat
    path.write_bytes(b"lines")
    monkeypatch.setattr(os, "fstat", lambda descriptor: path.stat() if descriptor == 1 else real(descriptor))
    with pytest.raises(ValueError, match=r"log: .*stdout"):
        write_output(path, b"new")
    assert path.read_bytes() == b"lines"


def test_an_output_sweeps_what_killed_writers_of_the_same_file_have_left(tmp_path: Path) -> None:
    left = {name: AtomicFile(tmp_path / name) for name in ("x", "x.y", "other", "held")}
    kept = [left[name].temporary.name for name in ("x.y", "other", "held")]
    for name in ("x", "x.y", "other"):
        del left[name]
    (tmp_path / ".x.foreign.tmp").touch()
    write_output(tmp_path / "x", b"new")
    write_output(tmp_path / "held", b"new")
    assert names(tmp_path) == sorted(["x", "held", ".x.foreign.tmp", *kept])
    left["held"].discard()


# --- temporaries -----------------------------------------------------------------------------------------------------


def swept(folder: Path) -> int:
    """Sweeps, and returns how many files that has removed."""
    before = len(os.listdir(folder))
    sweep_temporaries(folder)
    return before - len(os.listdir(folder))


@pytest.mark.parametrize("has_locks", [True, False])
def test_sweep_leaves_the_file_of_a_writer_in_this_process_also_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with AtomicFile(tmp_path / "x") as file:
        write_all(file.descriptor, b"abc")
        assert swept(tmp_path) == 0
        file.commit()
    assert (tmp_path / "x").read_bytes() == b"abc"
    assert swept(tmp_path) == 0
    assert names(tmp_path) == ["x"]


def test_sweep_continues_when_another_process_publishes_a_file_meanwhile(tmp_path: Path) -> None:
    for name in ("one", "other"):
        AtomicFile(tmp_path / name)
    first, second = sorted(tmp_path.iterdir())

    def is_kept(name: str) -> bool:
        if name == first.name:
            first.unlink()
        return False

    sweep_temporaries(tmp_path, is_kept)
    assert not second.exists()


_WRITER = """
import sys
from pathlib import Path
from shardio.system.files import AtomicFile, write_all
with AtomicFile(Path(sys.argv[1])) as file:
    write_all(file.descriptor, b"written elsewhere")
    print("writing", flush=True)
    if sys.stdin.readline():
        file.commit()
"""


@contextlib.contextmanager
def writer_process(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process that is in the middle of writing `path`. A line to its stdin makes it commit."""
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0], "the writer did not start"
            assert process.stdout.readline() == b"writing\n"
            yield process
        finally:
            process.kill()


def test_sweep_leaves_the_file_of_a_living_process_and_removes_that_of_a_killed_one(tmp_path: Path) -> None:
    with writer_process(tmp_path / "living") as living:
        with writer_process(tmp_path / "killed") as killed:
            assert len(names(tmp_path)) == 2
            assert swept(tmp_path) == 0
            killed.kill()
            assert killed.wait(60) == -signal.SIGKILL
        assert [name.split(".")[1] for name in names(tmp_path)] == ["killed", "living"]
        assert swept(tmp_path) == 1
        assert [name.split(".")[1] for name in names(tmp_path)] == ["living"]
        living.communicate(b"commit\n", timeout=60)
        assert living.returncode == 0
    assert (tmp_path / "living").read_bytes() == b"written elsewhere"
    assert names(tmp_path) == ["living"]


def of_another_machine(folder: Path, silent_seconds: float) -> Path:
    """A temporary file that another machine has not written to for so long, and whose lock cannot be seen here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.system.files._machine", lambda: "a0a0a0a0")
        AtomicFile(folder / "x")
    (path,) = folder.glob(".x.a0a0a0a0-*")
    os.utime(path, (time.time() - silent_seconds,) * 2)
    return path


def test_sweep_leaves_the_file_of_another_machine_until_it_has_been_silent_for_a_day(tmp_path: Path) -> None:
    path = of_another_machine(tmp_path, 86_000)
    assert swept(tmp_path) == 0
    path.unlink()
    path = of_another_machine(tmp_path, 86_800)
    with path.open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert swept(tmp_path) == 0
    assert swept(tmp_path) == 1
    assert names(tmp_path) == []


def test_two_machines_names_differ_and_one_machines_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = set()
    for node in ("node1", "node1", "node2"):
        _machine.cache_clear()
        monkeypatch.setattr(os, "uname", lambda node=node: os.uname_result(("Linux", node, "", "", "")))
        tags.add(_machine())
    _machine.cache_clear()
    assert len(tags) == 2


def test_remove_takes_the_files_of_living_writers_too_and_they_cannot_publish(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", b"published")
    of_another_machine(tmp_path, 0)
    with AtomicFile(tmp_path / "x") as file:
        write_all(file.descriptor, b"late")
        remove_temporaries(tmp_path)
        with pytest.raises(FileNotFoundError):
            file.commit()
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"published"


def test_sweep_touches_nothing_but_regular_temporaries(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    tag = f".{_machine()}-0123456789abcdef.tmp"
    (tmp_path / f".link{tag}").symlink_to(target)
    (tmp_path / f".dangling{tag}").symlink_to(tmp_path / "nothing")
    (tmp_path / f".folder{tag}").mkdir()
    os.mkfifo(tmp_path / f".fifo{tag}")
    for name in ("visible.tmp", ".hidden", ".notes.tmp", ".notes.0123456789abcdef.tmp", "train-00000.npy"):
        (tmp_path / name).write_bytes(b"x")
    before = names(tmp_path)
    (tmp_path / f".left.{_machine()}-0123456789abcdef.tmp").write_bytes(b"x")
    with must_not_block():
        assert swept(tmp_path) == 1
    assert names(tmp_path) == before
    assert target.read_bytes() == b"precious"


def test_a_writer_swept_before_it_had_its_lock_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = fcntl.flock, 0

    def flock(descriptor: int, operation: int) -> None:
        nonlocal count
        if count < 2 and not operation & fcntl.LOCK_NB:
            monkeypatch.setattr(fcntl, "flock", real)
            count += swept(tmp_path)
            monkeypatch.setattr(fcntl, "flock", flock)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    write_atomic(tmp_path / "x", b"abc")
    assert count == 2
    assert (tmp_path / "x").read_bytes() == b"abc"
    assert names(tmp_path) == ["x"]


# --- opening ---------------------------------------------------------------------------------------------------------


def test_open_regular_gives_a_descriptor_of_its_own_and_the_size(tmp_path: Path) -> None:
    for content in (b"", b"abc", bytes(10_000)):
        (tmp_path / "x").write_bytes(content)
        file, nbytes = open_regular(tmp_path / "x")
        with file:
            assert nbytes == len(content)
            assert os.pread(file.fileno(), 20_000, 0) == content
            assert not os.get_inheritable(file.fileno())
            with pytest.raises(OSError):
                os.write(file.fileno(), b"x")


HOSTILE: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.symlink_to("target"), "a symbolic link"),
    (lambda path: path.symlink_to("nothing"), "a symbolic link"),
    (lambda path: path.symlink_to(path.name), "a symbolic link"),
    (os.mkfifo, "a FIFO"),
    (Path.mkdir, "a folder"),
    (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "a FIFO, socket or device"),
]


@pytest.mark.parametrize(("make", "what"), HOSTILE)
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], object], what: str) -> None:
    path = tmp_path / "train-00000.npy"
    (tmp_path / "target").write_bytes(b"abc")
    make(path)
    before, descriptors = names(tmp_path), num_descriptors()
    for flags in (None, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT):
        found = "a" if flags is not None else what
        with must_not_block(), pytest.raises(FormatError, match=f"^{path}: expected a regular file, found {found}"):
            open_regular(path) if flags is None else open_untrusted(path, flags)
        assert (names(tmp_path), num_descriptors()) == (before, descriptors)


def test_nothing_and_a_device_are_no_regular_files_and_other_errors_pass_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FormatError, match="gone/x: expected a file of the shard set, found nothing: the whole folder is gone"
    ):
        open_regular(tmp_path / "gone" / "x")
    with pytest.raises(FormatError, match="x: expected a file of the shard set, found nothing"):
        open_regular(tmp_path / "x")
    with pytest.raises(FormatError, match=r"^/dev/null: expected a regular file, found a device"):
        open_regular(Path("/dev/null"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="file/x"):
        open_regular(tmp_path / "file" / "x")
    monkeypatch.setattr(os, "open", failing(errno.EACCES))
    with pytest.raises(PermissionError):
        open_regular(tmp_path / "file")


def test_a_file_that_is_written_in_place_has_no_second_name(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    open_untrusted(tmp_path / "x", os.O_WRONLY, sole_name=True).close()
    os.link(tmp_path / "x", tmp_path / "y")
    assert read_untrusted(tmp_path / "x") == b"abc"
    with pytest.raises(ConvertError, match=r"x: .*found .* second name .*: remove it$"):
        open_untrusted(tmp_path / "x", os.O_WRONLY, refusal=ConvertError, way_out=": remove it", sole_name=True)


def test_an_open_file_closes_when_it_is_forgotten_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    file = open_file(tmp_path / "x", os.O_RDONLY | os.O_CLOEXEC)
    descriptor = file.fileno()
    assert os.pread(descriptor, 9, 0) == b"abc"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
