"""`diff`: what is different between two sets, by the keys of their samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.changes.draft import ArrayDraft, Draft, SplitDraft
from shardio.changes.parents import Parent, open_parent, read_held
from shardio.format.layout import CRC32_ROW, HEADER_NBYTES, columns_of

_MOST_NAMED = 5


@dataclass(frozen=True)
class Some:
    """Samples of which something is to be told: their number, and the keys of the first few."""

    count: int
    first: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.count > 0


@dataclass(frozen=True)
class Relabelled:
    """Samples that have another class."""

    count: int
    first: tuple[tuple[str, str, str], ...]
    """(key, class in A, class in B)"""

    def __bool__(self) -> bool:
        return self.count > 0


@dataclass(frozen=True)
class SplitDiff:
    """What is different in a split of both sets."""

    added: Some
    removed: Some
    relabelled: Relabelled
    other_pixels: Some
    other_columns: Mapping[str, Some]
    """Columns of both sets that have other numbers for some samples."""
    other_arrays: Mapping[str, Some]
    """Arrays of both sets that have other values for some samples, by their checksums."""
    added_columns: tuple[str, ...]
    removed_columns: tuple[str, ...]
    added_arrays: tuple[str, ...]
    removed_arrays: tuple[str, ...]
    reordered: bool
    """Whether the samples of both sets come in another order."""
    squashed: bool
    """Whether the pictures of one of the sets are squashed, and those of the other are not."""

    @property
    def equal(self) -> bool:
        return not any(vars(self).values())


@dataclass(frozen=True)
class DiffReport:
    a: str
    b: str
    """The digests."""
    sample_shapes: tuple[tuple[int, int, int], tuple[int, int, int]]
    added_classes: tuple[str, ...]
    removed_classes: tuple[str, ...]
    reordered_classes: bool
    """Whether a class of both sets has another number."""
    added_splits: Mapping[str, int]
    """Splits that only B has, and how many samples they have."""
    removed_splits: Mapping[str, int]
    splits: Mapping[str, SplitDiff]
    """The splits of both sets."""

    @property
    def equal(self) -> bool:
        """Whether both sets have the same samples, in the same order."""
        first, second = self.sample_shapes
        others = (self.added_classes, self.removed_classes, self.reordered_classes, self.added_splits)
        return (
            first == second
            and not any(others)
            and not self.removed_splits
            and all(split.equal for split in self.splits.values())
        )


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> DiffReport:
    """Returns what is different in the set `b`, seen from the set `a`. Pixels and arrays are compared by their crc32.

    Samples of one key are the same, those of a key that is there several times in their order. Raises SetNotFoundError,
    FormatError.
    """
    one, two = open_parent(a), open_parent(b)
    here, there = one.draft, two.draft
    both = [name for name in here.splits if name in there.splits]
    common = set(here.classes) & set(there.classes)
    return DiffReport(
        one.manifest.digest,
        two.manifest.digest,
        (here.sample_shape, there.sample_shape),
        _without(there.classes, here.classes),
        _without(here.classes, there.classes),
        any(here.classes.index(name) != there.classes.index(name) for name in common)
        if here.classes != there.classes
        else False,
        {name: len(split) for name, split in there.splits.items() if name not in both},
        {name: len(split) for name, split in here.splits.items() if name not in both},
        {name: _diff_split(one, two, name) for name in both},
    )


def _without(names: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    known = set(others)
    return tuple(name for name in names if name not in known)


def _diff_split(one: Parent, two: Parent, name: str) -> SplitDiff:
    a, b = one.draft.splits[name], two.draft.splits[name]
    place = {key: sample for sample, key in enumerate(_distinct_keys(b))}
    keys = _distinct_keys(a)
    pairs = [(sample, place[key]) for sample, key in enumerate(keys) if key in place]
    in_a = np.array([sample for sample, _ in pairs], np.int64)
    in_b = np.array([sample for _, sample in pairs], np.int64)
    removed = np.setdiff1d(np.arange(len(a)), in_a)
    added = np.setdiff1d(np.arange(len(b)), in_b)

    def where(different: NDArray[np.bool_]) -> Some:
        return _some(a, in_a[different])

    columns_a, columns_b = dict(columns_of(a.rows.dtype)), dict(columns_of(b.rows.dtype))
    columns = {
        column: where(_differ(a.rows[column][in_a], b.rows[column][in_b]))
        for column in ("source_width", "source_height", *(c for c in columns_a if c in columns_b))
    }
    arrays = {
        array: where(_array_differs(one, two, name, array, in_a, in_b)) for array in a.arrays if array in b.arrays
    }
    return SplitDiff(
        added=_some(b, added),
        removed=_some(a, removed),
        relabelled=_relabelled(one.draft, two.draft, name, in_a, in_b),
        other_pixels=where(a.rows["crc32"][in_a] != b.rows["crc32"][in_b]),
        other_columns={column: some for column, some in columns.items() if some},
        other_arrays={array: some for array, some in arrays.items() if some},
        added_columns=_without([*columns_b], [*columns_a]),
        removed_columns=_without([*columns_a], [*columns_b]),
        added_arrays=_without([*b.arrays], [*a.arrays]),
        removed_arrays=_without([*a.arrays], [*b.arrays]),
        reordered=bool((np.diff(in_b) < 0).any()),
        squashed=a.squashed != b.squashed,
    )


def _distinct_keys(split: SplitDraft) -> list[tuple[bytes, int]]:
    """Returns the key of each sample, with how often it was there before."""
    seen: dict[bytes, int] = {}
    found = []
    for key in split.keys:
        times = seen.get(key, 0)
        found.append((key, times))
        seen[key] = times + 1
    return found


def _some(split: SplitDraft, samples: NDArray[np.int64]) -> Some:
    return Some(len(samples), tuple(os.fsdecode(key) for key in split.rows["key"][samples[:_MOST_NAMED]].tolist()))


def _differ(a: NDArray[np.generic], b: NDArray[np.generic]) -> NDArray[np.bool_]:
    different: NDArray[np.bool_] = a != b
    if a.dtype.kind == b.dtype.kind == "f":  # NaN stands for an empty cell
        different &= ~((a != a) & (b != b))
    return different


def _relabelled(a: Draft, b: Draft, name: str, in_a: NDArray[np.int64], in_b: NDArray[np.int64]) -> Relabelled:
    one, two = a.splits[name].rows["label"][in_a], b.splits[name].rows["label"][in_b]
    if a.classes != b.classes and a.classes and b.classes:
        number = {label: i for i, label in enumerate(b.classes)}
        different = np.array([number.get(label, -1) for label in a.classes])[one] != two
    else:
        different = one != two
    found = np.flatnonzero(different)

    def shown(draft: Draft, label: int) -> str:
        return draft.classes[label] if draft.classes else str(label)

    first = tuple(
        (
            os.fsdecode(a.splits[name].rows["key"][in_a[i]]),
            shown(a, int(one[i])),
            shown(b, int(two[i])),
        )
        for i in found[:_MOST_NAMED].tolist()
    )
    return Relabelled(len(found), first)


def _array_differs(
    one: Parent, two: Parent, split: str, name: str, in_a: NDArray[np.int64], in_b: NDArray[np.int64]
) -> NDArray[np.bool_]:
    a, b = one.draft.splits[split].arrays[name], two.draft.splits[split].arrays[name]
    if (a.kind, a.row) != (b.kind, b.row):
        return np.ones(len(in_a), np.bool_)
    different: NDArray[np.bool_] = _crc32s(one, a)[in_a] != _crc32s(two, b)[in_b]
    return different


def _crc32s(parent: Parent, array: ArrayDraft) -> NDArray[np.uint32]:
    """Returns the checksum of each sample's value."""
    (held,) = array.stored.crc32s
    numbers = np.frombuffer(read_held(held, parent.manifest.sample_shape), CRC32_ROW.dtype, offset=HEADER_NBYTES)
    found: NDArray[np.uint32] = numbers[array.stored.rows_of()]
    return found
