"""Declares the arrays of a set, other than its pixels, and checks their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardio.format.layout import (
    LABELS_NAME,
    MAX_ARRAYS,
    ArrayKind,
    RowType,
    SampleShape,
    check_array_name,
    check_kind,
    find_wrong_bool,
)
from shardio.format.parse import first_repeated

ArrayDeclaration = tuple[ArrayKind, DTypeLike, Sequence[int]]
"""(kind, dtype, shape of one sample's value), such as ("mask", "uint8", (224, 224)) or ("array", "float16", (768,)).
docs/format.md says what the kinds mean."""

Label = int | tuple[float, ...] | None
"""A label: an integer; a tuple of float32 numbers, of the same length in the whole split; or None for no label."""

ARRAY = "array"
"""The name of an array that SRC does not name: the rows of an NPY file, or dataset items that are only an array."""


@dataclass(frozen=True)
class ArraySpec:
    """An array to make: its name, its kind, the type of its rows, and the origin of its values."""

    name: str
    kind: ArrayKind
    row: RowType
    source: Literal["item", "file", "label", "column"] = "item"
    """Where values come from: the entry of a dataset's item with the array's name ("item"), the file of a mask
    ("file"), labels that are not integers ("label"), or a column of a table ("column")."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.row.dtype)

    def check(self, value: object, where: str = "") -> NDArray[Any]:
        """Returns one sample's value as an array of the declared dtype and shape.

        Raises TypeError for another dtype, and ValueError for another shape or an invalid bool. Error messages begin
        with `where`.
        """
        found = self.check_dtype(value, where)
        if found.shape != self.row.shape:
            raise ValueError(f"{where}array {self.name!r}: expected shape {self.row.shape}, found {found.shape}")
        if wrong_bool := find_wrong_bool(found):
            raise ValueError(f"{where}array {self.name!r}: {wrong_bool}")
        return found

    def check_dtype(self, value: object, where: str = "") -> NDArray[Any]:
        """Returns `value` as an array of the declared dtype and of any shape. Raises TypeError, whose message begins
        with `where`, if `value` is no array or has another dtype."""
        try:
            found = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: of tensors
            raise TypeError(f"{where}array {self.name!r}: expected {self.dtype}, found no array: {error}") from None
        if found.dtype.newbyteorder("=") != self.dtype.newbyteorder("="):
            raise TypeError(f"{where}array {self.name!r}: expected {self.dtype}, found {found.dtype}")
        return found.astype(self.dtype, copy=False)


def as_float32(label: object) -> NDArray[np.float32]:
    """Returns a number or numbers as float32. Raises TypeError for anything else, ValueError for too large a number."""
    found = np.asarray(label)
    if found.dtype.kind not in "biuf":
        raise TypeError(f"label must be a number or a vector of numbers, found {label!r:.80}")
    with np.errstate(over="ignore"):
        numbers = found.astype(np.float32)
    if (np.isinf(numbers) & np.isfinite(found)).any():
        raise ValueError(f"label must fit in float32, found {label!r:.80}")
    return numbers


def label_array(label: Label) -> tuple[ArraySpec, ...]:
    """Returns a tuple with the spec of a split's array of labels. `label` is any label of the split. Returns () if
    `label` is an integer or None: a split with such labels has no array of labels."""
    if not isinstance(label, tuple):
        return ()
    return (ArraySpec(LABELS_NAME, "array", RowType("<f4", (len(label),) if len(label) > 1 else ()), "label"),)


def declare(
    arrays: Mapping[str, ArrayDeclaration], sample_shape: SampleShape | None, taken: Iterable[str] = ()
) -> tuple[ArraySpec, ...]:
    """Returns the specs of the arrays in the declarations `arrays`, for samples of `sample_shape`. Raises ValueError or
    TypeError for a declaration that is invalid or does not fit the samples, and for a name in `taken`: names that mean
    something else."""
    taken = set(taken)
    specs = []
    for name, declaration in arrays.items():
        check_array_name(name)
        if name in taken or name == LABELS_NAME:
            raise ValueError(f"array {name!r}: expected another name, as {name!r} means another part of a sample")
        is_triple = isinstance(declaration, (tuple, list)) and len(declaration) == 3
        if not is_triple or not isinstance(declaration[2], (tuple, list)):
            expected = '("array", "float16", (768,)), or ("array", "int64", ()) for single numbers'
            raise TypeError(f"array {name!r}: expected (kind, dtype, shape), as {expected}; found {declaration!r}")
        kind, dtype, shape = declaration
        try:
            row = RowType(np.dtype(dtype).newbyteorder("<").str, tuple(shape))
            specs.append(ArraySpec(name, check_kind(name, kind, row, sample_shape), row))
        except (ValueError, TypeError) as error:
            raise type(error)(f"array {name!r}: {error}") from None
    check_specs(specs)
    return tuple(specs)


def label_name(names: Iterable[str], where: str = "") -> str:
    """Returns "label" or "labels", whichever is in `names`; "" if neither is. If both are, raises ValueError, whose
    message begins with `where`."""
    found = [name for name in names if name in ("label", LABELS_NAME)]
    if len(found) > 1:
        raise ValueError(f"{where}expected labels under one name, found {found[0]!r} and {found[1]!r}: drop one")
    return "".join(found)


def check_specs(specs: Sequence[ArraySpec]) -> None:
    """Raises ValueError if a set cannot have all of these arrays."""
    if (repeated := first_repeated([spec.name.lower() for spec in specs])) is not None:
        raise ValueError(f"arrays must have names that differ in more than case; found {repeated!r} twice")
    if len(specs) > MAX_ARRAYS:
        raise ValueError(f"a set may have at most {MAX_ARRAYS} arrays; found {len(specs)} arrays: leave some out")


def check_splits(splits: Iterable[str], specs: Sequence[ArraySpec]) -> None:
    """Raises ValueError if, in any of `splits`, files of an array in `specs` had the names of another split's
    shards, or if names of two splits differ only in case: their files would be the same on some filesystems."""
    splits = [*splits]
    there = {split.lower(): split for split in splits}
    if same := [split for split in splits if there[split.lower()] != split]:
        raise ValueError(
            f"splits must have names that differ in more than case; found {same[0]!r} and {there[same[0].lower()]!r}"
        )
    for split in there.values():
        for spec in specs:
            if (other := there.get(f"{split}-{spec.name}".lower())) is not None:
                raise ValueError(
                    f"array {spec.name!r}: expected another name, as its files for the split {split!r} would have the "
                    f"same names as the shards of the split {other!r}"
                )
