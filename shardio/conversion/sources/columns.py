"""Numbers for every sample from a CSV or parquet file: additional columns of the index.

A row of the file belongs to the source whose key is in its column `path`. The tasks of a conversion do not use the
columns: they are added to the index when the set is published.
"""

from __future__ import annotations

import csv
import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.sources.collection import Source
from shardio.conversion.writing.shard_file import with_columns
from shardio.errors import SourceError
from shardio.format.layout import IndexColumns, check_columns
from shardio.format.parse import first_repeated
from shardio.sets.arrow import check_installed, open_parquet, read_table

PATH = "path"
"""The name of the column with the keys of sources."""

# float64 holds integers exactly up to here.
_MAX_EXACT = 1 << 53
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)

_Numbers = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """The columns of all sources of a collection."""

    columns: IndexColumns
    rows: Mapping[bytes, int]
    """The row of each path in the file. The keys of all sources are among the paths."""
    values: Mapping[str, _Numbers]
    """The numbers of each column, by row of the file."""
    sha256: str
    """Hash of the names, types and numbers of the columns, for all sources."""
    num_unused: int
    """The number of rows in the file whose path is not the key of a source."""

    def extend(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Returns a copy of index rows with the columns added. Rows may be of any of the sources, in any order."""
        found = [self.rows[key] for key in rows["key"].tolist()]
        return with_columns(rows, self.columns, {name: numbers[found] for name, numbers in self.values.items()})


def read_columns(path: Path, splits: Mapping[str, Sequence[Source]]) -> ColumnTable:
    """Reads the columns of a CSV file with a header, or of a parquet file, for the sources of all splits.

    Every column except `path` must be numeric. A column with only integers becomes int64. Any other becomes float64,
    where empty cells are NaN, and refuses integers that float64 cannot hold exactly.

    Raises SourceError if a cell is not a number, a path occurs twice, or a source has no row; OSError if the file
    cannot be read.
    """
    paths, table = _read_parquet(path) if check_columns_file(path) else _read_csv(path)
    if not table:
        raise SourceError(f"{path}: expected columns of numbers in addition to {PATH!r}, found none")
    try:
        columns = check_columns([(name, numbers.dtype.str) for name, numbers in table])
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    rows = {key: row for row, key in enumerate(paths)}
    if (repeated := first_repeated(paths)) is not None:
        raise SourceError(
            f"{path}: expected one row for each path, found {_show(repeated)} twice ({len(paths) - len(rows):,} rows "
            "too many)"
        )
    found = [_find(path, rows, sources) for sources in splits.values()]
    sha256 = hashlib.sha256(repr(columns).encode())
    for _, numbers in table:
        for rows_of_split in found:
            sha256.update(numbers[rows_of_split].tobytes())
    return ColumnTable(columns, rows, dict(table), sha256.hexdigest(), len(paths) - len(set().union(*found)))


def check_columns_file(path: Path) -> bool:
    """Returns True if the file of columns is parquet, and False if it is CSV.

    Raises SourceError if the file is missing, or is parquet and pyarrow is missing; OSError if it cannot be read.
    """
    if not path.is_file():
        found = "something else" if path.exists() else "nothing"
        raise SourceError(f"{path}: expected a CSV or parquet file of columns, found {found}")
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    if is_parquet:
        check_installed(path)
    return is_parquet


def _find(path: Path, rows: Mapping[bytes, int], sources: Sequence[Source]) -> list[int]:
    """Returns the row of each source."""
    if missing := [source.key for source in sources if source.key not in rows]:
        raise SourceError(
            f"{path}: expected a row for every image, found none for {len(missing):,} of {len(sources):,}, such as "
            f"{_show(missing[0])}. The file's first path is {_show(next(iter(rows), b''))}; paths are relative to SRC, "
            "and other cells may be empty"
        )
    return [rows[source.key] for source in sources]


def _show(key: bytes) -> str:
    return repr(key.decode(errors="replace"))


# --- CSV -------------------------------------------------------------------------------------------------------------


class _Cells:
    """The numbers of one column: integers as long as every cell is an integer, floats from then on."""

    def __init__(self) -> None:
        self._numbers: array[int] | array[float] = array("q")

    def append(self, cell: str) -> None:
        """Appends the number in the cell. Raises ValueError if the cell is not a number, or the number does not fit."""
        number = self._parse(cell)
        if isinstance(number, float) and self._numbers.typecode == "q":
            for integer in self._numbers:
                self._check_exact(integer)
            self._numbers = array("d", self._numbers)
        elif isinstance(number, int) and self._numbers.typecode == "d":
            self._check_exact(number)
        try:
            self._numbers.append(number)  # type: ignore[arg-type]
        except OverflowError:
            raise ValueError(f"expected integers that fit in int64, found {cell}") from None

    @staticmethod
    def _parse(cell: str) -> int | float:
        if _INTEGER.fullmatch(cell):
            return int(cell)
        try:
            if not cell.isascii() or "_" in cell:  # which Python's float would take
                raise ValueError
            return float(cell) if cell else np.nan
        except ValueError:
            raise ValueError(f"expected a number or nothing, found {cell[:80]!r}") from None

    @staticmethod
    def _check_exact(integer: int | float) -> None:
        if abs(integer) > _MAX_EXACT:
            raise ValueError(f"expected -2**53 to 2**53, as other cells are fractions or empty, found {integer}")

    def to_array(self) -> _Numbers:
        return _canonical(np.array(self._numbers))


def _canonical(numbers: NDArray[Any]) -> _Numbers:
    """Returns the numbers as little-endian int64 or float64. All NaNs get the same bytes."""
    if numbers.dtype.kind == "i":
        return numbers.astype("<i8")
    floats: NDArray[np.float64] = numbers.astype("<f8")
    floats[np.isnan(floats)] = np.nan
    return floats


def _read_csv(path: Path) -> tuple[list[bytes], list[tuple[str, _Numbers]]]:
    # utf-8-sig, as spreadsheets begin their files with a byte order mark; paths need not be UTF-8.
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            at = _path_column(path, header)
            paths: list[bytes] = []
            columns = {number: _Cells() for number in range(len(header)) if number != at}
            for row in reader:
                if not row:
                    continue  # an empty line
                if len(row) != len(header):
                    raise ValueError(f"expected {len(header)} cells, found {len(row)}")
                paths.append(row[at].encode("utf-8", "surrogateescape"))
                for number, cells in columns.items():
                    try:
                        cells.append(row[number].strip())
                    except ValueError as error:
                        raise ValueError(f"column {header[number]!r}: {error}") from None
        except SourceError:
            raise
        except (ValueError, csv.Error) as error:
            raise SourceError(f"{path}, line {reader.line_num}: {error}") from None
    return paths, [(header[number], cells.to_array()) for number, cells in columns.items()]


def _path_column(path: Path, names: list[str]) -> int:
    if names.count(PATH) != 1:
        found = ", ".join(names)[:200] if PATH not in names else f"{names.count(PATH)} of them"
        raise SourceError(f"{path}: expected one column named {PATH!r}, found {found or 'no header'}")
    return names.index(PATH)


# --- parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> tuple[list[bytes], list[tuple[str, _Numbers]]]:
    with open_parquet(path) as file:
        schema = file.schema_arrow
        at = _path_column(path, schema.names)
        table = read_table(path, file)
        kind = str(schema.types[at])
        if kind not in ("string", "large_string", "binary", "large_binary"):
            raise SourceError(f"{path}: expected text in the column {PATH!r}, found {kind}")
        paths = table.column(at).cast("binary").to_pylist()
        if None in paths:
            raise SourceError(f"{path}: expected a path in every row, found none in row {paths.index(None)}")
        numeric = [
            (name, _parquet_numbers(path, name, table.column(number)))
            for number, name in enumerate(schema.names)
            if number != at
        ]
    return paths, numeric


def _parquet_numbers(path: Path, name: str, column: Any) -> _Numbers:
    kind = str(column.type)
    if kind in ("halffloat", "float", "double"):
        return _canonical(column.to_numpy())  # where there is nothing, there is NaN
    if kind != "bool" and not re.fullmatch(r"u?int(8|16|32|64)", kind):
        raise SourceError(f"{path}: column {name!r}: expected numbers, found {kind}")
    integers = column.cast("int64")
    if not integers.null_count:
        return _canonical(integers.to_numpy())
    nothing = integers.is_null().to_numpy()
    numbers = integers.fill_null(0).to_numpy()
    if (beyond := numbers[(numbers > _MAX_EXACT) | (numbers < -_MAX_EXACT)]).size:
        raise SourceError(
            f"{path}: column {name!r}: expected -2**53 to 2**53, as other cells are empty, found {beyond[0]}"
        )
    return _canonical(np.where(nothing, np.nan, numbers))
