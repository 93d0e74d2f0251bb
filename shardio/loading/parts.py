"""What a batch holds of each sample beside its pixels: arrays and columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.entries import ArrayEntry
from shardio.format.layout import RowType
from shardio.reading.layout import SplitLayout
from shardio.reading.reader import Reader

# Fields of every index that are numbers of the picture. Labels are in every batch, and keys are no numbers.
_NUMBERS = ("source_width", "source_height", "crc32")


@dataclass(frozen=True)
class Parts:
    """The `arrays` and `columns` of each sample, by name, in this order. Any thread may use one."""

    arrays: Mapping[str, ArrayEntry] = field(default_factory=dict)
    columns: Mapping[str, RowType] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[str, ...]:
        """The arrays that are read, with "" for the pixels."""
        return "", *self.arrays

    @property
    def masks(self) -> tuple[str, ...]:
        return self._of_kind("mask")

    @property
    def boxes(self) -> tuple[str, ...]:
        return self._of_kind("boxes")

    def _of_kind(self, kind: str) -> tuple[str, ...]:
        return tuple(name for name, array in self.arrays.items() if array.kind == kind)

    @property
    def rows(self) -> dict[str, RowType]:
        """What is delivered of each sample beside its pixels, by name."""
        return {**{name: array.row for name, array in self.arrays.items()}, **self.columns}

    def read_more(self, reader: Reader, indices: NDArray[np.int64], more: Mapping[str, NDArray[Any]]) -> None:
        """Copies what the samples `indices` have beside their pixels into `more`, which has arrays of `rows`."""
        for name in self.arrays:
            reader.read_array(name, indices, more[name])
        for name in self.columns:
            more[name][:] = reader.column_of(name, indices)


def as_names(what: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names as a tuple. Raises TypeError if they are none, or a single one."""
    if not isinstance(names, (str, bytes)) and isinstance(names, Iterable):
        found = tuple(names)
        if all(isinstance(name, str) for name in found):
            return found
    raise TypeError(f"{what} must be a list of names; found {names!r}")


def find_parts(layout: SplitLayout, arrays: Sequence[str] = (), columns: Sequence[str] = ()) -> Parts:
    """Returns the parts of samples that `ShardLoader` is asked for. Raises ValueError for what the split does not
    have."""
    where = f"{layout.path}, {layout.split}"
    _check_names(where, "arrays", arrays, layout.content.arrays)
    index = layout.content.index
    _check_names(where, "columns", columns, (*(name for name, _ in index.columns), *_NUMBERS))
    return Parts(
        {name: layout.array(name) for name in arrays},
        {name: RowType(index.dtype[name].str, ()) for name in columns},
    )


def _check_names(where: str, what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError unless each of `names` is one of `known`, and comes once."""
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: {what} must be among {', '.join(known) or 'none'}; found {name!r}")
        if name in seen:
            raise ValueError(f"{where}: {what} must be named once each; found {name!r} twice")
        seen.add(name)
