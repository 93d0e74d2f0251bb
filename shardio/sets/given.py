"""Reads files that callers pass in, which are not trusted: arrays of numbers, lists of keys, parquet."""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.errors import ShardioError, SourceError, first_of
from shardio.system.opening import check_unpacked, naming, open_untrusted

_NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"
HEADER_MOST = 16 << 10
"""NumPy writes and reads no longer header."""
# Columns of parquet are read in pieces of this size and nothing ahead of them. pyarrow would otherwise keep every row
# group that was read until the last one is.
_BUFFER_NBYTES = 1 << 20

# What reading parquet may take. A page is unpacked whole, and each value becomes an object of Python.
_PAGE_NBYTES, _BATCH_NBYTES, _OBJECT_NBYTES = 512 << 20, 64 << 20, 32

Keys = str | os.PathLike[str] | Sequence[str | bytes] | NDArray[Any]


def as_key(key: str | bytes) -> bytes:
    return os.fsencode(key) if isinstance(key, str) else bytes(key)


def show_key(key: bytes) -> str:
    return repr(os.fsdecode(key))


def some_keys(keys: Sequence[bytes]) -> str:
    """Returns the first three keys, as text for a message, and how many keys there are besides."""
    return first_of(keys, 3, show_key)


def hash_of(parts: Iterable[bytes]) -> str:
    """Returns the sha256 (hex) of a caller's input, given in parts, as a provenance records it."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(b"%d " % len(part) + part)
    return sha256.hexdigest()


@contextlib.contextmanager
def refusing(path: str | Path) -> Iterator[None]:
    """Turns errors of the block into a SourceError that says that the file `path` holds no array. Errors of shardio and
    of the system pass through."""
    try:
        yield
    except ShardioError:
        raise
    except Exception as error:  # NumPy passes on what tokenize, zipfile and zlib raise
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # zipfile seeks before the beginning
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"{path}: expected an array (NPY), or an archive of arrays (NPZ), without Python objects: {first}"
        ) from None


class ArrayHeader(NamedTuple):
    """The header of an NPY file. `by_columns` means Fortran order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_columns: bool
    start: int
    """The offset of the values in the file."""

    @property
    def nbytes(self) -> int:
        """The size in bytes that the file must have at least."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def parse_header(first: bytes) -> ArrayHeader:
    """Returns the header in `first`, the first HEADER_MOST bytes of an NPY file. Call it inside `refusing`, which gives
    its ValueErrors the file's name."""
    file = io.BytesIO(first)
    # Version 3 has names of fields in UTF-8, and no array of a set has fields.
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)[0]
    if version not in read:
        raise ValueError(f"version {version} of the NPY format, where 1 and 2 are supported")
    shape, by_columns, dtype = read[version](file)
    if dtype.hasobject:
        raise ValueError("the dtype has Python objects")
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape} has a negative number")
    return ArrayHeader(dtype, shape, by_columns, file.tell())


class ArrayFile:
    """The array in an NPY file. Rows are read when requested, and not mapped, as the file may be truncated meanwhile.

    Raises SourceError if the file holds no array or was truncated, OSError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = file = open_untrusted(path, refusal=SourceError)
        if os.pread(file.fileno(), len(_ZIP), 0) == _ZIP:
            raise SourceError(
                f"{path}: expected an NPY file, found an archive (NPZ or ZIP): save each array by `np.save`"
            )
        with refusing(path):
            header = parse_header(os.pread(file.fileno(), HEADER_MOST, 0))
            self.dtype, self.shape, by_columns, self._start = header
            self._row_nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize
            if os.fstat(file.fileno()).st_size < header.nbytes:
                raise ValueError(
                    f"the file is shorter than the {header.nbytes:,} bytes of an array of shape {self.shape}"
                )
            # An array that is stored by columns (Fortran order) is read whole, as its rows are not contiguous.
            in_memory = by_columns or not self.shape
            self._whole: NDArray[Any] | None = np.load(file, allow_pickle=False) if in_memory else None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Returns a range of rows, or the rows with these numbers. An array of shape () returns its only value."""
        if self._whole is not None:
            return self._whole[rows] if self.shape else self._whole
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        found = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        into = memoryview(found.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        firsts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1).tolist()
        for first, end in pairwise([*firsts, len(numbers)]):
            left = into[first * self._row_nbytes : end * self._row_nbytes]
            offset = self._start + int(numbers[first]) * self._row_nbytes
            while left:
                with naming(self._path):
                    count = os.preadv(self._file.fileno(), [left], offset)
                if not count:
                    raise SourceError(
                        f"{self._path}: expected {len(self):,} rows, found it truncated at byte {offset}: copy it again"
                    )
                left, offset = left[count:], offset + count
        return found


