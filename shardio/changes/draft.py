"""Describes a set to be made from files of other sets. No I/O happens here.

Stored rows never move within their shards. An order says which stored rows are samples, and in which order. Shards
without samples are left out, and so are all but one of equal shards, if there is an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.errors import ConvertError
from shardio.format.entries import Crc32Entry, FileEntry, IndexEntry, RejectsEntry, ShardEntry
from shardio.format.layout import (
    LABELS_NAME,
    MAX_ARRAYS,
    ArrayKind,
    RowType,
    SampleShape,
    array_shard_name,
    has_label,
    index_dtype,
    is_safe_name,
)

AnyEntry = TypeVar("AnyEntry", bound=FileEntry, covariant=True)


@dataclass(frozen=True)
class OldFile(Generic[AnyEntry]):
    """A file of an old set that the new set shares, with the same bytes."""

    folder: Path
    entry: AnyEntry

    @property
    def path(self) -> Path:
        return self.folder / self.entry.file


class UsedShards(NamedTuple):
    """The shards that have samples. `order` has the row of each sample, counted over these shards; None if sample i is
    in row i."""

    shards: tuple[OldFile[ShardEntry], ...]
    order: NDArray[np.int64] | None
    rows: NDArray[np.bool_] | None
    """For each old stored row, whether it is in these shards; None if all rows are."""


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The shards with the rows of the pixels or of an array, and the row of each sample."""

    shards: tuple[OldFile[ShardEntry], ...]
    order: NDArray[np.int64] | None
    """The stored row of each sample; None if sample i is in row i, and every row is a sample."""
    crc32s: tuple[OldFile[Crc32Entry], ...] = ()
    """The files of an array's checksums, for all rows in order; empty for pixels, whose checksums are in the index."""

    @property
    def num_rows(self) -> int:
        return sum(shard.entry.num_samples for shard in self.shards)

    def locate(self, sample: int) -> tuple[OldFile[ShardEntry], int]:
        """Returns (shard of a sample, row of the sample in that shard)."""
        row = sample if self.order is None else int(self.order[sample])
        for shard in self.shards:
            if row < shard.entry.num_samples:
                return shard, row
            row -= shard.entry.num_samples
        raise IndexError(f"sample {sample}: its row is not one of the {self.num_rows} stored rows")

    def take(self, samples: NDArray[np.int64]) -> StoredRows:
        if not self.shards:  # the pixels of a set without any
            return self
        return replace(self, order=samples if self.order is None else self.order[samples])

    def kept(self) -> UsedShards:
        if self.order is None:
            return UsedShards(self.shards, None, None)
        counts = np.array([shard.entry.num_samples for shard in self.shards])
        starts = np.cumsum([0, *counts])
        shard_of = np.searchsorted(starts, self.order, side="right") - 1
        # Merged sets may share shards: of equal ones, the first has the samples of all.
        first: dict[str, int] = {}
        firsts = [first.setdefault(shard.entry.sha256, number) for number, shard in enumerate(self.shards)]
        same = np.array(firsts)[shard_of]
        rows, shard_of = self.order - starts[shard_of] + starts[same], same
        used = np.bincount(shard_of, minlength=len(counts)) > 0
        # Rows after a dropped shard move up by its rows.
        gone = np.cumsum(np.where(used, 0, counts)) - np.where(used, 0, counts)
        order = rows - gone[shard_of]
        shards = tuple(shard for shard, is_used in zip(self.shards, used, strict=True) if is_used)
        is_all = len(order) == counts[used].sum() and np.array_equal(order, np.arange(len(order)))
        return UsedShards(shards, None if is_all else order, None if used.all() else np.repeat(used, counts))


def concatenated(parts: Sequence[StoredRows]) -> StoredRows:
    """Returns the stored rows and the samples of all `parts`, one part after the other."""
    order = None
    if any(part.order is not None for part in parts):
        starts = np.cumsum([0, *(part.num_rows for part in parts)])
        orders = [np.arange(part.num_rows) if part.order is None else part.order for part in parts]
        order = np.concatenate([rows + start for rows, start in zip(orders, starts[:-1], strict=True)])
    shards = tuple(chain.from_iterable(part.shards for part in parts))
    return StoredRows(shards, order, tuple(chain.from_iterable(part.crc32s for part in parts)))


@dataclass(frozen=True, eq=False)
class ArrayDraft:
    kind: ArrayKind
    row: RowType
    stored: StoredRows


@dataclass(frozen=True, eq=False)
class GivenArray:
    """A new array. `blocks` yields its rows in the order of the samples, in arrays (rows of the block, *row.shape)."""

    kind: ArrayKind
    row: RowType
    blocks: Iterable[NDArray[Any]]


