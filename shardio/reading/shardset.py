"""An opened split of a published set: checked, mapped, and then nothing but memory.

Everything that docs/format.md demands is checked before a byte is mapped, on the descriptor that is mapped; all but the
checksums, which cost a read of the whole set: `shardio verify` compares them.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from shardio.errors import printable
from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest import FileEntry, Manifest, load_manifest
from shardio.format.opening import check_not_cut, open_checked, open_sized
from shardio.order.orders import as_integer
from shardio.order.windows import Windows
from shardio.reading.layout import SplitLayout
from shardio.reading.mapping import RowMapping, advise_random, resident_share, will_need
from shardio.reading.rowcopy import copy_rows, copy_windows
from shardio.sets.names import find_folder
from shardio.system.eager import eager
from shardio.system.opening import OpenFile, open_regular
from shardio.system.retry import Attempts, reading_failed


class Sample(NamedTuple):
    """`image` is a read-only view of the shard, (height, width, channels) uint8; `label` an int."""

    image: NDArray[np.uint8]
    label: int

    def __repr__(self) -> str:
        return f"Sample(image={self.image.dtype} {self.image.shape}, label={self.label})"


@eager
def open_shards(path: str | os.PathLike[str], split: str = "train", *, digest: str | None = None) -> ShardSet:
    """Opens one split of the set in the folder `path`, or of that name in the catalogue (`shardio.sets.names`).

    `digest` pins the content, all of the set's splits: the digest that `shardio info` prints, or its first 12 digits or
    more. Raises SetNotFoundError if there is no set or no such split; FormatError if it is another set than the pinned
    one, or if any file is not what the manifest says.
    """
    path = find_folder(path)
    return ShardSet(Path(path), load_manifest(path, digest), split)


def position_of(index: SupportsIndex, count: int) -> int:
    """Returns which of `count` samples `index` is, counted from the end if it is negative. Raises IndexError if it is
    none of them, TypeError if it is no integer."""
    number = as_integer("index", index)
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of range: expected {-count} to {count - 1} for {count} samples")
    return number % count


def _owns(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


class ShardSet(SplitLayout, Sequence[Sample]):
    """A sequence of samples: a split whose files are mapped. Opening is O(shards), never O(samples); any number of
    threads may read.

    Nothing is cached and nothing needs closing: the mappings go when the last array that uses them does.
    """

    def __init__(self, path: Path, manifest: Manifest, split: str) -> None:
        super().__init__(path, manifest, split)
        content = self.content
        try:
            self._mapping = RowMapping([shard.num_samples for shard in content.shards], self.row_nbytes)
        except OSError:
            for shard in content.shards:  # is it the manifest that claims what no file has?
                open_sized(self.path_of(shard), shard).close()
            raise
        self._rows = self._mapping.rows
        # Sample i of shard s is in row i + shifts[s].
        self._shifts = np.array(self._mapping.first_rows) - self.first_samples
        self._map_shards()
        dtype = content.index.dtype
        table = RowMapping([content.num_samples], dtype.itemsize)
        table.place(0, self._open_index())
        self._table = table.rows
        # The table, and not Sequence's search for an equal sample, which pictures have no use for.
        self.index: NDArray[np.void] = table.rows.view(dtype)[:, 0]  # type: ignore[assignment]
        """One row per sample: label, key, source_width, source_height, crc32, then the set's own columns, if any. A
        read-only view of the mapped file."""

    def _map_shards(self) -> None:
        for number in range(len(self.content.shards)):
            self._map_shard(number)

    def _map_shard(self, number: int) -> None:
        shard = self.content.shards[number]
        self._mapping.place(number, open_checked(self.path_of(shard), shard, self.sample_shape))

    def _open_index(self) -> OpenFile:
        """Opens the index, checked."""
        index = self.content.index
        return open_checked(self.path_of(index), index, self.sample_shape)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.manifest.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names for people, in their order: "tench" for n01440764. `classes` if the set has none."""
        return self.manifest.class_names or self.manifest.classes

    @property
    def digest(self) -> str:
        """The sha256 (hex) that names the content of the whole set, all splits."""
        return self.manifest.digest

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """All labels in order: a copy, made at the first access."""
        labels = np.ascontiguousarray(self.index["label"])
        labels.flags.writeable = False
        return labels

    @property
    def shard_arrays(self) -> tuple[NDArray[np.uint8], ...]:
        """Returns read-only views of the shards: uint8 (samples in the shard, bytes per sample)."""
        spans = zip(self._starts[:-1] + self._shifts, self._starts[1:] + self._shifts, strict=True)
        return tuple(self._rows[first:last] for first, last in spans)

    def __repr__(self) -> str:
        return printable(
            f"<ShardSet {self.path}, {self.split}: {len(self)} samples of {self.sample_shape}, "
            f"{len(self.classes)} classes, digest {self.digest[:12]}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies hold path and digest: the same set is opened anew, and no other."""
        return partial(open_shards, digest=self.digest), (self._folder, self.split)

    def _row_numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        numbers: NDArray[np.int64] = indices + self._shifts[shards]
        return numbers

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    @eager
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = position_of(index, len(self))
        return Sample(self._image(position), int(self.index["label"][position]))

    def _image(self, position: int) -> NDArray[np.uint8]:
        return self._rows[self._row_numbers(np.array(position))].reshape(self.sample_shape)

    def expect_random_reads(self) -> None:
        """Tells the kernel to read what is touched, and ahead of it nothing but what `will_read` announces."""
        advise_random(self._rows)

    def will_read(self, indices: NDArray[np.int64], windows: Windows | None = None) -> None:
        """Has the kernel begin to read these samples, or of each the lines that its window crosses, into the page
        cache. A hint: it never fails and hardly waits."""
        known, first = np.unique(indices, return_index=True)  # ascending, as disks like it
        inside = (known >= 0) & (known < len(self))
        numbers = self._row_numbers(known[inside].astype(np.int64, copy=False))
        if windows is None:
            will_need(self._rows, numbers)
        else:
            stride = self.sample_shape[1] * self.sample_shape[2]
            will_need(self._rows, numbers, windows.tops[first[inside]] * stride, windows.height * stride)

    def resident_share(self, indices: NDArray[np.int64] | None = None, most: int = 512) -> float | None:
        """Returns which share of these samples, or of the split, is in the page cache, told by at most so many of them.

        None if that is unknown: the kernel tells only users who own the files or may write to them.
        """
        if not self._residency_is_told:
            return None
        count = len(self) if indices is None else len(indices)
        some = np.linspace(0, count - 1, min(most, count)).astype(np.int64)
        return resident_share(self._rows, self._row_numbers(some if indices is None else indices[some]))

    @cached_property
    def _residency_is_told(self) -> bool:
        path = self.path_of(self.content.shards[0])
        return sys.platform == "linux" and (_owns(path) or os.access(path, os.W_OK))

    @eager
    def gather(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        """Copies the samples `indices` (integers, one-dimensional) into `out`, or a window of each.

        `out` is the caller's: uint8 (len(indices), height, width, channels), C-contiguous; with `windows`, its height
        and width are theirs. Raises IndexError, before anything is copied, if an index is negative or too large, or a
        window not inside its sample. The copying releases the GIL; threads may gather at the same time into different
        memory.

        What the storage does not give is asked for again for a second; then OSError names it, or FormatError if the
        file was cut. (Where shardio was installed without a compiler, the process ends by SIGBUS instead.)
        """
        indices = self.check_request(indices, out, windows)
        numbers = self._row_numbers(indices)
        if windows is None:
            rows = out.reshape(len(indices), self._rows.shape[1])
            self._insist(lambda done: copy_rows(self._rows, numbers[done:], rows[done:]), indices)
            return
        images = self._rows.reshape(-1, *self.sample_shape)
        tops, lefts = windows.tops, windows.lefts
        self._insist(lambda done: copy_windows(images, numbers[done:], tops[done:], lefts[done:], out[done:]), indices)

    def labels_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns a copy of the labels of these samples, which must exist: int64. Errors are those of `gather`."""
        return self.column_of("label", indices)

    @eager
    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns a copy of a column of the index for these samples, which must exist. Errors are those of `gather`.

        `index[name]` is a view of the mapping instead, where a page that cannot be had ends the process.
        """
        dtype = self.index.dtype
        if name not in (dtype.names or ()):
            raise ValueError(f"expected a column of the index, one of {', '.join(dtype.names or ())}; found {name!r}")
        indices = self.check_indices(indices)
        rows = np.empty((len(indices), self._table.shape[1]), np.uint8)
        self._insist(lambda done: copy_rows(self._table, indices[done:], rows[done:]), indices, name)
        column: NDArray[Any] = rows.view(dtype)[name][:, 0]
        return column

    def _insist(self, copy: Callable[[int], int], indices: NDArray[np.int64], column: str | None = None) -> None:
        """Has `copy` copy something for each of these samples: from their shards, or a column from the index.

        It is called with how many are done, and returns how many more it did: all of them, unless storage failed.
        """
        attempts: Attempts | None = None  # made when storage fails, which is seldom
        done = 0
        while (done := done + copy(done)) < len(indices):
            attempts = attempts or Attempts()
            failure = self._failure(int(indices[done]), column, attempts.failed + 1)
            if not attempts.again():
                raise failure

    def _failure(self, index: int, column: str | None, attempts: int) -> OSError:
        """Returns why a page cannot be had: a fault does not tell, but reading the file does. Raises FormatError if it
        was cut."""
        entry: FileEntry
        if column is None:
            entry, offset = self.locate_one(index)
            what, nbytes = f"sample {index}", self._rows.shape[1]
        else:
            entry, what, nbytes = self.content.index, f"the {column} of sample {index}", self._table.shape[1]
            offset = HEADER_NBYTES + index * nbytes
        path = self.path_of(entry)
        file, found = open_regular(path)
        with file:
            check_not_cut(path, entry, found)
            try:
                os.pread(file.fileno(), nbytes, offset)
            except OSError as error:
                return reading_failed(error, path, what, offset, attempts)
        hint = "the file of this name can be read: if it was replaced since it was opened, open the set again"
        return reading_failed(OSError(errno.EIO, os.strerror(errno.EIO)), path, what, offset, attempts, hint)
