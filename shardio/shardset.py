"""An opened split of a published set: checked, mapped, and then nothing but memory.

Everything that docs/format.md demands is checked before a byte is mapped, on the descriptor that is mapped. The
checksums are not: they cost a read of the whole set, which `shardio verify` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from shardio.crop import Windows
from shardio.errors import FormatError, SetNotFoundError
from shardio.files import open_regular
from shardio.format import (
    HEADER_NBYTES,
    SampleShape,
    sample_nbytes,
    shard_header,
)
from shardio.manifest import FileEntry, Manifest, load_manifest
from shardio.mapping import RowMapping, advise_random, resident_share, will_need
from shardio.rowcopy import copy_rows, copy_windows


class Sample(NamedTuple):
    """`image` is a read-only view of the shard, (height, width, channels) uint8; `label` an int."""

    image: NDArray[np.uint8]
    label: int


def open_shards(path: str | os.PathLike[str], split: str = "train") -> ShardSet:
    """Open one split of the set in the folder `path`.

    SetNotFoundError if there is no set or no such split; FormatError if any file is not what the manifest says.
    """
    return ShardSet(Path(path), load_manifest(path), split)


def open_sized(path: Path, entry: FileEntry) -> int:
    """Open a file of the set and check its type and size; its descriptor, for the caller to close."""
    descriptor, nbytes = open_regular(path)
    if nbytes != entry.nbytes:
        os.close(descriptor)
        raise FormatError(
            f"{path}: expected {entry.nbytes} bytes, as the manifest says, found {nbytes}; "
            "copy the file again, or convert again"
        )
    return descriptor


def open_checked(path: Path, entry: FileEntry, header: bytes) -> int:
    """As open_sized, and check that the file begins with `header`, byte for byte."""
    descriptor = open_sized(path, entry)
    try:
        found = os.pread(descriptor, HEADER_NBYTES, 0)
        if found != header:
            at = next((i for i, (a, b) in enumerate(zip(found, header, strict=False)) if a != b), len(found))
            raise FormatError(
                f"{path}: header: expected {header[at : at + 16]!r} at byte {at}, found {found[at : at + 16]!r}; "
                "copy the file again, or convert again"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _map(mapping: RowMapping, number: int, path: Path, entry: FileEntry, header: bytes) -> None:
    """Check a file and map it; its descriptor is open no longer than that."""
    descriptor = open_checked(path, entry, header)
    try:
        mapping.place(number, descriptor)
    finally:
        os.close(descriptor)


def _owns(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False


class ShardSet(Sequence[Sample]):
    """A sequence of samples. Opening is O(shards), never O(samples); any number of threads may read.

    Nothing is cached and nothing needs closing: the mappings go when the last array that uses them does.
    """

    def __init__(self, path: Path, manifest: Manifest, split: str) -> None:
        if split not in manifest.splits:
            raise SetNotFoundError(f"{path}: expected a split {split!r}, found {', '.join(sorted(manifest.splits))}")
        self.path = path
        self.manifest = manifest
        self.split = split
        entry = manifest.splits[split]
        shape = manifest.sample_shape
        counts = [shard.num_samples for shard in entry.shards]
        try:
            shards = RowMapping(counts, sample_nbytes(shape))
        except OSError:
            for shard in entry.shards:  # is it the manifest that claims what no file has?
                os.close(open_sized(path / shard.file, shard))
            raise
        for number, shard in enumerate(entry.shards):
            _map(shards, number, path / shard.file, shard, shard_header(shard.num_samples, shape))
        self._rows = shards.rows
        # Sample i is in the shard s with starts[s] <= i < starts[s + 1], and there in row i + shifts[s].
        self._starts = np.cumsum([0, *counts])
        self._shifts = np.array(shards.first_rows) - self._starts[:-1]
        dtype = entry.index.dtype
        table = RowMapping([entry.num_samples], dtype.itemsize)
        _map(table, 0, path / entry.index.file, entry.index, entry.index_header)
        # The table, and not Sequence's search for an equal sample, which pictures have no use for.
        self.index: NDArray[np.void] = table.rows.view(dtype)[:, 0]  # type: ignore[assignment]
        """One row per sample: label, key, source_width, source_height, crc32, then the set's own columns, if any. A
        read-only view of the mapped file."""

    @property
    def sample_shape(self) -> SampleShape:
        """(height, width, channels)"""
        return self.manifest.sample_shape

    @property
    def classes(self) -> tuple[str, ...]:
        return self.manifest.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """What people call the classes, in their order: "tench" for n01440764. `classes` if the set does not say."""
        return self.manifest.class_names or self.manifest.classes

    @property
    def digest(self) -> str:
        """sha256 (hex) that names the content of the whole set, all splits."""
        return self.manifest.digest

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """All labels in order: a copy, made at the first access."""
        labels = np.ascontiguousarray(self.index["label"])
        labels.flags.writeable = False
        return labels

    @property
    def shard_arrays(self) -> tuple[NDArray[np.uint8], ...]:
        """Read-only views of the shards: uint8 (samples in the shard, bytes per sample)."""
        spans = zip(self._starts[:-1] + self._shifts, self._starts[1:] + self._shifts, strict=True)
        return tuple(self._rows[first:last] for first, last in spans)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _row_numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        numbers: NDArray[np.int64] = indices + self._shifts[shards]
        return numbers

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # negative indices, and IndexError
        image = self._rows[self._row_numbers(np.array(position))].reshape(self.sample_shape)
        return Sample(image, int(self.index["label"][position]))

    def check_request(
        self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None
    ) -> NDArray[np.int64]:
        """The indices as int64, if samples may be read so: see `gather`, which demands the same."""
        indices = np.asarray(indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(
                f"indices must be one-dimensional integers; found {indices.dtype} of shape {indices.shape}"
            )
        height, width, channels = self.sample_shape
        expected = (len(indices), height, width, channels)
        if windows is not None and out.ndim == 4 and 0 < out.shape[1] <= height and 0 < out.shape[2] <= width:
            height, width = height - out.shape[1], width - out.shape[2]  # where windows may begin
            expected = (len(indices), *out.shape[1:3], channels)
            for name, places, most in (("tops", windows.tops, height), ("lefts", windows.lefts, width)):
                if len(places) != len(indices) or (len(places) and not 0 <= places.min() <= places.max() <= most):
                    raise IndexError(f"expected {len(indices)} {name} from 0 to {most}; found {places}")
        if out.shape != expected or out.dtype != np.uint8 or not out.flags.carray:
            what = "read-only" if not out.flags.writeable else f"{out.dtype} of {out.shape}"
            raise ValueError(f"out must be C-contiguous, writeable uint8 of shape {expected}; found {what}")
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"indices must be from 0 to {len(self) - 1}; found {indices.min()} to {indices.max()}")
        return indices.astype(np.int64, copy=False)

    @property
    def first_samples(self) -> NDArray[np.int64]:
        """The index of each shard's first sample."""
        return self._starts[:-1]

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where samples that exist are stored: the numbers of their shards, and their first bytes in these files."""
        shards: NDArray[np.int64] = np.searchsorted(self._starts, indices, side="right") - 1
        return shards, HEADER_NBYTES + (indices - self._starts[shards]) * sample_nbytes(self.sample_shape)

    def expect_random_reads(self) -> None:
        """From now on the kernel reads from storage what is touched, and nothing ahead of it but what is announced."""
        advise_random(self._rows)

    def will_read(self, indices: NDArray[np.int64]) -> None:
        """Have the kernel begin to read these samples into the page cache. A hint: it never fails and hardly waits."""
        indices = np.unique(indices)  # ascending, as disks like it
        known = indices[(indices >= 0) & (indices < len(self))]
        will_need(self._rows, self._row_numbers(known.astype(np.int64, copy=False)))

    def resident_share(self, most: int = 512) -> float | None:
        """Which share of the split is in the page cache, told by at most so many samples. None if that is unknown.

        The kernel tells only whoever owns the files or may write to them.
        """
        path = self.path / self.manifest.splits[self.split].shards[0].file
        if sys.platform != "linux" or not (_owns(path) or os.access(path, os.W_OK)):
            return None
        indices = np.linspace(0, len(self) - 1, min(most, len(self))).astype(np.int64)
        return resident_share(self._rows, self._row_numbers(indices))

    def gather(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        """Copy the samples `indices` (integers, one-dimensional) into `out`, or a window of each.

        `out` is the caller's: uint8 (len(indices), height, width, channels), C-contiguous; with `windows`, its height
        and width are theirs. IndexError if an index is negative or too large, or a window not inside its sample, before
        anything is copied. The copying releases the GIL; threads may gather at the same time into different memory.
        """
        indices = self.check_request(indices, out, windows)
        numbers = self._row_numbers(indices)
        if windows is None:
            copy_rows(self._rows, numbers, out.reshape(len(indices), self._rows.shape[1]))
        else:
            images = self._rows.reshape(-1, *self.sample_shape)
            copy_windows(images, numbers, windows.tops, windows.lefts, out)
