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
from shardio.cache.partial_set import PartialSet, StagedReader, fetch
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
from shardio.reading.reader import BatchMemory, ReadCounts, Reader, Request, WrappingReader
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


class _StagedSplit:
    """The split `split` of the set in `storage`, and the set's copy under `lease`, which threads complete. The threads
    stop when `owner`, a CachedSplit, is freed: this object holds no reference to `owner`."""

    def __init__(self, owner: CachedSplit, storage: Storage, manifest: Manifest, split: str, lease: Lease) -> None:
        self.storage, self.manifest, self.split, self.lease = storage, manifest, split, lease
        self.filler: CopyFiller | None = None
        """The filler of the thread that was started last."""
        self.threads: list[DaemonThread] = []
        self._unverified = [None]
        """One item until the copy is verified: the thread that takes the item starts the verification."""
        self.stopped = Flag(owner)

    def open_copy(self) -> ShardSet:
        """Opens the complete copy. Raises FormatError if a file is missing or fails the checks of opening."""
        shards = open_shards(self.lease.path, self.split, digest=self.lease.digest, mapped=False)
        for entry in shards.content.files:
            if not self.lease.has(entry):
                raise missing_file(shards.path_of(entry))
        return shards

    def open_partial(self) -> PartialSet:
        return PartialSet(self.storage, self.manifest, self.split, self.lease)

    def begin(
        self, order: Sequence[ShardEntry] = (), *, verify: bool = False, meeting: Meeting | None = None
    ) -> DaemonThread:
        """Starts a thread that completes the copy, and returns it. The parameters are those of CopyFiller."""
        self.filler = filler = CopyFiller(
            self.storage,
            self.manifest,
            self.lease,
            order=order,
            verify=verify,
            stop=self.stopped,
            has_readers=True,
            meeting=meeting,
            on_message=_warn,
        )
        thread = DaemonThread(partial(self._run, filler), "shardio-stage")
        self.threads.append(thread)
        thread.begin()
        return thread

    def verify_once(self) -> None:
        """Starts a thread that verifies the copy and replaces damaged files, unless one was started. Thread safe."""
        if not self.threads and not self.stopped.is_set():
            with contextlib.suppress(IndexError):
                self._unverified.pop()
                self.begin(verify=True)

    def _run(self, filler: CopyFiller) -> None:
        """Runs `filler`. An error becomes a warning, as training can continue without the copy."""
        try:
            filler.state = "complete" if filler.run() else "stopped"
        except Exception as error:
            filler.state = "stopped" if self.stopped.is_set() else f"failed: {error}"
            if filler.state != "stopped":
                _warn(f"training continues, reading {self.storage.name} without a copy: {error}")
        finally:
            if self.stopped.is_set():
                self.lease.close()

    def stop(self) -> None:
        self.stopped.set()
        self.storage.close()

    def close(self) -> None:
        """Stops copying, waits for the threads, and ends the lease. May be called again, even after an interruption.

        Does not wait for a thread that has been waiting for the storage for a second. Does not wait at all if a
        finalizer calls this in a copying thread. Then the lease ends when the threads that are left stop.
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
                    self.lease.close()


class CopyReader(WrappingReader):
    """Reads a split from its copy or, while the copy is incomplete, from copy and storage. Chooses a reader again when
    an epoch begins, and when a file of the copy is damaged or gone. The arguments are those of `make_reader`."""

    def __init__(
        self, staged: _StagedSplit, shards: ShardSet, io: Io, num_samples: int, tables: Sequence[str], reserved: int
    ) -> None:
        self._staged = staged
        self._io: Io = io
        self._make = partial(make_reader, io=io, num_samples=num_samples, tables=tables, reserved_nbytes=reserved)
        super().__init__(self._open(shards))
        self._former: list[Reader] = []
        self._lock = threading.Lock()

    def _open(self, shards: ShardSet) -> Reader:
        if isinstance(shards, PartialSet):
            lease, index = self._staged.lease, shards.content.index
            if self._io == "direct" and lease.has(index) and direct_alignment(lease.path / index.file) is None:
                where = f'{lease.path}: this filesystem lacks O_DIRECT, which io="direct" needs'
                raise ValueError(f'{where}: use "auto", "mmap" or "pread"')
            reader: Reader = StagedReader(shards, ())
            self.reason = (
                f"the copy in {lease.path} was not complete, or not readable, when reading began: missing shards are "
                f"read from {shards.storage.name}; an epoch that finds it complete reads it as io={self._io!r} says"
            )
        else:
            reader, self.reason = self._make(shards)
        self._shards = shards
        return reader

    def _reopen(self) -> Reader | None:
        """Returns a new reader for the copy as it is now; None to keep the present reader."""
        staged, shards = self._staged, self._shards
        changed = shards.changed_files()
        for entry in changed:  # it was removed, or replaced by a sound file, or written to
            with contextlib.suppress(OSError):
                try:
                    SplitLayout.open_file(shards, entry).close()
                except FormatError:
                    take_names(staged.lease.path.parent, os.lstat(staged.lease.path / entry.file), _warn)
        if (changed or isinstance(shards, PartialSet)) and staged.lease.is_complete():
            # A file may be copied again. Whatever else is wrong, the set can still be read as before.
            with contextlib.suppress(FormatError, OSError):
                return self._open(staged.open_copy())
        if not changed or not staged.lease.path.exists():
            return None
        staged.begin()
        return self._open(staged.open_partial())

    def _change(self, reader: Reader) -> None:
        """Replaces `reader` if it no longer suits the copy, unless another thread has replaced it already."""
        with self._lock:
            if self._reader is reader and (reopened := self._reopen()) is not None:
                self._former.append(reader)  # which may be reading
                self._reader = reopened

    def _try(self, read: Callable[[Reader], None]) -> None:
        reader = self._reader
        try:
            read(reader)
        except FormatError:
            self._change(reader)
            if self._reader is reader:
                raise
            read(self._reader)

    @property
    def whole_lines(self) -> int:
        return self._reader.whole_lines

    @property
    def min_part_nbytes(self) -> int:  # type: ignore[override]
        return self._reader.min_part_nbytes

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        self._try(lambda reader: reader.copy(name, indices, out, lines))

    def read_samples(
        self, request: Request, memory: BatchMemory, numbers: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> None:
        self._try(lambda reader: reader.read_samples(request, memory, numbers, indices))

    def begin_epoch(self) -> bool:
        self._change(self._reader)
        return super().begin_epoch()

    def counts(self) -> ReadCounts:
        readers = self._reader, *self._former
        return ReadCounts(*map(sum, zip(*(reader.counts() for reader in readers), strict=True)))


class StorageReader(Reader):
    """Reads samples whose rows in the copy are damaged, from the storage.

    If the storage has the right crc32, a thread verifies the whole copy, once, and copies damaged files again.
    """

    name = "storage"

    def __init__(self, shards: ShardSet, staged: _StagedSplit) -> None:
        super().__init__(shards.halved)
        self._shards = shards
        self._staged = staged

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        shards, rows = self._shards, as_rows(out)
        lines = np.arange(len(indices)) if lines is None else lines
        for index, line in zip(indices.tolist(), lines.tolist(), strict=True):
            fetch(self._staged.storage, shards.table_of(name).what(index), *shards.locate_one(name, index), rows[line])
        self._count(len(indices) * rows.shape[1])
        if shards.copy_crc32s(name, indices).tolist() == [crc32(rows[line]) for line in lines.tolist()]:
            self._staged.verify_once()


class CachedSplit(Finalized, SplitSource):
    """A split of the set `place` (a folder or URL), read through the cache in the folder `cache`.

    Holds a lease on the set's copy until `close`, or until the object is garbage collected. With a `meeting`, its nodes
    make their copies together. `digest` is the digest that the set must have, or its first 12 digits or more.

    Raises the errors of `take_lease`; SetNotFoundError if the set has no such split; LaunchError if the ranks of the
    meeting do not all ask for the same split.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        cache: str | os.PathLike[str],
        split: str,
        digest: str | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        storage = open_storage(place)
        close_at_exit(self)
        try:
            lease, manifest = take_lease(storage, Cache(cache), digest)
        except BaseException:
            storage.close()
            raise
        self._staged = _StagedSplit(self, storage, manifest, split, lease)
        try:
            check_split(storage.name, manifest, split)
            self._meeting, self._split = meeting, manifest.splits[split]
            self.num_samples, self.digest = self._split.num_samples, manifest.digest
            if meeting is not None:
                meeting.agree({"set": storage.name, "split": split, "digest": manifest.digest})
        except BaseException:
            self.close()
            raise

    def open(self, batches: Iterable[NDArray[np.int64]] = ()) -> ShardSet:
        """Returns the split, once its index is copied. A thread copies the shards. Without a meeting, it begins with
        the shards that `batches`, the sample numbers of each of the first batches, need first."""
        staged, lease, meeting = self._staged, self._staged.lease, self._meeting
        # All nodes copy in one order, and a node that has everything passes it on.
        order = _by_need(self._split, batches) if meeting is None else ()
        if lease.is_complete():
            with contextlib.suppress(FormatError, PermissionError):  # a file is missing, truncated or another user's
                self._shards = staged.open_copy()
                if meeting is not None:
                    staged.begin(meeting=meeting)
                return self._shards
            lease.check_own(lease.path)
            staged.storage.load_manifest(self.digest)  # or the source could be another set
        thread = staged.begin(order, meeting=meeting)
        while not lease.has(self._split.index) and thread.is_alive():
            time.sleep(_POLL_SECONDS)
        self._shards = staged.open_partial()
        return self._shards

    def make_reader(self, io: Io, num_samples: int, tables: Sequence[str] = ("",), reserved_nbytes: int = 0) -> Reader:
        self._reader = CopyReader(self._staged, self._shards, io, num_samples, tables, reserved_nbytes)
        return self._reader

    def make_second(self) -> StorageReader:
        return StorageReader(self._shards, self._staged)

    def describe(self) -> dict[str, Any]:
        num_away = self._shards.look() if isinstance(self._shards, PartialSet) else 0
        count = sum(len(self._shards.table_of(name).files) for name in self._shards.main_tables)
        state = self._staged.filler.state if self._staged.filler else "complete"
        staging = {"state": state, "path": str(self._staged.lease.path), "shards": count}
        return {"io_reason": self._reader.reason, "staging": {**staging, "shards_here": count - num_away}}

    def stop(self) -> None:
        self._staged.stop()

    def close(self) -> None:
        if hasattr(self, "_staged"):  # else its making was interrupted
            self._staged.close()

    finalize = close


def _by_need(split: SplitEntry, batches: Iterable[NDArray[np.int64]]) -> list[ShardEntry]:
    """Returns the shards of the samples in `batches`, arrays of sample numbers, in the order of their first use. Takes
    a sample's number for its stored row, which is only a guess if the split has an order file."""
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
    """Warns that `threads`, if any, still wait for the storage of the set `place`, which does not answer. With
    `opens_files`, the warning names the files that they read."""
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
    returns, if any. Without `cache`, the source reads the set where it is. It does so too, with a warning, if the
    system refuses to make or lock the cache, unless there is a Meeting or the set is at a URL.
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
