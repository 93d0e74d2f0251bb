"""Reads and checks whole indexes of a set. An index has all data of the samples except pixels and arrays.

Also computes the counts that commands print.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.entries import ArrayEntry, FileEntry, IndexEntry, RowsEntry, ShardEntry, SplitEntry
from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_split
from shardio.format.opening import check_header, check_sha256
from shardio.sets.selection import Numbers, Selection
from shardio.sets.storage import Storage, open_storage


@dataclass(frozen=True, eq=False)
class IndexedSet:
    """A set's manifest, with the indexes and selected samples of some of its splits."""

    place: str
    """The set's folder or URL, for messages."""
    manifest: Manifest
    splits: Mapping[str, NDArray[np.void]]
    """The index of each split, one row per sample."""
    found: Mapping[str, NDArray[np.int64]]
    """The indices of the selected samples of each split."""


def read_indexes(place: str, splits: Sequence[str], selection: Selection) -> IndexedSet:
    """Returns the indexes of `splits`, or of all splits if empty, and the samples that `selection` selects.

    Raises SetNotFoundError if the set or a split does not exist, FormatError or OSError if a file cannot be read.
    """
    with closing(open_storage(place)) as storage:
        manifest = storage.load_manifest()
        for name in splits:
            check_split(storage.name, manifest, name)
        chosen = [name for name in manifest.splits if not splits or name in splits]
        indexes = {name: read_index(storage, manifest, name) for name in chosen}
        found = {
            name: selection.samples(rows, manifest, numbers_of(storage, manifest.splits[name]))
            for name, rows in indexes.items()
        }
        return IndexedSet(storage.name, manifest, indexes, found)


def read_index(storage: Storage, manifest: Manifest, split: str) -> NDArray[np.void]:
    """Returns the index of a split, one row per sample.

    Raises FormatError if the index differs from the manifest or a label is not a class, OSError if it cannot be read.
    """
    entry = manifest.splits[split].index
    rows = read_rows(storage, entry)
    if manifest.classes and entry.has_label:
        check_range(rows["label"], len(manifest.classes), "a label", storage.path_of(entry))
    return rows


def numbers_of(storage: Storage, split: SplitEntry) -> Numbers:
    """Returns, for each array of shape () of a split, a function that reads its values: the numbers for a Selection."""
    found = [(name, array) for name, array in split.arrays.items() if not array.row.shape]
    return {name: partial(_read_values, storage, split, array) for name, array in found}


def _read_values(storage: Storage, split: SplitEntry, array: ArrayEntry) -> NDArray[Any]:
    values: NDArray[Any] = np.concatenate([read_rows(storage, shard) for shard in array.shards])
    if array.order is None:
        return values
    entry = split.orders[array.order]
    order = read_rows(storage, entry)
    check_range(order, len(values), "a stored row", storage.path_of(entry))
    return values.take(order)


def read_rows(storage: Storage, entry: IndexEntry | RowsEntry | ShardEntry) -> NDArray[Any]:
    """Returns the rows of a file, with unchecked values. Raises FormatError if it differs from the manifest."""
    data = read_checked(storage, entry)
    check_header(storage.path_of(entry), entry.header(), data[:HEADER_NBYTES].tobytes())
    return data[HEADER_NBYTES:].view(entry.dtype)


def read_checked(storage: Storage, entry: FileEntry) -> NDArray[np.uint8]:
    """Returns all bytes of a file, uint8 (nbytes,). Raises FormatError if its size or sha256 is wrong."""
    try:
        data = np.empty(entry.nbytes, np.uint8)
    except MemoryError:
        storage.read_into(entry, 0, memoryview(bytearray(1)))  # raises FormatError if the file is not that large
        raise
    storage.read_into(entry, 0, data.data)
    check_sha256(storage.path_of(entry), entry, hashlib.sha256(data.data).hexdigest())
    return data


def check_range(numbers: NDArray[np.int64], stop: int, what: str, path: object) -> None:
    """Raises FormatError, with `path` and `what` in the message, unless all `numbers` are from 0 to `stop` - 1."""
    if text := find_outside(numbers, stop, what)[1]:
        raise FormatError(f"{path}: {text}")


def find_outside(numbers: NDArray[np.int64], stop: int, what: str) -> tuple[NDArray[np.int64], str]:
    """Returns the positions of `numbers` outside of 0 to `stop` - 1, and an error text about the first of them, or "".
    `what` names in the text what the numbers are."""
    wrong = np.flatnonzero((numbers < 0) | (numbers >= stop))
    text = f"sample {wrong[0]}: expected {what}, 0 to {stop - 1}, found {numbers[wrong[0]]}" if wrong.size else ""
    return wrong, text


# --- counts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum of some numbers. NaNs are left out, and counted in `num_missing`."""

    minimum: float
    median: float
    maximum: float
    num_missing: int = 0


def spread_of(values: NDArray[Any]) -> Spread | None:
    """Returns the Spread of `values`; None if all of them are NaN, or there are none. Integers stay integers."""
    values = values.view(np.uint8) if values.dtype.kind == "b" else values
    there = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    if not len(there):
        return None
    with np.errstate(invalid="ignore"):  # between -inf and inf there is no number
        middle = float(np.median(there))
    median: float = int(middle) if values.dtype.kind in "iu" and middle.is_integer() else middle
    return Spread(there.min().item(), median, there.max().item(), len(values) - len(there))


def spreads_of(rows: NDArray[np.void], numbers: Numbers) -> dict[str, Spread]:
    """Returns Spreads by name: "source_width", "source_height" and "width / height" of the source images whose sizes
    are in the index `rows`, and the name of each array in `numbers`. Leaves out names without values."""
    widths, heights = rows["source_width"].astype(np.int64), rows["source_height"].astype(np.int64)
    known = (widths > 0) & (heights > 0)
    widths, heights = widths[known], heights[known]
    values = {"source_width": widths, "source_height": heights, "width / height": widths / heights}
    values |= {name: read() for name, read in numbers.items()}
    return {name: spread for name, one in values.items() if (spread := spread_of(one)) is not None}


def count_classes(labels: NDArray[np.int64], num_classes: int) -> list[tuple[int, int]]:
    """Returns (label, number of samples) for each class or, if `num_classes` is 0, each label found. Rarest first."""
    if num_classes:
        counts = np.bincount(labels, minlength=num_classes)
        found = np.arange(num_classes)
    else:
        found, counts = np.unique(labels, return_counts=True)
    rarest = np.argsort(counts, kind="stable")
    return list(zip(found[rarest].tolist(), counts[rarest].tolist(), strict=True))
