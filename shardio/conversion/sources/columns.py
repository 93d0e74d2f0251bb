"""Numbers for every sample from a table: additional columns of the index.

The tasks of a conversion do not use them: they are added to the index when the set is published.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.writing.shard_file import with_columns
from shardio.errors import SourceError
from shardio.format.layout import IndexColumns, check_columns

# float64 holds integers exactly up to here.
_MAX_EXACT = 1 << 53
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)

_Numbers = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """The columns of all sources of a collection."""

    columns: IndexColumns
    rows: Mapping[bytes, int]
    """The place of each source's numbers, by its key."""
    values: Mapping[str, _Numbers]
    """The numbers of each column."""

    def sha256(self, splits: Iterable[Iterable[bytes]]) -> str:
        """Returns a hash of the names, types and numbers of the columns, for the keys of each split."""
        sha256 = hashlib.sha256(repr(self.columns).encode())
        for keys in splits:
            found = [self.rows[key] for key in keys]
            for numbers in self.values.values():
                sha256.update(numbers[found].tobytes())
        return sha256.hexdigest()

    def extend(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Returns a copy of index rows with the columns added. Rows may be of any of the sources, in any order."""
        found = [self.rows[key] for key in rows["key"].tolist()]
        return with_columns(rows, self.columns, {name: numbers[found] for name, numbers in self.values.items()})


def make_columns(
    path: Path, word: str, lines: Sequence[int], keys: Sequence[bytes], numbers: Mapping[str, Sequence[Any]]
) -> ColumnTable:
    """Returns columns from the cells of a table, in `path`, for the sources with these keys.

    A column with only integers becomes int64. Any other becomes float64, where empty cells are NaN, and refuses
    integers that float64 cannot hold exactly. Raises SourceError, with the row's line, for a cell that is no number.
    """
    values = {}
    for name, cells in numbers.items():
        column = _Cells()
        for line, cell in zip(lines, cells, strict=True):
            try:
                column.append(cell)
            except ValueError as error:
                raise SourceError(f"{path}, {word} {line}: column {name!r}: {error}") from None
        values[name] = column.to_array()
    try:
        columns = check_columns([(name, found.dtype.str) for name, found in values.items()])
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    return ColumnTable(columns, {key: row for row, key in enumerate(keys)}, values)


def merge_columns(tables: Sequence[ColumnTable]) -> ColumnTable:
    """Returns the columns of several tables as one. Raises SourceError if they have other names or types."""
    first, *others = tables
    if other := next((one for one in others if one.columns != first.columns), None):
        raise SourceError(
            f"tables: expected the same columns of numbers in each, found {first.columns} and {other.columns}"
        )
    rows = dict(zip(chain.from_iterable(one.rows for one in tables), count(), strict=False))
    values = {name: np.concatenate([one.values[name] for one in tables]) for name in first.values}
    return ColumnTable(first.columns, rows, values)


class _Cells:
    """The numbers of one column: integers as long as every cell is an integer, floats from then on."""

    def __init__(self) -> None:
        self._numbers: array[int] | array[float] = array("q")

    def append(self, cell: Any) -> None:
        """Appends the number in the cell. Raises ValueError if the cell is not a number, or the number does not fit."""
        number = self._parse("" if cell is None else str(int(cell) if isinstance(cell, bool) else cell).strip())
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
