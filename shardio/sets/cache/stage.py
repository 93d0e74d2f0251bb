"""`stage`: a verified copy of a set in a cache, made once however many processes ask for it at the same time.

One of them has the right to fill the copy; the others wait for it, or read from the source meanwhile. Files are hashed
while they are copied, and get their names only with the sha256 of the manifest. So the next one goes on with the files
that are there when the first is killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from shardio.errors import FormatError, SpaceError
from shardio.format.layout import shard_header
from shardio.format.manifest import FileEntry, Manifest, commit_manifest
from shardio.format.opening import open_checked, open_sized
from shardio.format.parse import is_digest
from shardio.sets.cache.folder import Cache, CachedCopy, Lease
from shardio.sets.local import hinting_at_order
from shardio.sets.storage import FolderStorage, Storage, open_storage
from shardio.system.files import AtomicFile, make_folder, naming, remove_temporaries, reserve, write_all
from shardio.system.threads import DaemonThread

# Long enough for the streaming rate of disks and servers, short enough to stop soon.
_PIECE_NBYTES = 8 << 20
# The kernel is told to write after so much of a file: what the final fsync has to wait for stays small.
_SYNC_NBYTES = 128 << 20
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
    """Of all files but the manifest."""
    num_copied: int
    """Files that this call has copied. The others were there, or another process has copied them meanwhile."""
    nbytes_copied: int
    evicted: tuple[str, ...]
    """The digests of copies that were removed to make room."""
    seconds: float


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
    """Have a verified copy of the set `src`, a folder or URL, in the folder `cache`, which is made if need be.

    A copy that is there is looked at as `shardio verify --quick` does, and with `verify` read as a whole; what is
    damaged is copied again. With `digest`, which pins the set, the source is not looked at if nothing is to be copied.
    `workers` files are copied at a time. To make room, copies that nobody uses are evicted, first those that were not
    used for longest. The copy is held until the call returns, and may be evicted after that: see `Cache.lease`.

    `on_progress` is called in the `workers` threads with (bytes since, bytes in all) where this call copies or
    verifies; `on_wait` once if another process copies, with its number or None if that is unknown.

    SetNotFoundError, FormatError or OSError as the source is not there, damaged or not to be read; FormatError if it
    is another set than `digest` says; CacheError if the folder is something else than a cache; SpaceError if there is
    too little room. Files that were finished are kept, and the same call goes on with them.
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
    )


