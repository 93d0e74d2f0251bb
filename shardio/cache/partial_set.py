"""A split that is read while it is copied into a cache: rows in the copy from there, the rest from the source.

Another process may be copying, so only the copy's folder shows which files and blocks are there. Samples that are read
from the source are written into the unfinished files of the copy, so no process reads them from the source again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardio.cache.leases import Lease
from shardio.cache.partial_copy import MISSING, THERE, PartialCopy, blocks_of
from shardio.errors import CacheError, FormatError
from shardio.format.entries import FileEntry, ShardEntry
from shardio.format.layout import MANIFEST_NAME, SampleShape, crc32
from shardio.format.manifest import Manifest
from shardio.format.opening import check_sha256
from shardio.kernels.rowcopy import Places, Windows
from shardio.reading.layout import SplitLayout, StoredTable
from shardio.reading.mapped_table import MappedTable
from shardio.reading.reader import MappedReader, wrong_row
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.storage import FolderStorage, Storage
from shardio.system.files import write_all
from shardio.system.opening import FolderHandle, OpenFile, naming, open_nameless
from shardio.system.pour import pour

# The time between two looks for finished shards.
_LOOK_SECONDS = 1.0
# A server answers many requests at a time, but each of them late.
_STORAGE_THREADS = 16
# In addition to the states of a block: the file has its name, so its sha256 is right.
_WHOLE = 3


class PartialTable(MappedTable):
    """A table of `shards`, whose order, if it has one, is the mapped table `order`. Maps files of the copy as they
    appear, and reads missing rows from the storage. Compares rows of an unfinished, not yet verified file with their
    crc32."""

    def __init__(self, table: StoredTable, order: MappedTable | None, shards: PartialSet) -> None:
        super().__init__(table, shards.folder, order)
        self._shards = weakref.proxy(shards)  # which has this table
        blocks = blocks_of(shards.manifest)
        self._first_blocks = np.array([blocks[entry].first for entry in table.files])
        self._block_rows = np.array([blocks[entry].num_rows for entry in table.files])
        self._partial: PartialCopy | None = None
        self._is_away = np.ones(len(table.files), bool)
        """Which files are not finished, bool (files,)."""
        self._looked_at = float("-inf")
        self.look()

    def look(self) -> int:
        """Maps the files that were finished since the last call. Returns how many files are still unfinished."""
        self._looked_at = time.monotonic()
        if self._partial is None and self._is_away.any():
            self._partial = self._map_unfinished()
        for number in np.flatnonzero(self._is_away).tolist():
            entry = self.table.files[number]
            if self._shards.lease.has(entry):
                try:
                    # Another thread may do the same: then one mapping of the file replaces an equal one.
                    self.map_file(number, SplitLayout.open_file(self._shards, entry))
                except FormatError:  # damaged, or gone since: it will be copied again
                    continue
                self._is_away[number] = False
        if not (count := int(self._is_away.sum())):
            self._partial = None
        return count

    def _map_unfinished(self) -> PartialCopy | None:
        """Maps the unfinished files. Returns None if they do not all exist yet, or if blocks are not whole rows."""
        partial = PartialCopy.find(self._shards.lease.path, self._shards.manifest)
        if partial is None or not self._block_rows.all():
            return None
        for number in np.flatnonzero(self._is_away).tolist():
            entry = self.table.files[number]
            with contextlib.suppress(OSError, CacheError):
                file = partial.open(entry)
                if os.fstat(file.fileno()).st_size == entry.nbytes:
                    self.map_file(number, file)
                    continue
            return None  # it was finished in between, or is being made: the next look finds it
        return partial

    def _states(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the state of each sample's block; _WHOLE if the file is finished. Calls `look`, once a second."""
        if not self._is_away.any():
            return np.full(len(indices), _WHOLE)
        stored = self.stored(indices)
        files = self.table.locate(stored)[0]
        if self._is_away[files].any() and time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self.look()
        states: NDArray[Any] = np.full(len(indices), MISSING)
        if (partial := self._partial) is not None:
            blocks = self._first_blocks[files] + (stored - self.table.starts[files]) // self._block_rows[files]
            states = partial.states[blocks]
        return np.where(self._is_away[files], states, _WHOLE)

    def lent(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return None if (self._states(indices) != _WHOLE).any() else super().lent(indices)

    def copy(self, indices: NDArray[np.int64], out: NDArray[np.uint8], lines: Places = None) -> None:
        """Copies rows, as `MappedTable.copy`. Reads rows that the copy lacks from the storage, one after the other.

        Raises an OSError that names a sample that cannot be read, and FormatError if a row in the storage is damaged.
        """
        states = self._states(indices)
        if (states == _WHOLE).all():
            super().copy(indices, out, lines)
            return
        lines = np.arange(len(indices)) if lines is None else lines
        is_here = (states == _WHOLE) | (states == THERE)
        super().copy(indices[is_here], out, lines[is_here])
        # Samples that no process is fetching come first.
        for number in sorted(np.flatnonzero(~is_here).tolist(), key=states.__getitem__):
            self._fetch(int(indices[number]), out[lines[number]])
        doubted, places = indices[states != _WHOLE], lines[states != _WHOLE]
        expected = self._shards.copy_crc32s(self.table.name, doubted)
        for sample, line, crc in zip(doubted.tolist(), places.tolist(), expected.tolist(), strict=True):
            if crc32(out[line]) != crc:
                fetch(self._shards.storage, self.table.what(sample), *self.locate_one(sample), out[line])
                if (found := crc32(out[line])) != crc:
                    raise wrong_row(self._shards, self._shards.storage, self.table.name, sample, found)

    def copy_windows(
        self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows, shape: SampleShape
    ) -> None:
        states = self._states(indices)
        if (states == _WHOLE).all():
            super().copy_windows(indices, out, windows, shape)
            return
        places = np.split(out, (windows.num_pixels * shape[2]).cumsum()[:-1])
        for number in np.argsort(states, kind="stable").tolist():
            (rows, columns), image = windows.part(number), np.empty(shape, np.uint8)
            sample, lines = int(indices[number]), image[rows]
            (entry, offset), is_copied = self.locate_one(sample), states[number] == _WHOLE or self._partial is not None
            if is_copied or entry.file in self._shards.storage.damaged:
                self.copy(indices[number : number + 1], image.reshape(1, -1))
            else:  # no more than is needed, as from a set without a copy
                offset += rows.start * image[0].nbytes
                fetch(self._shards.storage, self.table.what(sample), entry, offset, lines.reshape(-1))
            np.copyto(places[number].reshape(len(lines), -1, shape[2]), lines[:, columns])

    def _fetch(self, sample: int, out: NDArray[np.uint8]) -> None:
        """Fills `out`, uint8 (row_nbytes,), with a sample's row: from the copy if its blocks are THERE by now,
        otherwise from the storage.

        If the sample's file is unfinished, reads whole blocks, and writes them into the file for all processes.
        """
        (entry, offset), what = self.locate_one(sample), self.table.what(sample)
        if (partial := self._partial) is None:
            fetch(self._shards.storage, what, entry, offset, out)
            return
        blocks = partial.blocks[entry]
        begin, end = blocks.around(offset, offset + self.table.row_nbytes)
        start, stop = blocks.start(begin), blocks.start(end)
        partial.wait(entry, start, stop)
        if (partial.states_of(entry, start, stop) == THERE).all():
            super().copy(np.array([sample]), out.reshape(1, -1))
            return

        read_into = functools.partial(fetch, self._shards.storage, what)
        data = np.frombuffer(partial.fetch(entry, start, stop, read_into, partial.add), np.uint8)
        out[:] = data[offset - start :][: len(out)]


def fetch(storage: Storage, what: str, entry: FileEntry, offset: int, out: NDArray[np.uint8] | memoryview) -> None:
    """Fills `out` with bytes of a file in the storage, from byte `offset` on. An OSError begins with `what`."""
    try:
        storage.read_into(entry, offset, memoryview(out).cast("B"))  # type: ignore[arg-type]
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}", error.filename) from None


