"""`stage`: a verified copy of a set in a cache, made once however many processes ask for it at the same time.

One of them has the right to fill the copy; the others wait for it, or read from the source meanwhile. The next one goes
on with the files that are there when the first is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from shardio.cache.folder import Cache, CachedCopy
from shardio.cache.leases import Lease
from shardio.cache.share import link_from_others
from shardio.errors import CacheError, FormatError, SpaceError
from shardio.format.entries import FileEntry
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest, read_manifest
from shardio.format.opening import SoundFiles, open_sound
from shardio.format.parse import is_digest
from shardio.sets.fill import Filler
from shardio.sets.local import hinting_at_order
from shardio.sets.storage import Storage, open_storage
from shardio.system.files import remove_temporaries
from shardio.system.opening import FileAt, FolderHandle
from shardio.system.threads import Flag

# A lock cannot be waited for so that another thread can end the waiting, so it is asked for again and again.
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class StageReport:
    path: str
    """The folder of the copy."""
    source: str
    digest: str
    num_files: int
    nbytes: int
    """The size of all files but the manifest."""
    num_copied: int
    """The files that this call has copied. The others were there, or another process has copied them meanwhile."""
    nbytes_copied: int
    evicted: tuple[str, ...]
    """The digests of copies that were removed to make room."""
    seconds: float
    num_linked: int = 0
    """The files that this call took over from other copies in the cache."""
    nbytes_linked: int = 0
    """Their size. They take no more room than before."""


def stage(
    src: str | os.PathLike[str],
    cache: str | os.PathLike[str],
    *,
    digest: str | None = None,
    workers: int = 4,
    verify: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_wait: Callable[[int | None], None] | None = None,
) -> StageReport:
    """Makes a verified copy of the set `src`, a folder or URL, in the folder `cache`, which is made if need be.

    A copy that is there is checked as `shardio verify --quick` does, and with `verify` read as a whole; damaged files
    are copied again. With `digest`, which pins the set, the source is not looked at if nothing is to be copied.
    `workers` files are copied at a time. A file that another complete copy has, by its sha256, is not copied: both
    copies have it then, and it is gone with the last of them. To make room, copies that are not in use are evicted,
    first those that were not used for longest. The copy is held until the call returns, and may be evicted after that:
    see `Cache.lease`.

    `on_progress` is called in the `workers` threads with (bytes since, bytes in all) where this call copies or
    verifies; `on_wait` once if another process copies, with its number or None if that is unknown.

    Raises SetNotFoundError, FormatError or OSError as the source is not there, damaged or not to be read; FormatError
    if it is another set than `digest` says; CacheError if the folder is something else than a cache; SpaceError if
    there is too little room. Files that were finished are kept, and the same call goes on with them.
    """
    start = time.perf_counter()
    storage = open_storage(src)
    with hinting_at_order(cache, "SRC, the set, comes first, and CACHE second"):
        lease, manifest = take_lease(storage, Cache(cache), digest)
    with contextlib.closing(storage), lease:
        stager = Stager(
            storage, manifest, lease, workers=workers, verify=verify, on_progress=on_progress, on_wait=on_wait
        )
        stager.run()
    return StageReport(
        path=str(lease.path),
        source=storage.name,
        digest=manifest.digest,
        num_files=len(stager.files),
        nbytes=manifest.nbytes,
        num_copied=len(stager.copied),
        nbytes_copied=sum(entry.nbytes for entry in stager.copied),
        evicted=tuple(copy.digest for copy in stager.evicted),
        seconds=time.perf_counter() - start,
        num_linked=len(stager.linked),
        nbytes_linked=sum(entry.nbytes for entry in stager.linked),
    )


def take_lease(storage: Storage, cache: Cache, digest: str | None = None) -> tuple[Lease, Manifest]:
    """Returns a lease on the copy of the set in `storage`, which need not be there yet, and the set's manifest.

    `digest` is what `check_digest` takes. If it is whole, and the copy complete, the storage is not looked at. Errors
    are those of `Storage.load_manifest` and `Cache.lease`.
    """
    if digest is None or not is_digest(digest):
        manifest = storage.load_manifest(digest)
        return cache.lease(manifest.digest), manifest
    lease = cache.lease(digest)
    try:
        return lease, lease.manifest() or storage.load_manifest(digest)
    except BaseException:
        lease.close()
        raise


class Stager:
    """Makes the copy that `lease` is for from `storage`: in `run`, by `workers` threads.

    The lease remains the caller's, and must be held until `run` has returned. Files in `order` are copied first, as
    they come there, behind the indexes; all others after them. A process that reads from the source meanwhile sees by
    `lease.has` what is there already, whichever process has copied it.

    `stop` may be set by any thread: `run` then returns within the time that a piece of 8 MiB takes, or a sync that is
    under way. `on_progress` and `on_wait` are those of `stage`; `run` calls `on_fill` when this process has got the
    right to fill the copy, be it after another one that it has waited for.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        lease: Lease,
        *,
        order: Sequence[FileEntry] = (),
        workers: int = 4,
        verify: bool = False,
        stop: Flag | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_wait: Callable[[int | None], None] | None = None,
        on_fill: Callable[[], None] | None = None,
    ) -> None:
        self.files = _in_order(manifest, order)
        """All files of the set but the manifest, as they are copied."""
        self.evicted: list[CachedCopy] = []
        """The copies that had to make room."""
        self.linked: list[FileEntry] = []
        """The files that were taken over from other copies."""
        self._storage = storage
        self._manifest = manifest
        self._lease = lease
        self._cache = Cache(lease.path.parent)
        self._verify = verify
        self._stop = stop or Flag()
        self._filler = Filler(storage, workers, "shardio-stage", self._stop, self._progress)
        self._on_progress = on_progress
        self._on_wait = on_wait
        self._on_fill = on_fill
        self._total = 0
        self._sound: SoundFiles = {}

    @property
    def copied(self) -> list[FileEntry]:
        """The files that this one has copied; whole and durable."""
        return self._filler.copied

    def run(self) -> bool:
        """Returns True when the copy is complete, be it by this process or by another; False if `stop` was set before.

        Errors are those of `stage`.
        """
        self._cache.sweep()
        waiting = False
        while not self._stop.is_set():
            if not self._verify and self._lease.manifest() is not None and not self._missing(self._lease.path):
                return True
            filling = self._lease.try_filling(_absolute(self._storage.name))
            if filling is not None:
                with filling:
                    if self._on_fill is not None:
                        self._on_fill()
                    with self._open_folder() as folder:
                        return self._fill(folder)
            if not waiting and self._on_wait is not None:
                self._on_wait(self._lease.filler())
            waiting = True
            self._stop.wait(_POLL_SECONDS)
        return False

    def _missing(self, folder: Path | FolderHandle) -> list[FileEntry]:
        """Returns the files that opening would not take."""
        return [entry for entry in self.files if not self._is_there(folder / entry.file, entry)]

    def _is_there(self, path: Path | FileAt, entry: FileEntry) -> bool:
        try:
            open_sound(path, entry, self._manifest.sample_shape, self._sound).close()
        except FormatError:
            return False
        return True

    def _open_folder(self) -> FolderHandle:
        try:
            return self._lease.open_folder()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._make_room(self.files)  # the disk is so full that it takes no folder
            return self._lease.open_folder()

    def _fill(self, folder: FolderHandle) -> bool:
        """Does what `run` does, with the right to fill the copy.

        The folder is open: in a cache of several users its name may lead to another set at any moment.
        """
        try:
            return self._fill_open(folder)
        finally:
            # Nothing stays of a copy that was not begun: it would keep other users from making it.
            with contextlib.suppress(OSError):
                folder.path.rmdir()

    def _fill_open(self, folder: FolderHandle) -> bool:
        remove_temporaries(folder)  # no other process writes here: these are left of one that was killed
        was_empty = not os.listdir(folder.fileno())
        todo = self._link(folder, self._missing(folder))
        if self._verify:
            there = [entry for entry in self.files if entry not in todo]
            self._total += sum(entry.nbytes for entry in there)
            todo += self._filler.find_damaged(folder, there)
        if self._stop.is_set():
            return False
        try:
            self._make_room(todo)
        except SpaceError:
            if was_empty:
                self._unlink(folder)
            raise
        self._total += sum(entry.nbytes for entry in todo)
        try:
            self._copy(folder, todo)
            if self._stop.is_set():
                return False
            try:
                read_manifest(folder / MANIFEST_NAME, self._lease.digest)
            except FormatError:
                commit_manifest(folder, self._manifest)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._cache.no_room(self._lease.digest, self._needed(todo), error.strerror) from error
        if not folder.is_in_place():
            raise CacheError(
                f"{folder}: expected the folder that was filled, found that another process has put something else "
                "there: look whose it is and remove it, or choose another cache"
            )
        return True

    def _link(self, folder: FolderHandle, todo: list[FileEntry]) -> list[FileEntry]:
        """Takes over what other copies have. Returns the files that are still to be copied."""
        if todo:
            self.linked = link_from_others(folder, todo, self._manifest.sample_shape)
        return [entry for entry in todo if entry not in self.linked]

    def _unlink(self, folder: FolderHandle) -> None:
        """Leaves nothing of a copy that has no file but those that were taken over: they free nothing."""
        with contextlib.suppress(OSError):
            for entry in self.linked:
                os.unlink(entry.file, dir_fd=folder.fileno())
        self.linked = []

    def _copy(self, folder: FolderHandle, todo: Sequence[FileEntry]) -> None:
        try:
            self._filler.copy(folder, todo)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # Another process that found the same room has taken it: once more, with what can be evicted now.
            self._make_room(todo)
            self._filler.copy(folder, self._left(todo))

    def _left(self, todo: Sequence[FileEntry]) -> list[FileEntry]:
        return [entry for entry in todo if entry not in self.copied]

    def _needed(self, todo: Sequence[FileEntry]) -> int:
        return sum(entry.nbytes for entry in self._left(todo)) + len(self._manifest.dumps())

    def _make_room(self, todo: Sequence[FileEntry]) -> None:
        self.evicted += self._cache.make_room(self._lease.digest, self._needed(todo))

    def _progress(self, nbytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(nbytes, self._total)


def _absolute(name: str) -> str:
    """Returns the name of a storage for a process that works in another folder."""
    return name if "://" in name else os.path.abspath(name)


def _in_order(manifest: Manifest, order: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Returns the indexes and other tables, then what is wanted first, and the rest, each file once."""
    splits = manifest.splits.values()
    tables = chain.from_iterable(split.tables for split in splits)
    return tuple(
        dict.fromkeys((*tables, *order, *chain.from_iterable(split.files for split in splits), manifest.rejects))
    )
