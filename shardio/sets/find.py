"""Finds samples of a set by its indexes alone, wherever it lies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_split
from shardio.sets.index import read_index
from shardio.sets.names import is_url
from shardio.sets.selection import Selection
from shardio.sets.storage import open_storage


@dataclass(frozen=True, eq=False)
class IndexedSplit:
    """A split's index, one row per sample."""

    name: str
    rows: NDArray[np.void]


@dataclass(frozen=True, eq=False)
class IndexedSet:
    """The indexes of some splits of a set: all that is known of their samples without a look at pixels."""

    place: str
    """The folder or URL, as it may be shown."""
    manifest: Manifest
    splits: tuple[IndexedSplit, ...]

    def find(self, selection: Selection) -> list[NDArray[np.int64]]:
        """Returns the selected samples of each split, ascending. Raises ValueError if there is no such class or
        column."""
        return [selection.samples(split.rows, self.manifest) for split in self.splits]


def read_indexes(place: str | os.PathLike[str], splits: Sequence[str] = ()) -> IndexedSet:
    """Reads the indexes of these splits, or of all, of the set in a folder, at a URL or of a name in the catalogue.

    Raises SetNotFoundError if there is no set or no such split, FormatError if it is damaged, OSError if it cannot be
    read.
    """
    text = os.fspath(place)
    with closing(open_storage(text if is_url(text) else Path(text))) as storage:
        manifest = storage.load_manifest()
        for name in splits:
            check_split(storage.name, manifest, name)
        chosen = [name for name in manifest.splits if not splits or name in splits]
        read = tuple(IndexedSplit(name, read_index(storage, manifest, name)) for name in chosen)
        return IndexedSet(storage.name, manifest, read)
