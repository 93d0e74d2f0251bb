"""What a caller gives in files: lists of keys, labels of keys, and arrays; each may be anything."""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import ShardioError, SourceError
from shardio.sets.arrow import open_parquet, read_table
from shardio.system.opening import check_unpacked, naming, open_untrusted

KEY_COLUMNS = ("key", "path")
LABEL_COLUMNS = ("label", "class")

_NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"

Keys = str | os.PathLike[str] | Sequence[str | bytes] | NDArray[Any]
Labels = str | os.PathLike[str] | Mapping[str | bytes, str | int] | Mapping[str, str | int] | Mapping[bytes, str | int]


def as_key(key: str | bytes) -> bytes:
    return os.fsencode(key) if isinstance(key, str) else bytes(key)


def show_key(key: bytes) -> str:
    return repr(os.fsdecode(key))


def some_keys(keys: Sequence[bytes], most: int = 3) -> str:
    """Returns the first keys as they may stand in a message."""
    more = f" and {len(keys) - most:,} more" if len(keys) > most else ""
    return ", ".join(map(show_key, keys[:most])) + more


def hash_of(parts: Iterator[bytes] | Sequence[bytes]) -> str:
    """Returns a sha256 by which a provenance names what a caller has given."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(b"%d " % len(part) + part)
    return sha256.hexdigest()


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turns what is raised for files that are no arrays into a SourceError that names the file."""
    try:
        yield
    except ShardioError:
        raise
    except Exception as error:  # NumPy passes on what tokenize, zipfile and zlib raise
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # zipfile seeks before the beginning
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"{path}: expected an array as `np.save` writes it, without Python objects, found: {first}"
        ) from None


class ArrayFile:
    """The array in an NPY file, whose rows are read when they are asked for.

    They are not mapped: another process may truncate the file, which would kill this one. Raises SourceError if there
    is no array, or it was truncated; OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = file = open_untrusted(path, refusal=SourceError)
        if os.pread(file.fileno(), len(_ZIP), 0) == _ZIP:
            raise SourceError(f"{path}: expected an NPY file, found an archive: save each array by `np.save`")
        with _refusing(path):
            # Version 3 has names of fields in UTF-8, and no array of a set has fields.
            read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
            self.shape, by_columns, self.dtype = read_header[np.lib.format.read_magic(file)[0]](file)
            if self.dtype.hasobject:
                raise ValueError("Python objects")
            self._start = file.tell()
            self._row_nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize
            nbytes = self._start + math.prod(self.shape) * self.dtype.itemsize
            if min(self.shape, default=0) < 0 or os.fstat(file.fileno()).st_size < nbytes:
                raise ValueError(f"fewer bytes than the {nbytes:,} of an array of shape {self.shape}")
            file.seek(0)
            # A row of an array that is stored by columns is nowhere in one piece.
            in_memory = by_columns or not self.shape
            self._whole: NDArray[Any] | None = np.load(file, allow_pickle=False) if in_memory else None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Returns these rows: a range of them, or any, by their numbers."""
        if self._whole is not None:
            return self._whole[rows]
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        found = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        into = memoryview(found.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        firsts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1).tolist()
        for first, end in zip(firsts, [*firsts[1:], len(numbers)], strict=True):
            self._read_into(into[first * self._row_nbytes : end * self._row_nbytes], int(numbers[first]))
        return found

    def _read_into(self, buffer: memoryview, row: int) -> None:
        done = 0
        with naming(self._path):
            while done < len(buffer):
                offset = self._start + row * self._row_nbytes + done
                if not (count := os.preadv(self._file.fileno(), [buffer[done:]], offset)):
                    raise SourceError(f"{self._path}: expected {len(self):,} rows, found it truncated at byte {offset}")
                done += count


# --- keys ------------------------------------------------------------------------------------------------------------


def read_keys(keys: Keys) -> list[bytes]:
    """Returns the keys in a file, which has one in each line, or is an NPY or NPZ file of them; or those of a sequence.

    Raises SourceError if the file has none.
    """
    if not isinstance(keys, (str, os.PathLike)):
        return [as_key(key) for key in _listed(np.asarray(keys) if isinstance(keys, np.ndarray) else keys)]
    path = Path(keys)
    with open_untrusted(path, refusal=SourceError) as opened, io.BufferedReader(opened) as file:
        if not file.peek(len(_NPY)).startswith((_NPY, _ZIP)):
            return _lines(path, file.read())
        with _refusing(path):
            return [as_key(key) for key in _listed(_load(path, file), f"{path}: ")]


def _load(path: Path, file: IO[bytes]) -> NDArray[Any]:
    """Returns the array in an NPY file, or that of an NPZ file which has the keys."""
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        names = [name for name in loaded.files if name in ("keys", "key")] or loaded.files
        if len(names) != 1:
            raise SourceError(f"{path}: expected an array 'keys' in it, found {', '.join(loaded.files)[:200]}")
        # Another archive than NumPy's may hold the name without its ending.
        members = [one for one in loaded.zip.infolist() if one.filename.removesuffix(".npy") == names[0]]
        check_unpacked(path, sum(one.file_size for one in members), refusal=SourceError)
        array: NDArray[Any] = loaded[names[0]]
        return array


