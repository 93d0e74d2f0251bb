"""A disk that fails on purpose, put between this process and the files below some folders.

While installed, every call that Python code makes on these files is counted and goes through one lock. At the call that
a `Fault` names the disk refuses it, or the process is killed: before the call, halfway through it, or together with the
machine's power. For that the disk remembers what is durable: the content of each file when it was last synced, and the
names in each folder when that was. Nothing is really synced, which would only take time.

It is meant for a process of its own, which is forked, breaks and is gone.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import functools
import io
import itertools
import os
import pathlib
import random
import shutil
import signal
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shardio.system.opening import OpenFile

Kind = Literal[
    "kill",
    "kill halfway",
    "interrupt",
    "ENOSPC",
    "ENOSPC for good",
    "EIO",
    "EIO for good",
    "power, nothing unsynced survives",
    "power, names survive",
    "power, anything may survive",
]

REMOVALS = ("unlink", "remove", "rmdir")
WRITES = (
    *("create", "write", "pwrite", "file.write", "ftruncate", "posix_fallocate", "fsync", "fdatasync"),
    *("link", "rename", "replace", "mkdir", "close written"),
)
"""Calls that a full disk may refuse. `open` counts as `create` where it may make a file; the others are reads."""

KINDS_OF_WRITES: tuple[Kind, ...] = get_args(Kind)
KINDS_OF_REMOVALS: tuple[Kind, ...] = tuple(kind for kind in KINDS_OF_WRITES if not kind.startswith("ENOSPC"))
KINDS_OF_READS: tuple[Kind, ...] = ("kill", "interrupt", "EIO")
KINDS_OF_CLOSE: tuple[Kind, ...] = ("kill", "interrupt")
"""Faults of closing a file that was only read. Closing one that was written is called `close written`, a write."""

_PATCHED = (
    *("stat", "lstat", "fstat", "scandir", "listdir", "pread", "preadv", "statvfs", "close", "open", "write", "pwrite"),
    *("ftruncate", "posix_fallocate", "fsync", "fdatasync", "link", "rename", "replace", "mkdir", *REMOVALS),
)


def kinds_of(call: str) -> tuple[Kind, ...]:
    """Returns the kinds of faults that make sense at a call."""
    if call in WRITES:
        return KINDS_OF_WRITES
    if call == "close":
        return KINDS_OF_CLOSE
    return KINDS_OF_REMOVALS if call in REMOVALS else KINDS_OF_READS


@dataclass(frozen=True)
class Fault:
    """A fault of one kind at one call; calls are counted from 1. `seed` decides what survives a loss of power."""

    at: int
    kind: Kind
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind} at call {self.at}"


class FaultyDisk:
    """Stands between this process and the files at or below `folder`, and those below `read_only`, after `install`.

    Only `folder` is written to and may lose what was not synced. `on_death` is called just before the process is ended
    by a fault. Thread safe.
    """

    def __init__(self, folder: Path, read_only: Path, fault: Fault | None, on_death: Callable[[], None]) -> None:
        self.calls: list[str] = []
        """The name of each call, in order."""
        self.failed: list[tuple[str, str]] = []
        """Name and path of each call that failed or that was not made."""
        self._folder = os.fspath(folder)
        self._prefixes = (f"{folder}/", f"{read_only}/")
        self._fault = fault
        self._on_death = on_death
        self._lock = threading.RLock()
        self._dying: int | None = None
        self._real = {name: getattr(os, name) for name in _PATCHED}
        self._real_open = builtins.open
        self._real_fcntl = fcntl.fcntl
        # Files have numbers of our own: an inode is used again when its file is removed.
        self._numbers: dict[int, int] = {}
        self._next_number = itertools.count()
        self._contents: dict[int, bytes] = {}
        """The bytes of each file when it was last synced."""
        self._names: dict[str, dict[str, int]] = {}
        """The file of each name in each folder when that was last synced."""
        for place, _, files in os.walk(self._folder):
            self._names[place] = self._listed(place)
            for name in files:
                self._contents[self._names[place][name]] = self._read(f"{place}/{name}")

    def content(self, path: Path) -> bytes:
        """Returns the bytes of a file of ours, without a call that is counted."""
        return self._read(os.fspath(path))

    # --- putting it in place -----------------------------------------------------------------------------------------

    def install(self) -> None:
        """Puts the disk in place for the rest of this process."""
        # Python 3.10's pathlib has looked its functions up already.
        accessor: Any = getattr(pathlib, "_NormalAccessor", None)
        for name in _PATCHED:
            wrapped = self._wrap(name, self._real[name])
            setattr(os, name, wrapped)
            if hasattr(accessor, name):
                setattr(accessor, name, staticmethod(wrapped))
        for name in ("flock", "fcntl"):
            setattr(fcntl, name, self._wrap(name, getattr(fcntl, name)))
        builtins.open = io.open = self._open_file
        OpenFile.close = self._close_open_file  # type: ignore[assignment, method-assign]
        if hasattr(accessor, "open"):
            accessor.open = staticmethod(self._open_file)

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            place = self._place(args, options)
            if place is None:
                return real(*args, **options)
            known_as = name
            if name == "open":
                known_as = "create" if (args[1] if len(args) > 1 else options["flags"]) & os.O_CREAT else "open"
            return self.call(known_as, place, real, *args, **options)

        return call

    def _place(self, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        """Returns the path that a call is about, if it is one of ours."""
        what = args[0] if args else options.get("path", ".")
        if isinstance(what, int):
            path = self._path_of(what)
        else:
            path = os.fsdecode(what)
            if (folder := options.get("dir_fd")) is not None:
                path = os.path.join(self._path_of(folder), path)
        return path if f"{path}/".startswith(self._prefixes) else None

    def _path_of(self, descriptor: int) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return ""

    def _open_file(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if set(mode) - set("rwb") or self._place((file,), {}) is None:
            return self._real_open(file, mode, buffering, *args, **options)
        opener = options.pop("opener", None) or (lambda path, flags: os.open(path, flags, 0o666))
        raw = _File(self, file, mode.replace("b", ""), opener=opener)
        if buffering == 0:
            return raw
        buffered = io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    @property
    def _close_open_file(self) -> Callable[[OpenFile], None]:
        """A method: files that C closes are counted here alone, and only if they were written."""

        def close(file: OpenFile) -> None:
            real = functools.partial(io.FileIO.close, file)
            # Its mode does not tell: an OpenFile is made of any descriptor.
            is_written = not file.closed and self._is_written(file.fileno())
            place = self._place((file.fileno(),), {}) if is_written else None
            if place is None:
                real()
            else:
                self.call("close written", place, real)

        return close

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, name: str, place: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._dying == threading.get_ident():
            return real(*args, **options)
        with self._lock:
            if name == "close" and args and self._is_written(args[0]):
                name = "close written"
            self.calls.append(name)
            fault = self._fault
            if fault is not None and len(self.calls) >= fault.at:
                if len(self.calls) == fault.at:
                    self._fail(fault, name, place, real, args, options)
                elif fault.kind.endswith("for good") and name in WRITES:
                    self._refuse(fault, name, place)
            if name in ("fsync", "fdatasync"):
                self._sync(args[0], place)
                return None
            if name in ("create", "mkdir"):
                return self._make(name, place, real, *args, **options)
            return real(*args, **options)

    def _is_written(self, descriptor: int) -> bool:
        return self._real_fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY

    def _make(self, name: str, place: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            self._real["lstat"](place)
            return real(*args, **options)
        result = real(*args, **options)
        self._numbers[self._real["lstat"](place).st_ino] = next(self._next_number)
        if name == "mkdir":
            self._names.pop(place, None)
        return result

    def _fail(
        self,
        fault: Fault,
        name: str,
        place: str,
        real: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Does what the fault says. Returns only if the call is still to be made."""
        if fault.kind == "interrupt":
            self.failed.append((name, place))
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)  # which the main thread notices
            return
        refused = fault.kind.startswith("E")
        if refused and name == "close":
            return  # closing a file that was only read cannot fail
        if name in ("write", "pwrite", "file.write") and fault.kind != "kill":
            half = memoryview(args[-1 if name == "file.write" else 1]).cast("B")
            half = half[: len(half) // 2]
            if name == "file.write":
                real(half)
            else:
                # A disk that fills up in the middle of a direct write leaves whole blocks.
                descriptor = args[0]
                flags = self._real_fcntl(descriptor, fcntl.F_GETFL)
                real(descriptor, half[: len(half) & -4096] if flags & os.O_DIRECT else half, *args[2:])
        elif fault.kind == "kill halfway":
            with contextlib.suppress(OSError):  # it dies all the same
                real(*args, **options)
        elif refused and name == "close written":
            real(*args, **options)
        if refused:
            self._refuse(fault, name, place)
        self.failed.append((name, place))
        if fault.kind.startswith("power"):
            self._lose_power(fault)
        self._on_death()
        os._exit(137)

    def _refuse(self, fault: Fault, name: str, place: str) -> None:
        self.failed.append((name, place))
        code = errno.ENOSPC if fault.kind.startswith("ENOSPC") else errno.EIO
        by_descriptor = (
            "write",
            "pwrite",
            "pread",
            "ftruncate",
            "posix_fallocate",
            "fsync",
            "fdatasync",
            "fstat",
            "preadv",
        )
        # The error of a call on a descriptor names no file, as in os.
        names = [] if name in by_descriptor or name.startswith(("file.", "close")) else [place]
        raise OSError(code, os.strerror(code), *names)

    # --- what is durable ---------------------------------------------------------------------------------------------

    def _number(self, inode: int) -> int:
        if inode not in self._numbers:  # the file was made before the disk was in place
            self._numbers[inode] = next(self._next_number)
        return self._numbers[inode]

    def _listed(self, folder: str) -> dict[str, int]:
        with self._real["scandir"](folder) as entries:
            return {entry.name: self._number(entry.inode()) for entry in entries}

    def _sync(self, descriptor: int, place: str) -> None:
        status = self._real["fstat"](descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._names[place] = self._listed(place)
        else:
            # The file is opened anew: the descriptor may be for whole blocks only, or the name be gone.
            self._contents[self._number(status.st_ino)] = self._read(f"/proc/self/fd/{descriptor}")

    def _read(self, path: str) -> bytes:
        with self._real_open(path, "rb") as file:
            return file.read()

    def _lose_power(self, fault: Fault) -> None:
        """Leaves on the disk what a machine may find there when it has power again."""
        # Other threads wait for the lock until the process ends: their calls would change what is copied here.
        self._dying = threading.get_ident()
        after = f"{self._folder}.after"
        self._survive(self._folder, after, _Survival(fault))
        shutil.rmtree(self._folder)
        os.rename(after, self._folder)

    def _survive(self, folder: str, target: str, survival: _Survival) -> None:
        """Copies to `target` what survives of `folder`."""
        os.mkdir(target)
        old = self._names.get(folder, {})
        new = self._listed(folder) if os.path.isdir(folder) else {}
        kept: dict[str, int] = {}
        for name in sorted(old.keys() | new.keys()):
            names = new if old.get(name) != new.get(name) and survival.of_new_name() else old
            if name in names:
                kept[name] = names[name]
        # A rename is one step: the file has its old name if it has not the new one.
        lost = (set(old.values()) & set(new.values())) - set(kept.values())
        kept |= {name: number for name, number in old.items() if number in lost}
        for name, number in sorted(kept.items()):
            path = f"{folder}/{name}"
            if path in self._names or os.path.isdir(path):
                self._survive(path, f"{target}/{name}", survival)
                continue
            content = self._contents.get(number, b"")
            if new.get(name) == number:
                if (current := self._read(path)) == content:
                    os.link(path, f"{target}/{name}")  # the same file, with its inode and its times
                    continue
                content = survival.of_content(content, current)
            with open(f"{target}/{name}", "wb") as file:
                file.write(content)


class _Survival:
    """Decides what survives a loss of power without having been synced, as the kind of fault says."""

    def __init__(self, fault: Fault) -> None:
        self._kind = fault.kind
        self._random = random.Random(fault.seed)

    def of_new_name(self) -> bool:
        """Tells whether a name that was given, changed or removed survives so."""
        if self._kind == "power, anything may survive":
            return self._random.random() < 0.5
        return self._kind == "power, names survive"

    def of_content(self, durable: bytes, current: bytes) -> bytes:
        """Returns the bytes that are found in a file that was written to."""
        if self._kind == "power, names survive":
            # The size is written with the name, and the bytes are not.
            return durable[: len(current)].ljust(len(current), b"\0")
        if self._kind == "power, anything may survive":
            # Bytes that were synced and not written since are always there.
            end = self._random.randint(0, len(current))
            unchanged = bytes(one if one == other else 0 for one, other in zip(durable, current, strict=False))
            return self._random.choice(
                [durable, current, current[:end] + durable[end:], unchanged.ljust(len(current), b"\0")]
            )
        return durable


class _File(io.FileIO):
    """A file of Python's own whose calls the disk counts."""

    def __init__(self, disk: FaultyDisk, file: Any, mode: str, opener: Any) -> None:
        self._disk = disk
        super().__init__(file, mode, opener=None if isinstance(file, int) else opener)
        self._where = os.readlink(f"/proc/self/fd/{self.fileno()}")

    def read(self, size: int | None = -1) -> bytes:
        return self._disk.call("file.read", self._where, super().read, size)  # type: ignore[no-any-return]

    def readall(self) -> bytes:
        return self._disk.call("file.read", self._where, super().readall)  # type: ignore[no-any-return]

    def readinto(self, buffer: Any) -> int:
        return self._disk.call("file.read", self._where, super().readinto, buffer)  # type: ignore[no-any-return]

    def write(self, data: Any) -> int:
        return self._disk.call("file.write", self._where, super().write, data)  # type: ignore[no-any-return]

    def close(self) -> None:
        if self.closed:
            return
        self._disk.call("close written" if self.writable() else "close", self._where, super().close)
