"""A split of a set, wherever it lies, opened through a cache: at once, and read faster when its copy is complete.

    storage -> stager (a thread of one process per node) -> copy -> StagedSet -> StagedReader -> gather threads

Training does not wait for the copy: samples whose shards have not come are read from the storage. When the copy is
complete, the next epoch reads it as any other set on the node's own disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, SetNotFoundError, printable
from shardio.format.checksum import crc32
from shardio.format.manifest import ShardEntry, Split
from shardio.order.windows import Windows
from shardio.reading.choose import Io, make_reader
from shardio.reading.partial import StagedSet, fetch
from shardio.reading.readers import ReadCounts, Reader, Tally, direct_alignment
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.cache.folder import Cache, Lease
from shardio.sets.cache.stage import Stager, take_lease
from shardio.sets.storage import Storage, open_storage
from shardio.system.threads import DaemonThread, close_at_exit

# The index comes first, and opening waits for it.
_POLL_SECONDS = 0.02
# Batches at the beginning of the order by which shards are sorted. With a global shuffle the first few need them all.
_MOST_BATCHES = 1000
# Threads wait for a server that answers many requests at a time, and each of them late.
_STORAGE_THREADS = 16


@dataclass
class _State:
    """What is told of a CachedSplit, in words. Any thread may read it."""

    text: str = "complete"
    """How far the copy is. The staging thread assigns it."""
    io_reason: str = ""
    """Why samples are read as they are. The consumer's thread assigns it."""


