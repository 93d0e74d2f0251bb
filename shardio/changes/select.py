"""`select` and `drop`: some of a set's samples, in a new set that shares its shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.changes.carry import Carrying, ChangeReport, Room, carry_out, check_target
from shardio.changes.draft import Draft
from shardio.changes.parents import choose_split, choose_splits, open_parent
from shardio.changes.tables import ArrayFile, Keys, as_key, hash_of, read_keys, some_keys
from shardio.errors import ConvertError, SourceError
from shardio.sets.choice import Choice, check_numbers, parse_condition

_MOST_TOLD = 1000


def _describe(choice: Choice) -> dict[str, Any]:
    """Returns the choice as a provenance has it."""
    return {
        "labels": _told([str(label) for label in choice.labels]),
        "keys": _told([os.fsdecode(glob) for glob in choice.globs]),
        "where": [str(condition) for condition in choice.where],
        "list_sha256": None if choice.listed is None else hash_of(sorted(choice.listed)),
        "random": choice.share,
        "seed": choice.seed,
    }


def _told(names: list[str]) -> list[str] | dict[str, Any]:
    """Returns names as a provenance has them: a manifest is no place for thousands."""
    if len(names) <= _MOST_TOLD:
        return names
    return {"count": len(names), "sha256": hash_of([os.fsencode(name) for name in names])}


def plan_choice(draft: Draft, splits: Sequence[str], choice: Choice, *, drop: bool) -> Draft:
    """Returns the set of the chosen samples of these splits, or of the others, and of all other splits."""
    try:
        chosen = {name: choice.samples(draft.splits[name].rows, draft) for name in splits}
    except ValueError as error:
        raise ConvertError(str(error)) from None
    if choice.listed is not None:
        there = {key for name in splits for key in draft.splits[name].keys}
        if missing := sorted(choice.listed - there):
            raise ConvertError(
                f"{len(missing):,} of {len(choice.listed):,} listed keys are of no sample: {some_keys(missing)}"
            )
    made = dict(draft.splits)
    for name, samples in chosen.items():
        if drop:
            samples = np.delete(np.arange(len(draft.splits[name])), samples)
        made[name] = draft.splits[name].take(samples)
    return replace(draft, splits=made)


def _without_empty(draft: Draft, may_go: Sequence[str]) -> Draft:
    """Returns the set without those of the splits that have no sample. Raises ConvertError if another has none."""
    left = {name: split for name, split in draft.splits.items() if len(split) or name not in may_go}
    if empty := [name for name, split in left.items() if not len(split)]:
        raise ConvertError(
            f"split {empty[0]!r}: no sample is left. Name the splits that are to change by `--split`, from Python "
            "`split=`: the others stay as they are. `drop` with a split alone removes that"
        )
    if not left:
        raise ConvertError("no sample is left in any split")
    return replace(draft, splits=left)


def plan_indices(draft: Draft, split: str, indices: NDArray[Any], *, drop: bool, where: str = "indices") -> Draft:
    """Returns the set in which a split has just these samples, in this order, or all but these."""
    content = draft.splits[split]
    try:
        samples = check_numbers(indices, len(content), where)
    except ValueError as error:
        raise SourceError(str(error)) from None
    if drop:
        samples = np.delete(np.arange(len(content)), samples)
    return replace(draft, splits={**draft.splits, split: content.take(samples)})


def _change(
    operation: str,
    out: str | os.PathLike[str],
    new: str | os.PathLike[str],
    split: str | Sequence[str] | None,
    choice: Choice,
    indices: str | os.PathLike[str] | NDArray[Any] | Sequence[int] | None,
    used_classes: bool,
    carrying: Carrying,
) -> ChangeReport:
    drop = operation == "drop"
    parent = open_parent(out)
    check_target(new, [parent])
    draft, arguments = parent.draft, _describe(choice)
    if indices is not None:
        if not choice.is_all:
            raise ValueError("indices say which samples are meant: leave the other conditions out")
        name = choose_split(parent, split, "indices are")
        is_file = isinstance(indices, (str, os.PathLike))
        numbers = ArrayFile(Path(os.fspath(indices)))[:] if is_file else np.asarray(indices)  # type: ignore[arg-type]
        made = plan_indices(draft, name, numbers, drop=drop, where=str(indices) if is_file else "indices")
        arguments = {"indices_sha256": hash_of([np.asarray(numbers).tobytes()]), "split": [name]}
        made = _without_empty(made, ())
    else:
        splits = choose_splits(parent, split)
        if choice.is_all and not (drop and split is not None):
            raise ValueError(f"{operation}: say which samples: by labels, keys, conditions, a list or indices")
        made = _without_empty(plan_choice(draft, splits, choice, drop=drop), splits if choice.is_all else ())
        arguments["split"] = splits if split is not None else None
        if choice.share is None:
            del arguments["seed"]
    if used_classes:
        made = made.without_unused_classes()
        arguments["used_classes"] = True
    return carry_out(made, new, operation, arguments, [parent], carrying)


def _choice(
    labels: Sequence[str | int] | str | int,
    keys: Sequence[str | bytes] | str | bytes,
    where: Sequence[str] | str,
    listed: Keys | None,
    random: float | None,
    seed: int,
) -> Choice:
    return Choice(
        labels=(labels,) if isinstance(labels, (str, int)) else tuple(labels),
        globs=tuple(map(as_key, (keys,) if isinstance(keys, (str, bytes)) else keys)),
        where=tuple(map(parse_condition, (where,) if isinstance(where, str) else where)),
        listed=None if listed is None else frozenset(read_keys(listed)),
        share=random,
        seed=seed,
    )


def select(
    out: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    split: str | Sequence[str] | None = None,
    labels: Sequence[str | int] | str | int = (),
    keys: Sequence[str | bytes] | str | bytes = (),
    where: Sequence[str] | str = (),
    listed: Keys | None = None,
    indices: str | os.PathLike[str] | NDArray[Any] | Sequence[int] | None = None,
    random: float | None = None,
    seed: int = 0,
    used_classes: bool = False,
    copy: bool = False,
    on_room: Callable[[Room], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ChangeReport:
    """Makes a new set in the folder `new` of some samples of the set in `out`, and rewrites no pixel.

    `split` names the splits that change, by default all; the others stay. Samples are taken for which everything holds
    that is given: one of `labels` (names of classes, also those for people, or numbers), one of the patterns `keys`
    (with * and ?), each comparison `where` ("year >= 2000"), and being `listed`: a file of keys, or a sequence of them.
    `random` takes this share of them, chosen by `seed`. Their order stays. Instead of all that, `indices` has the
    numbers of samples of one split in the order that they shall have, or a mask of bool: an array or an NPY file.

    Classes keep their numbers, also those without a sample; `used_classes` leaves these out and numbers the others.
    `Carrying` says what `copy`, `on_room` and `on_progress` do, and `carry_out` what is raised.
    """
    carrying = Carrying(copy, on_room, on_progress)
    choice = _choice(labels, keys, where, listed, random, seed)
    return _change("select", out, new, split, choice, indices, used_classes, carrying)


def drop(
    out: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    split: str | Sequence[str] | None = None,
    labels: Sequence[str | int] | str | int = (),
    keys: Sequence[str | bytes] | str | bytes = (),
    where: Sequence[str] | str = (),
    listed: Keys | None = None,
    indices: str | os.PathLike[str] | NDArray[Any] | Sequence[int] | None = None,
    random: float | None = None,
    seed: int = 0,
    used_classes: bool = False,
    copy: bool = False,
    on_room: Callable[[Room], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ChangeReport:
    """Makes a new set in `new` of all samples of the set in `out` but those that `select` would take.

    With `split` and nothing else, these splits are left out as a whole.
    """
    carrying = Carrying(copy, on_room, on_progress)
    choice = _choice(labels, keys, where, listed, random, seed)
    return _change("drop", out, new, split, choice, indices, used_classes, carrying)
