"""`change` makes a new set with other samples, labels, classes or arrays, which shares files with the old set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.changes.carry import CarryOptions, ChangeReport, Parent, Room, carry_out, check_target, open_parent
from shardio.changes.draft import Draft, GivenArray, SplitDraft, check_vectors
from shardio.changes.labels import Assignment, Classes, Labels, assign, read_labels
from shardio.errors import ConvertError, SourceError
from shardio.format.layout import LABELS_NAME, ArrayKind, RowType, check_array_name, check_kind, find_wrong_bool
from shardio.format.manifest_file import check_split
from shardio.sets.given import ArrayFile, Keys, read_keys, some_keys
from shardio.sets.index import numbers_of
from shardio.sets.selection import Selection
from shardio.sets.storage import FolderStorage

Values = str | os.PathLike[str] | NDArray[Any] | Iterable[NDArray[Any]]

# Large enough for the rate of disks, small enough for memory.
_BLOCK_NBYTES = 8 << 20


def change(
    out: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    keep: Selection | None = None,
    drop: Selection | None = None,
    labels: Labels | None = None,
    classes: Classes | None = None,
    arrays: Mapping[str, Values] | None = None,
    kinds: Mapping[str, ArrayKind] | None = None,
    array_keys: Keys | None = None,
    split: str | Sequence[str] | None = None,
    copy: bool = False,
    on_room: Callable[[Room], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ChangeReport:
    """Makes a new set in `new` from the set in `out`, rewriting no pixels. Returns a report. Steps run in this order.

    - `keep` or `drop`: samples to keep or drop; `drop=Selection()` drops each split named by `split`
    - `labels`: new labels (a class by name or number): a CSV or parquet file with the columns `key` and `label`, or a
      mapping of keys to labels. Other samples keep their labels
    - `classes`: the names of all classes in order; or "used": only classes with samples; or "new": the old classes,
      then new names in `labels`
    - `arrays`: by name, an NPY file, an array or blocks of rows; an old array of the same name is replaced. The array
      "labels", float32, replaces all labels
    - `kinds`: {name: "mask"} for arrays with a value for each pixel; see `ArrayKind`
    - `array_keys`: the keys of the arrays' rows, as in `Selection(listed=...)`, if they are in another order
    - `split`: the splits to change, by default all; the others stay. Arrays go into one split.

    `CarryOptions` documents `copy`, `on_room` and `on_progress`; `carry_out` documents the errors.
    """
    if keep is not None and drop is not None:
        raise ValueError("give `keep` or `drop`, not both")
    if all(step is None for step in (keep, drop, labels, classes, arrays)):
        raise ValueError(
            "expected a change: `--keep`, `--drop`, `--labels`, `--classes` or `--array`, from Python `keep=`, "
            "`drop=`, `labels=`, `classes=` or `arrays=`; found none"
        )
    if arrays is None and (kinds or array_keys is not None):
        raise ValueError("`kinds` and `array_keys` (`--array-keys`) need `arrays` (`--array`): no arrays were given")
    parent = open_parent(out)
    target = check_target(new, [parent])
    splits = [split] if isinstance(split, str) else list(parent.manifest.splits if split is None else split)
    for name in splits:
        check_split(parent.folder, parent.manifest, name)
    draft, arguments = parent.draft, dict[str, Any](split=splits if split is not None else None)
    notes: dict[str, Any] = {}
    for name, selection in (("keep", keep), ("drop", drop)):
        if selection is not None:
            draft = _select(parent, splits, selection, drop=name == "drop", named=split is not None)
            splits = [one for one in splits if one in draft.splits]
            arguments[name] = selection.describe() or "all"
    if labels is not None or classes is not None:
        assignment = Assignment({}) if labels is None else read_labels(labels)
        before, draft = draft, assign(draft, splits, assignment, classes)
        notes["num_relabeled"] = {name: _num_relabeled(before, draft, name) for name in splits}
        notes["new_classes"] = [name for name in draft.classes if name not in before.classes]
        arguments["labels"] = None if labels is None else assignment.describe()
        arguments["classes"] = classes if classes is None or isinstance(classes, str) else len(classes)
    if arrays is not None:
        if len(splits) != 1:
            raise ConvertError(
                f"{parent.folder}: arrays go into one split, found {', '.join(sorted(splits)) or 'none'}: choose one "
                "by `--split`, from Python `split=`"
            )
        keys = None if array_keys is None else read_keys(array_keys)
        draft = add_arrays(draft, splits[0], arrays, kinds or {}, keys)
        arguments["arrays"] = {
            name: {"kind": array.kind, "dtype": array.row.dtype, "shape": list(array.row.shape)}
            for name, array in draft.splits[splits[0]].given.items()
        }
        arguments["by_key"] = keys is not None
    check_vectors(parent.draft, draft, parent.folder)
    return carry_out(draft, target, "change", arguments, [parent], CarryOptions(copy, on_room, on_progress), notes)


def _num_relabeled(before: Draft, after: Draft, split: str) -> int:
    """Returns the number of samples of a split whose class or label differs between two drafts."""
    one, two = (draft.splits[split].labels for draft in (before, after))
    if one is None or two is None:
        return len(after.splits[split]) if one is not two else 0
    if before.classes != after.classes:
        places = {name: place for place, name in enumerate(after.classes)}
        one = np.array([places.get(name, -1) for name in before.classes], np.int64)[one]
    return int(np.count_nonzero(one != two))


def _select(parent: Parent, splits: Sequence[str], selection: Selection, *, drop: bool, named: bool) -> Draft:
    """Returns a draft with only the selected samples of `splits`; with `drop`, without the selected samples. `named`:
    whether the caller has named the splits. Only then may `drop` without a condition drop whole splits."""
    draft, storage = parent.draft, FolderStorage(parent.folder)
    if selection.is_all and not (drop and named):
        raise ValueError(
            "the selection has no condition: choose samples by classes, keys, comparisons, a list or indices"
        )
    if selection.indices is not None and len(splits) > 1:
        raise ConvertError(
            f"indices are numbers of samples in one split, found {len(splits)} splits ({', '.join(sorted(splits))}): "
            "choose one by `--split`, from Python `split=`"
        )
    if selection.listed is not None:
        there = {key for name in splits for key in draft.splits[name].keys}
        if missing := sorted(selection.listed - there):
            raise ConvertError(
                f"{len(missing):,} of {len(selection.listed):,} listed keys belong to no sample: {some_keys(missing)}. "
                "`shardio find` prints the keys of a set"
            )
    made = dict(draft.splits)
    for name in splits:
        split = draft.splits[name]
        numbers = numbers_of(storage, parent.manifest.splits[name])
        samples = selection.samples(split.rows, draft, numbers)
        made[name] = split.take(np.delete(np.arange(len(split)), samples) if drop else samples)
    if selection.is_all:
        made = {name: split for name, split in made.items() if len(split)}
    if empty := [name for name, split in made.items() if not len(split)]:
        raise ConvertError(
            f"split {empty[0]!r}: no sample is left. To keep the split as it is, name only other splits by `--split`, "
            "from Python `split=`. To drop the whole split, give only `--drop` and `--split`"
        )
    if not made:
        raise ConvertError("no sample is left in any split: drop fewer splits by `--split`, from Python `split=`")
    return replace(draft, splits=made)


def add_arrays(
    draft: Draft, name: str, arrays: Mapping[str, Values], kinds: Mapping[str, ArrayKind], keys: list[bytes] | None
) -> Draft:
    """Returns a draft with `arrays` added to the split `name`. `kinds` has the kind of each, by default "array". Row i
    of each array belongs to sample i; with `keys`, to the sample with the key keys[i]."""
    if not arrays:
        raise ValueError("`arrays` (`--array`): expected at least one array, found none")
    if unknown := sorted(kinds.keys() - arrays.keys()):
        raise ValueError(f"kinds must name arrays that are given ({', '.join(arrays)}); found {unknown[0]!r}")
    split = draft.splits[name]
    order = None if keys is None else _match_keys(split, keys)
    given = {}
    for array, values in arrays.items():
        check_array_name(array)
        kind = kinds.get(array, "array")
        where = os.fspath(values) if isinstance(values, (str, os.PathLike)) else f"array {array!r}"
        row, blocks = _rows_of(where, values, len(split) if keys is None else len(keys), order)
        try:
            check_kind(array, kind, row, draft.sample_shape)
        except ValueError as error:
            raise SourceError(f"{where}: {error}") from None
        given[array] = GivenArray(kind, row, _checked(where, blocks, row))
    if LABELS_NAME in given:
        split = split.with_labels(None)
    kept = {array: content for array, content in split.arrays.items() if array not in given}
    return replace(draft, splits={**draft.splits, name: replace(split, arrays=kept, given=given)})


def _match_keys(split: SplitDraft, keys: list[bytes]) -> NDArray[np.int64]:
    """Returns the array row of each sample, int64 (samples,). `keys` has the key of each array row."""
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < len(keys):
        twice = [key for row, key in enumerate(keys) if rows[key] != row]
        raise SourceError(
            f"`array_keys` (`--array-keys`): expected each key once, found {len(twice):,} repeated keys: "
            f"{some_keys(twice)}: leave out their rows, in the keys and in the arrays"
        )
    samples = split.keys
    crc32s: dict[bytes, int] = {}
    if several := [
        k for k, n in zip(samples, split.rows["crc32"].tolist(), strict=True) if crc32s.setdefault(k, n) != n
    ]:
        raise SourceError(
            f"`array_keys` (`--array-keys`): expected keys of one sample each, found different samples with the key "
            f"{some_keys(several)}: give the rows in the order of the samples, without keys"
        )
    if missing := [key for key in samples if key not in rows]:
        raise SourceError(
            f"`array_keys` (`--array-keys`): expected a key for every sample, found none for {len(missing):,} of "
            f"{len(samples):,} samples: {some_keys(missing)}. The first given key is {some_keys(keys[:1]) or 'none'}. "
            "Add the missing rows, or keep only the samples that have rows, by `--keep --list`"
        )
    return np.fromiter((rows[key] for key in samples), np.int64, len(samples))


def _rows_of(
    where: str, source: Values, expected: int, order: NDArray[np.int64] | None
) -> tuple[RowType, Iterable[NDArray[Any]]]:
    """Returns (type of the rows of the array `source`, blocks of its rows in the order of the samples). `order` has the
    row of each sample; None if row i is of sample i. `source` must have `expected` rows. Errors begin with `where`."""
    values = ArrayFile(Path(where)) if isinstance(source, (str, os.PathLike)) else source
    if isinstance(values, (np.ndarray, ArrayFile)):
        row = _row_type(where, values)
        if len(values) != expected:
            hint = "; if each row has a key, give the keys by `--array-keys`, from Python `array_keys=`"
            what, hint = ("samples", hint) if order is None else ("keys", "")
            raise SourceError(
                f"{where}: expected a row for each of the {expected:,} {what}, found {len(values):,} rows{hint}"
            )
        return row, _blocks(values, row, order)
    if order is not None:
        raise ValueError(
            f"{where}: blocks of rows must be in the order of the samples: leave `array_keys` out, or give one array"
        )
    iterator = iter(values)
    first = next(iterator, None)
    if first is None:
        raise SourceError(f"{where}: expected at least one block of values, found none")
    row = _row_type(where, first)
    return row, chain([first], iterator)


def _row_type(where: str, values: object) -> RowType:
    if not isinstance(values, (np.ndarray, ArrayFile)):
        raise SourceError(f"{where}: expected NumPy arrays, found {type(values).__name__}")
    if not values.shape:
        raise SourceError(f"{where}: expected a row for each sample, found a single value")
    try:
        return RowType(values.dtype.str, values.shape[1:])
    except ValueError as error:
        little = values.dtype.newbyteorder("<").str
        hint = f": save it as {little!r}, by `array.astype({little!r})`" if values.dtype.str.startswith(">") else ""
        raise SourceError(f"{where}: {error}{hint}") from None


def _blocks(values: NDArray[Any] | ArrayFile, row: RowType, order: NDArray[np.int64] | None) -> Iterator[NDArray[Any]]:
    count = max(1, _BLOCK_NBYTES // row.nbytes)
    num_rows = len(values) if order is None else len(order)
    for start in range(0, num_rows, count):
        yield values[start : start + count] if order is None else values[order[start : start + count]]


def _checked(where: str, blocks: Iterable[NDArray[Any]], row: RowType) -> Iterator[NDArray[Any]]:
    for block in blocks:
        if (found := _row_type(where, block)) != row:
            raise SourceError(f"{where}: expected only rows of {row}, as in the first block, found {found}")
        if wrong := find_wrong_bool(block):
            raise SourceError(f"{where}: {wrong}")
        yield block
