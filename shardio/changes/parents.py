"""Reads a parent set: its manifest, indexes and orders, all compared with their checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.changes.draft import ArrayDraft, Draft, OldFile, SplitDraft, StoredRows
from shardio.errors import FormatError
from shardio.format.entries import ArrayEntry, FileEntry, IndexEntry, OrderEntry, ShardEntry, SplitEntry
from shardio.format.layout import HEADER_NBYTES, SampleShape
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.format.opening import check_sha256, open_checked
from shardio.sets.index import check_labels
from shardio.sets.names import find_folder


@dataclass(frozen=True)
class Parent:
    """An existing set in `folder`, an absolute path, from which a new set is made."""

    folder: Path
    manifest: Manifest

    @cached_property
    def draft(self) -> Draft:
        """Returns a draft that equals the set. Raises FormatError if an index or an order is damaged."""
        manifest = self.manifest
        return Draft(
            manifest.sample_shape,
            manifest.classes,
            manifest.class_names,
            {name: self._split(split) for name, split in manifest.splits.items()},
            (OldFile(self.folder, manifest.rejects),),
        )

    def _split(self, split: SplitEntry) -> SplitDraft:
        orders = [(entry, self._order(entry)) for entry in split.orders]
        return SplitDraft(
            rows=self._rows(split.index),
            index=OldFile(self.folder, split.index),
            pixels=self._stored(split.shards, split.order, orders),
            arrays={
                name: ArrayDraft(array.kind, array.row, self._stored(array.shards, array.order, orders, array))
                for name, array in split.arrays.items()
            },
            squashed=split.squashed,
        )

    def _rows(self, entry: IndexEntry) -> NDArray[np.void]:
        rows = np.frombuffer(self._read(entry), entry.dtype, offset=HEADER_NBYTES)
        check_labels(rows, len(self.manifest.classes), self.folder / entry.file)
        return rows

    def _order(self, entry: OrderEntry) -> NDArray[np.int64]:
        return np.frombuffer(self._read(entry), np.int64, offset=HEADER_NBYTES)

    def _stored(
        self,
        shards: Sequence[ShardEntry],
        number: int | None,
        orders: Sequence[tuple[OrderEntry, NDArray[np.int64]]],
        array: ArrayEntry | None = None,
    ) -> StoredRows:
        crc32s = () if array is None else (OldFile(self.folder, array.crc32),)
        stored = StoredRows(tuple(OldFile(self.folder, shard) for shard in shards), None, crc32s)
        if number is None:
            return stored
        entry, order = orders[number]
        if not (order.min() >= 0 and order.max() < stored.num_rows):
            at = int(np.argmax((order < 0) | (order >= stored.num_rows)))
            raise FormatError(
                f"{self.folder / entry.file}: sample {at}: expected a stored row from 0 to {stored.num_rows - 1}, "
                f"found {order[at]}"
            )
        return StoredRows(stored.shards, order, crc32s)

    def _read(self, entry: FileEntry) -> bytes:
        return read_held(OldFile(self.folder, entry), self.manifest.sample_shape)


def read_held(held: OldFile[FileEntry], sample_shape: SampleShape | None) -> bytes:
    """Returns all bytes of a file. Raises FormatError if the bytes differ from the manifest."""
    with open_checked(held.path, held.entry, sample_shape) as file:
        data = file.readall()
    check_sha256(held.path, held.entry, hashlib.sha256(data).hexdigest())
    return data


def open_parent(place: str | os.PathLike[str]) -> Parent:
    """Returns the set in the folder `place`, or with the name `place` in the catalogue. Raises SetNotFoundError,
    FormatError."""
    folder = Path(os.path.realpath(find_folder(place)))
    return Parent(folder, load_manifest(folder))
