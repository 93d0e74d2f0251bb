"""Tells which kind of filesystem holds a path, and whether its bytes lie on another machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardio.system.machine import PROC

# Filesystems by which machines share folders. Those of FUSE are mounted as "fuse.NAME".
_SHARED = """
afs alluxio-fuse beegfs blobfuse blobfuse2 ceph ceph-fuse cifs coda curvefs cvmfs davfs davfs2 dfuse dvs gcsfuse
geesefs gfs gfs2 glusterfs goofys gpfs hdfs juicefs lizardfs lustre mfs moosefs mount-s3 mountpoint-s3 ncpfs nfs nfs4
objectivefs ocfs2 orangefs ossfs panfs pvfs2 quobyte rclone s3fs seaweedfs smb3 smbfs smbnetfs sshfs vastfs weed
wekafs yrfs
"""
# Filesystems by which containers and virtual machines get folders of their host, which may lie anywhere.
_OF_THE_HOST = ("9p", "virtiofs")
# Blocks of a disk of this machine, though a process serves them.
_LOCAL_FUSE = "fuseblk"


def filesystem_kind(path: str | os.PathLike[str], proc: Path = PROC) -> str:
    """Returns the kind of filesystem that holds `path`, as mount(8) names it: "ext4", "nfs4", "fuse.sshfs". "" if
    unknown."""
    place = os.path.realpath(path)
    try:
        device = os.stat(place).st_dev
        mounts = list(_mounts((proc / "self" / "mountinfo").read_text(errors="surrogateescape")))
    except OSError:
        return ""
    # All mounts of one device are of one kind. But files of btrfs and overlayfs show devices that no mount has: then
    # the path tells.
    ours = [mount for mount in mounts if mount.device == device] or mounts
    around = [mount for mount in ours if Path(place).is_relative_to(mount.point)] or ours
    # Where mounts lie over each other, the last one counts.
    return max(reversed(around), key=lambda mount: len(mount.point)).kind if around else ""


def is_network(kind: str) -> bool:
    """Returns whether a filesystem of this kind may keep its bytes elsewhere, so that a read can fail."""
    return kind in (*_SHARED.split(), *_OF_THE_HOST) or (kind.startswith("fuse") and kind != _LOCAL_FUSE)


def is_shared(kind: str) -> bool:
    """Returns whether other machines are known to see the same files through a filesystem of this kind."""
    return kind.removeprefix("fuse.") in _SHARED.split()


class _Mount(NamedTuple):
    device: int
    point: str
    kind: str


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        place, separator, filesystem = line.partition(" - ")
        fields = place.split(" ")
        if not separator or len(fields) < 6 or not re.fullmatch(r"\d+:\d+", fields[2]):
            continue
        major, minor = map(int, fields[2].split(":"))
        # mountinfo has space, tab, newline and backslash as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        yield _Mount(os.makedev(major, minor), point, filesystem.split(" ")[0])
