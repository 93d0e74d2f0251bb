"""Samples that a set has more than once: equal ones, by the checksums of all, and alike ones, among those looked at.

What repeats under another label, or in another split, is likely to be an error of the collection.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.reading.shardset import ShardSet
from shardio.viewing.alike import close_pairs, fields_of, join, look_alike, tells
from shardio.viewing.pictures import read_pictures

# Pictures that are compared with others, at most: of each kind of repeats, and of one checksum or key.
_MOST_COMPARED = 4000
_MOST_OF_A_GROUP = 200
_MOST_KEYS = 1000


@dataclass(frozen=True)
class Seen:
    """The samples of a split that were looked at, ascending, and the hashes of their pictures."""

    indices: NDArray[np.int64]
    hashes: NDArray[np.uint64]


@dataclass(frozen=True, order=True)
class Member:
    split: str
    index: int
    label: int


@dataclass(frozen=True)
class Group:
    """Two or more samples that have the same pixels (`equal`), or look alike."""

    equal: bool
    members: tuple[Member, ...]

    @property
    def labels_differ(self) -> bool:
        return len({member.label for member in self.members}) > 1

    @property
    def splits_differ(self) -> bool:
        return len({member.split for member in self.members}) > 1


@dataclass(frozen=True)
class Repeats:
    """`groups` begin with those under different labels, then those in different splits. `keys` are groups of samples
    that have one key in a split and differ in their labels."""

    groups: tuple[Group, ...]
    keys: tuple[Group, ...]
    num_not_compared: int
    """Samples with the checksum, or pairs with the hash, of another one that were too many to be compared."""


class _Samples:
    """All samples of all splits under one number each."""

    def __init__(self, splits: Mapping[str, ShardSet], labels: Mapping[str, NDArray[np.int64]]) -> None:
        self.names = list(splits)
        self.splits = splits
        self.labels = np.concatenate(list(labels.values()))
        self.starts = np.cumsum([0, *map(len, splits.values())])

    def member(self, number: int) -> Member:
        place, index = self.locate(number)
        return Member(self.names[place], index, int(self.labels[number]))

    def locate(self, number: int) -> tuple[int, int]:
        place = int(np.searchsorted(self.starts, number, "right")) - 1
        return place, number - int(self.starts[place])

    def column(self, name: str) -> NDArray[np.uint32]:
        return np.concatenate([shards.column_of(name, np.arange(len(shards))) for shards in self.splits.values()])

    def read(self, numbers: list[int]) -> Iterator[NDArray[np.uint8]]:
        """Yields the pictures of ascending numbers."""
        places = [self.locate(number) for number in numbers]
        for place, name in enumerate(self.names):
            yield from read_pictures(
                self.splits[name], np.array([index for at, index in places if at == place], np.int64)
            )


def find_repeats(
    splits: Mapping[str, ShardSet], labels: Mapping[str, NDArray[np.int64]], seen: Mapping[str, Seen]
) -> Repeats:
    """Finds what repeats in these splits, whose labels are `labels`. Alike pictures are searched among those `seen`."""
    samples = _Samples(splits, labels)
    equal, left_equal = _find_equal(samples)
    again = {number for group in equal for number in group[1:]}
    alike, left_alike = _find_alike(samples, seen, again)
    groups = [Group(is_equal, tuple(map(samples.member, group))) for is_equal, group in _merged(equal, alike)]
    groups.sort(key=lambda group: (not group.labels_differ, not group.splits_differ, not group.equal, group.members))
    keys = islice(_find_keys(splits, labels), _MOST_KEYS)
    return Repeats(tuple(groups), tuple(keys), left_equal + left_alike)


def _merged(equal: list[list[int]], alike: list[list[int]]) -> Iterator[tuple[bool, list[int]]]:
    """Yields all groups, and whether each has equal pictures alone. Equal pictures join the group of the first."""
    others = {group[0]: group for group in equal}
    for group in alike:
        members = sorted(number for one in group for number in others.pop(one, [one]))
        yield False, members
    for group in others.values():
        yield True, group


def _find_equal(samples: _Samples) -> tuple[list[list[int]], int]:
    """Returns groups of equal pictures, and how many samples were not compared. Checksums of four bytes tell which may
    be equal: among a million samples, a hundred pairs have one by chance."""
    crc32s = samples.column("crc32")
    order = np.argsort(crc32s, kind="stable")
    candidates = [order[start:stop] for start, stop in _runs(crc32s[order])]
    candidates.sort(key=lambda group: (len(np.unique(samples.labels[group])) < 2, int(group[0])))
    chosen: list[int] = []
    left = 0
    for group in candidates:
        room = min(_MOST_OF_A_GROUP, _MOST_COMPARED - len(chosen))
        chosen += group[:room].tolist()
        left += len(group[room:])
    chosen.sort()
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, picture in zip(chosen, samples.read(chosen), strict=True):
        same[hashlib.blake2b(picture.data, digest_size=16).digest()].append(number)
    return [group for group in same.values() if len(group) > 1], left


def _find_alike(samples: _Samples, seen: Mapping[str, Seen], again: set[int]) -> tuple[list[list[int]], int]:
    """Returns groups of pictures that look alike, without those of `again`, and how many pairs were not compared."""
    numbers = np.concatenate([seen[name].indices + start for name, start in zip(seen, samples.starts, strict=False)])
    hashes = np.concatenate([some.hashes for some in seen.values()])
    wanted = tells(hashes) & ~np.isin(numbers, np.array(sorted(again), np.int64))
    numbers, hashes = numbers[wanted], hashes[wanted]
    pairs = [(int(numbers[one]), int(numbers[other])) for one, other in close_pairs(hashes)]
    pairs.sort(key=lambda pair: (samples.labels[pair[0]] == samples.labels[pair[1]], pair))
    left = max(0, len(pairs) - _MOST_COMPARED // 2)
    pairs = pairs[: _MOST_COMPARED // 2]
    needed = sorted({number for pair in pairs for number in pair})
    fields = {n: fields_of(picture) for n, picture in zip(needed, samples.read(needed), strict=True)}
    return join(pair for pair in pairs if look_alike(fields[pair[0]], fields[pair[1]])), left


def _find_keys(splits: Mapping[str, ShardSet], labels: Mapping[str, NDArray[np.int64]]) -> Iterator[Group]:
    """Yields groups of samples of one key, in one split, whose labels differ."""
    for name, shards in splits.items():
        keys = shards.column_of("key", np.arange(len(shards)))
        order = np.argsort(keys, kind="stable")
        for start, stop in _runs(keys[order]):
            members = order[start:stop][:_MOST_OF_A_GROUP]
            if keys[members[0]] and len(np.unique(labels[name][members])) > 1:
                yield Group(False, tuple(Member(name, int(i), int(labels[name][i])) for i in members))


def _runs(values: NDArray[Any]) -> list[tuple[int, int]]:
    """Returns where two or more equal values stand one after the other: (start, stop)."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    starts, stops = np.concatenate([[0], changes]), np.concatenate([changes, [len(values)]])
    long = stops - starts > 1
    return list(zip(starts[long].tolist(), stops[long].tolist(), strict=True))
