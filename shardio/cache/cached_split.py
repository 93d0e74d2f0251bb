"""A split of a set, read through a cache: usable at once, and faster once the copy is complete.

    storage -> filler (a thread of one process per node) -> copy -> PartialSet -> CopyReader -> gather threads

Training does not wait for the copy: samples whose shards are not copied yet are read from the storage. Once the copy is
complete, the next epoch reads it like any other set on the node's own disk, until a file is found damaged.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.cache.filler import CopyFiller, take_names
from shardio.cache.folder import Cache
from shardio.cache.leases import Lease
from shardio.cache.meeting import Meeting
from shardio.cache.partial_set import CopyReader, PartialSet, StagedReader, fetch
from shardio.cache.stage import take_lease
from shardio.errors import FormatError, ShardioError, first_of, printable
from shardio.format.entries import ShardEntry, SplitEntry
from shardio.format.layout import crc32
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_split
from shardio.kernels.finalized import Finalized
from shardio.kernels.rowcopy import Places
from shardio.reading.choose import Io, SplitSource, make_reader
from shardio.reading.layout import SplitLayout, as_rows
from shardio.reading.reader import Reader
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.names import is_url, resolve
from shardio.sets.storage import Storage, open_storage
from shardio.system.opening import last_asked, missing_file
from shardio.system.pour import direct_alignment
from shardio.system.threads import DaemonThread, Flag, close_at_exit, wait_while_running

# The index comes first, and opening waits for it.
_POLL_SECONDS = 0.02
# The batches by which shards are sorted. With a global shuffle the first few need all shards.
_MOST_BATCHES = 1000


class _BackgroundFill:
    """Copies a set in a thread, which has no reference to `owner`, a CachedSplit, and stops when `owner` is freed."""

    def __init__(self, owner: CachedSplit, storage: Storage) -> None:
        self.storage = storage
        self.threads: list[DaemonThread] = []
        self.manifest: Manifest
        self.lease: Lease | None = None
        self.state = "complete"
        """The progress of the copy, in words."""
        self.io_reason = ""
        """Why this kind of reader was chosen, as text for users."""
        self.stopped = Flag(owner)

    def begin(
        self, order: Sequence[ShardEntry] = (), *, verify: bool = False, meeting: Meeting | None = None
    ) -> DaemonThread:
        self._tell_filling()
        assert self.lease is not None
        filler = CopyFiller(
            self.storage,
            self.manifest,
            self.lease,
            order=order,
            verify=verify,
            stop=self.stopped,
            on_wait=self._tell_waiting,
            on_fill=self._tell_filling,
            meeting=meeting,
            on_message=_warn,
        )
        thread = DaemonThread(partial(self._run, filler), "shardio-stage")
        self.threads.append(thread)
        thread.begin()
        return thread

    def _tell_filling(self) -> None:
        self.state = f"copying from {self.storage.name}"

    def _tell_waiting(self, process: int | None) -> None:
        self.state = "another process is copying" if process is None else f"process {process} is copying"

    def _run(self, filler: CopyFiller) -> None:
        """Runs `filler`. An error becomes a warning, as training can continue without the copy."""
        try:
            self.state = "complete" if filler.run() else "stopped"
        except Exception as error:
            self.state = "stopped" if self.stopped.is_set() else f"failed: {error}"
            if self.state != "stopped":
                _warn(f"training continues, reading {self.storage.name} without a copy: {error}")
        finally:
            if self.stopped.is_set():
                self._end_lease()

    def stop(self) -> None:
        self.stopped.set()
        self.storage.close()

    def close(self) -> None:
        """Stops copying, waits for the thread, and ends the lease. May be called again, even after an interruption.
        If the storage does not answer for a second, the thread is left, and ends the lease when it does.

        If a finalizer calls this in the copying thread, it does not wait: the thread ends the lease when it stops.
        """
        self.stop()
        copies = threading.current_thread().name.startswith("shardio-stage")
        if not (copies and any(thread.is_alive() for thread in self.threads)):
            try:
                if left := wait_while_running(self.threads):
                    place = os.path.abspath(self.storage.name)
                    helpers = [each for each in threading.enumerate() if last_asked(each.ident).startswith(place)]
                    warn_of_silence(self.storage.name, [*left, *helpers])
            finally:
                if not any(thread.is_alive() for thread in self.threads):  # else the thread does it
                    self._end_lease()

    def _end_lease(self) -> None:
        if self.lease is not None:
            self.lease.close()


class StorageReader(Reader):
    """Reads samples whose rows in the copy are damaged, from the storage.

    Calls `on_damaged_copy` after each `copy` whose samples all have the right crc32 in the storage.
    """

    name = "storage"

    def __init__(self, shards: ShardSet, storage: Storage, on_damaged_copy: Callable[[], None]) -> None:
        super().__init__(shards.halved)
        self._shards = shards
        self._storage = storage
        self._on_damaged_copy = on_damaged_copy

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        shards, rows = self._shards, as_rows(out)
        lines = np.arange(len(indices)) if lines is None else lines
        for index, line in zip(indices.tolist(), lines.tolist(), strict=True):
            fetch(self._storage, shards.table_of(name).what(index), *shards.locate_one(name, index), rows[line])
        self._count(len(indices) * rows.shape[1])
        if shards.copy_crc32s(name, indices).tolist() == [crc32(rows[line]) for line in lines.tolist()]:
            self._on_damaged_copy()


class CachedSplit(Finalized, SplitSource):
    """A split of the set `place` (a folder or URL), read through the cache in the folder `cache`.

    Holds a lease on the set's copy until `close`, or until the object is garbage collected. With a `meeting`, its nodes
    make their copies together.

    `digest` pins the set. Raises the errors of `take_lease`; SetNotFoundError if the set has no such split; LaunchError
    if the ranks of the meeting do not all ask for the same split.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        cache: str | os.PathLike[str],
        split: str,
        digest: str | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        self._name = split
        self._meeting = meeting
        self._storage = open_storage(place)
        self._fill = _BackgroundFill(self, self._storage)
        close_at_exit(self)
        try:
            self._fill.lease, self._manifest = take_lease(self._storage, Cache(cache), digest)
            self._lease, self._fill.manifest = self._fill.lease, self._manifest
            check_split(self._storage.name, self._manifest, split)
            self._split = self._manifest.splits[split]
            self.num_samples, self.digest = self._split.num_samples, self._manifest.digest
            if meeting is not None:
                wanted = {"set": self._storage.name, "split": split, "digest": self._manifest.digest}
                meeting.agree(wanted)
        except BaseException:
            self.close()
            raise

    def open(self, batches: Iterable[NDArray[np.int64]] = ()) -> ShardSet:
        """Waits until the index is copied. A thread copies the shards: in the order in which `batches` need them."""
        # All nodes copy in one order, and a node that has everything passes it on.
        order = _by_need(self._split, batches) if self._meeting is None else ()
        if self._lease.is_complete():
            with contextlib.suppress(FormatError, PermissionError):  # a file is missing, truncated or another user's
                self._shards = _open_copy(self._lease, self._name)
                if self._meeting is not None:
                    self._fill.begin(meeting=self._meeting)
                return self._shards
            self._lease.check_own(self._lease.path)
            self._storage.load_manifest(self.digest)  # or the source could be another set
        thread = self._fill.begin(order, meeting=self._meeting)
        while not self._lease.has(self._split.index) and thread.is_alive():
            time.sleep(_POLL_SECONDS)
        self._shards = PartialSet(self._storage, self._manifest, self._name, self._lease)
        return self._shards

    def make_reader(self, io: Io, num_samples: int, tables: Sequence[str] = ("",), reserved_nbytes: int = 0) -> Reader:
        # `settle` outlives this: neither it nor what it calls may refer to self.
        staging, lease, name, index = self._fill, self._lease, self._name, self._split.index
        storage, manifest, opened = self._storage, self._manifest, [self._shards]

        def make(shards: ShardSet) -> Reader:
            if isinstance(shards, PartialSet):
                if io == "direct" and lease.has(index) and direct_alignment(lease.path / index.file) is None:
                    where = f'{lease.path}: this filesystem lacks O_DIRECT, which io="direct" needs'
                    raise ValueError(f'{where}: use "auto", "mmap" or "pread"')
                reader: Reader = StagedReader(shards, ())
                staging.io_reason = (
                    f"the copy in {lease.path} was not complete, or not readable, when reading began: missing shards "
                    f"are read from {storage.name}; an epoch that finds it complete reads it as io={io!r} says"
                )
            else:
                reader, staging.io_reason = make_reader(shards, io, num_samples, tables, reserved_nbytes)
            opened[0] = shards
            return reader

        def settle() -> Reader | None:
            changed = opened[0].changed_files()
            for entry in changed:  # it was removed, or replaced by a sound file, or written to
                with contextlib.suppress(OSError):
                    try:
                        SplitLayout.open_file(opened[0], entry).close()
                    except FormatError:
                        take_names(lease.path.parent, os.lstat(lease.path / entry.file), _warn)
            if (changed or isinstance(opened[0], PartialSet)) and lease.is_complete():
                # A file may be copied again. Whatever else is wrong, the set can still be read as before.
                with contextlib.suppress(FormatError, OSError):
                    return make(_open_copy(lease, name))
            if not changed or not lease.path.exists():
                return None
            staging.begin()
            return make(PartialSet(storage, manifest, name, lease))

        return CopyReader(make(self._shards), settle)

    def make_second(self) -> StorageReader:
        """When the samples are intact in the storage, a thread verifies the whole copy, once, and mends it."""
        not_begun = [None]  # the gather thread that pops it begins

        def verify_copy() -> None:
            if not self._fill.threads and not self._fill.stopped.is_set():
                with contextlib.suppress(IndexError):
                    not_begun.pop()
                    self._fill.begin(verify=True)

        return StorageReader(self._shards, self._storage, verify_copy)

    def describe(self) -> dict[str, Any]:
        num_away = self._shards.look() if isinstance(self._shards, PartialSet) else 0
        count = sum(len(self._shards.table_of(name).files) for name in self._shards.main_tables)
        staging: dict[str, Any] = {"state": self._fill.state, "path": str(self._lease.path)}
        staging |= {"shards": count, "shards_here": count - num_away}
        return {"io_reason": self._fill.io_reason, "staging": staging}

    def stop(self) -> None:
        self._fill.stop()

    def close(self) -> None:
        if hasattr(self, "_fill"):  # else its making was interrupted
            self._fill.close()

    finalize = close


