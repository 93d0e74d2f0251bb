"""The entries of a manifest for each file, array and split, as frozen values.

`content` of an entry returns the entry's JSON object. `files` are the files that belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from shardio.format.layout import (
    CRC32_ROW,
    HEADER_NBYTES,
    LABEL_ROW,
    LABELS_NAME,
    ORDER_ROW,
    ArrayKind,
    RowType,
    index_dtype,
    index_header,
)


@dataclass(frozen=True)
class FileEntry:
    """A published file: its name in the set's folder, its size in bytes, and its sha256 (64 hex digits)."""

    file: str
    nbytes: int
    sha256: str

    def header(self) -> bytes:
        """Returns the bytes that the file must start with; b"" if it may start with any bytes."""
        return b""

    def content(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class ShardEntry(FileEntry):
    """A file with a row of the type `row` for each of `num_samples` samples: its pixels, or its value of an array."""

    num_samples: int
    row: RowType

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers of which a row consists."""
        return np.dtype(self.row.dtype)

    def header(self) -> bytes:
        return self.row.file_header(self.num_samples)

    def content(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "row"}  # the set or the array has it


@dataclass(frozen=True)
class TableEntry(FileEntry):
    """An index, an order or checksums: a file that is small next to the pixels.

    No checksum of a sample covers its content, so the sha256 of the whole file is compared when the file is opened.
    """


@dataclass(frozen=True)
class RowsEntry(TableEntry):
    """A table of numbers, one per row. The number of rows follows from the file's size."""

    row: ClassVar[RowType]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.row.dtype)

    def header(self) -> bytes:
        return self.row.file_header((self.nbytes - HEADER_NBYTES) // self.row.nbytes)


@dataclass(frozen=True)
class OrderEntry(RowsEntry):
    """A table with the stored row of each sample of a split, int64."""

    row = ORDER_ROW


@dataclass(frozen=True)
class Crc32Entry(RowsEntry):
    """A table with the crc32 of each stored row of an array, uint32."""

    row = CRC32_ROW


@dataclass(frozen=True)
class IndexEntry(TableEntry):
    key_nbytes: int
    has_label: bool = True
    """Whether rows of the index have a label."""

    @property
    def dtype(self) -> np.dtype[np.void]:
        return index_dtype(self.key_nbytes, has_label=self.has_label)

    def header(self) -> bytes:
        return index_header((self.nbytes - HEADER_NBYTES) // self.dtype.itemsize, self.dtype)

    def content(self) -> dict[str, Any]:
        content = dict(vars(self))
        # One text for one content: keys that would say nothing are left out.
        if not content.pop("has_label"):
            content["label"] = False
        return content


@dataclass(frozen=True)
class RejectsEntry(FileEntry):
    num_rejects: int


@dataclass(frozen=True)
class ArrayEntry:
    """An array of a split: a value of type `row` for each sample, stored in the array's own `shards`."""

    kind: ArrayKind
    row: RowType
    shards: tuple[ShardEntry, ...]
    crc32: Crc32Entry
    order: int | None = None
    """The position of the array's order among the split's `orders`; None if sample i is in stored row i."""

    @property
    def num_rows(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return (self.crc32, *self.shards)

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "kind": self.kind,
            "dtype": self.row.dtype,
            "shape": list(self.row.shape),
            "crc32": self.crc32.content(),
            "shards": [shard.content() for shard in self.shards],
        }
        if self.order is not None:
            content["order"] = self.order
        return content


@dataclass(frozen=True)
class SplitEntry:
    """The samples of a split: an index of one row per sample, arrays and, unless the set has no pixels, shards.

    The pixels of sample i are row i of the shards, counted over all shards; or, with an `order`, the row that the table
    orders[order] gives for sample i.
    """

    num_samples: int
    index: IndexEntry
    shards: tuple[ShardEntry, ...]
    orders: tuple[OrderEntry, ...] = ()
    order: int | None = None
    """The position of the pixels' order among `orders`; None if sample i is in stored row i."""
    arrays: Mapping[str, ArrayEntry] = field(default_factory=dict)
    squashed: bool = False
    """Whether pictures were resized to the sample's shape regardless of their aspect ratios."""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files of the split: first the index and orders, which opening reads, then shards and arrays."""
        arrays = self.arrays.values()
        return (self.index, *self.orders, *self.shards, *chain.from_iterable(array.files for array in arrays))

    @property
    def num_rows(self) -> int:
        """The number of stored rows of pixels. Without an order, it is the number of samples."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def label_row(self) -> RowType | None:
        """The type of a label: int64 in the index, or float32 in the array `labels`; None if there are no labels."""
        if self.index.has_label:
            return LABEL_ROW
        return self.arrays[LABELS_NAME].row if LABELS_NAME in self.arrays else None

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "num_samples": self.num_samples,
            "index": self.index.content(),
            "shards": [shard.content() for shard in self.shards],
        }
        if self.orders:
            content["orders"] = [order.content() for order in self.orders]
        if self.order is not None:
            content["order"] = self.order
        if self.arrays:
            content["arrays"] = {name: array.content() for name, array in self.arrays.items()}
        if self.squashed:
            content["squashed"] = True
        return content
