"""`merge`: the samples of several sets, one behind the other, in a new set that shares their shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.errors import ConvertError
from shardio.format.layout import MAX_CLASSES, IndexColumns, columns_of, index_dtype
from shardio.sets.changes.carry import Carrying, ChangeReport, Room, carry_out, check_target
from shardio.sets.changes.draft import ArrayDraft, Draft, SplitDraft, concatenated
from shardio.sets.changes.parents import Parent, open_parent
from shardio.sets.changes.tables import some_keys

SameKeys = Literal["refuse", "allow"]


@dataclass(frozen=True)
class MergeOptions:
    only_common: bool = False
    """Whether columns and arrays that not all sets have are left out. Otherwise they are an error."""
    same_keys: SameKeys = "refuse"
    """Whether two samples of a split may have one key."""

    def __post_init__(self) -> None:
        if self.same_keys not in get_args(SameKeys):
            raise ValueError(f"same_keys must be one of {', '.join(get_args(SameKeys))}; found {self.same_keys!r}")


def plan_merge(drafts: Sequence[Draft], names: Sequence[str], options: MergeOptions) -> Draft:
    """Returns the set of all samples. `names` are those of the sets, for messages."""
    first = drafts[0]
    for draft, name in zip(drafts, names, strict=True):
        if draft.sample_shape != first.sample_shape:
            raise ConvertError(
                f"{name}: expected samples of {first.sample_shape}, as in {names[0]}, found "
                f"{draft.sample_shape}: convert one of them again"
            )
    drafts = _with_one_list_of_classes(drafts, names)
    splits: dict[str, SplitDraft] = {}
    for name in dict.fromkeys(name for draft in drafts for name in draft.splits):
        having = [
            (draft.splits[name], where) for draft, where in zip(drafts, names, strict=True) if name in draft.splits
        ]
        splits[name] = _merge_split(name, [split for split, _ in having], [where for _, where in having], options)
    rejects = tuple(held for draft in drafts for held in draft.rejects)
    # Empty files say nothing.
    some = tuple(held for held in rejects if held.entry.num_rejects)
    return replace(drafts[0], splits=splits, rejects=some or rejects[:1])


def _with_one_list_of_classes(drafts: Sequence[Draft], names: Sequence[str]) -> list[Draft]:
    """Returns the sets with the classes of all of them, in the order in which they come first."""
    if not any(draft.classes for draft in drafts):
        return list(drafts)
    for draft, name in zip(drafts, names, strict=True):
        if not draft.classes:
            raise ConvertError(f"{name}: expected a set with classes, as the others have them, found labels alone")
    number = {name: i for i, name in enumerate(dict.fromkeys(one for draft in drafts for one in draft.classes))}
    if len(number) > MAX_CLASSES:
        raise ConvertError(f"expected at most {MAX_CLASSES:,} classes, found {len(number):,} in all sets")
    called: dict[str, str] = {}
    for draft in drafts:
        for name, people in zip(draft.classes, draft.class_names, strict=False):
            called.setdefault(name, people)
    class_names = tuple(called.get(name, name) for name in number) if called else ()
    return [
        replace(
            draft.with_classes(tuple(number), np.array([number[name] for name in draft.classes])),
            class_names=class_names,
        )
        for draft in drafts
    ]


def _merge_split(split: str, parts: Sequence[SplitDraft], names: Sequence[str], options: MergeOptions) -> SplitDraft:
    if len(parts) == 1:
        return parts[0]
    if len({part.squashed for part in parts}) > 1:
        squashed = ", ".join(name for part, name in zip(parts, names, strict=True) if part.squashed)
        raise ConvertError(
            f"split {split!r}: expected all sets squashed or none, found only {squashed} squashed: convert one of them "
            "again with the `--fit` of the others"
        )
    columns = _common_columns(split, parts, names, options)
    arrays = _common_arrays(split, parts, names, options)
    rows = _join_rows(parts, columns)
    if options.same_keys == "refuse":
        keys, counts = np.unique(rows["key"], return_counts=True)
        if (twice := keys[counts > 1]).size:
            raise ConvertError(
                f"split {split!r}: {twice.size:,} keys are there more than once: {some_keys(twice.tolist())}. Leave "
                "samples out by `shardio drop --list`, or take all by `--same-keys allow`, from Python "
                '`same_keys="allow"`'
            )
    return replace(
        parts[0],
        rows=rows,
        index=None,
        pixels=concatenated([part.pixels for part in parts]),
        arrays={
            name: replace(parts[0].arrays[name], stored=concatenated([part.arrays[name].stored for part in parts]))
            for name in arrays
        },
    )


def _join_rows(parts: Sequence[SplitDraft], columns: IndexColumns) -> NDArray[np.void]:
    width = max(part.rows.dtype["key"].itemsize for part in parts)
    rows = np.zeros(sum(map(len, parts)), index_dtype(width, columns))
    start = 0
    for part in parts:
        for name in rows.dtype.names or ():
            rows[name][start : start + len(part)] = part.rows[name]
        start += len(part)
    return rows


def _common_columns(
    split: str, parts: Sequence[SplitDraft], names: Sequence[str], options: MergeOptions
) -> IndexColumns:
    first = columns_of(parts[0].rows.dtype)
    for part, name in zip(parts, names, strict=True):
        if not options.only_common and set(columns_of(part.rows.dtype)) != set(first):
            _refuse(split, "columns", dict(first), dict(columns_of(part.rows.dtype)), names[0], name)
    return tuple(one for one in first if all(one in columns_of(part.rows.dtype) for part in parts))


def _common_arrays(split: str, parts: Sequence[SplitDraft], names: Sequence[str], options: MergeOptions) -> list[str]:
    first = _types(parts[0].arrays)
    for part, name in zip(parts, names, strict=True):
        if not options.only_common and _types(part.arrays) != first:
            _refuse(split, "arrays", first, _types(part.arrays), names[0], name)
    return [name for name, kind in first.items() if all(_types(part.arrays).get(name) == kind for part in parts)]


def _types(arrays: Mapping[str, ArrayDraft]) -> dict[str, str]:
    return {name: f"{array.kind} of {array.row.dtype} {array.row.shape}" for name, array in arrays.items()}


def _refuse(split: str, what: str, first: dict[str, str], other: dict[str, str], here: str, there: str) -> None:
    def shown(types: dict[str, str]) -> str:
        return ", ".join(f"{name} ({kind})" for name, kind in types.items()) or "none"

    raise ConvertError(
        f"split {split!r}: expected equal {what}, found {shown(first)} in {here}, and {shown(other)} in {there}: "
        f"`--only-common`, from Python `only_common=True`, leaves out those that not all have"
    )


def carry_out_merge(
    parents: Sequence[Parent],
    new: str | os.PathLike[str],
    options: MergeOptions,
    carrying: Carrying,
    operation: str = "merge",
) -> ChangeReport:
    draft = plan_merge([parent.draft for parent in parents], [str(parent.folder) for parent in parents], options)
    arguments = {"only_common": options.only_common, "same_keys": options.same_keys}
    return carry_out(draft, new, operation, arguments, parents, carrying)


def merge(
    sets: Sequence[str | os.PathLike[str]],
    new: str | os.PathLike[str],
    *,
    only_common: bool = False,
    same_keys: SameKeys = "refuse",
    copy: bool = False,
    on_room: Callable[[Room], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ChangeReport:
    """Makes a new set in the folder `new` of all samples of these sets, which must have one shape.

    Splits of one name become one: the samples of the first set come first. Classes are united by their names, in the
    order in which they come first, and labels are numbered anew. Lines of rejects.jsonl are those of all sets.
    `MergeOptions` describes `only_common` and `same_keys`; `Carrying` says what `copy`, `on_room` and `on_progress` do,
    and `carry_out` what is raised.
    """
    if isinstance(sets, (str, os.PathLike)) or not sets:
        raise ValueError("merge takes a list of sets, and then the folder of the new one")
    options = MergeOptions(only_common, same_keys)
    parents = [open_parent(one) for one in sets]
    check_target(new, parents)
    return carry_out_merge(parents, new, options, Carrying(copy, on_room, on_progress))
