"""A split that is read while it is copied into a cache: rows in the copy from there, the rest from the source.

Another process may be copying, so only the copy's folder shows which files and blocks are there. Samples that are read
from the source are written into the unfinished files of the copy, so no process reads them from the source again.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardio.cache.leases import Lease
from shardio.cache.partial_copy import MISSING, THERE, PartialCopy
from shardio.errors import CacheError, FormatError
from shardio.format.entries import FileEntry, ShardEntry
from shardio.format.layout import MANIFEST_NAME, SampleShape, crc32
from shardio.format.manifest import Manifest
from shardio.format.opening import check_sha256, open_checked
from shardio.kernels.rowcopy import Places, Windows
from shardio.reading.layout import StoredTable
from shardio.reading.mapped_table import MappedTable
from shardio.reading.reader import (
    WAYS_OUT,
    MappedReader,
    ReadCounts,
    Reader,
    Request,
    Views,
    WrappingReader,
    wrong_row,
)
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
    """A table of `shards`, whose files are mapped as they appear in `copy`. Rows that the copy lacks are read from
    `storage`. Rows of a file without its own name are compared with their crc32: nobody has verified it yet."""

    def __init__(
        self,
        table: StoredTable,
        folder: str,
        order: MappedTable | None,
        storage: Storage,
        copy: Lease,
        shards: PartialSet,
    ) -> None:
        super().__init__(table, folder, order)
        self._storage = storage
        self._copy = copy
        self._manifest = shards.manifest
        self._shards = weakref.proxy(shards)  # which has this table
        self._partial: PartialCopy | None = None
        self._is_away = np.ones(len(table.files), bool)
        """The files that are not finished."""
        self._looked_at = float("-inf")
        self.look()

    def look(self) -> int:
        """Maps the files that were finished since the last call. Returns how many files are still unfinished."""
        self._looked_at = time.monotonic()
        if self._partial is None and self._is_away.any():
            self._partial = self._map_unfinished()
        for number in np.flatnonzero(self._is_away).tolist():
            entry = self.table.files[number]
            if self._copy.has(entry):
                try:
                    # Another thread may do the same: then one mapping of the file replaces an equal one.
                    self.map_file(number, open_checked(self.path_of(entry), entry, self._manifest.sample_shape))
                except FormatError:  # damaged, or gone since: it will be copied again
                    continue
                self._is_away[number] = False
        if not (count := int(self._is_away.sum())):
            self._partial = None
        return count

    def _map_unfinished(self) -> PartialCopy | None:
        """Maps the unfinished files. Returns None if they do not all exist yet, or if blocks are not whole rows."""
        partial = PartialCopy.find(self._copy.path, self._manifest)
        blocks = [partial.blocks[entry] for entry in self.table.files] if partial else []
        self._first_blocks = np.array([each.first for each in blocks])
        self._block_rows = np.array([each.num_rows for each in blocks])
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
        """Returns the state of each sample's block, or _WHOLE. Calls `look` if the last call is a second ago."""
        if not self._is_away.any():
            return np.full(len(indices), _WHOLE)
        stored = self.stored(indices)
        files = self.table.locate(stored)[0]
        if self._is_away[files].any() and time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self.look()
        states = np.where(self._is_away[files], MISSING, _WHOLE)
        if (partial := self._partial) is not None:
            blocks = self._first_blocks[files] + (stored - self.table.starts[files]) // self._block_rows[files]
            states = np.where(states == _WHOLE, _WHOLE, partial.states[blocks])
        return states

    @property
    def file_rows(self) -> tuple[NDArray[np.uint8], ...]:
        """The rows of each file, as `MappedTable.file_rows`. Raises FormatError while a file is not in the copy."""
        if self.look():
            missing = self.table.files[int(np.argmax(self._is_away))]
            raise FormatError(f"{self.path_of(missing)}: this shard is not copied yet: wait until the copy is complete")
        return super().file_rows

    def lent(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return None if (self._states(indices) != _WHOLE).any() else super().lent(indices)

    def copy(self, indices: NDArray[np.int64], out: NDArray[np.uint8], name: str = "", lines: Places = None) -> None:
        """Copies rows, as `MappedTable.copy`. Reads rows that the copy lacks from the storage, one after the other.

        Raises an OSError that names the sample that could not be read, FormatError if a row is wrong in the storage.
        """
        states = self._states(indices)
        if (states == _WHOLE).all():
            super().copy(indices, out, name, lines)
            return
        lines = np.arange(len(indices)) if lines is None else lines
        is_here = (states == _WHOLE) | (states == THERE)
        super().copy(indices[is_here], out, name, lines[is_here])
        # Samples that no process is fetching come first.
        for number in sorted(np.flatnonzero(~is_here).tolist(), key=states.__getitem__):
            self._fetch(int(indices[number]), out[lines[number]])
        doubted, places = indices[states != _WHOLE], lines[states != _WHOLE]
        expected = self._shards.copy_crc32s(self.table.name, doubted)
        for sample, line, crc in zip(doubted.tolist(), places.tolist(), expected.tolist(), strict=True):
            if crc32(out[line]) != crc:
                self._read_again(sample, out[line], crc)

    def _read_again(self, sample: int, out: NDArray[np.uint8], expected: int) -> None:
        """Reads a row that has a wrong crc32 from the storage. Raises FormatError if it is wrong there, too."""
        fetch(self, self._storage, sample, out)
        if (found := crc32(out)) != expected:
            raise wrong_row(self._shards, self.table.name, sample, expected, found, self._storage.path_of)

    def copy_windows(
        self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows, shape: SampleShape
    ) -> None:
        states = self._states(indices)
        if (states == _WHOLE).all():
            super().copy_windows(indices, out, windows, shape)
            return
        places = np.split(out, (windows.num_pixels * shape[2]).cumsum()[:-1])
        for number in np.argsort(states, kind="stable").tolist():
            one, place = slice(number, number + 1), places[number]
            if states[number] == _WHOLE:
                super().copy_windows(indices[one], place, windows[one], shape)
                continue
            rows, columns = windows.part(number)
            image = np.empty(shape, np.uint8)
            if self._partial is None and self.locate_one(int(indices[number]))[0].file not in self._storage.damaged:
                lines = image[rows].reshape(-1)  # no more than is needed, as from a set that is not copied
                fetch(self, self._storage, int(indices[number]), lines, rows.start * image[0].nbytes)
            else:
                self.copy(indices[one], image.reshape(1, -1))
            np.copyto(place.reshape(rows.stop - rows.start, -1, shape[2]), image[rows, columns])

    def _fetch(self, sample: int, out: NDArray[np.uint8]) -> None:
        """Fills `out` with a sample's row, as the function `fetch`.

        If the sample's file is unfinished, fetches whole blocks, and writes them into the file for all processes.
        """
        if (partial := self._partial) is None:
            fetch(self, self._storage, sample, out)
            return
        entry, offset = self.locate_one(sample)
        blocks = partial.blocks[entry]
        begin, end = blocks.around(offset, offset + self.table.row_nbytes)
        start, stop = blocks.start(begin), blocks.start(end)
        partial.wait(entry, start, stop)
        if (partial.states_of(entry, start, stop) == THERE).all():
            super().copy(np.array([sample]), out.reshape(1, -1))
            return

        def read_into(_: FileEntry, begin: int, buffer: memoryview) -> None:
            fetch(self, self._storage, sample, np.frombuffer(buffer, np.uint8), begin - offset)

        def add(entry: FileEntry, begin: int, buffer: memoryview) -> None:
            with contextlib.suppress(OSError, CacheError):  # finished, or the disk is full: the sample is here anyway
                try:
                    partial.add(entry, begin, buffer)
                except (OSError, CacheError):
                    partial.mark(entry, MISSING, begin, begin + len(buffer))  # or others would wait for it
                    raise

        data = np.frombuffer(partial.fetch(entry, start, stop, read_into, add), np.uint8)
        out[:] = data[offset - start :][: len(out)]


def fetch(table: MappedTable, storage: Storage, sample: int, out: NDArray[np.uint8], first: int = 0) -> None:
    """Fills `out` with bytes of a sample's row in the storage, from byte `first` on. Errors name the sample."""
    entry, offset = table.locate_one(sample)
    try:
        storage.read_into(entry, offset + first, out.data.cast("B"))
    except FormatError as error:  # the file has another length
        raise FormatError(f"{error}; {table.table.what(sample)}: {WAYS_OUT}") from None
    except OSError as error:
        raise OSError(error.errno, f"{table.table.what(sample)}: {error.strerror}", error.filename) from None


class PartialSet(ShardSet):
    """A ShardSet of the unfinished `copy`. Samples that the copy lacks are read from `storage`.

    If the storage fails, reading raises an OSError that names the sample. The constructor fetches and checks an index
    or order that the copy lacks.
    """

    def __init__(self, storage: Storage, manifest: Manifest, split: str, copy: Lease) -> None:
        self._storage = storage
        self._copy = copy
        super().__init__(copy.path, manifest, split)

    def _map(self, table: StoredTable) -> MappedTable:
        if not isinstance(table.files[0], ShardEntry):  # the index, an order or checksums
            return super()._map(table)
        order = None if table.order is None else self._mapped_of(table.order)
        with naming(self.path_of(table.files[0])):
            return PartialTable(table, self.folder, order, self._storage, self._copy, self)

    def look(self) -> int:
        """Maps the shards that were finished since the last call. Returns how many are still unfinished."""
        return sum(cast(PartialTable, self.mapped(name)).look() for name in self.main_tables)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the set as its copy or, while that is incomplete, as the source, which must be a folder."""
        if not self.look() and os.path.lexists(self.path / MANIFEST_NAME):
            return super().__reduce__()
        if isinstance(self._storage, FolderStorage):
            return partial(open_shards, digest=self.digest), (self._storage.name, self.split)
        raise TypeError(
            f"a set that is being copied from {self._storage.name} cannot be pickled or copied: wait until the copy is "
            "complete, or open it in the process that uses it"
        )

    def open_file(self, entry: FileEntry, folder: FolderHandle | None = None) -> OpenFile:
        """Opens a file of the copy, or fetches it into a nameless temporary file."""
        if self._copy.has(entry):
            with contextlib.suppress(FormatError):  # damaged: it will be copied again
                return super().open_file(entry)

        def read(offset: int, buffer: memoryview) -> int:
            self._storage.read_into(entry, offset, buffer)
            return len(buffer)

        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_nameless())
            found = pour(read, entry.nbytes, partial(write_all, file.fileno()))
            check_sha256(self._storage.path_of(entry), entry, found)
            stack.pop_all()
        return file


class PartialReader(WrappingReader):
    """Reads a PartialSet, and changes to the complete copy at the start of the first epoch after it is complete.

    `settle` returns a reader of the complete copy, or None if the copy cannot be read alone yet.
    """

    num_threads = _STORAGE_THREADS
    whole_lines = 1

    def __init__(self, shards: PartialSet, settle: Callable[[], Reader | None]) -> None:
        # Without tables to announce: the kernel cannot read ahead what is not here yet.
        self._first = MappedReader(shards, ())
        super().__init__(self._first)
        self.name = "staged"
        self._settle = settle

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        self._reader.copy(name, indices, out, lines)

    def copy_windows(self, indices: NDArray[np.int64], windows: Windows, out: NDArray[np.uint8]) -> None:
        self._reader.copy_windows(indices, windows, out)

    def make_pixels(
        self, request: Request, views: Views, numbers: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> None:
        self._reader.make_pixels(request, views, numbers, indices)

    def begin_epoch(self) -> bool:
        if self._reader is self._first and (settled := self._settle()) is not None:
            self._reader, self.name = settled, settled.name
        return super().begin_epoch()

    def counts(self) -> ReadCounts:
        readers = {self._first, self._reader}
        return ReadCounts(*map(sum, zip(*(reader.counts() for reader in readers), strict=True)))
