"""Where the samples of a split are stored: arithmetic on its manifest, which opens and maps nothing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SetNotFoundError
from shardio.format.layout import HEADER_NBYTES, SampleShape, sample_nbytes
from shardio.format.manifest import FileEntry, Manifest, ShardEntry
from shardio.order.windows import Windows


class SplitLayout:
    """The files of one split, and the place of each sample in them. Nothing in it changes.

    Raises SetNotFoundError if the set has no such split.
    """

    def __init__(self, path: Path, manifest: Manifest, split: str) -> None:
        if split not in manifest.splits:
            raise SetNotFoundError(f"{path}: expected a split {split!r}, found {', '.join(sorted(manifest.splits))}")
        self.path = path
        self.manifest = manifest
        self.split = split
        self.content = manifest.splits[split]
        """The split's entries in the manifest."""
        self.row_nbytes = sample_nbytes(manifest.sample_shape)
        self._folder = os.path.abspath(path)  # wherever the process may go
        # Sample i is in the shard s with starts[s] <= i < starts[s + 1].
        self._starts = np.cumsum([0, *(shard.num_samples for shard in self.content.shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def sample_shape(self) -> SampleShape:
        """(height, width, channels)"""
        return self.manifest.sample_shape

    @property
    def first_samples(self) -> NDArray[np.int64]:
        """The index of each shard's first sample."""
        return self._starts[:-1]

    def path_of(self, entry: FileEntry) -> str:
        """Returns the absolute path of one of the set's files. (A string: there may be thousands, and a Path costs as
        much as opening the file.)"""
        return f"{self._folder}/{entry.file}"

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the shards of samples that exist, by number, and the samples' first bytes in these files."""
        shards: NDArray[np.int64] = np.searchsorted(self._starts, indices, side="right") - 1
        return shards, HEADER_NBYTES + (indices - self._starts[shards]) * self.row_nbytes

    def locate_one(self, index: int) -> tuple[ShardEntry, int]:
        """Returns the shard of a sample that exists, and the sample's first byte in that file."""
        (shard,), (offset,) = (found.tolist() for found in self.locate(np.array([index])))
        return self.content.shards[shard], offset

    def check_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns them as int64. Raises ValueError if they are no integers, IndexError if one is of no sample."""
        indices = np.asarray(indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(
                f"indices must be one-dimensional integers; found {indices.dtype} of shape {indices.shape}"
            )
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"indices must be from 0 to {len(self) - 1}; found {indices.min()} to {indices.max()}")
        return indices.astype(np.int64, copy=False)

    def check_request(
        self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None
    ) -> NDArray[np.int64]:
        """Returns the indices as int64. Raises ValueError or IndexError unless `out` can hold these samples, or these
        windows of them: `ShardSet.gather` says when."""
        indices = self.check_indices(indices)
        height, width, channels = self.sample_shape
        expected = (len(indices), height, width, channels)
        if windows is not None:
            expected = (len(indices), windows.height, windows.width, channels)
            for name, places, size, most in (
                ("tops", windows.tops, windows.height, height),
                ("lefts", windows.lefts, windows.width, width),
            ):
                if not 0 < size <= most:
                    raise IndexError(f"expected windows of at most {(height, width)}; found {expected[1:3]}")
                last = most - size
                if len(places) != len(indices) or (len(places) and not 0 <= places.min() <= places.max() <= last):
                    raise IndexError(f"expected {len(indices)} {name} from 0 to {last}; found {places}")
        if out.shape != expected or out.dtype != np.uint8 or not out.flags.carray:
            what = "read-only" if not out.flags.writeable else f"{out.dtype} of {out.shape}"
            raise ValueError(f"out must be C-contiguous, writeable uint8 of shape {expected}; found {what}")
        return indices