def read_keys(keys: Keys) -> list[bytes]:
    """Returns the keys in a sequence, in a text file with a key per line, or in an NPY or NPZ file.

    Raises SourceError if a file or array holds no keys, TypeError if a sequence holds something other than keys.
    """
    if not isinstance(keys, (str, os.PathLike)):
        return _checked_keys(keys)
    path = Path(keys)
    with naming(path), open_untrusted(path, refusal=SourceError) as opened, io.BufferedReader(opened) as file:
        if not file.peek(len(_NPY)).startswith((_NPY, _ZIP)):
            return _lines(path, file.read())
        with refusing(path):
            return _checked_keys(_load(path, file), f"{path}: ")


def _lines(path: Path, data: bytes) -> list[bytes]:
    found = [line.rstrip(b"\r") for line in data.removeprefix(codecs.BOM_UTF8).split(b"\n")]
    while found and not found[-1]:
        found.pop()
    if not found or b"" in found:
        line = found.index(b"") + 1 if found else 1
        raise SourceError(f"{path}, line {line}: expected a name in every line, found an empty line")
    return found


def _load(path: Path, file: IO[bytes]) -> NDArray[Any]:
    """Returns the array in an NPY file, or the array of keys in an NPZ file."""
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        names = [name for name in loaded.files if name in ("keys", "key")] or loaded.files
        if len(names) != 1:
            raise SourceError(
                f"{path}: expected one array, or an array 'keys', in the archive, found {', '.join(loaded.files)[:200]}"
            )
        # Another archive than NumPy's may hold the name without its ending.
        members = [one for one in loaded.zip.infolist() if one.filename.removesuffix(".npy") == names[0]]
        check_unpacked(path, sum(one.file_size for one in members))
        array: NDArray[Any] = loaded[names[0]]
        return array


def _checked_keys(keys: NDArray[Any] | Sequence[str | bytes], where: str = "") -> list[bytes]:
    if isinstance(keys, np.ndarray):
        if keys.ndim != 1 or keys.dtype.kind not in "SU":
            raise SourceError(
                f"{where}expected keys as a one-dimensional array of text, found {keys.dtype} of shape {keys.shape}"
            )
        keys = keys.tolist()
    for key in keys:
        if not isinstance(key, (str, bytes)):
            raise TypeError(f"{where}expected keys as str or bytes, found {key!r:.80}")
    return list(map(as_key, keys))


# --- parquet, by the extra of this name -------------------------------------------------------------------------------


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Yields the file as a pyarrow.parquet.ParquetFile, which is closed at the end of the `with` block.

    Raises SourceError, also from inside the block, if the file is damaged; and if pyarrow is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise SourceError(
            f"{path}: pyarrow is needed to read parquet, but is not installed. Install it: "
            'pip install "shardio[parquet]"'
        ) from None
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise SourceError(f"{path}: expected a path in UTF-8, which pyarrow requires: rename the file") from None
    try:
        # Checksums of pages are compared where a file has them.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=_BUFFER_NBYTES, pre_buffer=False, page_checksum_verification=True
        ) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns may be any bytes
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's; pyarrow's errors about damage have no number
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{path}: damaged, or no parquet file: {first_line}") from None


