"""Makes a draft from an old set, and the folder of a new set from a draft, whole or not at all.

Old indexes, orders and checksums are compared with their sha256. Shards and unchanged indexes become hard links; a
shard that cannot be linked is cloned or copied. Everything else is written, and last the manifest. Then a rename makes
the set appear.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.changes.draft import (
    ArrayDraft,
    Draft,
    GivenArray,
    OldFile,
    SplitDraft,
    StoredRows,
    check_arrays,
    number_of,
)
from shardio.errors import ConvertError, FormatError, SpaceError
from shardio.format.entries import (
    ArrayEntry,
    Crc32Entry,
    FileEntry,
    IndexEntry,
    OrderEntry,
    RejectsEntry,
    SplitEntry,
)
from shardio.format.layout import (
    CRC32_ROW,
    HEADER_NBYTES,
    ORDER_ROW,
    REJECTS_NAME,
    array_shard_name,
    index_name,
    shard_name,
)
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.format.opening import open_checked
from shardio.sets.history import describe_change
from shardio.sets.index import check_range, read_checked, read_index, read_rows
from shardio.sets.names import check_local, local_folder
from shardio.sets.new_folder import check_new, rename_new, sweep_beside, temporary_folder
from shardio.sets.rows import ArrayWriter, write_crc32s, write_index, write_order
from shardio.sets.storage import FileCopier, FolderStorage
from shardio.system.files import AtomicFile, remove_temporaries, try_clone, try_link, write_atomic
from shardio.system.opening import FileAt, FolderHandle, is_same_file, naming

ARRAY_SHARD_NBYTES = 4 << 30
"""Maximum size of a file of a new array, in bytes."""


@dataclass(frozen=True)
class Parent:
    """An old set from which a new set is made. `folder` is an absolute path."""

    folder: Path
    manifest: Manifest

    @cached_property
    def draft(self) -> Draft:
        """A draft of the same content as this set. Raises FormatError if an index or an order is damaged."""
        manifest = self.manifest
        with contextlib.closing(FolderStorage(self.folder)) as storage:
            splits = {name: self._split(storage, name) for name in manifest.splits}
        rejects = () if manifest.rejects is None else (OldFile(self.folder, manifest.rejects),)
        return Draft(manifest.sample_shape, manifest.pixels, manifest.classes, manifest.class_names, splits, rejects)

    def _split(self, storage: FolderStorage, name: str) -> SplitDraft:
        split = self.manifest.splits[name]
        orders = [(entry, read_rows(storage, entry)) for entry in split.orders]
        return SplitDraft(
            rows=read_index(storage, self.manifest, name),
            index=OldFile(self.folder, split.index),
            pixels=self._stored(split, orders),
            arrays={
                name: ArrayDraft(array.kind, array.row, self._stored(array, orders))
                for name, array in split.arrays.items()
            },
            squashed=split.squashed,
        )

    def _stored(
        self, rows: SplitEntry | ArrayEntry, orders: Sequence[tuple[OrderEntry, NDArray[np.int64]]]
    ) -> StoredRows:
        order = None
        if rows.order is not None:
            entry, order = orders[rows.order]
            check_range(order, rows.num_rows, "a stored row", self.folder / entry.file)
        crc32s = (OldFile(self.folder, rows.crc32),) if isinstance(rows, ArrayEntry) else ()
        return StoredRows(tuple(OldFile(self.folder, shard) for shard in rows.shards), order, crc32s)


def open_parent(place: str | os.PathLike[str]) -> Parent:
    """Returns the set in the folder `place`. Raises SetNotFoundError if it has none, FormatError if it is damaged."""
    folder = Path(os.path.realpath(local_folder(place)))
    return Parent(folder, load_manifest(folder))


@dataclass
class Room:
    """How many bytes of the new set are linked, cloned, copied and written. Known before the first copy."""

    linked_nbytes: int = 0
    cloned_nbytes: int = 0
    copied_nbytes: int = 0
    written_nbytes: int = 0
    """Estimated size of the new indexes, orders and arrays, until the set is made; then the exact size."""

    @property
    def needed_nbytes(self) -> int:
        return self.copied_nbytes + self.written_nbytes


@dataclass(frozen=True)
class ChangeReport:
    """Describes the new set that `change` or `merge` made."""

    path: str
    digest: str
    num_samples: Mapping[str, int]
    """Samples per split."""
    classes: tuple[str, ...]
    num_files: int
    nbytes: int
    """Size of all files except the manifest, in bytes."""
    linked_nbytes: int
    cloned_nbytes: int
    copied_nbytes: int
    written_nbytes: int
    """Size of the files that are neither links nor clones nor copies, without the manifest."""
    notes: Mapping[str, Any]
    """Results of `change`: "num_relabeled" (samples per split) and "new_classes" (names). Of `merge`: "left_out"
    (SPLIT/ARRAY of each array that the new set lacks; the array "labels" has labels that are not integers)."""


@dataclass(frozen=True)
class CarryOptions:
    """How `change` and `merge` make files, and what functions they call. Does not change the content of the new set."""

    copy: bool = False
    """Whether files are cloned or copied instead of shared with the old sets by hard links."""
    on_room: Callable[[Room], None] | None = None
    """Called once, before the first file is copied, with the bytes that are linked, cloned, copied and written."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with (bytes copied since the last call, bytes to copy in total)."""


