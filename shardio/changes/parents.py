"""Reads a parent set: its manifest, indexes and orders, all compared with their checksums."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.changes.draft import ArrayDraft, Draft, OldFile, SplitDraft, StoredRows
from shardio.format.entries import ArrayEntry, OrderEntry, SplitEntry
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.sets.index import check_range, read_index, read_rows
from shardio.sets.names import local_folder
from shardio.sets.storage import FolderStorage


@dataclass(frozen=True)
class Parent:
    """An existing set in `folder`, an absolute path, from which a new set is made."""

    folder: Path
    manifest: Manifest

    @cached_property
    def draft(self) -> Draft:
        """Returns a draft that equals the set. Raises FormatError if an index or an order is damaged."""
        manifest = self.manifest
        with closing(FolderStorage(self.folder)) as storage:
            splits = {name: self._split(storage, name) for name in manifest.splits}
        rejects = () if manifest.rejects is None else (OldFile(self.folder, manifest.rejects),)
        return Draft(manifest.sample_shape, manifest.classes, manifest.class_names, splits, rejects)

    def _split(self, storage: FolderStorage, name: str) -> SplitDraft:
        split = self.manifest.splits[name]
        orders = [(entry, read_rows(storage, entry)) for entry in split.orders]
        return SplitDraft(
            rows=read_index(storage, self.manifest, name),
            index=OldFile(self.folder, split.index),
            pixels=self._stored(split, orders),
            arrays={
                name: ArrayDraft(array.kind, array.row, self._stored(array, orders))
                for name, array in split.arrays.items()
            },
            squashed=split.squashed,
        )

    def _stored(
        self, rows: SplitEntry | ArrayEntry, orders: Sequence[tuple[OrderEntry, NDArray[np.int64]]]
    ) -> StoredRows:
        order = None
        if rows.order is not None:
            entry, order = orders[rows.order]
            check_range(order, rows.num_rows, "a stored row", self.folder / entry.file)
        crc32s = (OldFile(self.folder, rows.crc32),) if isinstance(rows, ArrayEntry) else ()
        return StoredRows(tuple(OldFile(self.folder, shard) for shard in rows.shards), order, crc32s)


def open_parent(place: str | os.PathLike[str]) -> Parent:
    """Returns the set in the folder `place`. Raises SetNotFoundError, FormatError."""
    folder = Path(os.path.realpath(local_folder(place)))
    return Parent(folder, load_manifest(folder))
