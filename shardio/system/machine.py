"""How many cores and how much memory this machine gives to this process.

Both are read from /proc and /sys/fs/cgroup, where these are; elsewhere the answer is "unknown".
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns how many cores this process may keep busy: fewer than the machine has where a job scheduler binds
    processes to some, or a container gets the time of some. Part of a core counts as one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(share) for share in _cgroups_cores(proc, cgroups))]))


def _cgroups_cores(proc: Path, cgroups: Path) -> Iterator[float]:
    """Yields the time that each level above this process may take of the processor, in cores."""
    for folder, unified in _cgroups(proc, cgroups, "cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such level, no such limit, or "max"
            if unified:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            if quota > 0:  # -1 is no limit
                yield quota / period


def memory_left(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Returns the bytes that this process, or the page cache on its behalf, can still take; None if unknown.

    Page cache counts as free, as the kernel reclaims it: so a set that is in the page cache already counts as left.
    """
    found = [*_machine_left(proc), *_cgroups_left(proc, cgroups)]
    return max(0, min(found)) if found else None


def _machine_left(proc: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, KeyError):
        yield 1024 * _numbers(proc / "meminfo")["MemAvailable:"]


def _cgroups_left(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields what is left of each memory limit above this process."""
    for folder, unified in _cgroups(proc, cgroups, "memory"):
        if unified:
            for limit in ("memory.max", "memory.high"):
                yield from _left(folder, limit, "memory.current", "")
        else:
            yield from _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _cgroups(proc: Path, cgroups: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields the folders that say what a controller allows this process, as a job's limit may be set at any level above
    it; and whether each is one of the unified hierarchy (v2)."""
    try:
        lines = (proc / "self" / "cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield from ((folder, True) for folder in _levels(cgroups, path))
        elif controller in controllers.split(","):
            # Controllers that are mounted together have a link for each of them.
            yield from ((folder, False) for folder in _levels(cgroups / controller, path))


def _levels(root: Path, path: str) -> list[Path]:
    """Returns the process's cgroup and all above it. In a container `path` may be the host's: then only `root` is."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside of this process's cgroup namespace
        parts = []
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _left(folder: Path, limit: str, usage: str, prefix: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # no such level, no such limit, or "max"
        total = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        numbers = _numbers(folder / "memory.stat")
        cache = numbers.get(f"{prefix}active_file", 0) + numbers.get(f"{prefix}inactive_file", 0)
        yield total - max(0, used - cache)


def _numbers(path: Path) -> dict[str, int]:
    """Returns the numbers in lines such as `name 123` or `name: 123 kB`, by name."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