def check_target(new: str | os.PathLike[str], parents: Sequence[Parent]) -> Path:
    """Returns the absolute path of `new`, the folder of the new set. Removes leftovers of killed processes next to it.

    Raises ConvertError if the folder exists, would be inside a parent set, or cannot be made there.
    """
    check_local(new, ConvertError, "make the set in a folder here, and copy it there (docs/cluster.md)")
    target = Path(os.path.abspath(new))
    sweep_beside(target)  # first: the killed process, or a faster one, may have made the set
    check_new(target, [parent.folder for parent in parents])
    return target


def carry_out(
    draft: Draft,
    target: Path,
    operation: str,
    arguments: Mapping[str, Any],
    parents: Sequence[Parent],
    options: CarryOptions,
    notes: Mapping[str, Any],
) -> ChangeReport:
    """Makes the set that `draft` describes in the folder `target`, and returns a report, which includes `notes`.

    The manifest records `operation`, "change" or "merge", its `arguments` (JSON values) and the digests of `parents`.
    Raises ConvertError if `target` exists or the set cannot be made, FormatError if an old file is damaged, SpaceError
    if the disk is too full, or OSError. After an error this call leaves no set in `target`. A killed process leaves the
    whole set, or a temporary folder next to it, which the next change there removes.
    """
    check_arrays(draft)
    with temporary_folder(target) as (folder, _):
        maker = _Maker(draft, folder, options)
        provenance = describe_change(operation, arguments, [parent.manifest for parent in parents])
        manifest = maker.make(provenance)
        rename_new(folder, target)
    room = maker.room
    room.written_nbytes = manifest.nbytes - room.linked_nbytes - room.cloned_nbytes - room.copied_nbytes
    return ChangeReport(
        path=str(target),
        digest=manifest.digest,
        num_samples={name: split.num_samples for name, split in manifest.splits.items()},
        classes=manifest.classes,
        num_files=len(manifest.files) + 1,
        nbytes=manifest.nbytes,
        notes=notes,
        **asdict(room),
    )


