"""`attach`: more arrays for a split, in a new set that shares everything that was there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.changes.carry import Carrying, ChangeReport, Room, carry_out, check_target
from shardio.changes.draft import Draft, GivenArray, SplitDraft
from shardio.changes.parents import choose_split, open_parent
from shardio.changes.tables import ArrayFile, Keys, read_keys, some_keys
from shardio.errors import SourceError
from shardio.format.layout import ArrayKind, RowType, check_array_name, check_kind, find_wrong_box

Given = str | os.PathLike[str] | NDArray[Any] | Iterable[NDArray[Any]]

# Large enough for the rate of disks, small enough for memory.
_BLOCK_NBYTES = 8 << 20


def plan_arrays(
    draft: Draft,
    split: str,
    arrays: Mapping[str, Given],
    kinds: Mapping[str, ArrayKind],
    keys: list[bytes] | None = None,
    *,
    replacing: bool = False,
) -> Draft:
    """Returns the set with these arrays. Row i of each is of sample i, or with `keys` of the sample of key i.

    Raises SourceError or ValueError if an array is not what a set can have.
    """
    content = draft.splits[split]
    if unknown := sorted(kinds.keys() - arrays.keys()):
        raise ValueError(f"kinds must be those of the arrays ({', '.join(arrays)}); found {unknown[0]!r}")
    order = None if keys is None else _rows_of(content, keys)
    kept = dict(content.arrays)
    given = {}
    for name, source in arrays.items():
        check_array_name(name)
        if name in kept:
            if not replacing:
                raise ValueError(
                    f"split {split!r} has an array {name!r} already: choose another name, or replace it by "
                    "`--replace`, from Python `replace=True`"
                )
            del kept[name]
        given[name] = _given(draft, content, name, source, kinds.get(name, "array"), order, keys)
    return replace(draft, splits={**draft.splits, split: replace(content, arrays=kept, given=given)})


def _given(
    draft: Draft,
    split: SplitDraft,
    name: str,
    source: Given,
    kind: ArrayKind,
    order: NDArray[np.int64] | None,
    keys: list[bytes] | None,
) -> GivenArray:
    where = os.fspath(source) if isinstance(source, (str, os.PathLike)) else f"array {name!r}"
    values = ArrayFile(Path(where)) if isinstance(source, (str, os.PathLike)) else source
    if isinstance(values, (np.ndarray, ArrayFile)):
        expected = len(split) if keys is None else len(keys)
        found = len(values) if values.ndim else 0
        if found != expected:
            what = f"the {expected:,} samples" if keys is None else f"the {expected:,} keys"
            hint = "" if keys is not None else "; `--by`, from Python `by=`, takes the keys of its rows"
            raise SourceError(f"{where}: expected a row for each of {what}, found {found:,}{hint}")
        row = _row_type(where, values)
        blocks: Iterable[NDArray[Any]] = _blocks(values, row, order)
    else:
        if order is not None:
            raise ValueError(f"{where}: blocks come in the order of the samples, so leave `by` out")
        iterator = iter(values)
        first = next(iterator, None)
        if first is None:
            raise SourceError(f"{where}: expected blocks of values, found none")
        row = _row_type(where, first)
        blocks = _checked(where, chain([first], iterator), row)
    try:
        check_kind(kind, row, draft.sample_shape)
    except ValueError as error:
        raise SourceError(f"{where}: {error}") from None
    if kind == "boxes":
        blocks = _boxes_checked(where, blocks, split, order)
    return GivenArray(kind, row, blocks)


def _row_type(where: str, values: object) -> RowType:
    if not isinstance(values, (np.ndarray, ArrayFile)):
        raise SourceError(f"{where}: expected arrays of NumPy, found {type(values).__name__}")
    if values.ndim == 0:
        raise SourceError(f"{where}: expected a row for each sample, found a single value")
    try:
        return RowType(values.dtype.str, values.shape[1:])
    except ValueError as error:
        little = values.dtype.newbyteorder("<").str
        hint = f": save it as {little!r}, by `array.astype({little!r})`" if values.dtype.str.startswith(">") else ""
        raise SourceError(f"{where}: {error}{hint}") from None


def _blocks(values: NDArray[Any] | ArrayFile, row: RowType, order: NDArray[np.int64] | None) -> Iterator[NDArray[Any]]:
    """Yields the rows of an array, some at a time, in this order."""
    count = max(1, _BLOCK_NBYTES // row.nbytes)
    num_rows = len(values) if order is None else len(order)
    for start in range(0, num_rows, count):
        yield values[start : start + count] if order is None else values[order[start : start + count]]


def _boxes_checked(
    where: str, blocks: Iterable[NDArray[Any]], split: SplitDraft, order: NDArray[np.int64] | None
) -> Iterator[NDArray[Any]]:
    start = 0
    for block in blocks:
        if wrong := find_wrong_box(block[: len(split) - start]):  # more are refused when they are counted
            sample, box = divmod(start * block.shape[1] + wrong[0], block.shape[1])
            row, key = sample if order is None else order[sample], os.fsdecode(split.rows["key"][sample])
            raise SourceError(f"{where}, row {row} ({key}): box {box}: {wrong[1]}")
        start += len(block)
        yield block


def _checked(where: str, blocks: Iterable[object], row: RowType) -> Iterator[NDArray[Any]]:
    for block in blocks:
        if not isinstance(block, np.ndarray) or block.ndim == 0 or _row_type(where, block) != row:
            found = f"{block.dtype} {block.shape[1:]}" if isinstance(block, np.ndarray) else type(block).__name__
            raise SourceError(f"{where}: expected blocks of rows of {row.dtype} {row.shape}, found {found}")
        yield block


def _rows_of(split: SplitDraft, keys: list[bytes]) -> NDArray[np.int64]:
    """Returns for each sample the row of its key. Raises SourceError if one has none, or two."""
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < len(keys):
        seen = set[bytes]()
        twice = [key for key in keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        raise SourceError(f"keys: expected each once, found {len(twice):,} again: {some_keys(twice)}")
    samples = split.keys
    if missing := [key for key in samples if key not in rows]:
        raise SourceError(
            f"keys: expected the key of every sample, found none for {len(missing):,} of {len(samples):,}: "
            f"{some_keys(missing)}. The first key given is {some_keys(keys[:1]) or 'none'}. Leave these samples out by "
            "`shardio select --list` before"
        )
    return np.fromiter((rows[key] for key in samples), np.int64, len(samples))


def attach(
    out: str | os.PathLike[str],
    new: str | os.PathLike[str],
    arrays: Mapping[str, Given],
    *,
    kinds: Mapping[str, ArrayKind] | ArrayKind = "array",
    split: str | None = None,
    by: Keys | None = None,
    replace: bool = False,
    copy: bool = False,
    on_room: Callable[[Room], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ChangeReport:
    """Makes a new set in the folder `new` of the set in `out`, in which a split has more arrays: one value for each
    sample.

    `arrays` has for each name an NPY file, an array, or blocks of rows one after the other. Row i is
    of sample i of the split; with `by`, a file of keys (one in each line, or an NPY or NPZ file of them) or a sequence,
    row i is of the sample of the i-th key, and rows of other keys are left out. `kinds` says for each name, or for all,
    what its values are to the pictures: see `ArrayKind`. `replace` says that arrays of these names may be there
    already. `split` may be left out if there is one only.

    Raises SourceError if a file is not what it must be. `Carrying` says what `copy`, `on_room` and `on_progress` do,
    and `carry_out` what else is raised.
    """
    if not arrays:
        raise ValueError("attach: expected at least one array, found none")
    parent = open_parent(out)
    check_target(new, [parent])
    name = choose_split(parent, split, "arrays are")
    kind_of = dict.fromkeys(arrays, kinds) if isinstance(kinds, str) else dict(kinds)
    keys = None if by is None else read_keys(by)
    draft = plan_arrays(parent.draft, name, arrays, kind_of, keys, replacing=replace)
    made = draft.splits[name].given
    arguments = {
        "split": name,
        "arrays": {
            one: {"kind": array.kind, "dtype": array.row.dtype, "shape": list(array.row.shape)}
            for one, array in made.items()
        },
        "by_key": by is not None,
        "replace": replace,
    }
    return carry_out(draft, new, "attach", arguments, [parent], Carrying(copy, on_room, on_progress))
