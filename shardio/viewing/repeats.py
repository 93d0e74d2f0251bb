"""Finds samples that a set has more than once: equal samples, and pictures that look alike.

Equal samples are found among all samples, pictures that look alike among the pictures that were read. A repeat with
another label, or in another split, is probably an error in the data.

Pictures that look alike are found by dHash (Neal Krawetz, "Kind of Like That", hackerfactor.com, 2013): 64 bits that
mark where a small gray picture becomes brighter to the right. Hashes are close if they differ in few bits. To find
close pairs, the hashes are sorted four times, each time by another quarter of their bits first: two hashes that differ
in at most three bits agree in at least one quarter, and are neighbors in that order.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.drawing.sheet import as_image
from shardio.viewing.pictures import NO_LABEL, AllSamples

MAX_BITS = 3
"""Hashes are close if they differ in at most this many bits: then at least one of their four quarters is equal."""

_QUARTERS = 4
_QUARTER_BITS = 16
# A hash is compared with this many neighbors at most, so that a set of flat pictures with equal hashes stays fast.
_WINDOW = 256
# The differences in a flat picture are noise: with fewer bits set, or unset, its hash says nothing.
_MIN_BITS = 6
# Pictures with close hashes look alike if their 16 x 16 fields differ by at most 8 gray levels on average.
_FIELDS = 16
_MAX_DIFFERENCE = 8.0
# Pictures that are compared at most: of each kind of repeats, and with one checksum or key.
_MAX_COMPARED = 4000
_MAX_OF_GROUP = 200
_MAX_KEYS = 1000

_BITS_OF = np.array([bin(number).count("1") for number in range(1 << 16)], np.uint8)


@dataclass(frozen=True, order=True)
class RepeatedSample:
    """One sample of a group of repeated samples."""

    split: str
    index: int
    label: int | None


@dataclass(frozen=True)
class RepeatGroup:
    """Two or more samples whose pictures are equal (`equal`) or look alike."""

    equal: bool
    samples: tuple[RepeatedSample, ...]

    @property
    def labels_differ(self) -> bool:
        return len({sample.label for sample in self.samples} - {None}) > 1

    @property
    def splits_differ(self) -> bool:
        return len({sample.split for sample in self.samples}) > 1


@dataclass(frozen=True)
class Repeats:
    """The repeats in a set: groups with different labels first, then groups over several splits, then other groups."""

    groups: tuple[RepeatGroup, ...]
    keys: tuple[RepeatGroup, ...]
    """Groups of samples of one split that have the same key and different labels."""
    num_not_compared: int
    """Candidates that were not compared because there were too many: samples with equal checksums, and pairs with
    close hashes."""


def hash_picture(image: Image.Image) -> int:
    """Returns the dHash of a picture, an integer of 64 bits."""
    grays = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX))
    return int.from_bytes(np.packbits(grays[:, 1:] > grays[:, :-1]).tobytes(), "big")


def find_repeats(samples: AllSamples, numbers: NDArray[np.int64], hashes: NDArray[np.uint64]) -> Repeats:
    """Returns the repeats in a set. Equal pictures are searched for among all samples.

    Pictures that look alike are searched for among the samples `numbers`. `hashes` has the dHash of each of these.
    """
    equal, left_equal = _find_equal(samples)
    duplicates = [number for group in equal for number in group[1:]]
    alike, left_alike = _find_alike(samples, numbers, hashes, duplicates)
    groups = [_group(samples, is_equal, group) for is_equal, group in _merged(equal, alike)]
    groups.sort(key=lambda group: (not group.labels_differ, not group.splits_differ, not group.equal, group.samples))
    return Repeats(tuple(groups), tuple(islice(_find_keys(samples), _MAX_KEYS)), left_equal + left_alike)


def _group(samples: AllSamples, is_equal: bool, numbers: Iterable[int]) -> RepeatGroup:
    found = []
    for number in numbers:
        label = int(samples.labels[number])
        found.append(RepeatedSample(*samples.locate(number), None if label == NO_LABEL else label))
    return RepeatGroup(is_equal, tuple(found))


def _merged(equal: list[list[int]], alike: list[list[int]]) -> Iterator[tuple[bool, list[int]]]:
    """Yields (whether all pictures are equal, numbers of the samples) for each group in `equal` and `alike`. A group of
    equal pictures joins the group of pictures that look like its first picture."""
    others = {group[0]: group for group in equal}
    for group in alike:
        yield False, sorted(number for one in group for number in others.pop(one, [one]))
    for group in others.values():
        yield True, group


def _find_equal(samples: AllSamples) -> tuple[list[list[int]], int]:
    """Returns (groups of samples with equal pictures, number of candidates that were not compared).

    Equal checksums only make candidates: of a million samples, about a hundred pairs have equal checksums by chance.
    """
    crc32s = np.concatenate([shards.column_of("crc32", np.arange(len(shards))) for shards in samples.splits.values()])
    order = np.argsort(crc32s, kind="stable")
    candidates = [order[start:stop] for start, stop in _runs(crc32s[order])]
    candidates.sort(key=lambda group: (len(np.unique(samples.labels[group])) < 2, int(group[0])))
    chosen: list[int] = []
    left = 0
    for group in candidates:
        room = min(_MAX_OF_GROUP, _MAX_COMPARED - len(chosen))
        chosen += group[:room].tolist()
        left += len(group[room:])
    chosen.sort()
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, picture in zip(chosen, samples.read(np.array(chosen, np.int64)), strict=True):
        same[hashlib.blake2b(picture.data, digest_size=16).digest()].append(number)
    return [group for group in same.values() if len(group) > 1], left


def _find_alike(
    samples: AllSamples, numbers: NDArray[np.int64], hashes: NDArray[np.uint64], duplicates: list[int]
) -> tuple[list[list[int]], int]:
    """Returns (groups of the samples `numbers` that look alike, without the samples `duplicates`; number of pairs that
    were not compared). `hashes` has the dHash of each sample in `numbers`."""
    bits = _count_bits(hashes)
    wanted = (bits >= _MIN_BITS) & (bits <= 64 - _MIN_BITS) & ~np.isin(numbers, np.array(duplicates, np.int64))
    numbers, hashes = numbers[wanted], hashes[wanted]
    pairs = [(int(numbers[one]), int(numbers[other])) for one, other in close_pairs(hashes)]
    pairs.sort(key=lambda pair: (samples.labels[pair[0]] == samples.labels[pair[1]], pair))
    left = max(0, len(pairs) - _MAX_COMPARED // 2)
    pairs = pairs[: _MAX_COMPARED // 2]
    needed = np.unique(np.array(pairs, np.int64))
    fields = dict(zip(needed.tolist(), map(_fields, samples.read(needed)), strict=True))
    close = [pair for pair in pairs if np.abs(fields[pair[0]] - fields[pair[1]]).mean() <= _MAX_DIFFERENCE]
    return join(close), left


def _count_bits(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    parts = np.ascontiguousarray(numbers).view(np.uint16).reshape(-1, 4)
    counts: NDArray[np.int64] = _BITS_OF[parts].sum(axis=1, dtype=np.int64)
    return counts


def _fields(picture: NDArray[np.uint8]) -> NDArray[np.int16]:
    """Returns the mean levels of a picture in a grid of 16 x 16 fields, int16 (16, 16[, 3])."""
    return np.asarray(as_image(picture).resize((_FIELDS, _FIELDS), Image.Resampling.BOX)).astype(np.int16)


def close_pairs(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the pairs of indices whose hashes differ in at most MAX_BITS bits: int64 (pairs, 2), sorted, distinct.

    Of several equal hashes, only the first is paired with different hashes. The first is also paired with each of the
    equal hashes.
    """
    values, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[inverse] != np.arange(len(hashes)))
    pairs = [np.stack([first[inverse[repeated]], repeated], axis=1)]
    for quarter in range(_QUARTERS):
        shift = np.uint64(quarter * _QUARTER_BITS)
        rotated = (values << shift) | (values >> (np.uint64(64) - shift) if shift else np.uint64(0))
        order = np.argsort(rotated)
        leading = rotated[order] >> np.uint64(64 - _QUARTER_BITS)
        near = np.arange(len(values))
        for step in range(1, _WINDOW):
            near = near[near + step < len(values)]
            near = near[leading[near] == leading[near + step]]
            if not len(near):
                break
            one, other = order[near], order[near + step]
            close = _count_bits(values[one] ^ values[other]) <= MAX_BITS
            pairs.append(np.stack([first[one[close]], first[other[close]]], axis=1))
    lower, higher = np.sort(np.concatenate(pairs), axis=1).T
    # One number for each pair: np.unique of rows takes ten times as long.
    found = np.unique(lower * len(hashes) + higher)
    return np.stack(np.divmod(found, max(1, len(hashes))), axis=1)


