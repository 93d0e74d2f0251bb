"""Things that a process may leave behind: descriptors, and names in /dev/shm."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

_SHM = Path("/dev/shm")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors() -> set[tuple[str, str]]:
    """Returns each open descriptor, and what it leads to."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def shared_names() -> set[str]:
    # tqdm's first bar makes a lock for all processes, whose semaphore has a name until this one ends: from Python 3.14
    # on, where processes are not forked by default. So it is made before anything is compared.
    tqdm.get_lock()  # type: ignore[no-untyped-call]
    return set(os.listdir(_SHM))


def shared_names_left(before: set[str]) -> set[str]:
    """Returns the names in /dev/shm that were not there before, without those of other programs or another run.

    A name does not tell which process made it. A file is another's if another user made it, or if it is mapped by a
    process that does not descend from this one, and by none that does. A file that no process has mapped was left here.
    """
    found: dict[tuple[int, int], str] = {}
    for name in shared_names() - before:
        with contextlib.suppress(FileNotFoundError):
            status = (_SHM / name).stat()
            if status.st_uid == os.geteuid():
                found[status.st_dev, status.st_ino] = name
    if not found:
        return set()
    ours, others = set[tuple[int, int]](), set[tuple[int, int]]()
    for pid, descends in _processes():
        (ours if descends else others).update(_mapped(pid))
    return {name for file, name in found.items() if file in ours or file not in others}


def _processes() -> Iterator[tuple[int, bool]]:
    """Yields every process of the machine, and whether it is this one or descends from it."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parents[int(entry)] = int(Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[1])
    for pid in parents:
        ancestor = pid
        while ancestor != os.getpid() and ancestor in parents:
            ancestor = parents[ancestor]
        yield pid, ancestor == os.getpid()


def _mapped(pid: int) -> set[tuple[int, int]]:
    """Returns device and inode of every file that a process has mapped; none if it has ended or is another user's."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path("/proc", str(pid), "maps").read_bytes().split(b"\n")[:-1]:  # a name may hold other line ends
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = (int(number, 16) for number in device.split(b":"))
            found.add((os.makedev(major, minor), int(inode)))
    return found
