"""An opened split of a set: its files are checked once and mapped into memory.

Each file is checked as docs/format.md demands before it is mapped, on the descriptor that is mapped. The sha256 of the
index and of orders is compared as well. Comparing the sha256 of pixels and arrays would read the whole set: `shardio
verify` does so.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, ShardioError, printable
from shardio.format.entries import FileEntry, TableEntry
from shardio.format.layout import LABELS_NAME, SampleShape
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.format.opening import state_of
from shardio.kernels.resample import Planes
from shardio.kernels.rowcopy import Windows
from shardio.order.orders import as_integer
from shardio.reading.layout import SplitLayout, StoredTable, as_rows
from shardio.reading.mapped_table import MappedTable
from shardio.reading.mapping import advise_random, resident_share, will_need
from shardio.reading.sample import (
    NUM_SHOWN,
    NUM_THUMBNAILS,
    Sample,
    captions_of,
    class_text,
    pictures_html,
    some_of,
    table_html,
)
from shardio.sets.names import local_folder
from shardio.sets.selection import Numbers
from shardio.system.eager import eager
from shardio.system.machine import filesystem_kind, is_network
from shardio.system.opening import naming


@eager
def open_shards(
    path: str | os.PathLike[str], split: str = "train", *, digest: str | None = None, mapped: bool = True
) -> ShardSet:
    """Opens one split of the set in the folder `path`, and returns it.

    `digest` pins the content of all splits: the digest that `shardio info` prints, or its first 12 digits or more.
    `mapped=False` maps files only when they are read, for a set of which only labels are wanted. Raises
    SetNotFoundError if there is no set or no such split; FormatError if the set has another digest, or if a file
    differs from the manifest; OSError if the system refuses to map a file.
    """
    path = local_folder(path)
    return ShardSet(Path(path), load_manifest(path, digest), split, mapped=mapped)


# Samples that are stored as yuv420 are copied, and made RGB, a few at a time.
_ROOM_NBYTES = 4 << 20


def position_of(index: SupportsIndex, count: int) -> int:
    """Returns `index` as a number from 0 to count - 1; negative indices count from the end. Raises IndexError if it is
    out of range, and TypeError if it is not an integer."""
    number = as_integer("index", index)
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of range: expected {-count} to {count - 1} for {count} samples")
    return number % count


_PUBLIC = frozenset(
    (
        *("array", "arrays", "class_names", "classes", "digest", "gather", "gather_array", "has_pixels", "image_of"),
        *("images_of", "index", "labels", "labels_of", "manifest", "path", "sample_shape", "show", "source_sizes"),
        *("split", "values_of"),
    )
)
"""What a ShardSet promises to users: docs/api.md. Its other names are for the loader and the commands."""


class ShardSet(SplitLayout, Sequence[Sample]):
    """An opened split, as a sequence of samples. Its files are mapped into memory; any number of threads may read.

    Opening reads the index and orders, about 60 bytes per sample. No sample is cached, and nothing needs closing: a
    mapping is freed with the last array that uses it.
    """

    def __init__(self, path: Path, manifest: Manifest, split: str, *, mapped: bool = True) -> None:
        super().__init__(path, manifest, split)
        self._mapped: dict[StoredTable, MappedTable] = {}
        # Arrays are opened when they are first asked for: not all jobs want them. Their files must still be these.
        for array in self.content.arrays.values():
            self._known |= {shard.file: state_of(self.path_of(shard)) for shard in array.shards}
        # The index is last, and its sha256 tells whether the path leads to another set since the manifest was read.
        for table in (*self.orders, *map(self.table_of, self.main_tables), self.index_table):
            if mapped:
                self._mapped_of(table)
            else:
                for entry in table.files:
                    self.open_file(entry).close()

    # The table, and not Sequence's search for an equal sample, which pictures have no use for.
    @cached_property
    def index(self) -> NDArray[np.void]:  # type: ignore[override]
        """The index, with a row for each sample: label (if labels are integers), key, source_width, source_height and
        crc32. A read-only view of private memory: if torch writes to it all the same, no file changes."""
        return self._mapped_of(self.index_table).rows.view(self.content.index.dtype)[:, 0]

    def _map(self, table: StoredTable) -> MappedTable:
        # Indexes and orders are few bytes. On a server, pages that do not come would stop a thread, or end the process.
        load = isinstance(table.files[0], TableEntry) and is_network(filesystem_kind(self.path))
        with naming(self.path_of(table.files[0])):
            mapped = MappedTable(table, self.folder, None if table.order is None else self._mapped_of(table.order))
            for number, entry in enumerate(table.files):
                mapped.map_file(number, self.open_file(entry), private=table is self.index_table, load=load)
        return mapped

    def changed_files(self) -> list[FileEntry]:
        """Returns the files that were written to, replaced or removed since they were opened."""
        files = [entry for entry in self.content.files if entry.file in self._known]
        return [entry for entry in files if state_of(self.path_of(entry)) != self._known[entry.file]]

    def unmap(self) -> None:
        """Frees the address space of files that no array refers to. They are mapped again when they are needed."""
        self._mapped.clear()

    def _mapped_of(self, table: StoredTable) -> MappedTable:
        # Two threads may map it at the same time; one of the mappings then goes.
        return self._mapped.get(table) or self._mapped.setdefault(table, self._map(table))

    @property
    def classes(self) -> tuple[str, ...]:
        return self.manifest.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """Readable names of the classes, in order: "tench" for n01440764. If the set has none, `classes`."""
        return self.manifest.class_names or self.manifest.classes

    @property
    def digest(self) -> str:
        """The sha256 (hex) that identifies the content of the whole set, with all splits."""
        return self.manifest.digest

    @cached_property
    def labels(self) -> NDArray[Any]:
        """The labels of all samples, in order, (N,) or (N, K): a read-only copy, made at the first access. Raises the
        errors of `labels_of`."""
        labels = self.labels_of(np.arange(len(self)))
        labels.flags.writeable = False
        return labels

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name.startswith("_") or name in _PUBLIC]

    def __repr__(self) -> str:
        arrays = f" with {', '.join(self.arrays)}" if self.arrays else ""
        shape = self.manifest.sample_shape or "no pixels"
        return printable(
            f"<ShardSet {self.path}, {self.split}: {len(self)} samples of {shape}{arrays}, "
            f"{len(self.classes)} classes, digest {self.digest[:12]}>"
        )

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: HTML with a table of facts, and some samples if they can be read."""
        facts = {
            "set": str(self.path),
            "split": f"{self.split} (of {', '.join(sorted(self.manifest.splits))})",
            "samples": f"{len(self):,} of {' x '.join(map(str, self.manifest.sample_shape or ['no pixels']))}",
            "classes": f"{len(self.classes):,}: {', '.join(self.class_names[:NUM_SHOWN])}",
            "arrays": ", ".join(self.arrays),
            "digest": self.digest,
        }
        table = table_html({name: text for name, text in facts.items() if text})
        if not self.has_pixels:
            return table
        try:
            return table + pictures_html(*self._shown(some_of(len(self), NUM_THUMBNAILS)))
        except (OSError, FormatError):
            return table

    def show(
        self,
        indices: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        columns: int | None = None,
        side: int | None = None,
    ) -> Any:
        """Returns a sheet of samples with their numbers, classes and keys: a PIL image, which a notebook shows.

        - `indices`: the samples to show; by default 24 samples, spread over the split
        - `columns`: the number of pictures per row; by default at most 8
        - `side`: the longer side of each picture in pixels

        Raises the errors of `gather`.
        """
        from shardio.drawing.sheet import sheet

        numbers = some_of(len(self), NUM_SHOWN) if indices is None else self.check_indices(np.asarray(indices))
        return sheet(*self._shown(numbers), columns=columns, side=side)

    def _shown(self, numbers: NDArray[np.int64]) -> tuple[list[NDArray[np.uint8]], list[str]]:
        """Returns copies of the samples' images, and a caption for each sample."""
        pictures = np.empty((len(numbers), *self.sample_shape), np.uint8)
        self.gather(numbers, pictures)
        return list(pictures), captions_of(self, numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies hold the set's path, split and digest. Unpickling opens the set again, and fails if the
        digest differs."""
        return partial(open_shards, digest=self.digest), (self.folder, self.split)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    @eager
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = position_of(index, len(self))
        arrays = {name: self.values_of(name, np.array([position]))[0] for name in self.arrays if name != LABELS_NAME}
        image = self.image_of(position) if self.has_pixels else None
        label: Any = None
        if self.content.label_row is not None:
            labels = self.labels_of(np.array([position]))
            label = labels[0] if labels.ndim == 2 else labels[0].item()
        return Sample(image, label, arrays, class_text(label, self.class_names) if isinstance(label, int) else "")

    def image_of(self, position: int) -> NDArray[np.uint8]:
        """Returns a copy of one sample's pixels. Raises ShardioError if the set has no pixels."""
        image = np.empty((1, *self.sample_shape), np.uint8)
        self.gather(np.array([position]), image)
        return image.reshape(self.sample_shape)

    def expect_random_reads(self, name: str = "") -> None:
        """Tells the kernel that the pixels (""), or the array `name`, are read at random: it skips neighbor pages."""
        advise_random(self.mapped(name).rows)

    def will_read(self, indices: NDArray[np.int64], windows: Windows | None = None, name: str = "") -> None:
        """Asks the kernel to read the pixels (""), or the array `name`, of samples, which must exist, into the page
        cache. Hardly waits. With `windows`, only the lines of pixels that each window crosses are read."""
        distinct, first = np.unique(indices, return_index=True)  # ascending, as disks like it
        table = self.mapped(name)
        numbers = table.numbers(distinct)
        if windows is None:
            will_need(table.rows, numbers)
        else:
            _, width, channels = self.sample_shape
            stride, wanted = width * channels, windows[first]
            will_need(table.rows, numbers, wanted.tops * stride, wanted.heights * stride)

    def resident_share(self, indices: NDArray[np.int64] | None = None, most: int = 512, name: str = "") -> float | None:
        """Returns the share of the samples `indices` (default: all) that is in the page cache, from 0 to 1.

        Looks at the pixels (""), or the array `name`, of at most `most` of the samples. Returns None if the kernel does
        not report it: it answers only users who own the files or may write to them.
        """
        if not self._residency_is_known:
            return None
        count = len(self) if indices is None else len(indices)
        some = np.linspace(0, count - 1, min(most, count)).astype(np.int64)
        table = self.mapped(name)
        return resident_share(table.rows, table.numbers(some if indices is None else indices[some]))

    @cached_property
    def _residency_is_known(self) -> bool:
        path = self.path_of(self.content.files[-1])
        with contextlib.suppress(OSError):
            return sys.platform == "linux" and (os.access(path, os.W_OK) or os.stat(path).st_uid == os.geteuid())
        return False

    @eager
    def gather(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        """Copies the samples `indices` (integers, one-dimensional), or a window of each sample, into `out`.

        `out` is uint8 (len(indices), height, width, channels), C-contiguous. With `windows`, `out` is one-dimensional
        and gets one window after the other; if all windows have one size, `out` may have a window's height and width
        instead. Raises IndexError, before anything is copied, if an index is negative or too large, or a window is not
        inside its sample. Copying releases the GIL; threads may gather at the same time into different memory.

        A failed read is retried for a second; then `gather` raises an OSError that names the sample, or FormatError if
        the file was truncated.
        """
        indices = self.check_indices(indices)
        if windows is None:
            _check_out(out, np.dtype(np.uint8), (len(indices), *self.sample_shape))
        else:
            _check_windows(out, self.sample_shape, len(indices), windows)
        if self.halved is not None:
            self._gather_halved(indices, out, windows)
        elif windows is None:
            self.mapped().copy(indices, as_rows(out))
        elif len(indices):
            self.mapped().copy_windows(indices, out.reshape(-1), windows, self.sample_shape)

    def _gather_halved(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None) -> None:
        """Does `gather` for a set that is stored as yuv420, a few samples at a time."""
        step, done = max(1, _ROOM_NBYTES // self.row_nbytes), 0
        for first in range(0, len(indices), step):
            images = self.images_of(self.rows_of(indices[first : first + step]))
            if windows is None:
                out[first : first + step] = images
            else:
                cut = [image[windows.part(number)].reshape(-1) for number, image in enumerate(images, start=first)]
                nbytes = sum(map(len, cut))
                np.concatenate(cut, out=out.reshape(-1)[done : done + nbytes])
                done += nbytes

    def rows_of(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns copies of the stored rows with the pixels of samples, which must exist, uint8 (B, row_nbytes). The
        index has the crc32 of such a row. Raises the errors of `gather`."""
        rows = np.empty((len(indices), self.row_nbytes), np.uint8)
        self.mapped().copy(indices, rows)
        return rows

    def images_of(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the images that stored `rows` hold, uint8 (B, height, width, channels), without copying if it can."""
        if self.halved is None:
            return rows.reshape(-1, *self.sample_shape)
        images = np.empty((len(rows), *self.sample_shape), np.uint8)
        Planes.packed(rows, Windows.whole(*images.shape[:3]), images.shape[3], halved=True).copy_images(images)
        return images

    @eager
    def gather_array(self, name: str, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copies the values of the array `name` for the samples `indices` into `out`. Raises the errors of `gather`.

        `out` is C-contiguous, has the array's dtype, and has the value of sample indices[i] in out[i]. Raises
        ValueError if the split has no such array.
        """
        row = self.array(name).row
        indices = self.check_indices(indices)
        _check_out(out, np.dtype(row.dtype), (len(indices), *row.shape))
        self.mapped(name).copy(indices, as_rows(out))

    def copy_crc32s(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the stored crc32 of each sample's value of the array `name`, or of its pixels (""), uint32. The array
        and the samples must exist."""
        if not name:
            return self.copy_column("crc32", indices)
        found = np.empty(len(indices), np.uint32)
        self._mapped_of(self.crc32s[name]).copy(indices, as_rows(found))
        return found

    def locate_one(self, name: str, sample: int) -> tuple[FileEntry, int]:
        """Returns the entry of the file that has a sample's value of the array `name`, or its pixels (""), and the byte
        offset of the value in the file."""
        table, stored = self.table_of(name), np.array([sample])
        if table.order is not None:
            self._mapped_of(table.order).copy(np.array([sample]), as_rows(stored))
        files, offsets = table.locate(stored)
        return table.files[int(files[0])], int(offsets[0])

    def mapped(self, name: str = "") -> MappedTable:
        """Returns the mapped table of the array `name`, or of the pixels ("")."""
        return self._mapped_of(self.table_of(name))

    def source_sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the height and width of each sample's source image, int64 (B, 2); None unless the split is squashed.
        In a squashed split, images were resized to the set's shape without keeping their aspect ratios. Raises the
        errors of `gather`."""
        if not self.content.squashed:
            return None
        indices = self.check_indices(indices)
        columns = [self.copy_column(name, indices) for name in ("source_height", "source_width")]
        return np.stack(columns, axis=1).astype(np.int64)

    def labels_of(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns a copy of the labels of the samples `indices`, which must exist: int64 (B,), or float32 (B,) or (B,
        K). Raises ShardioError if the split has no labels, and the errors of `gather`."""
        if self.content.label_row is None:
            raise ShardioError(f"{self.path}, {self.split}: expected labels, found none: choose another split or set")
        if self.content.index.has_label:
            return self.column_of("label", indices)
        return self.values_of(LABELS_NAME, indices)

    def values_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns a copy of the array `name` for the samples `indices`, (B, ...). Raises the errors of `gather`."""
        row = self.array(name).row
        values = np.empty((len(indices), *row.shape), row.dtype)
        self.gather_array(name, indices, values)
        return values

    @property
    def numbers(self) -> Numbers:
        """For each array of shape (), by name, a function that returns all its values, for `Selection.samples`."""
        every = np.arange(len(self))
        found = [name for name, array in self.content.arrays.items() if not array.row.shape]
        return {name: partial(self.values_of, name, every) for name in found}

    @eager
    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns a copy of the column `name` of the index for the samples `indices`, which must exist.

        Raises ValueError if the index has no such column, and the errors of `gather`. In contrast, `index[name]` is a
        view of the mapping: a page that cannot be read then ends the process.
        """
        names = self.content.index.dtype.names or ()
        if name not in names:
            raise ValueError(f"expected a column of the index, one of {', '.join(names)}; found {name!r}")
        return self.copy_column(name, self.check_indices(indices))

    def copy_column(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns the same as `column_of`, without checking the arguments."""
        fields = self.content.index.dtype.fields
        assert fields is not None
        dtype, start = fields[name][:2]
        column = np.empty(len(indices), dtype)
        self._mapped_of(self.index_table).copy_cells(indices, start, as_rows(column), name)
        return column


def _check_windows(out: NDArray[Any], picture: SampleShape, count: int, windows: Windows) -> None:
    """Raises ValueError or IndexError unless `windows` are `count` windows inside the picture, and `out` fits them."""
    height, width, channels = picture
    windows.check_inside(height, width)
    if len(windows) != count:
        raise IndexError(f"expected {count} windows, one for each index; found {len(windows)} windows")
    shape: tuple[int, ...] = (int(windows.num_pixels.sum()) * channels,)
    if out.ndim != 1 and count:  # windows of one size may have an axis each
        shape = (count, int(windows.heights[0]), int(windows.widths[0]), channels)
        if (windows.heights != shape[1]).any() or (windows.widths != shape[2]).any():
            raise ValueError(f"`out` must have one dimension for windows of several sizes; found shape {out.shape}")
    _check_out(out, np.dtype(np.uint8), shape if count else out.shape)


def _check_out(out: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        what = "a read-only array" if not out.flags.writeable else f"{out.dtype} of shape {out.shape}"
        raise ValueError(f"`out` must be C-contiguous, writeable {dtype} of shape {shape}; found {what}")