def _open_copy(lease: Lease, split: str) -> ShardSet:
    """Opens a complete copy. Raises FormatError if a file has lost its name, or fails the checks of `open_shards`."""
    shards = open_shards(lease.path, split, digest=lease.digest, mapped=False)
    for entry in shards.content.files:
        if not lease.has(entry):
            raise missing_file(shards.path_of(entry))
    return shards


def _by_need(split: SplitEntry, batches: Iterable[NDArray[np.int64]]) -> list[ShardEntry]:
    """Returns the shards that `batches` need, in that order: a guess if the split has an order file."""
    if not split.shards:
        return []
    starts = np.cumsum([0, *(shard.num_samples for shard in split.shards)])
    numbers: dict[int, None] = {}
    for batch in islice(batches, _MOST_BATCHES):
        # There may be more samples than stored rows.
        found = np.searchsorted(starts, np.minimum(batch, starts[-1] - 1), side="right") - 1
        numbers.update(dict.fromkeys(found.tolist()))
        if len(numbers) == len(split.shards):
            break
    return [split.shards[number] for number in numbers]


def warn_of_silence(place: str, threads: Sequence[threading.Thread], *, opens_files: bool = True) -> None:
    """Warns that `threads`, if any, are left waiting for the storage of the set `place`. Names the files they read."""
    if threads:
        names = sorted({last_asked(thread.ident) for thread in threads} - {""}) if opens_files else []
        files = f" ({first_of(names, 3)})" if names else ""
        _warn(f"{place}: no answer from the storage{files}: closed without waiting for it")


def _warn(text: str) -> None:
    with contextlib.suppress(RuntimeWarning):  # where warnings are errors
        warnings.warn(printable(text), RuntimeWarning, stacklevel=2)


def open_source(
    path: str | os.PathLike[str],
    split: str,
    cache: str | os.PathLike[str] | None,
    digest: str | None,
    meet: Callable[[], Meeting | None] = lambda: None,
) -> SplitSource:
    """Returns a source of the split of the set `path`, a folder or URL.

    With `cache`, a folder, the source is a CachedSplit, which copies together with the ranks of the Meeting that `meet`
    returns, if any. Otherwise the set is read where it is; also, with a warning, if the cache cannot be made or locked.
    """
    if cache is None:
        return SplitSource(path, split, digest)
    meeting = meet()
    try:
        return CachedSplit(path, cache, split, digest, meeting)
    except OSError as error:
        # The other ranks wait for this one, and a set at a URL is only read through a cache.
        if meeting is not None or is_url(resolve(path)) or isinstance(error, ShardioError):
            raise
        source = SplitSource(path, split, digest)  # if it was the set that cannot be read, this fails, too
        source.staging = {"state": f"failed: {error}", "path": str(cache)}
        _warn(f"training continues, reading {path} without a copy: {error}")
        return source