@dataclass(frozen=True, eq=False)
class SplitDraft:
    rows: NDArray[np.void]
    """The index, one row per sample."""
    index: OldFile[IndexEntry] | None
    """The old index file if it has exactly these rows; None if a new index has to be written."""
    pixels: StoredRows
    arrays: Mapping[str, ArrayDraft]
    given: Mapping[str, GivenArray] = field(default_factory=dict)
    squashed: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def keys(self) -> list[bytes]:
        keys: list[bytes] = self.rows["key"].tolist()
        return keys

    def take(self, samples: NDArray[np.int64]) -> SplitDraft:
        """Returns a split with the samples `samples`, in this order. A sample may be repeated."""
        if np.array_equal(samples, np.arange(len(self))):
            return self
        arrays = {name: replace(array, stored=array.stored.take(samples)) for name, array in self.arrays.items()}
        return replace(self, rows=self.rows[samples], index=None, pixels=self.pixels.take(samples), arrays=arrays)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The labels in the index, int64 (samples,); None if the index has no labels."""
        return self.rows["label"] if has_label(self.rows.dtype) else None

    def with_labels(self, labels: NDArray[np.int64] | None) -> SplitDraft:
        """Returns a split with `labels` in the index and no array of labels; with None, without labels in the index."""
        if labels is None or self.labels is None:
            rows = np.zeros(len(self), index_dtype(self.rows.dtype["key"].itemsize, has_label=labels is not None))
            for name in ("key", "source_width", "source_height", "crc32"):
                rows[name] = self.rows[name]
        elif np.array_equal(labels, self.labels):
            return self
        else:
            rows = self.rows.copy()
        if labels is None:
            return replace(self, rows=rows, index=None)
        rows["label"] = labels
        arrays = {name: array for name, array in self.arrays.items() if name != LABELS_NAME}
        return replace(self, rows=rows, index=None, arrays=arrays)


@dataclass(frozen=True, eq=False)
class Draft:
    """The content of a set to be made."""

    sample_shape: SampleShape | None
    pixels: str
    classes: tuple[str, ...]
    class_names: tuple[str, ...]
    splits: Mapping[str, SplitDraft]
    rejects: tuple[OldFile[RejectsEntry], ...]
    """The rejects.jsonl files of the old sets. The rejects.jsonl of the new set has the lines of all these files."""

    def with_classes(self, classes: Sequence[str]) -> Draft:
        """Returns a draft with exactly `classes`. Each label becomes the number that its class has in `classes`. Raises
        ConvertError if a sample has a class that is not in `classes`."""
        place = {name: number for number, name in enumerate(classes)}
        numbers = np.array([place.get(name, -1) for name in self.classes], np.int64)
        splits = dict(self.splits)
        for name, split in self.splits.items():
            if (labels := split.labels) is None:
                continue
            if (lost := labels[numbers[labels] < 0]).size:
                raise ConvertError(
                    f"split {name!r}: {lost.size:,} samples have classes that are not listed, such as "
                    f"{self.classes[int(lost[0])]!r}: list their classes, give them other labels, or drop them"
                )
            splits[name] = split.with_labels(numbers[labels])
        names = dict(zip(self.classes, self.class_names, strict=False))
        class_names = tuple(names.get(name, name) for name in classes) if names else ()
        return replace(self, classes=tuple(classes), class_names=class_names, splits=splits)


def check_arrays(draft: Draft) -> None:
    """Raises ConvertError if a split has too many arrays, or if names clash or are too long for files."""
    splits = {name.lower(): name for name in draft.splits}
    for name, split in draft.splits.items():
        if (same := splits[name.lower()]) != name:
            raise ConvertError(
                f"splits {name!r} and {same!r}: names must differ in more than case: convert one of the sets again, "
                "with the name of the split in the other"
            )
        arrays = [*split.arrays, *split.given]
        if len(arrays) > MAX_ARRAYS:
            raise ConvertError(f"split {name!r}: expected at most {MAX_ARRAYS} arrays, found {len(arrays)}: add fewer")
        seen: dict[str, str] = {}
        for array in arrays:
            # Names that differ only in case are one file on some filesystems.
            other = splits.get(f"{name}-{array}".lower())
            if other is not None:
                raise ConvertError(
                    f"array {array!r} of the split {name!r}: its files would have the names of files of the split "
                    f"{other!r}: choose another name"
                )
            if (same := seen.setdefault(array.lower(), array)) != array:
                raise ConvertError(f"arrays {same!r} and {array!r}: names must differ in more than case: rename one")
            if not is_safe_name(array_shard_name(name, array, 999_999)):
                raise ConvertError(
                    f"array {array!r} of the split {name!r}: file names may have at most 200 characters, found "
                    f"{len(array_shard_name(name, array, 999_999))}: choose shorter names"
                )


def check_vectors(before: Draft, after: Draft, where: object) -> None:
    """Raises ConvertError if labels that stay are vectors with a number for each class of the old set `before`, and the
    new set `after` has other classes: the numbers would be of other classes. `where` is the old set."""
    for name in before.splits.keys() & after.splits.keys() if after.classes != before.classes else ():
        labels = after.splits[name].arrays.get(LABELS_NAME)
        if labels is not None and labels.row.shape == (len(before.classes),):
            raise ConvertError(
                f"{where}: split {name!r}: labels are vectors with a number for each of the {len(before.classes)} "
                "classes, but the new set would have other classes, or another order of them: give vectors for the new "
                "classes by `shardio change --classes FILE --array labels=FILE.npy`"
            )


def number_of(order: NDArray[np.int64] | None, orders: list[NDArray[np.int64]]) -> int | None:
    """Returns the index of `order` in `orders`; None if `order` is None. Appends `order` if it is not there yet."""
    if order is None:
        return None
    for number, known in enumerate(orders):
        if np.array_equal(known, order):
            return number
    orders.append(order)
    return len(orders) - 1