class _Stop(threading.Event):
    """An Event without its lock, which a Ctrl-C in the middle of set() would leave locked, and which a finaliser that
    runs in the middle of wait() would wait for. It is also set when its `owner` dies, without a line of Python."""

    def __init__(self, owner: object) -> None:
        super().__init__()
        self._reasons: list[object] = []
        self._owner = weakref.ref(owner, self._reasons.append)

    def is_set(self) -> bool:
        return bool(self._reasons)

    def set(self) -> None:
        self._reasons.append(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Sleeps for all of `timeout`, which must be short."""
        time.sleep(0.0 if self._reasons else timeout or 0.0)
        return self.is_set()


class _Held:
    """What a CachedSplit has to end. `close` may be called again, also where it was interrupted.

    A thread that stages refers to this as well, and must not keep the CachedSplit.
    """

    def __init__(self, owner: CachedSplit, storage: Storage) -> None:
        self.stop = _Stop(owner)
        self.storage = storage
        self.threads: list[DaemonThread] = []
        self.lease: Lease | None = None

    def tell_to_stop(self) -> None:
        self.stop.set()
        self.storage.close()

    def close(self) -> None:
        """A finaliser may run in any thread: in one that copies it must not wait for itself. Then that ends the
        lease."""
        self.tell_to_stop()
        copies = threading.current_thread().name.startswith("shardio-stage")
        if not (copies and any(thread.is_alive() for thread in self.threads)):
            try:
                for thread in self.threads:
                    thread.wait()
            finally:
                self.end_lease()

    def end_lease(self) -> None:
        if self.lease is not None:
            self.lease.close()


class StagedReader:
    """Reads a StagedSet. From the epoch on that finds the copy complete, the reader that `settle` returns reads it."""

    num_threads = _STORAGE_THREADS

    def __init__(self, shards: StagedSet, settle: Callable[[], Reader | None]) -> None:
        self.name = "staged"
        self._shards = shards
        self._settle = settle
        self._settled: Reader | None = None
        self._tally = Tally()
        self.labels_of = shards.labels_of
        self.column_of = shards.column_of

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        if self._settled is not None:
            self._settled.read(indices, out, windows)
        else:
            self._shards.gather(indices, out, windows)
            self._tally.add(out.nbytes)

    def reads_ahead(self) -> bool:
        if self._settled is None and (settled := self._settle()) is not None:
            self._settled = settled
            self.name = settled.name
        return self._settled is not None and self._settled.reads_ahead()

    def will_read(self, indices: NDArray[np.int64], windows: Windows | None = None) -> None:
        if self._settled is not None:
            self._settled.will_read(indices, windows)

    def counts(self) -> ReadCounts:
        counts = self._tally.counts()
        return ReadCounts(*map(sum, zip(counts, self._settled.counts(), strict=True))) if self._settled else counts

    def close(self) -> None:
        if self._settled is not None:
            self._settled.close()


class StorageReader:
    """Reads samples a second time, one after the other, from the storage, and tells if they are sound there. Thread
    safe. The storage belongs to the CachedSplit."""

    def __init__(self, shards: ShardSet, storage: Storage, on_damaged_copy: Callable[[], None]) -> None:
        self._shards = shards
        self._storage = storage
        self._on_damaged_copy = on_damaged_copy
        self._tally = Tally()

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        indices = self._shards.check_request(indices, out)
        for index, pixels in zip(indices.tolist(), out, strict=True):
            fetch(self._shards, self._storage, index, pixels, None)
        self._tally.add(out.nbytes)
        if self._shards.column_of("crc32", indices).tolist() == [crc32(pixels) for pixels in out]:
            self._on_damaged_copy()

    def counts(self) -> ReadCounts:
        return self._tally.counts()

    def close(self) -> None:
        """Nothing to give back."""


class CachedSplit:
    """The split `split` of the set `place`, a folder or URL, by way of the cache in the folder `cache`.

    A `shardio.reading.source.SplitSource`. When this is made it holds a lease and knows the manifest. `open` begins to
    stage, if need be, and opens the split. `close` ends the staging and the lease; it also runs when this dies.

    `digest` and errors are those of `take_lease`. Raises SetNotFoundError if there is no such split.
    """

    _shards: ShardSet

    def __init__(
        self, place: str | os.PathLike[str], cache: str | os.PathLike[str], split: str, digest: str | None = None
    ) -> None:
        self._name = split
        self._storage = open_storage(place)
        self._state = _State()
        self._held = _Held(self, self._storage)
        close_at_exit(self)
        try:
            self._held.lease, self._manifest = take_lease(self._storage, Cache(cache), digest)
            self._lease = self._held.lease
            if split not in self._manifest.splits:
                found = ", ".join(sorted(self._manifest.splits))
                raise SetNotFoundError(f"{self._storage.name}: expected a split {split!r}, found {found}")
            self._split = self._manifest.splits[split]
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self.close()

    @property
    def num_samples(self) -> int:
        return self._split.num_samples

    def open(self, batches: Iterable[NDArray[np.int64]] = ()) -> ShardSet:
        """The shards that these batches of indices need first are copied first."""
        if (shards := self._open_copy()) is None:
            shards = self._open_meanwhile(batches)
        self._shards = shards
        return shards

    def _open_copy(self) -> ShardSet | None:
        """Returns the split of a complete copy; None if one of its files is missing or was cut, and is copied again."""
        if self._lease.is_complete():
            with contextlib.suppress(FormatError):
                return open_shards(self._lease.path, self._name)
        return None

    def _open_meanwhile(self, batches: Iterable[NDArray[np.int64]]) -> StagedSet:
        thread = self._begin_staging(_by_need(self._split, batches))
        while not self._lease.has(self._split.index) and thread.is_alive():
            time.sleep(_POLL_SECONDS)
        return StagedSet(self._storage, self._manifest, self._name, self._lease)

    def _begin_staging(self, order: Sequence[ShardEntry] = (), *, verify: bool = False) -> threading.Thread:
        state, name = self._state, self._storage.name

        def tell_filling() -> None:
            state.text = f"copying from {name}"

        tell_filling()
        stager = Stager(
            self._storage,
            self._manifest,
            self._lease,
            order=order,
            verify=verify,
            stop=self._held.stop,
            on_wait=lambda process: _tell(state, process),
            on_fill=tell_filling,
        )
        thread = DaemonThread(partial(_stage, stager, state, name, self._held), "shardio-stage")
        self._held.threads.append(thread)
        thread.begin()
        return thread

    def make_reader(self, io: Io, num_samples: int) -> Reader:
        # `settle` outlives this: neither it nor what it calls may refer to self.
        state, lease, name, index = self._state, self._lease, self._name, self._split.index

        def make(shards: ShardSet) -> Reader:
            reader, state.io_reason = make_reader(shards, io, num_samples)
            return reader

        def settle() -> Reader | None:
            if lease.is_complete():
                # A file may be copied once more. Whatever else is wrong, the set can be read as it was so far.
                with contextlib.suppress(FormatError, OSError):
                    return make(open_shards(lease.path, name))
            return None

        if not isinstance(self._shards, StagedSet):
            return make(self._shards)
        if io == "direct" and lease.has(index) and direct_alignment(lease.path / index.file) is None:
            raise ValueError(f'{lease.path}: O_DIRECT does not work there: use io="auto", "mmap" or "pread"')
        state.io_reason = (
            f"{self._storage.name} is being copied to {lease.path}: what has not come is read from there; the epoch "
            f"after it is complete reads it as io={io!r} says"
        )
        return StagedReader(self._shards, settle)

    def make_second(self) -> StorageReader:
        """Returns what reads damaged samples again: from the storage.

        If they are sound there, a thread verifies all of the copy, once, and copies damaged files again. A rename
        replaces each file, so that other processes go on with what they have mapped, or find the new one.
        """
        not_begun = [None]  # the gather thread that pops it begins

        def verify_copy() -> None:
            if not self._held.threads and not self._held.stop.is_set():
                try:
                    not_begun.pop()
                except IndexError:
                    return
                self._begin_staging(verify=True)

        return StorageReader(self._shards, self._storage, verify_copy)

    def describe(self) -> dict[str, Any]:
        """`staging` tells how far the copy is: its `state` in words, its `path`, and how many `shards` of the split are
        `shards_here`."""
        num_away = 0
        if isinstance(self._shards, StagedSet):
            self._shards.look()
            num_away = self._shards.num_away
        count = len(self._split.shards)
        copy = {"state": self._state.text, "path": str(self._lease.path)}
        staging = {**copy, "shards": count, "shards_here": count - num_away}
        return {"io_reason": self._state.io_reason, "staging": staging}

    def stop(self) -> None:
        """Have the copying end soon, and reading from the storage fail. Does not wait; may be called again."""
        self._held.tell_to_stop()

    def close(self) -> None:
        """End the copying and the lease. The set that was opened goes on with what is there, and what it has mapped."""
        if (held := getattr(self, "_held", None)) is not None:  # of one that was not made, nothing
            held.close()


def _tell(state: _State, process: int | None) -> None:
    state.text = "copied by another process" if process is None else f"copied by process {process}"


def _stage(stager: Stager, state: _State, name: str, held: _Held) -> None:
    """In the staging thread: it has nobody to raise an error to, and training can go on without the copy."""
    try:
        state.text = "complete" if stager.run() else "stopped"
    except Exception as error:
        if held.stop.is_set():
            state.text = "stopped"
            return
        state.text = f"failed: {error}"
        with contextlib.suppress(RuntimeWarning):  # where warnings are errors
            text = printable(f"training goes on, reading {name} without a copy: {error}")
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    finally:
        if held.stop.is_set():
            held.end_lease()


def _by_need(split: Split, batches: Iterable[NDArray[np.int64]]) -> list[ShardEntry]:
    """The shards that the first batches need, in the order in which they do."""
    starts = np.cumsum([0, *(shard.num_samples for shard in split.shards)])
    numbers: dict[int, None] = {}
    for batch in islice(batches, _MOST_BATCHES):
        numbers.update(dict.fromkeys((np.searchsorted(starts, batch, side="right") - 1).tolist()))
        if len(numbers) == len(split.shards):
            break
    return [split.shards[number] for number in numbers]
