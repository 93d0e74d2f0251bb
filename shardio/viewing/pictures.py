"""Opens all splits of a set, reads pictures of a split one by one, and makes thumbnails of classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.drawing.sheet import thumbnail
from shardio.errors import FormatError
from shardio.format.layout import crc32
from shardio.format.manifest_file import load_manifest
from shardio.reading.sample import some_of
from shardio.reading.shardset import ShardSet
from shardio.sets.levels import first_split

# Approximate bytes of pictures read at a time.
_BATCH_NBYTES = 16 << 20
# Limits of a gallery, so that a page stays below 20 MB. A thumbnail takes about 3 kB.
_GALLERY_NBYTES = 12_000_000
_MAX_THUMBNAILS = 4000
_MAX_PER_CLASS = 24


def open_splits(path: str | os.PathLike[str]) -> dict[str, ShardSet]:
    """Returns all splits of the set in the folder `path`, opened: the training split first, then by name."""
    folder = Path(path)
    manifest = load_manifest(folder)
    first = first_split(manifest.splits)
    names = sorted(manifest.splits, key=lambda name: (name != first, name))
    return {name: ShardSet(folder, manifest, name) for name in names}


def read_pictures(shards: ShardSet, indices: NDArray[np.int64], *, check: bool = False) -> Iterator[NDArray[np.uint8]]:
    """Yields the pictures of the samples `indices`, in this order: uint8 (height, width, channels).

    Raises the errors of `ShardSet.gather`. With `check`, raises FormatError at a picture whose crc32 differs from the
    index.
    """
    size = max(1, _BATCH_NBYTES // shards.row_nbytes)
    shards.expect_random_reads()
    shards.will_read(indices[:size])
    for start in range(0, len(indices), size):
        some = indices[start : start + size]
        shards.will_read(indices[start + size : start + 2 * size])
        rows, expected = shards.rows_of(some), shards.column_of("crc32", some).tolist()
        for index, row, crc, picture in zip(some.tolist(), rows, expected, shards.images_of(rows), strict=True):
            if check:
                check_crc32(shards, "", index, row, crc)
            yield picture


def check_crc32(shards: ShardSet, name: str, index: int, row: NDArray[Any], expected: int) -> None:
    """Raises FormatError unless `row` has the crc32 `expected`. `row` is the value of the array `name` for the sample
    `index`; or the sample's pixels if `name` is ""."""
    if (found := crc32(row)) != expected:
        path = shards.path_of(shards.locate_one(name, index)[0])
        raise FormatError(
            f"{path}: sample {index}: expected {name or 'pixels'} with crc32 {expected:08x}, found {found:08x}: "
            "`shardio verify` lists all damage and says how to repair it"
        )


NO_LABEL = int(np.iinfo(np.int64).min)
"""The label, in this room, of samples that have no label, or a label that is not an integer."""


def labels_for_page(shards: ShardSet) -> NDArray[np.int64]:
    """Returns the labels of all samples, int64 (samples,). They are all NO_LABEL if the index has no labels."""
    if not shards.content.index.has_label:
        return np.full(len(shards), NO_LABEL)
    return shards.labels_of(np.arange(len(shards)))


class AllSamples:
    """The samples of all splits of a set, numbered consecutively from 0."""

    def __init__(self, splits: Mapping[str, ShardSet]) -> None:
        self.splits = splits
        self.labels = np.concatenate([labels_for_page(shards) for shards in splits.values()])
        self.starts = np.cumsum([0, *map(len, splits.values())])
        """The first number of each split, and the number of samples."""

    def locate(self, number: int) -> tuple[str, int]:
        """Returns (split, index in the split) of the sample `number`."""
        place = int(np.searchsorted(self.starts, number, "right")) - 1
        return list(self.splits)[place], number - int(self.starts[place])

    def read(self, numbers: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        """Yields the pictures of the samples `numbers`, which ascend."""
        parts = np.split(numbers, np.searchsorted(numbers, self.starts[1:-1]))
        for shards, start, part in zip(self.splits.values(), self.starts, parts, strict=False):
            yield from read_pictures(shards, part - start)


def keys_of(shards: ShardSet, indices: NDArray[np.int64]) -> list[str]:
    """Returns the keys of the samples `indices`. Bytes that are not UTF-8 are decoded as by `os.fsdecode`."""
    return [os.fsdecode(bytes(key)) for key in shards.column_of("key", indices)]


Thumbnail = tuple[int, str, str]
"""(number of a sample, its key, its thumbnail as a data URL)."""


def make_gallery(shards: ShardSet, wanted: Sequence[int]) -> dict[int, list[Thumbnail]]:
    """Returns, for each label in `wanted`, thumbnails of evenly spaced samples with this label. If `wanted` has more
    labels than a page can have thumbnails, evenly spaced labels are chosen."""
    labels = labels_for_page(shards)
    order = np.argsort(labels, kind="stable")
    order = order[np.isin(labels[order], np.array(wanted, np.int64))]
    present, starts = np.unique(labels[order], return_index=True)
    members = np.split(order, starts[1:])
    per_class = min(max(1, _MAX_THUMBNAILS // max(1, len(present))), _MAX_PER_CLASS)
    chosen = [members[i][some_of(len(members[i]), per_class)] for i in some_of(len(present), _MAX_THUMBNAILS)]
    indices = np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))
    gallery: dict[int, list[Thumbnail]] = {}
    nbytes = 0
    pictures, keys = read_pictures(shards, indices), keys_of(shards, indices)
    for index, key, picture in zip(indices.tolist(), keys, pictures, strict=True):
        url = thumbnail(picture)
        gallery.setdefault(int(labels[index]), []).append((index, key, url))
        nbytes += len(url)
        if nbytes > _GALLERY_NBYTES:
            break
    return gallery
