"""The pictures of a whole set: all its splits opened, and samples of one read in a row."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import ShardSet
from shardio.sets.levels import first_split

# Bytes of pictures that are read at a time, about.
_BATCH_NBYTES = 16 << 20


def open_splits(path: str | os.PathLike[str]) -> dict[str, ShardSet]:
    """Opens all splits of the set in the folder `path`: the one that models are trained with first, then by name."""
    folder = Path(path)
    manifest = load_manifest(folder)
    first = first_split(manifest.splits)
    names = sorted(manifest.splits, key=lambda name: (name != first, name))
    return {name: ShardSet(folder, manifest, name) for name in names}


def read_pictures(shards: ShardSet, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
    """Yields the pictures (height, width, channels) of these samples, in this order. Each is valid until the next is
    asked for. Errors are those of `ShardSet.gather`."""
    size = max(1, _BATCH_NBYTES // shards.row_nbytes)
    out = np.empty((min(size, len(indices)), *shards.sample_shape), np.uint8)
    shards.expect_random_reads()
    shards.will_read(indices[:size])
    for start in range(0, len(indices), size):
        some = indices[start : start + size]
        shards.will_read(indices[start + size : start + 2 * size])
        shards.gather(some, out[: len(some)])
        yield from out[: len(some)]