def take_lease(storage: Storage, cache: Cache, digest: str | None = None) -> tuple[Lease, Manifest]:
    """A lease on the copy of the set in `storage`, which need not be there yet, and the set's manifest.

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
    they come there, behind the indexes; all others after them. Whoever reads from the source meanwhile sees by
    `lease.has` what is there already, whichever process has copied it.

    `stop` may be set by any thread: `run` then returns within the time that a piece of 8 MiB takes, or a sync that is
    under way. `on_progress` and `on_wait` are those of `stage`; `on_fill` is called by `run` when this process has got
    the right to fill the copy, be it after another one that it has waited for.
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
        stop: threading.Event | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_wait: Callable[[int | None], None] | None = None,
        on_fill: Callable[[], None] | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1; found {workers}")
        self.files = _in_order(manifest, order)
        """All files of the set but the manifest, as they are copied."""
        self.copied: list[FileEntry] = []
        """By this one; whole and durable."""
        self.evicted: list[CachedCopy] = []
        """To make room."""
        self._storage = storage
        self._manifest = manifest
        self._lease = lease
        self._headers = _headers(manifest)
        self._workers = workers
        self._verify = verify
        self._stop = stop or threading.Event()
        self._failed = False
        self._on_progress = on_progress
        self._on_wait = on_wait
        self._on_fill = on_fill
        self._total = 0

    def run(self) -> bool:
        """Return when the copy is complete, be it by this process or by another: True. False if `stop` was set before.

        Errors are those of `stage`.
        """
        self._lease.cache.sweep()
        waiting = False
        while not self._stop.is_set():
            if not self._verify and self._is_complete():
                return True
            filling = self._lease.try_filling(_absolute(self._storage.name))
            if filling is not None:
                with filling:
                    if self._on_fill is not None:
                        self._on_fill()
                    return self._fill()
            if not waiting and self._on_wait is not None:
                self._on_wait(self._lease.filler())
            waiting = True
            self._stop.wait(_POLL_SECONDS)
        return False

    def _is_complete(self) -> bool:
        return self._lease.is_complete() and self._lease.manifest() is not None and not self._missing()

    def _missing(self) -> list[FileEntry]:
        """What is not there with the right size and header."""
        return [entry for entry in self.files if not self._is_there(FolderStorage(self._lease.path), entry)]

    def _is_there(self, copy: FolderStorage, entry: FileEntry) -> bool:
        header = self._headers.get(entry.file)
        path = copy.path_of(entry)
        try:
            (open_sized(path, entry) if header is None else open_checked(path, entry, header)).close()
        except FormatError:
            return False
        return True

    # --- by the one that fills ---------------------------------------------------------------------------------------

    def _fill(self) -> bool:
        folder = self._lease.path
        if folder.exists():
            remove_temporaries(folder)  # nobody else writes here: these are of one that was killed
        todo = self._missing()
        if self._verify:
            there = [entry for entry in self.files if entry not in todo]
            self._total += sum(entry.nbytes for entry in there)
            sound = self._each(self._is_sound, there)
            todo += [entry for entry in there if not sound.get(entry.file, True)]
        if self._stop.is_set():
            return False
        self._make_room(todo)
        self._total += sum(entry.nbytes for entry in todo)
        try:
            make_folder(folder)
            self._copy_all(todo)
            if self._stop.is_set():
                return False
            if self._lease.manifest() is None:
                commit_manifest(folder, self._manifest)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._no_room(self._left(todo), error.strerror) from error
        return True

    def _copy_all(self, todo: Sequence[FileEntry]) -> None:
        try:
            self._each(self._copy, todo)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # Another one who found the same room has taken it: once more, with what can be evicted now.
            todo = self._left(todo)
            self._make_room(todo)
            self._failed = False
            self._each(self._copy, todo)

    def _left(self, todo: Sequence[FileEntry]) -> list[FileEntry]:
        return [entry for entry in todo if entry not in self.copied]

    def _needed(self, todo: Sequence[FileEntry]) -> int:
        return sum(entry.nbytes for entry in todo) + len(self._manifest.dumps())

    def _make_room(self, todo: Sequence[FileEntry]) -> None:
        needed = self._needed(todo)
        cache = self._lease.cache
        free = cache.free_nbytes()
        if needed <= free:
            return
        # Nothing is evicted if that would not do.
        if needed <= free + sum(copy.nbytes for copy in self._evictable(cache.copies())):
            self.evicted += cache.evict(free=needed).removed
            if needed <= cache.free_nbytes():
                return
        raise self._no_room(todo)

    def _evictable(self, copies: Sequence[CachedCopy]) -> list[CachedCopy]:
        return [copy for copy in copies if not copy.in_use and self._lease.cache.may_remove(copy.digest)]

    def _no_room(self, todo: Sequence[FileEntry], found: str | None = None) -> SpaceError:
        """`found` is what the filesystem says, which may know of a quota."""
        cache = self._lease.cache
        copies = [copy for copy in cache.copies() if copy.digest != self._lease.digest]
        held = "; ".join(map(_describe_use, (copy for copy in copies if copy.in_use))) or "no other copy"
        unused = [copy for copy in copies if not copy.in_use]
        ours = sum(copy.nbytes for copy in self._evictable(copies))
        others = sum(copy.nbytes for copy in unused) - ours
        return SpaceError(
            f"{cache.folder}: expected room for {self._needed(todo):,} bytes, found {f'{found}, ' if found else ''}"
            f"{cache.free_nbytes():,} free, {ours:,} in copies that nobody uses"
            f"{f', {others:,} in such ones that are for other users to remove' if others else ''}; in use: {held}. "
            "Finished files are kept. Make room, choose a larger disk for the cache, or read from the source"
        )

    def _each(self, do: Callable[[FileEntry], bool], entries: Sequence[FileEntry]) -> dict[str, bool]:
        """What `do` says of each file, by name, in `workers` threads. When one fails, the others end soon."""
        left, outcomes = deque(entries), dict[str, bool]()

        def work() -> None:
            while not self._ends():
                try:
                    entry = left.popleft()
                except IndexError:
                    return
                try:
                    outcomes[entry.file] = do(entry)
                except BaseException:
                    self._failed = True
                    raise

        threads = [DaemonThread(work, f"shardio-stage-{i}") for i in range(min(self._workers, len(entries)))]
        try:
            for thread in threads:
                thread.begin()
            for thread in threads:
                thread.result()
        except BaseException:
            self._failed = True
            raise
        finally:
            for thread in threads:
                thread.wait()
        return outcomes

    def _ends(self) -> bool:
        return self._failed or self._stop.is_set()

    def _progress(self, nbytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(nbytes, self._total)

    def _is_sound(self, entry: FileEntry) -> bool:
        """Whether a file of the copy has its sha256; one that the disk no longer gives has not."""
        try:
            return self._pour(FolderStorage(self._lease.path), entry, None) in (entry.sha256, None)
        except FormatError:  # it is being cut
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False

    def _copy(self, entry: FileEntry) -> bool:
        """Whether that was done: not if it is to end before."""
        path = self._lease.path / entry.file
        found: str | None = ""
        for _ in range(2):  # what was damaged on the way is not so again
            with AtomicFile(path) as file:
                with naming(path):
                    reserve(file.descriptor, entry.nbytes)
                found = self._pour(self._storage, entry, file)
                if found is None:
                    return False
                if found == entry.sha256:
                    file.commit()
                    self.copied.append(entry)
                    return True
            self._progress(-entry.nbytes)
        raise FormatError(
            f"{self._storage.path_of(entry)}: sha256: expected {entry.sha256}, found {found}: the source is damaged; "
            f"`shardio verify {self._storage.name}` names the samples"
        )

    def _pour(self, storage: Storage, entry: FileEntry, file: AtomicFile | None) -> str | None:
        """Read a file and hash it, and write it to `file` on the way: its sha256, or None if it is to end before.

        A piece is hashed while it is written and the next one is read, so that one large file keeps two cores busy.
        The GIL is free meanwhile.
        """
        sha256 = hashlib.sha256()
        size = min(_PIECE_NBYTES, entry.nbytes)
        here, there = memoryview(bytearray(size)), memoryview(bytearray(size))
        hashing: DaemonThread | None = None
        poured = 0
        try:
            with contextlib.nullcontext() if file is None else _Writer(file) as writer:
                for offset in range(0, entry.nbytes, _PIECE_NBYTES):
                    if self._ends():
                        return None
                    piece = here[: entry.nbytes - offset]
                    storage.read_into(entry, offset, piece)
                    if hashing is not None:  # of the piece before; then its buffer is free for the next one
                        hashing.result()
                    hashing = _begin(partial(sha256.update, piece), "shardio-stage-hash")
                    if writer is not None:
                        writer.write(piece)
                    self._progress(len(piece))
                    poured += len(piece)
                    here, there = there, here
        finally:
            if hashing is not None:
                hashing.wait()
            if 0 < poured < entry.nbytes:  # it may be begun again
                self._progress(-poured)
        return sha256.hexdigest()


class _Writer:
    """Writes to a file one piece after the other, and has the kernel bring them to the disk on the way.

    What remains for the fsync of a commit is short then. At the end of the `with` block no sync is under way.
    """

    def __init__(self, file: AtomicFile) -> None:
        self._file = file
        self._unsynced_nbytes = 0
        self._sync: DaemonThread | None = None

    def __enter__(self) -> _Writer:
        return self

    def write(self, piece: memoryview) -> None:
        """OSError names the file, whatever it is that failed, and if it was an earlier piece."""
        with naming(self._file.path):
            write_all(self._file.descriptor, piece)
            self._unsynced_nbytes += len(piece)
            if self._unsynced_nbytes >= _SYNC_NBYTES and not (self._sync and self._sync.is_alive()):
                self._end_sync()
                self._sync = _begin(partial(os.fdatasync, self._file.descriptor), "shardio-stage-sync")
                self._unsynced_nbytes = 0

    def _end_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()
            self._sync = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sync is not None:
            self._sync.wait()
        if error is None:
            with naming(self._file.path):
                self._end_sync()


def _begin(call: Callable[[], object], name: str) -> DaemonThread:
    thread = DaemonThread(call, name)
    thread.begin()
    return thread


def _absolute(name: str) -> str:
    """Of a storage, for whoever reads it elsewhere."""
    return name if "://" in name else os.path.abspath(name)


def _in_order(manifest: Manifest, order: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Indexes, what is wanted first, and the rest, each file once."""
    splits = manifest.splits.values()
    shards = [shard for split in splits for shard in split.shards]
    files = {entry.file: entry for entry in (*(split.index for split in splits), *order, *shards, manifest.rejects)}
    return tuple(files.values())


def _headers(manifest: Manifest) -> dict[str, bytes]:
    """With which bytes each file begins; rejects.jsonl with any."""
    headers = {split.index.file: split.index_header for split in manifest.splits.values()}
    for split in manifest.splits.values():
        for shard in split.shards:
            headers[shard.file] = shard_header(shard.num_samples, manifest.sample_shape)
    return headers


def _describe_use(copy: CachedCopy) -> str:
    by = f" by process {', '.join(map(str, copy.processes))}" if copy.processes else ""
    return f"{copy.digest[:16]} ({copy.source or 'source unknown'}), {copy.nbytes:,} bytes{by}"
