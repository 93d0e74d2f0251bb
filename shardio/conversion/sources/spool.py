"""Reads the images of parquet files, in place or from copies of the images, which are called the spool.

Parquet files have no random reads: to read one image, its whole row group is read, and a conversion may read images in
shuffled order. So all images are first copied out of the files into OUT/.convert, as plain bytes, row group by row
group in the order of storage. The copies take as much space as all encoded images, until the set is published.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from shardio.conversion.images.headers import MAX_SOURCE_NBYTES
from shardio.conversion.sources.collection import FileOrigin, Item, Source, check_source_nbytes, check_unchanged, digest
from shardio.errors import DecodeError
from shardio.format.layout import crc32
from shardio.sets.given import open_parquet, read_group
from shardio.system.files import AtomicFile, write_all
from shardio.system.opening import check_unpacked, naming, open_untrusted

# So few images at a time, as each may be MAX_SOURCE_NBYTES long.
_IMAGES_AT_ONCE = 16

# At the end of a spool file, for each row: the first byte of its image, how many it has or _NO_IMAGE, and their crc32.
_ENTRY = struct.Struct("<qqI")
_NO_IMAGE = -1


@dataclass(frozen=True)
class TableFile:
    """The number of rows, the size and the identity of a parquet file at the time of the scan."""

    num_rows: int
    nbytes: int
    """The approximate number of bytes of the file's images."""
    identity: str
    """The file's size and modification time, from `identify`. They show later whether the file has changed."""


@dataclass(frozen=True)
class ParquetOrigin(FileOrigin):
    """Reads images from a column of parquet files, or from the copies that `prepare` makes of them. Thread safe."""

    image: str
    """The name of the column of images, such as "image", or "image.bytes" for a field of a struct."""
    files: Mapping[bytes, TableFile]
    """The parquet files, by their paths relative to `folder`."""

    def read(self, source: Source) -> bytes:
        """Returns an encoded image from its copy, or from the parquet file if `spool` is None or the copy is damaged.

        Raises FileNotFoundError if another process has published the set and removed the copies.
        """
        where, number = source.item()
        is_sound, image = (False, None) if self.spool is None else self._read_spool(where, number)
        if not is_sound:
            image = self._read_row_group(where, number)
        if image is None:
            raise DecodeError("empty", "expected the bytes of an image, found null: the row has no image")
        return image

    def nbytes(self, sources: Sequence[Source]) -> int:
        return sum(self.files[where].nbytes for where in {s.place.where for s in sources if isinstance(s.place, Item)})

    def _read_row_group(self, where: bytes, number: int) -> bytes | None:
        path, group = self.folder / os.fsdecode(where), 0
        check_unchanged(path, self.files[where].identity)
        with open_parquet(path) as file:
            while number >= (num_rows := file.metadata.row_group(group).num_rows):
                number, group = number - num_rows, group + 1
            image = next(islice(chain.from_iterable(_images(path, file, group, self.image)), number, None))
            if image is None:
                return None
            check_source_nbytes(len(image))
            return bytes(image)

    def _spool_path(self, where: bytes) -> Path:
        assert self.spool is not None
        # The name depends on the identity, so a copy from an older version of the file is never used.
        return self.spool / f"{digest((os.fsdecode(where), self.files[where].identity))[:32]}.images"

    def _missing(self) -> list[bytes]:
        return [where for where in self.files if self.spool is None or not self._spool_path(where).exists()]

    def copies_nbytes(self) -> int:
        return sum(self.files[where].nbytes for where in self._missing())

    def prepare(self, report: Callable[[int], None]) -> None:
        """Copies the images of every parquet file that has no copy yet into `spool`. See `Origin.prepare`. A copy is
        complete or absent, and concurrent calls do not disturb each other. Takes memory for one page of a parquet file,
        and for 64 MiB of images or a single larger image."""
        for where in self._missing():
            self._copy_out(where, report)

    def _copy_out(self, where: bytes, report: Callable[[int], None]) -> None:
        path, target = self.folder / os.fsdecode(where), self._spool_path(where)
        entries, nbytes = bytearray(), self.files[where].num_rows * _ENTRY.size
        offset = 0
        with AtomicFile(target) as out, open_parquet(path) as file:
            groups = (_images(path, file, group, self.image) for group in range(file.num_row_groups))
            for images in chain.from_iterable(groups):
                for image in images:
                    size = _NO_IMAGE if image is None else len(image)
                    entries += _ENTRY.pack(offset, size, crc32(image or b""))
                    if image is not None and size <= MAX_SOURCE_NBYTES:
                        with naming(target):
                            write_all(out.descriptor, image)
                        check_unpacked(path, offset := offset + size)
                report(len(images))
            # Another number of rows is a change, too, even if somebody has set the time back.
            check_unchanged(path, self.files[where].identity if len(entries) == nbytes else "")
            with naming(target):
                write_all(out.descriptor, bytes(entries))
            out.commit()

    def _read_spool(self, where: bytes, number: int) -> tuple[bool, bytes | None]:
        """Reads the copy of row `number` of the file `where`. Returns (True, its image), (True, None) if the row has no
        image, or (False, None or damaged bytes) if the copy is damaged."""
        path = self._spool_path(where)
        with naming(path), open_untrusted(path) as file:
            start = os.fstat(file.fileno()).st_size - _ENTRY.size * (self.files[where].num_rows - number)
            entry = os.pread(file.fileno(), _ENTRY.size, max(0, start))
            if len(entry) < _ENTRY.size:
                return False, None
            offset, nbytes, crc = _ENTRY.unpack(entry)
            if nbytes == _NO_IMAGE:
                return crc == 0, None
            if offset < 0 or not 0 <= nbytes <= MAX_SOURCE_NBYTES:  # larger ones are not copied
                return False, None
            image = os.pread(file.fileno(), nbytes, offset)
            return crc32(image) == crc, image


def is_struct(kind: Any) -> bool:
    """Whether an Arrow type is a struct, which has named fields."""
    return str(kind).startswith("struct<")


def _images(path: Path, file: Any, group: int, column: str) -> Iterator[list[memoryview | None]]:
    """Yields the encoded images of a row group, in lists of up to 16 rows.

    Each image is a view that is valid until the next list is yielded, or None for a row without an image.
    """
    for batch in read_group(path, file, group, [column], _IMAGES_AT_ONCE):
        array = batch.column(0)
        if is_struct(array.type):
            (array,) = array.flatten()  # where the struct is null, so are its bytes
        yield [memoryview(value.as_buffer()) if value.is_valid else None for value in array]
