"""A split of a set, wherever it lies, opened through a cache: at once, and faster when its copy is there.

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
from shardio.reading.choose import Io, check_io, make_reader
from shardio.reading.partial import StagedSet, StorageReader
from shardio.reading.reader import ReadCounts, Reader, Tally
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.cache.folder import Cache
from shardio.sets.cache.leases import Lease
from shardio.sets.cache.stage import Stager, take_lease
from shardio.sets.storage import Storage, open_storage
from shardio.system.direct import direct_alignment
from shardio.system.threads import DaemonThread, Flag, close_at_exit

# The index comes first, and opening waits for it.
_POLL_SECONDS = 0.02
# Batches at the beginning of the order by which shards are sorted. With a global shuffle the first few need them all.
_MOST_BATCHES = 1000


@dataclass
class _State:
    """How far the copy is, in words. Assigned by the staging thread, read by any."""

    text: str = "complete"


class _Held:
    """What a CachedSplit has to end. `close` may be called again, also where it was interrupted.

    A thread that stages refers to this as well, and must not keep the CachedSplit.
    """

    def __init__(self, owner: CachedSplit, storage: Storage) -> None:
        self.stop = Flag(owner)
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
    """Reads a StagedSet; from the epoch on that finds the copy complete, with the reader that `settle` makes for it."""

    num_threads = StorageReader.num_threads

    def __init__(self, shards: StagedSet, settle: Callable[[], tuple[Reader, str] | None], reason: str) -> None:
        self.name = "staged"
        self.reason = reason
        """Why samples are read so; also of the reader that it has settled for."""
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

    def begin_epoch(self) -> bool:
        if self._settled is None and (settled := self._settle()) is not None:
            self._settled, self.reason = settled
            self.name = self._settled.name
        return self._settled is not None and self._settled.begin_epoch()

    def will_read(self, indices: NDArray[np.int64], windows: Windows | None = None) -> None:
        if self._settled is not None:
            self._settled.will_read(indices, windows)

    def counts(self) -> ReadCounts:
        counts = self._tally.counts()
        return ReadCounts(*map(sum, zip(counts, self._settled.counts(), strict=True))) if self._settled else counts

    def close(self) -> None:
        if self._settled is not None:
            self._settled.close()


class _SecondReader(StorageReader):
    """Reads samples from the storage that were read otherwise before, and says so if they are sound there."""

    def __init__(self, shards: ShardSet, storage: Storage, on_damaged_copy: Callable[[], None]) -> None:
        super().__init__(shards, storage)
        self._on_damaged_copy = on_damaged_copy

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        super().read(indices, out, windows)
        expected = self.column_of("crc32", indices).tolist()
        if windows is None and expected == [crc32(pixels) for pixels in out]:
            self._on_damaged_copy()


class CachedSplit:
    """The split `split` of the set `place`, a folder or URL, by way of the cache in the folder `cache`.

    When this is made it holds a lease and knows the manifest. `open` then begins to stage, if need be, and opens the
    split. `close` ends both; it also runs when this is forgotten. To be used by one thread.

    `digest` and errors are those of `take_lease`; SetNotFoundError if there is no such split.
    """

    def __init__(
        self, place: str | os.PathLike[str], cache: str | os.PathLike[str], split: str, digest: str | None = None
    ) -> None:
        self.split = split
        self._storage = open_storage(place)
        self._state = _State()
        self._held = _Held(self, self._storage)
        close_at_exit(self)
        try:
            self._held.lease, manifest = take_lease(self._storage, Cache(cache), digest)
            self._lease = self._held.lease
            if split not in manifest.splits:
                raise SetNotFoundError(
                    f"{self._storage.name}: expected a split {split!r}, found {', '.join(sorted(manifest.splits))}"
                )
            self.manifest = manifest
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self.close()

    @property
    def num_samples(self) -> int:
        return self.manifest.splits[self.split].num_samples

    def open(self, batches: Iterable[NDArray[np.int64]] = ()) -> ShardSet:
        """The split, to be read at once; shards that these batches of indices need first are copied first."""
        if self._lease.is_complete():
            with contextlib.suppress(FormatError):  # of a file that is missing or was cut: it is copied again
                return open_shards(self._lease.path, self.split)
        thread = self._begin_staging(_by_need(self.manifest.splits[self.split], batches))
        index = self.manifest.splits[self.split].index
        while not self._lease.has(index) and thread.is_alive():
            time.sleep(_POLL_SECONDS)
        return StagedSet(self._storage, self.manifest, self.split, self._lease)

    def _begin_staging(self, order: Sequence[ShardEntry] = (), *, verify: bool = False) -> threading.Thread:
        state, name = self._state, self._storage.name

        def tell_filling() -> None:
            state.text = f"copying from {name}"

        tell_filling()
        stager = Stager(
            self._storage,
            self.manifest,
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

    def make_reader(self, shards: ShardSet, io: Io, num_samples: int) -> tuple[Reader, str]:
        """As `engine.make_reader`, of what `open` has returned."""
        if not isinstance(shards, StagedSet):
            return make_reader(shards, io, num_samples)
        check_io(io)
        lease, split = self._lease, self.split
        index = self.manifest.splits[split].index
        if io == "direct" and lease.has(index) and direct_alignment(lease.path / index.file) is None:
            raise ValueError(f'{lease.path}: O_DIRECT does not work there: use io="auto", "mmap" or "pread"')

        def settle() -> tuple[Reader, str] | None:
            if lease.is_complete():
                # A file may be under way once more; and whatever else there is, it can be read as it was so far.
                with contextlib.suppress(FormatError, OSError):
                    return make_reader(open_shards(lease.path, split), io, num_samples)
            return None

        reason = (
            f"{self._storage.name} is being copied to {lease.path}: what has not come is read from there; the epoch "
            f"after it is complete reads it as io={io!r} says"
        )
        return StagedReader(shards, settle, reason), reason

    def make_second(self, shards: ShardSet) -> Reader:
        """What reads samples again that did not come sound: from the storage.

        If they are sound there, all of the copy is verified by a thread, once, and what is damaged is copied again.
        Each file of the copy is replaced by a rename, so that others go on with what they have mapped, or find the new.
        """

        not_begun = [None]  # whoever of the gather threads pops it begins

        def verify_copy() -> None:
            if not self._held.threads and not self._held.stop.is_set():
                try:
                    not_begun.pop()
                except IndexError:
                    return
                self._begin_staging(verify=True)

        return _SecondReader(shards, self._storage, verify_copy)

    def describe(self, shards: ShardSet) -> dict[str, Any]:
        """How far the copy is: `state` in words, its `path`, and how many `shards` of the split are `shards_here`."""
        count = len(self.manifest.splits[self.split].shards)
        if isinstance(shards, StagedSet):
            shards.look()
        here = count - shards.num_away if isinstance(shards, StagedSet) else count
        return {"state": self._state.text, "path": str(self._lease.path), "shards": count, "shards_here": here}

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
