"""Numbers for every sample from a table, which become arrays of shape ().

The tasks of a conversion do not use them: the arrays are written when the set is published.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ArraySpec
from shardio.errors import SourceError
from shardio.format.layout import RowType, check_array_name, check_kind

_INT64 = -(1 << 63), (1 << 63) - 1, "integers that fit in int64"
# float64 holds integers exactly up to here.
_EXACT = -(1 << 53), 1 << 53, "-2**53 to 2**53, as other cells are fractions or empty"
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)

_Numbers = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """The numbers of all sources of a collection."""

    rows: Mapping[bytes, int]
    """The place of each source's numbers, by its key."""
    values: Mapping[str, _Numbers]
    """The numbers of each column."""

    @property
    def types(self) -> dict[str, str]:
        """The type of each column by its name."""
        return {name: numbers.dtype.str for name, numbers in self.values.items()}

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """The arrays that the columns become."""
        return tuple(ArraySpec(name, "array", RowType(dtype, ()), "column") for name, dtype in self.types.items())

    def sha256(self, splits: Iterable[Sequence[bytes]]) -> str:
        """Returns a hash of the names, types and numbers of the columns, for the keys of each split."""
        sha256 = hashlib.sha256(repr(self.types).encode())
        for keys in splits:
            for numbers in self.of(keys).values():
                sha256.update(numbers.tobytes())
        return sha256.hexdigest()

    def of(self, keys: Sequence[bytes]) -> dict[str, _Numbers]:
        """Returns the numbers of the sources with these keys, in their order."""
        found = [self.rows[key] for key in keys]
        return {name: numbers[found] for name, numbers in self.values.items()}


def make_columns(
    path: Path, word: str, lines: Sequence[int], keys: Sequence[bytes], numbers: Mapping[str, Sequence[Any]]
) -> ColumnTable:
    """Returns columns from the cells of a table, in `path`, for the sources with these keys.

    A column with only integers becomes int64. Any other becomes float64, where empty cells are NaN, and refuses
    integers that float64 cannot hold exactly. Raises SourceError, with the row's line, for a cell that is no number.
    """
    values: dict[str, _Numbers] = {}
    for name, cells in numbers.items():
        found = []
        for line, cell in zip(lines, cells, strict=True):
            try:
                found.append(_parse(cell))
            except ValueError as error:
                raise SourceError(f"{path}, {word} {line}: column {name!r}: {error}") from None
        are_floats = any(isinstance(number, float) for number in found)
        least, most, expected = _EXACT if are_floats else _INT64
        for line, number in zip(lines, found, strict=True):
            if isinstance(number, int) and not least <= number <= most:
                raise SourceError(f"{path}, {word} {line}: column {name!r}: expected {expected}, found {number}")
        values[name] = np.array(found, "<f8" if are_floats else "<i8")
        if are_floats:
            values[name][np.isnan(values[name])] = np.nan  # all with the same bytes
        try:
            check_kind(check_array_name(name), "array", RowType(values[name].dtype.str, ()), None)
        except ValueError as error:
            raise SourceError(f"{path}: column {name!r}: {error}") from None
    return ColumnTable({key: row for row, key in enumerate(keys)}, values)


def merge_columns(tables: Sequence[ColumnTable]) -> ColumnTable:
    """Returns the columns of several tables as one. Raises SourceError if they have other names or types."""
    first, *others = tables
    if other := next((one for one in others if one.types != first.types), None):
        raise SourceError(
            f"tables: expected the same columns of numbers in each, found {first.types} and {other.types}"
        )
    rows = dict(zip(chain.from_iterable(one.rows for one in tables), count(), strict=False))
    values = {name: np.concatenate([one.values[name] for one in tables]) for name in first.values}
    return ColumnTable(rows, values)


def _parse(cell: Any) -> int | float:
    """Returns the number in a cell; NaN if it is empty. Raises ValueError if it is not a number."""
    text = "" if cell is None else str(int(cell) if isinstance(cell, bool) else cell).strip()
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        if not text.isascii() or "_" in text:  # which Python's float would take
            raise ValueError
        return float(text or "nan")
    except ValueError:
        raise ValueError(f"expected a number or nothing, found {text[:80]!r}") from None
