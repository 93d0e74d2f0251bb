"""Completes a copy of a set: links files from other copies, fetches the rest, verifies all, and writes the manifest.

If the process with the right to fill the copy is killed, the next process continues with what was written. Copies share
equal files as hard links. Files of a set never change, and a damaged file is replaced by a new file. So a change to one
copy never affects another, and removing the last link frees the space. Damage is in all copies that share the file, so
a damaged file is removed from all of them, and the next filler of each copies it from the source.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TypeVar

from shardio.cache.folder import Cache, CachedCopy
from shardio.cache.leases import CopyPaths, Lease, open_in_cache
from shardio.cache.meeting import GroupBrokenError, Meeting
from shardio.cache.partial_copy import COMING, MISSING, THERE, PartialCopy, part_of, remove_parts
from shardio.cache.together import LeftBehindError, Together
from shardio.errors import CacheError, FormatError, SpaceError
from shardio.format.entries import FileEntry, TableEntry
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest, read_manifest
from shardio.format.opening import KnownFiles, open_checked, open_sound
from shardio.format.parse import is_digest
from shardio.sets.names import is_url
from shardio.sets.storage import FileCopier, Storage
from shardio.system.files import fsync_folder, lock_at_once, remove_temporaries, reserve, try_link
from shardio.system.opening import FolderHandle, naming, naming_owner
from shardio.system.threads import Flag, Stop, ThreadPool

R = TypeVar("R")

# A thread that waits for a lock cannot be told to stop, so the lock is tried again and again.
_POLL_SECONDS = 0.05
# The requests under way at a time for a file, and their bytes: short ones if samples are waited for.
_REQUESTS = 1, 8 << 20
_SHARED_REQUESTS = 4, 512 << 10
# How often nodes that copy together form a group again from which nobody is gone.
_MOST_REGROUPS = 2


@dataclass(eq=False)
class CopyFiller:
    """Completes the copy of the set in `storage`, in the folder of `lease`, when `run` is called.

    `workers` threads copy indexes, orders and checksums first, then the files in `order`, then the other files. The
    caller holds the lease until `run` has returned. Any thread may set `stop`: `run` then returns once the piece of 8
    MiB, or the sync, under way is done. With `has_readers`, samples are read meanwhile, and requests are short. The
    other parameters are as for `stage`; `meeting` is its `together`.
    """

    storage: Storage
    manifest: Manifest
    lease: Lease
    _: KW_ONLY
    order: Sequence[FileEntry] = ()
    workers: int = 4
    verify: bool = False
    stop: Flag = field(default_factory=Flag)
    has_readers: bool = False
    on_progress: Callable[[int, int], None] | None = None
    on_wait: Callable[[int | None], None] | None = None
    meeting: Meeting | None = None
    on_message: Callable[[str], object] = lambda text: None
    evicted: list[CachedCopy] = field(default_factory=list, init=False)
    """The copies that were evicted to make room."""
    copied: list[FileEntry] = field(default_factory=list, init=False)
    """The files that this filler has copied; whole and durable."""
    linked: list[FileEntry] = field(default_factory=list, init=False)
    """The files that were linked from other copies, and verified."""

    def __post_init__(self) -> None:
        tables = (entry for entry in self.manifest.files if isinstance(entry, TableEntry))
        self.files = tuple(dict.fromkeys((*tables, *self.order, *self.manifest.files)))
        """All files of the set except the manifest, in the order in which they are copied."""
        self._cache = Cache(self.lease.path.parent)
        self._copier = FileCopier(self.storage, self.workers, "shardio-stage", self.on_progress, stop=self.stop)
        if self.meeting is not None:
            self.meeting.stop = self.stop
        self.state = f"copying from {self.storage.name}"
        """What is happening to the copy, in words for people."""
        self._known: KnownFiles = {}
        self._links: dict[FileEntry, os.stat_result] = {}
        """The unfinished files that are links to another copy's files, with their lstat."""

    def run(self) -> bool:
        """Completes the copy. Returns True once it is complete, or False if `stop` was set before.

        Waits while another process fills the copy. Raises the errors of `stage`.
        """
        way_out = "ask the owner to run `shardio stage` again, or `chmod -R a+rX`; or use another cache"
        with naming_owner(self.lease.path, way_out), contextlib.ExitStack() as stack:
            stack.callback(self._decline)  # or the others would wait for this rank
            self._cache.sweep()
            source = self.storage.name if is_url(self.storage.name) else os.path.abspath(self.storage.name)
            waits = False
            while not self.stop.is_set():
                complete = not self.verify and self.lease.manifest() is not None and not self._missing(self.lease.path)
                if complete and self.meeting is None:
                    fsync_folder(self.lease.path)  # the filler may have been killed before
                    self.lease.share()
                    return True
                filling = self.lease.try_filling(source)
                if filling is not None:
                    with filling, self._with_room(self.files, lambda _: self.lease.open_folder()) as folder:
                        try:
                            return self._fill(folder)
                        finally:
                            # An empty folder of a copy that was not begun would keep other users from making it.
                            with contextlib.suppress(OSError):
                                folder.path.rmdir()
                if self.meeting is not None:  # another process of this node fills, or takes part
                    self._decline()
                    continue
                if not waits:
                    waits, process = True, self.lease.filler()
                    self.state = "another process is copying" if process is None else f"process {process} is copying"
                    if self.on_wait is not None:
                        self.on_wait(process)
                time.sleep(_POLL_SECONDS)
            return False

    def _decline(self) -> None:
        meeting, self.meeting = self.meeting, None
        if meeting is not None and not self.stop.is_set():
            with contextlib.suppress(GroupBrokenError):
                meeting.form(self.manifest.digest, fills=False)

    def _missing(self, folder: Path | FolderHandle) -> list[FileEntry]:
        """Returns the files that are missing in `folder`, or that fail the checks of `open_sound`."""
        missing = []
        for entry in self.files:
            try:
                open_sound(folder / entry.file, entry, self._known).close()
            except FormatError:
                missing.append(entry)
        return missing

    def _fill(self, folder: FolderHandle) -> bool:
        """Completes the copy in `folder`, an open handle, as other users may put another folder at its path. Returns
        False if `stop` ended this early."""
        self.state = f"copying from {self.storage.name}"
        remove_temporaries(folder)  # no other process writes here: they are left by a killed one
        was_empty = not os.listdir(folder.fileno())
        todo = self._missing(folder)
        if todo:
            self._links = link_from_others(folder, todo)
        if self.verify:
            todo += self._remove_damaged(folder, [entry for entry in self.files if entry not in todo])
        if self.stop.is_set():
            return False
        try:
            self.evicted += self._cache.make_room(self.lease.digest, self._needed(todo))
        except SpaceError:
            if was_empty:  # evicting a copy that has only links would free nothing
                remove_parts(folder)
            raise
        self._copier.total += sum(entry.nbytes for entry in todo)
        try:
            if todo or self.meeting is not None:
                self._with_room(todo, lambda left: self._copy(folder, left))
            if self.stop.is_set():
                return False
            remove_parts(folder)
            try:
                read_manifest(folder / MANIFEST_NAME, self.lease.digest)
            except FormatError:
                commit_manifest(folder, self.manifest)
            self.lease.share()  # while other users still wait for the right to fill
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._cache.no_room(self.lease.digest, self._needed(todo), error.strerror) from error
        if not folder.is_in_place():
            raise CacheError(
                f"{folder}: another process moved or replaced this folder while shardio was filling it: remove what "
                "is at this path now, or choose another cache"
            )
        return True

    def _remove_damaged(self, folder: FolderHandle, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Reads the files `entries` of the copy. Removes damaged files, also from copies that share them by hard links,
        and returns their entries."""
        self._copier.total += sum(entry.nbytes for entry in entries)
        for entry in (damaged := self._copier.find_damaged(folder, entries)):
            with contextlib.suppress(FileNotFoundError):  # a process that read the file has removed it
                take_names(self._cache.folder, (folder / entry.file).lstat(), self.on_message)
        return damaged

    def _copy(self, folder: FolderHandle, todo: Sequence[FileEntry]) -> None:
        partial = PartialCopy.begin(folder, self.manifest, [entry for entry in todo if entry not in self._links])
        self.lease.share()
        try:
            if self.meeting is not None:
                self._copy_together(folder, partial)
            left = [entry for entry in self.files if partial.has(entry)]
            self._copier.each(lambda entry: self._complete(partial, entry), left)
        finally:
            if not (partial.states == THERE).any():
                remove_parts(folder)

    def _complete(self, partial: PartialCopy, entry: FileEntry) -> None:
        """Fetches the missing blocks of an unfinished file, verifies it, and renames it to its own name."""
        if entry not in self._links:
            with partial.open(entry, os.O_RDWR) as file, naming(partial.path_of(entry)):
                reserve(file.fileno(), entry.nbytes)
        found, wrong = "", 0
        for _ in range(6):  # if it was exchanged at its source meanwhile
            self.storage.changed.discard(entry.file)
            self._fetch_missing(partial, entry)
            if self.stop.is_set():
                return
            is_link = entry in self._links
            if (found := self._finish(partial, entry)) == entry.sha256:
                return
            wrong += not is_link and entry.file not in self.storage.changed
            if wrong == 2:  # damage on the way does not happen again
                break
        raise self._copier.damaged(entry, found)

    def _finish(self, partial: PartialCopy, entry: FileEntry) -> str:
        """Returns the sha256 of an unfinished file. If it is right, renames the file to its own name."""
        found, link = "", self._links.pop(entry, None)
        try:
            found = partial.finish(entry)
        finally:
            if found == entry.sha256:
                (self.copied if link is None else self.linked).append(entry)
            else:
                self._copier.count(-entry.nbytes)
        if link is not None and found != entry.sha256:
            take_names(self._cache.folder, link, self.on_message)
        return found

    def _fetch_missing(self, partial: PartialCopy, entry: FileEntry) -> None:
        """Fetches a file's MISSING blocks, then the COMING blocks that other processes do not complete in time."""
        blocks = partial.blocks[entry]
        requests, nbytes = _SHARED_REQUESTS if self.has_readers else _REQUESTS
        step = max(1, nbytes // blocks.size)
        fetched = 0

        def fetch(block: int, waits: bool) -> None:
            nonlocal fetched
            span = blocks.start(block), blocks.start(block + step)
            if waits:
                partial.wait(entry, *span)
            for start, stop, state in partial.runs(entry, *span):
                if self._copier.ends():
                    raise Stop
                if state == MISSING or (waits and state == COMING):
                    partial.fetch(entry, start, stop, self.storage.read_into, partial.write)
                    self._copier.count(stop - start)
                    fetched += stop - start

        try:
            with ThreadPool(requests, "shardio-stage-part") as pool:
                for waits in (False, True):
                    for _ in pool.map(functools.partial(fetch, waits=waits), range(0, blocks.count, step)):
                        pass
        except BaseException:
            self._copier.count(-fetched)  # it may be begun again, and then counts what is there
            raise
        self._copier.count(entry.nbytes - fetched)

    def _copy_together(self, folder: FolderHandle, partial: PartialCopy) -> None:
        """Fetches files with the other nodes of the meeting, until all have all files or this node is left alone."""

        def finish(entry: FileEntry) -> bool:
            if partial.has(entry):
                return self._finish(partial, entry) == entry.sha256
            damaged = self._remove_damaged(folder, [entry])  # it was here before, and came wrong to another node
            for each in damaged:
                partial.make(each)
            return not damaged

        meeting, self.meeting = self.meeting, None
        assert meeting is not None
        tries = _MOST_REGROUPS
        try:
            members = meeting.form(self.manifest.digest, fills=True)
        except GroupBrokenError as error:
            if not self.stop.is_set():
                self.on_message(f"{error}: this node goes on alone")
            return
        while len(members) > 1 and not self.stop.is_set():
            try:
                group, count = meeting.connect(members), self._copier.count
                Together(group, self.storage, partial, folder, self.files, finish, count, self.on_message).run()
                break
            except GroupBrokenError as error:
                if self.stop.is_set():
                    break
                before, members = members, meeting.regroup(members) if tries else ()
                ranks = {member.rank for member in members} or {meeting.rank}
                tries -= len(members) == len(before)
                gone = ", ".join(str(member) for member in before if member.rank not in ranks)
                self.on_message(
                    f"{gone or 'a node'} no longer takes part ({error}): "
                    + (f"{len(ranks)} nodes go on together" if len(ranks) > 1 else "this node goes on alone")
                )
            except LeftBehindError:
                self.on_message("this node is much slower than the others, and goes on alone")
                break

    def _with_room(self, todo: Sequence[FileEntry], make: Callable[[Sequence[FileEntry]], R]) -> R:
        """Returns make(todo). If the disk is full, evicts copies and calls `make` for the unfinished rest of `todo`."""
        try:
            return make(todo)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # The disk takes no folder, or another process has taken the same free space.
            self.evicted += self._cache.make_room(self.lease.digest, self._needed(todo))
            return make(self._left(todo))

    def _left(self, todo: Sequence[FileEntry]) -> list[FileEntry]:
        return [entry for entry in todo if entry not in self.copied and entry not in self.linked]

    def _needed(self, todo: Sequence[FileEntry]) -> int:
        """Returns how many more bytes of disk it takes to complete the files `todo`."""
        left = [entry for entry in self._left(todo) if entry not in self._links]
        needed = sum(entry.nbytes for entry in left) + len(self.manifest.dumps())
        for entry in left:
            with contextlib.suppress(OSError):
                needed -= min(entry.nbytes, os.lstat(str(part_of(self.lease.path, entry))).st_blocks * 512)
        return needed


def take_names(cache: Path, status: os.stat_result, say: Callable[[str], object]) -> None:
    """Removes the damaged file with the lstat `status` from all copies in `cache`. Calls `say` with a sentence about
    each copy that had the file. Processes that have the file open still read it until their next epoch."""
    for path in cache.glob("*/[!.]*.npy"):
        with contextlib.suppress(OSError):  # another user's
            if is_digest(path.parent.name) and os.path.samestat(path.lstat(), status):
                path.unlink()
                fsync_folder(path.parent)
                say(f"{path}: is damaged: removed; `shardio stage` copies it from the source")


def link_from_others(folder: FolderHandle, entries: Sequence[FileEntry]) -> dict[FileEntry, os.stat_result]:
    """Hard links the files `entries` from other complete copies of the cache into the copy `folder`, where possible.

    A link has the hidden name of an unfinished file, as it is not verified yet. Returns the lstat of each linked file.

    Links only this user's files, from this user's copies: other users could change their own files later.
    """
    linked: dict[FileEntry, os.stat_result] = {}
    cache, digest = folder.path.parent, folder.path.name
    for name in sorted(name for name in os.listdir(cache) if is_digest(name) and name != digest):
        if len(linked) == len(entries):
            break
        # Whatever prevents this, the file is copied from the source: the other copy is evicted or damaged, its set has
        # other shapes, or the filesystem takes no more links.
        with (
            contextlib.suppress(OSError, FormatError, CacheError),
            open_in_cache(CopyPaths(cache, name).lock) as lock,
            FolderHandle(cache / name) as other,
        ):
            # Not a lease: this keeps the copy meanwhile, and is no use of it.
            is_kept = lock_at_once(lock.fileno(), fcntl.LOCK_SH) and os.fstat(lock.fileno()).st_nlink
            if is_kept and os.fstat(other.fileno()).st_uid == os.geteuid():
                manifest = read_manifest(other / MANIFEST_NAME, name)
                have = {(entry.sha256, entry.nbytes): other / entry.file for entry in manifest.files}
                for entry in entries:
                    source = have.get((entry.sha256, entry.nbytes))
                    if source is None or entry in linked:
                        continue
                    with contextlib.suppress(OSError, FormatError), open_checked(source, entry) as file:
                        status, target = os.fstat(file.fileno()), part_of(folder, entry)
                        if status.st_uid != os.geteuid():
                            continue
                        with contextlib.suppress(FileExistsError):
                            try_link(source, target)
                        # Else it was being fetched, or another file has taken the name since.
                        if os.path.samestat(target.lstat(), status):
                            linked[entry] = status
    return linked