class PartialSet(ShardSet):
    """A ShardSet of an unfinished copy under the lease `copy`. Samples that the copy lacks are read from `storage`.

    If the storage fails, reading raises an OSError that names the sample. The constructor fetches and checks an index
    or order that the copy lacks.
    """

    def __init__(self, storage: Storage, manifest: Manifest, split: str, copy: Lease) -> None:
        self.storage, self.lease = storage, copy
        super().__init__(copy.path, manifest, split)

    def _map(self, table: StoredTable) -> MappedTable:
        if not isinstance(table.files[0], ShardEntry):  # the index, an order or checksums
            return super()._map(table)
        order = None if table.order is None else self._mapped_of(table.order)
        with naming(self.path_of(table.files[0])):
            return PartialTable(table, order, self)

    def look(self) -> int:
        """Maps the shards that were finished since the last call. Returns how many are still unfinished."""
        return sum(cast(PartialTable, self.mapped(name)).look() for name in self.main_tables)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the set as its copy or, while that is incomplete, as the source, which must be a folder."""
        if not self.look() and os.path.lexists(self.path / MANIFEST_NAME):
            return super().__reduce__()
        if isinstance(self.storage, FolderStorage):
            return functools.partial(open_shards, digest=self.digest), (self.storage.name, self.split)
        raise TypeError(
            f"a set that is being copied from {self.storage.name} cannot be pickled or copied: wait until the copy is "
            "complete, or open it in the process that uses it"
        )

    def open_file(self, entry: FileEntry, folder: FolderHandle | None = None) -> OpenFile:
        """Opens a file of the copy, by its path. If the copy lacks it, fetches it into a nameless temporary file."""
        if self.lease.has(entry):
            with contextlib.suppress(FormatError):  # damaged: it will be copied again
                return super().open_file(entry)
        file, read = open_nameless(), functools.partial(self.storage.read_into, entry)
        found = pour(read, entry.nbytes, functools.partial(write_all, file.fileno()))
        check_sha256(self.storage.path_of(entry), entry, found)
        return file


class StagedReader(MappedReader):
    """Reads a PartialSet. Asks the kernel for no read-ahead, as most bytes are not on this disk yet."""

    name = "staged"
    num_threads = _STORAGE_THREADS
    whole_lines = 1
    min_part_nbytes = 0