def _lines(path: Path, data: bytes) -> list[bytes]:
    found = [line.rstrip(b"\r") for line in data.split(b"\n")]
    while found and not found[-1]:
        found.pop()
    if not found or b"" in found:
        line = found.index(b"") + 1 if found else 1
        raise SourceError(f"{path}, line {line}: expected a name in every line, found none")
    return found


def read_lines(path: Path) -> list[str]:
    """Returns the names in a file, one in each line. Raises SourceError if there is none, or an empty line."""
    with open_untrusted(path, refusal=SourceError) as file:
        return [os.fsdecode(line) for line in _lines(path, file.readall())]


def _listed(keys: Any, where: str = "") -> list[str | bytes]:
    if isinstance(keys, np.ndarray):
        if keys.ndim != 1 or keys.dtype.kind not in "SU":
            raise SourceError(f"{where}expected keys as one row of text, found {keys.dtype} of shape {keys.shape}")
        listed: list[str | bytes] = keys.tolist()
        return listed
    listed = list(keys)
    for key in listed:
        if not isinstance(key, (str, bytes)):
            raise TypeError(f"{where}expected keys as str or bytes, found {key!r:.80}")
    return listed


# --- labels ----------------------------------------------------------------------------------------------------------


def read_labels(labels: Labels) -> tuple[dict[bytes, str | int], str]:
    """Returns a label for each key, from a CSV or parquet file with the columns `key` and `label` or from a mapping;
    and where they come from, as a message may say it."""
    if not isinstance(labels, (str, os.PathLike)):
        return {as_key(key): label for key, label in labels.items()}, "labels"
    path = Path(labels)
    with open_untrusted(path, refusal=SourceError) as file:
        is_parquet = file.read(4) == b"PAR1"
    found: dict[bytes, str | int] = {}
    with contextlib.closing(_parquet_rows(path) if is_parquet else _csv_rows(path)) as rows:
        for where, key, label in rows:
            if found.setdefault(key, label) != label:
                both = f"{found[key]!r} and {label!r}"
                raise SourceError(f"{path}, {where}: expected one label for {show_key(key)}, found {both}")
    if not found:
        raise SourceError(f"{path}: expected rows with a key and a label, found none")
    return found, str(path)


def _column(path: Path, names: Sequence[str], wanted: Sequence[str]) -> int:
    for name in wanted:
        if (times := list(names).count(name)) == 1:
            return list(names).index(name)
        if times:
            raise SourceError(f"{path}: expected one column {name!r}, found {times}")
    found = ", ".join(map(str, names))[:200] or "no header"
    raise SourceError(f"{path}: expected a column {wanted[0]!r}, found {found}")


def _csv_rows(path: Path) -> Generator[tuple[str, bytes, str | int], None, None]:
    # utf-8-sig, as spreadsheets begin their files with a byte order mark; keys need not be UTF-8.
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            key, label = _column(path, header, KEY_COLUMNS), _column(path, header, LABEL_COLUMNS)
            for row in reader:
                if not row:
                    continue  # an empty line
                if len(row) != len(header):
                    raise ValueError(f"expected {len(header)} cells, found {len(row)}")
                yield f"line {reader.line_num}", row[key].encode("utf-8", "surrogateescape"), row[label].strip()
        except (ValueError, csv.Error) as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{path}, line {reader.line_num}: {error}") from None


def _parquet_rows(path: Path) -> Generator[tuple[str, bytes, str | int], None, None]:
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        at = _column(path, names, KEY_COLUMNS), _column(path, names, LABEL_COLUMNS)
        table = read_table(path, file, [names[number] for number in at])
        keys = _values(path, table.column(names[at[0]]), ("string", "large_string", "binary", "large_binary"))
        labels = _values(path, table.column(names[at[1]]), None)
    for number, (key, label) in enumerate(zip(keys, labels, strict=True)):
        if key is None or label is None:
            raise SourceError(f"{path}, row {number}: expected a key and a label, found nothing")
        yield f"row {number}", as_key(key), label


def _values(path: Path, column: Any, kinds: Sequence[str] | None) -> list[Any]:
    """Returns the values of a column of one of these kinds, as bytes; with None, of text or integers, as they are."""
    if str(column.type).startswith("dictionary"):
        column = column.cast(column.type.value_type)
    kind = str(column.type)
    is_label = kinds is None and (kind in ("string", "large_string") or kind.startswith(("int", "uint")))
    if not is_label and kind not in (kinds or ()):
        expected = "class names or numbers" if kinds is None else "keys as text"
        raise SourceError(f"{path}: expected {expected} in a column, found {kind}")
    values: list[Any] = (column if is_label else column.cast("binary")).to_pylist()
    return values
