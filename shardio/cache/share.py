"""Files that several copies of a cache have: one file with several names (hard links), which takes its room once.

Files of a set never change, and a damaged one is replaced by another file. So what one copy has, others may have too:
nothing that is done to one of them is seen in another, and the last name that is removed frees the room.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from shardio.cache.leases import CopyPaths
from shardio.errors import CacheError, FormatError
from shardio.format.entries import FileEntry
from shardio.format.layout import MANIFEST_NAME, SampleShape
from shardio.format.manifest_file import read_manifest
from shardio.format.opening import open_sound
from shardio.format.parse import is_digest
from shardio.system.files import fsync_folder
from shardio.system.opening import FileAt, FolderHandle, at

_Inode = tuple[int, int]


class Sizes:
    """The room that files of copies take, each file once: as it was when this was made."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._names: dict[str, Counter[_Inode]] = {}
        """For each copy, how many names a file has there."""
        self._nbytes: dict[_Inode, int] = {}
        self._num_names: dict[_Inode, int] = {}
        for digest, folder in folders.items():
            names = self._names[digest] = Counter[_Inode]()
            for status in _files(folder):
                inode = status.st_dev, status.st_ino
                names[inode] += 1
                self._nbytes[inode], self._num_names[inode] = status.st_size, status.st_nlink

    def shared(self, digests: Iterable[str]) -> int:
        """Returns by how much these copies have less together than each by itself."""
        return sum((count - 1) * self._nbytes[inode] for inode, count in self._count(digests).items())

    def nbytes(self, digest: str) -> int:
        """Returns the size of all files of a copy, by each of their names there."""
        return sum(count * self._nbytes[inode] for inode, count in self._names[digest].items())

    def freed(self, digests: Iterable[str]) -> int:
        """Returns the size of the files that are gone when these copies are: none has a name anywhere else."""
        names = self._count(digests)
        return sum(self._nbytes[inode] for inode, count in names.items() if count >= self._num_names[inode])

    def _count(self, digests: Iterable[str]) -> Counter[_Inode]:
        total = Counter[_Inode]()
        for digest in digests:
            total.update(self._names[digest])
        return total


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Yields what lstat says of each file in a copy that this user may see."""
    with contextlib.suppress(PermissionError, FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a temporary file that has got its name
                yield entry.stat(follow_symlinks=False)


def link_from_others(folder: FolderHandle, entries: Sequence[FileEntry], sample_shape: SampleShape) -> list[FileEntry]:
    """Gives the copy in `folder` those of the files that another complete copy in the cache has. Returns them.

    The caller has the right to fill the copy. Only copies and files of the same user are looked at: another user might
    write to his. Each file is checked as an opening does. Nothing is done if the filesystem has no hard links.
    """
    wanted = {(entry.sha256, entry.nbytes) for entry in entries}
    linked: list[FileEntry] = []
    cache, digest = folder.path.parent, folder.path.name
    with os.scandir(cache) as others:
        names = sorted(other.name for other in others if is_digest(other.name) and other.name != digest)
    for name in names:
        left = [entry for entry in entries if entry not in linked]
        if not left:
            break
        # What cannot be had from here is copied from the source: another copy is evicted, or damaged, or of a set of
        # other shapes, or the filesystem takes no more links.
        with (
            contextlib.suppress(OSError, FormatError, CacheError),
            CopyPaths(cache, name).kept() as kept,
            FolderHandle(cache / name) as other,
        ):
            if kept and os.fstat(other.fileno()).st_uid == os.geteuid():
                manifest = read_manifest(other / MANIFEST_NAME, name)
                have = {(entry.sha256, entry.nbytes): entry for entry in manifest.files}
                if wanted.isdisjoint(have):
                    continue
                for entry in left:
                    there = have.get((entry.sha256, entry.nbytes))
                    if there is not None and _link(other / there.file, folder / entry.file, entry, sample_shape):
                        linked.append(entry)
    if linked:
        fsync_folder(folder)
    return linked


def _link(source: FileAt, target: FileAt, entry: FileEntry, sample_shape: SampleShape) -> bool:
    """Gives a file a second name. Returns False if it is not what the entry says, or the system refuses."""
    try:
        with open_sound(source, entry, sample_shape) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                return False
            # Not in the place of a damaged file, which other processes may be about to open: a copy is renamed there.
            (old, there), (new, here) = at(source), at(target)
            os.link(old, new, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
            found = os.lstat(new, dir_fd=here)
            if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                return True
            os.unlink(new, dir_fd=here)  # another file has taken the name since
    except (OSError, FormatError):
        pass
    return False
