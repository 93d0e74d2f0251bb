"""Finds sources with the same bytes, by a hash of each source that is computed when the source is read.

Equal images under different labels are errors that no decoder can detect, and equal images in train and val make an
evaluation too good. Duplicates are only reported, as the program cannot know which label is right.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardio.conversion.arrays import Label
from shardio.conversion.sources.collection import Origin, Source
from shardio.errors import DecodeError

# 128 bits: among 10**10 different files, two have the same hash with a probability of 1 in 10**18.
HASH_NBYTES = 16
UNREAD = bytes(HASH_NBYTES)
"""Stands in for the hash of a source that could not be read."""


@dataclass(frozen=True, order=True)
class Duplicate:
    """A source with the same bytes as another source. Ordered by split and key."""

    split: str
    key: bytes
    label: Label


@dataclass(frozen=True)
class Duplicates:
    """A group of two or more sources with the same bytes, sorted by split and key."""

    sources: tuple[Duplicate, ...]

    @property
    def labels_differ(self) -> bool:
        return len({source.label for source in self.sources}) > 1

    @property
    def splits_differ(self) -> bool:
        return len({source.split for source in self.sources}) > 1

    def to_line(self) -> bytes:
        """Returns the group as a line of ASCII JSON.

        Bytes of keys that are not UTF-8 become lone surrogates, as from `os.fsdecode`.
        """
        sources = [{"split": one.split, "key": os.fsdecode(one.key), "label": one.label} for one in self.sources]
        document = {"labels_differ": self.labels_differ, "splits_differ": self.splits_differ, "sources": sources}
        return (json.dumps(document) + "\n").encode("ascii")


def hash_source(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_NBYTES).digest()


def hash_sources(origin: Origin, sources: Sequence[Source], threads: int) -> bytes:
    """Reads all sources again, with `threads` threads, and returns the hashes of their bytes, concatenated."""

    def hash_one(source: Source) -> bytes:
        try:
            data = origin.read(source)
        except DecodeError:
            return UNREAD
        if not isinstance(data, bytes):
            raise TypeError(f"expected the bytes of a file, found an item of a dataset for {source.key!r}")
        return hash_source(data)

    with ThreadPoolExecutor(threads, "shardio-hash") as pool:
        return b"".join(pool.map(hash_one, sources))


def find_duplicates(
    sources: Sequence[tuple[str, Source]], hashes: bytes, refused: Set[tuple[str, bytes]]
) -> tuple[Duplicates, ...]:
    """Returns the groups of sources with the same bytes, without refused sources.

    `sources` are (split, source), `hashes` their concatenated hashes, `refused` the (split, key) of refused sources.
    Groups with different labels come first, then groups in different splits.
    """
    words = np.frombuffer(hashes, "<u8").reshape(len(sources), 2)
    taken = np.array([(split, source.key) not in refused for split, source in sources], bool)
    order = np.flatnonzero(taken & words.any(axis=1))
    order = order[np.lexsort(words[order].T)]
    words = words[order]
    changes = np.flatnonzero((words[1:] != words[:-1]).any(axis=1)) + 1
    groups = [order[start:stop] for start, stop in pairwise([0, *changes.tolist(), len(order)]) if stop - start > 1]
    found = [_duplicates(sources[i] for i in group) for group in groups]
    return tuple(sorted(found, key=lambda one: (not one.labels_differ, not one.splits_differ, one.sources[0])))


def _duplicates(group: Iterable[tuple[str, Source]]) -> Duplicates:
    return Duplicates(tuple(sorted(Duplicate(split, source.key, source.label) for split, source in group)))
