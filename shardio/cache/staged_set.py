"""A split that is read while it is copied into a cache: finished shards from the copy, the others from the source.

Shards are mapped as they are finished. Another process may be copying them, so only the copy's folder shows which
shards are finished.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardio.cache.leases import Lease
from shardio.errors import FormatError
from shardio.format.entries import FileEntry
from shardio.format.layout import MANIFEST_NAME, SampleShape
from shardio.format.manifest import Manifest
from shardio.format.opening import check_sha256, open_checked
from shardio.kernels.rowcopy import Places, Windows
from shardio.reading.layout import StoredTable
from shardio.reading.mapped_table import MappedTable
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.storage import FolderStorage, Storage
from shardio.system.files import write_all
from shardio.system.opening import OpenFile, open_nameless
from shardio.system.pour import pour

# The time between two looks for finished shards.
_LOOK_SECONDS = 1.0


class StagedTable(MappedTable):
    """A table whose files are mapped as they appear, whole, in `copy`. Rows of other files are read from `storage`."""

    def __init__(
        self,
        table: StoredTable,
        folder: str,
        order: MappedTable | None,
        storage: Storage,
        copy: Lease,
        sample_shape: SampleShape | None,
    ) -> None:
        super().__init__(table, folder, order)
        self._storage = storage
        self._copy = copy
        self._sample_shape = sample_shape
        self._is_away = np.ones(len(table.files), bool)
        self._looked_at = float("-inf")
        self.look()

    def look(self) -> int:
        """Maps the files that have appeared since the last call. Returns how many files are still missing."""
        self._looked_at = time.monotonic()
        for number in np.flatnonzero(self._is_away).tolist():
            entry = self.table.files[number]
            if self._copy.has(entry):
                try:
                    # Another thread may do the same: then one mapping of the file replaces an equal one.
                    self.place(number, open_checked(self.path_of(entry), entry, self._sample_shape))
                except FormatError:  # damaged, or gone since: it will be copied again
                    continue
                self._is_away[number] = False
        return int(self._is_away.sum())

    def _away_of(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which samples have rows that are not in the copy. Calls `look` first if it is due."""
        if not self._is_away.any():
            return np.zeros(len(indices), bool)
        files = self.table.locate(self.stored(indices))[0]
        if self._is_away[files].any() and time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self.look()
        away: NDArray[np.bool_] = self._is_away[files]
        return away

    @property
    def file_rows(self) -> tuple[NDArray[np.uint8], ...]:
        """See `MappedTable.file_rows`. Raises FormatError while a file is not in the copy."""
        if self.look():
            missing = self.table.files[int(np.argmax(self._is_away))]
            raise FormatError(f"{self.path_of(missing)}: this shard is not copied yet: wait until the copy is complete")
        return super().file_rows

    def row(self, sample: int) -> NDArray[np.uint8]:
        index = np.array([sample])
        if not self._away_of(index)[0]:
            return super().row(sample)
        rows = np.empty((1, self.table.row_nbytes), np.uint8)
        self.copy(index, rows)
        rows.flags.writeable = False
        row: NDArray[np.uint8] = rows[0]
        return row

    def copy(self, indices: NDArray[np.int64], out: NDArray[np.uint8], name: str = "", lines: Places = None) -> None:
        """See `MappedTable.copy`. Reads rows of missing files from the storage, one after the other.

        Raises an OSError that names the sample that could not be read.
        """
        away = self._away_of(indices)
        if not away.any():
            super().copy(indices, out, name, lines)
            return
        lines = np.arange(len(indices)) if lines is None else lines
        super().copy(indices[~away], out, name, lines[~away])
        for index, line in zip(indices[away].tolist(), lines[away].tolist(), strict=True):
            fetch(self, self._storage, index, out[line])

    def copy_windows(
        self,
        indices: NDArray[np.int64],
        out: NDArray[np.uint8],
        windows: Windows,
        shape: SampleShape,
        places: Places = None,
    ) -> None:
        away = self._away_of(indices)
        if not away.any():
            super().copy_windows(indices, out, windows, shape, places)
            return
        _, width, channels = shape
        nbytes = windows.num_pixels * channels
        starts = nbytes.cumsum() - nbytes if places is None else places
        here = np.flatnonzero(~away)
        super().copy_windows(indices[here], out, windows[here], shape, starts[here])
        for number in np.flatnonzero(away).tolist():
            place = out[starts[number] : starts[number] + nbytes[number]]
            rows, columns = windows.part(number)
            lines = np.empty((rows.stop - rows.start, width, channels), np.uint8)
            fetch(self, self._storage, int(indices[number]), lines.reshape(-1), rows.start * width * channels)
            np.copyto(place.reshape(len(lines), -1, channels), lines[:, columns])


def fetch(table: MappedTable, storage: Storage, sample: int, out: NDArray[np.uint8], first: int = 0) -> None:
    """Reads n bytes of a sample's row, from its byte `first` on, from the storage into `out`, uint8 (n,).

    Raises an OSError that names the sample.
    """
    entry, offset = table.locate_one(sample)
    try:
        storage.read_into(entry, offset + first, out.data.cast("B"))
    except OSError as error:
        raise OSError(error.errno, f"{table.table.what(sample)}: {error.strerror}", error.filename) from None


class StagedSet(ShardSet):
    """A ShardSet of an unfinished `copy`. Samples of missing shards are read from `storage`.

    It can be used like any other, by any number of threads; `path` is the path of the copy. Reading raises an OSError
    that names the sample if the storage fails. An index or order that is not in the copy is fetched and
    checked by the constructor.
    """

    def __init__(self, storage: Storage, manifest: Manifest, split: str, copy: Lease) -> None:
        self._storage = storage
        self._copy = copy
        super().__init__(copy.path, manifest, split)

    def _map(self, table: StoredTable) -> StagedTable:
        order = self._mapped_orders.get(table.order)
        return StagedTable(table, self.folder, order, self._storage, self._copy, self.manifest.sample_shape)

    def _map_small(self, table: StoredTable) -> MappedTable:
        mapped = MappedTable(table, self.folder, self._mapped_orders.get(table.order))
        for number, entry in enumerate(table.files):
            mapped.place(number, self._open_or_fetch(entry))
        return mapped

    def look(self) -> int:
        """Maps the shards that have appeared since the last call. Returns how many shards are still missing."""
        return sum(cast(StagedTable, self.mapped(name)).look() for name in self.main_tables)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle opens the copy again, or the source while the copy is incomplete."""
        if not self.look() and os.path.lexists(self.path / MANIFEST_NAME):
            return super().__reduce__()
        if isinstance(self._storage, FolderStorage):
            return partial(open_shards, digest=self.digest), (self._storage.name, self.split)
        raise TypeError(
            f"a set that is being copied from {self._storage.name} cannot be pickled or copied: wait until the copy is "
            "complete, or open it in the process that uses it"
        )

    def _open_or_fetch(self, entry: FileEntry) -> OpenFile:
        if self._copy.has(entry):
            with contextlib.suppress(FormatError):  # damaged: it will be copied again
                return self.open_file(entry)

        def read(offset: int, buffer: memoryview) -> int:
            self._storage.read_into(entry, offset, buffer)
            return len(buffer)

        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_nameless())
            found = pour(read, entry.nbytes, partial(write_all, file.fileno()))
            check_sha256(self._storage.path_of(entry), entry, found)
            stack.pop_all()
        return file