class _Maker:
    def __init__(self, draft: Draft, folder: FolderHandle, options: CarryOptions) -> None:
        self.room = Room()
        self._draft = draft
        self._folder = folder
        self._options = options
        self._to_copy: list[tuple[OldFile[FileEntry], FileEntry]] = []
        self._orders: dict[str, list[NDArray[np.int64]]] = {}
        """The distinct orders of each split."""

    def make(self, provenance: Mapping[str, Any]) -> Manifest:
        draft = self._draft
        staying = {name: self._keep_split(name, split) for name, split in draft.splits.items()}
        self._copy()
        manifest = Manifest(
            sample_shape=draft.sample_shape,
            classes=draft.classes,
            splits={name: self._finish_split(name, split, staying[name]) for name, split in draft.splits.items()},
            rejects=self._rejects(),
            provenance=provenance,
            class_names=draft.class_names,
            pixels=draft.pixels,
        )
        remove_temporaries(self._folder)  # of clones that could neither be made nor discarded
        commit_manifest(self._folder, manifest)
        return manifest

    # --- files that stay ----------------------------------------------------------------------------------------------

    def _keep_split(self, name: str, split: SplitDraft) -> SplitEntry:
        """Adds the shards of a split, of pixels and arrays, to the new set. Returns the split's manifest entry, in
        which the index, the orders and the checksums are still missing."""
        orders = self._orders[name] = []
        pixels = split.pixels.kept()
        shards = [replace(old.entry, file=shard_name(name, i)) for i, old in enumerate(pixels.shards)]
        for old, entry in zip(pixels.shards, shards, strict=True):
            self._keep(old, entry)
        number = number_of(pixels.order, orders)
        arrays = {array: self._keep_array(name, array, draft, orders) for array, draft in split.arrays.items()}
        return SplitEntry(len(split), IndexEntry("", 0, "", 4), tuple(shards), (), number, arrays, split.squashed)

    def _keep_array(self, split: str, name: str, draft: ArrayDraft, orders: list[NDArray[np.int64]]) -> ArrayEntry:
        kept = draft.stored.kept()
        shards = []
        for i, old in enumerate(kept.shards):
            file = array_shard_name(split, name, None if draft.row.is_small and len(kept.shards) == 1 else i)
            shards.append(replace(old.entry, file=file))
            self._keep(old, shards[-1])
        number = number_of(kept.order, orders)
        return ArrayEntry(draft.kind, draft.row, tuple(shards), Crc32Entry("", 0, ""), number)

    def _keep(self, old: OldFile[FileEntry], entry: FileEntry) -> None:
        """Adds the file `entry`, with the bytes of `old`, to the new set: as a link or clone, or later by `_copy`."""
        path = self._folder / entry.file
        with open_checked(old.path, old.entry) as file:
            if self._link(old, path):
                if not is_same_file(file, path):
                    raise FormatError(f"{old.path}: another process has just replaced this file: try again")
                return
            with AtomicFile(path) as clone, naming(path):
                if try_clone(file, clone.descriptor):
                    clone.commit()
                    self.room.cloned_nbytes += entry.nbytes
                    return
        self._to_copy.append((old, entry))
        self.room.copied_nbytes += entry.nbytes

    def _link(self, old: OldFile[FileEntry], path: FileAt) -> bool:
        """Makes `path` a hard link to an old file. Returns False if a link is impossible or not wanted."""
        if self._options.copy or not try_link(old.path, path):
            return False
        self.room.linked_nbytes += old.entry.nbytes
        return True

    def _copy(self) -> None:
        """Copies the files that could be neither linked nor cloned. Raises SpaceError first if the disk is too full."""
        for name, split in self._draft.splits.items():
            self.room.written_nbytes += HEADER_NBYTES + split.rows.nbytes
            self.room.written_nbytes += len(self._orders[name]) * ORDER_ROW.file_nbytes(len(split))
            for draft in split.arrays.values():
                self.room.written_nbytes += CRC32_ROW.file_nbytes(draft.stored.num_rows)
            for given in split.given.values():
                self.room.written_nbytes += given.row.file_nbytes(len(split)) + CRC32_ROW.file_nbytes(len(split))
        if self.room.needed_nbytes > (free := shutil.disk_usage(self._folder.path).free):
            raise SpaceError(
                f"{self._folder.path.parent}: expected {self.room.needed_nbytes:,} bytes of free space, found {free:,} "
                "bytes. Free some space, or make the new set on the filesystem of the old set, where files can be links"
            )
        if self._options.on_room is not None:
            self._options.on_room(self.room)
        if not self._to_copy:
            return
        with contextlib.closing(_ParentStorage(self._to_copy)) as storage:
            copier = FileCopier(storage, 2, "shardio-change", self._options.on_progress, self.room.copied_nbytes)
            copier.copy(self._folder, [new for _, new in self._to_copy])

    # --- files that are new -------------------------------------------------------------------------------------------

    def _finish_split(self, name: str, split: SplitDraft, entry: SplitEntry) -> SplitEntry:
        orders = self._orders[name]
        return replace(
            entry,
            index=self._index(name, split),
            orders=tuple(write_order(self._folder, name, number, order) for number, order in enumerate(orders)),
            arrays={
                **{
                    array: replace(kept, crc32=self._write_crc32s(name, array, split.arrays[array].stored))
                    for array, kept in entry.arrays.items()
                },
                **{array: self._write_array(name, array, len(split), given) for array, given in split.given.items()},
            },
        )

    def _index(self, name: str, split: SplitDraft) -> IndexEntry:
        if split.index is None or not self._link(split.index, self._folder / index_name(name)):
            return write_index(self._folder, name, split.rows)
        return replace(split.index.entry, file=index_name(name))

    def _write_crc32s(self, split: str, array: str, stored: StoredRows) -> Crc32Entry:
        numbers = np.concatenate([read_rows(FolderStorage(old.folder), old.entry) for old in stored.crc32s])
        rows = stored.kept().rows
        return write_crc32s(self._folder, split, array, numbers if rows is None else numbers[rows])

    def _write_array(self, split: str, name: str, num_samples: int, given: GivenArray) -> ArrayEntry:
        writer = ArrayWriter(self._folder, split, name, given.kind, given.row, ARRAY_SHARD_NBYTES)
        written = 0
        try:
            for block in given.blocks:
                written += len(block)
                if written > num_samples:
                    break
                writer.append(block)
            if written != num_samples:
                found = f"{written:,}" if written < num_samples else "more"
                raise ConvertError(
                    f"array {name!r}: expected a row for each of the {num_samples:,} samples of the split {split!r}, "
                    f"found {found} rows"
                )
            return writer.finish()
        except BaseException:
            writer.discard()
            raise

    def _rejects(self) -> RejectsEntry | None:
        old = self._draft.rejects
        if not old:
            return None
        data = b"".join(read_checked(FolderStorage(one.folder), one.entry).tobytes() for one in old)
        write_atomic(self._folder / REJECTS_NAME, data)
        num_rejects = sum(one.entry.num_rejects for one in old)
        return RejectsEntry(REJECTS_NAME, len(data), hashlib.sha256(data).hexdigest(), num_rejects)


class _ParentStorage(FolderStorage):
    """Reads the files of the parent sets under the names that the files get in the new set."""

    def __init__(self, files: Iterable[tuple[OldFile[FileEntry], FileEntry]]) -> None:
        self._paths = {entry.file: str(old.path) for old, entry in files}
        super().__init__(os.path.dirname(next(iter(self._paths.values()))))

    def path_of(self, entry: FileEntry) -> str:
        return self._paths[entry.file]