def join(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Returns the groups of numbers that `pairs` connect, directly or not. The numbers in a group ascend."""
    parents: dict[int, int] = {}

    def root(number: int) -> int:
        while (parent := parents.setdefault(number, number)) != number:
            parents[number] = number = parents[parent]
        return number

    for one, other in pairs:
        lower, higher = sorted((root(one), root(other)))
        parents[higher] = lower
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for number in sorted(parents):
        groups[root(number)].append(number)
    return [group for _, group in sorted(groups.items()) if len(group) > 1]


def _find_keys(samples: AllSamples) -> Iterator[RepeatGroup]:
    """Yields groups of samples of one split that have the same key and different labels."""
    for shards, start in zip(samples.splits.values(), samples.starts.tolist(), strict=False):
        keys = shards.column_of("key", np.arange(len(shards)))
        order = np.argsort(keys, kind="stable")
        for first, stop in _runs(keys[order]):
            members = order[first:stop][:_MAX_OF_GROUP]
            if keys[members[0]] and len(np.unique(samples.labels[start + members])) > 1:
                yield _group(samples, False, (start + members).tolist())


def _runs(values: NDArray[Any]) -> list[tuple[int, int]]:
    """Returns (start, stop) of each run of two or more equal values."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    starts, stops = np.concatenate([[0], changes]), np.concatenate([changes, [len(values)]])
    long = stops - starts > 1
    return list(zip(starts[long].tolist(), stops[long].tolist(), strict=True))