def read_batches(path: Path, file: Any, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yields the rows of `columns`, by default of all, as pyarrow.RecordBatches. `file` is from `open_parquet(path)`.

    Raises SourceError if the values take far more bytes than the file: see `check_unpacked`.
    """
    nbytes = 0
    for group in range(file.num_row_groups):
        for batch in read_group(path, file, group, columns, 1 << 16):
            # pyarrow repeats nothing in an array with a dictionary, but Python will.
            plain = (one.dictionary_decode() if hasattr(one, "dictionary") else one for one in batch.columns)
            nbytes += sum(one.nbytes for one in plain)
            check_unpacked(path, nbytes)
            yield batch


def read_group(path: Path, file: Any, group: int, columns: Sequence[str] | None, most_rows: int) -> Iterator[Any]:
    """Yields the rows of row group number `group` as RecordBatches of at most `most_rows` rows and about 64 MiB.

    Raises SourceError before anything is unpacked if a page is larger than 512 MiB and than twice its column in the
    file; or if the rows of the file, or the lists of the row group, have far more values than the file has bytes.
    """
    metadata, largest = file.metadata, 1
    check_unpacked(path, metadata.num_rows * _OBJECT_NBYTES)
    with path.open("rb") as opened:
        for number in range(metadata.num_columns):
            column, chunk = metadata.schema.column(number), metadata.row_group(group).column(number)
            if columns is not None and not any(f"{column.path}.".startswith(f"{name}.") for name in columns):
                continue
            sizes, counts = zip((0, 0), *_pages(path, opened, chunk), strict=True)
            if max(sizes) > (most := max(_PAGE_NBYTES, 2 * chunk.total_compressed_size)):
                expected = f"row group {group}: expected pages of at most {most:,} bytes, found {max(sizes):,}"
                raise SourceError(f"{path}: {expected} in {column.path!r}: write it with smaller pages or row groups")
            largest = max(largest, *sizes)
            if column.max_repetition_level:  # one row may have all values
                check_unpacked(path, sum(counts) * _OBJECT_NBYTES)
                largest = max(largest, sum(sizes), sum(counts) * _OBJECT_NBYTES)
    # No value is larger than a page, but every row may have the same value of a dictionary.
    rows = max(1, min(most_rows, _BATCH_NBYTES // largest))
    yield from file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)


def _pages(path: Path, file: IO[bytes], chunk: Any) -> Iterator[tuple[int, int]]:
    """Yields (unpacked bytes, number of values) of each page in a chunk of a column, from the headers of the pages."""
    at = min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
    end = at + chunk.total_compressed_size
    while 0 <= at < end:
        try:
            file.seek(at)
            header = _read_struct(file)
            values = header.get(5) or header.get(7) or header.get(8) or {}
            yield max(0, header[2]), max(0, values.get(1, 0))
            at = file.tell() + max(0, header[3])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            raise SourceError(f"{path}: damaged: expected a page at byte {at}, found none") from None


def _read_struct(file: IO[bytes]) -> dict[int, Any]:
    """Reads a struct of Thrift's compact protocol. Returns its integers and structs, by field number."""

    def read_number() -> int:
        byte = file.read(1)[0]
        return byte if byte < 0x80 else byte & 0x7F | read_number() << 7

    found: dict[int, Any] = {}
    field = 0
    while head := file.read(1)[0]:
        field += head >> 4 or read_number() // 2 - field
        kind = head & 15
        if kind in (4, 5, 6):  # signed: 0, -1, 1, -2, ...
            number = read_number()
            found[field] = number >> 1 ^ -(number & 1)
        elif kind == 8:  # bytes
            file.seek(read_number(), os.SEEK_CUR)
        elif kind == 12:
            found[field] = _read_struct(file)
        elif kind not in (1, 2):  # the two truth values; nothing else is in the header of a page
            raise KeyError(kind)
    return found
