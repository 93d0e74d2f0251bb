"""Finds out how many cores and how much memory this process may use, kinds of filesystems, and network addresses.

Most of it is read from /proc and /sys/fs/cgroup. Where these do not exist, results say that a value is unknown.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import math
import os
import re
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_SIOCGIFADDR = 0x8915  # of Linux


@functools.cache
def boot_id() -> str:
    """Returns an id of the machine's current boot. Where the system has none, returns a random id of this process."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(16)


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns how many cores this process may use, at least 1. A part of a core counts as one core.

    Job schedulers bind processes to cores, and containers may limit processor time.
    """
    cores = os.cpu_count() or 1
    with contextlib.suppress(AttributeError, OSError):  # macOS, and containers that forbid the call
        cores = len(os.sched_getaffinity(0))
    for folder, unified in _cgroups(proc, cgroups, "cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such level, no such limit, or "max"
            names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota > 0:  # -1 is no limit
                cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


def memory_left(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Returns how many more bytes of memory this process and its page cache can take; None if unknown.

    Page cache counts as free, as the kernel reclaims it.
    """
    found = list[int]()
    for folder, unified in _cgroups(proc, cgroups, "memory"):
        limits = ("memory.max", "memory.high") if unified else ("memory.limit_in_bytes",)
        usage, prefix = ("memory.current", "") if unified else ("memory.usage_in_bytes", "total_")
        for limit in limits:
            with contextlib.suppress(OSError, ValueError):  # no such level, no such limit, or "max"
                total = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                numbers = _numbers(folder / "memory.stat")
                cache = numbers.get(f"{prefix}active_file", 0) + numbers.get(f"{prefix}inactive_file", 0)
                found.append(total - max(0, used - cache))
    with contextlib.suppress(OSError, KeyError):
        found.append(1024 * _numbers(proc / "meminfo")["MemAvailable:"])
    return max(0, min(found)) if found else None


def _cgroups(proc: Path, cgroups: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields (folder, is v2) of this process's cgroup and each cgroup above it; `controller` is "cpu" or "memory"."""
    try:
        lines = (proc / "self" / "cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller in controllers.split(",") or not controllers:
            # Controllers that are mounted together have a link for each of them.
            root = cgroups / controller if controllers else cgroups
            # Without the part that is outside of this process's namespace, or that is the host's and does not exist.
            below = root if ".." in path.split("/") else root.joinpath(*path.split("/"))
            yield from ((folder, not controllers) for folder in (below, *below.parents) if folder.is_relative_to(root))


def _numbers(path: Path) -> dict[str, int]:
    """Returns {first word: number} for lines such as `name 123` or `name: 123 kB`. The first word keeps its colon."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}


# Filesystems through which machines share folders. FUSE filesystems are mounted as "fuse.NAME".
_SHARED = """
afs alluxio-fuse beegfs blobfuse blobfuse2 ceph ceph-fuse cifs coda curvefs cvmfs davfs davfs2 dfuse dvs gcsfuse
geesefs gfs gfs2 glusterfs goofys gpfs hdfs juicefs lizardfs lustre mfs moosefs mount-s3 mountpoint-s3 ncpfs nfs nfs4
objectivefs ocfs2 orangefs ossfs panfs pvfs2 quobyte rclone s3fs seaweedfs smb3 smbfs smbnetfs sshfs vastfs weed
wekafs yrfs
"""
# Filesystems through which containers and virtual machines see folders of their host, which may lie anywhere.
_OF_THE_HOST = ("9p", "virtiofs")
# Blocks of a disk of this machine, though a process serves them.
_LOCAL_FUSE = "fuseblk"


def filesystem_kind(path: str | os.PathLike[str], proc: Path = PROC) -> str:
    """Returns the kind of filesystem that holds `path`, as mount(8) names it ("ext4", "fuse.sshfs"); "" if unknown."""
    place = os.path.realpath(path)
    try:
        device = os.stat(place).st_dev
        lines = (proc / "self" / "mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    mounts: list[tuple[int, str, str]] = []  # device number, mount point, kind
    for line in lines:
        before, separator, filesystem = line.partition(" - ")
        fields = before.split(" ")
        if separator and len(fields) > 5 and re.fullmatch(r"\d+:\d+", fields[2]):
            # mountinfo has space, tab, newline and backslash as octal numbers.
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            mounts.append((os.makedev(*map(int, fields[2].split(":"))), point, filesystem.split(" ")[0]))
    # All mounts of one device are of one kind. But files of btrfs and overlayfs show devices that no mount has: then
    # the path decides.
    ours = [(point, kind) for number, point, kind in mounts if number == device] or [mount[1:] for mount in mounts]
    around = [(point, kind) for point, kind in ours if Path(place).is_relative_to(point)] or ours
    # If mounts lie over each other, the last one counts.
    return max(reversed(around), key=lambda mount: len(mount[0]))[1] if around else ""


def is_network(kind: str) -> bool:
    """Returns whether reads may fail because this kind of filesystem may keep its bytes on another machine."""
    return kind in (*_SHARED.split(), *_OF_THE_HOST) or (kind.startswith("fuse") and kind != _LOCAL_FUSE)


def is_shared(kind: str) -> bool:
    """Returns whether this kind of filesystem is known to share files between machines."""
    return kind.removeprefix("fuse.") in _SHARED.split()


def public_name(host: str, interface: str = "") -> str:
    """Returns `host`, but an IPv4 address of this machine if `host` is a name that means a loopback address here.

    The address is that of the network interface `interface`; with "", of the only interface that has an address. If
    there is none or several, or if `host` is "localhost" or does not resolve, the result is `host`.
    """
    if re.fullmatch("localhost|[0-9.]+|.*:.*", host) or not ipaddress.ip_address(own_address(host, "::")).is_loopback:
        return host
    found = list[str]()
    for name in [interface] if interface else [name for _, name in socket.if_nameindex() if name != "lo"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            found.append(socket.inet_ntoa(answer[20:24]))
    return found[0] if len(found) == 1 else host


def own_address(host: str, otherwise: str = "127.0.0.1") -> str:
    """Returns this machine's address on its way to `host`; `otherwise` if there is none. Sends nothing to `host`."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(address)
                return str(probe.getsockname()[0]).partition("%")[0]
    return otherwise
