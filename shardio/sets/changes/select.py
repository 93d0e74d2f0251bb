"""`select` and `drop`: some of a set's samples, in a new set that shares its shards."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import ConvertError, SourceError
from shardio.order.permutation import Permutation
from shardio.sets.changes.carry import Carrying, ChangeReport, Room, carry_out, check_target
from shardio.sets.changes.classes import describe_unknown, find_labels
from shardio.sets.changes.draft import Draft, SplitDraft
from shardio.sets.changes.parents import choose_split, choose_splits, open_parent
from shardio.sets.changes.tables import Keys, as_key, hash_of, open_array, read_keys, some_keys

_MOST_TOLD = 1000
_CONDITION = re.compile(r"\s*([A-Za-z_]\w*)\s*(==|=|!=|<=|>=|<|>)\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*", re.ASCII)
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": np.equal,
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


@dataclass(frozen=True)
class Condition:
    """A comparison of a column of the index with a number: "year >= 2000"."""

    column: str
    operator: str
    number: int | float

    def __str__(self) -> str:
        return f"{self.column} {self.operator} {self.number}"

    def holds(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Returns for each row of an index whether it does."""
        names = [name for name in rows.dtype.names or () if name != "key"]
        if self.column not in names:
            raise ConvertError(f"{self}: expected a column of the index ({', '.join(names)}), found {self.column!r}")
        found: NDArray[np.bool_] = _COMPARISONS[self.operator](rows[self.column], self.number)
        return found


def parse_condition(text: str) -> Condition:
    """Returns the condition in a text. Raises ValueError if it is none."""
    match = _CONDITION.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        name, operator, number = match.groups()
        value = int(number) if re.fullmatch(r"[+-]?[0-9]{1,30}", number) else float(number)
    except ValueError:
        raise ValueError(
            f"a condition must be COLUMN, one of == != < <= > >=, and a number, such as 'year >= 2000'; found {text!r}"
        ) from None
    return Condition(name, operator, value)


@dataclass(frozen=True, eq=False)
class Choice:
    """Which samples of a split are meant: those for which everything that is given holds."""

    labels: tuple[str | int, ...] = ()
    """Classes by name, by their names for people, or by number; any of them."""
    globs: tuple[bytes, ...] = ()
    """Patterns of keys; any of them."""
    where: tuple[Condition, ...] = ()
    """All of them."""
    listed: frozenset[bytes] | None = None
    share: float | None = None
    """Of the samples for which the rest holds this share is taken, at random."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"random must be a share of the samples, more than 0 and at most 1; found {self.share}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1; found {self.seed}")

    def samples(self, draft: Draft, split: SplitDraft) -> NDArray[np.int64]:
        """Returns the samples in ascending order."""
        meant = np.ones(len(split), np.bool_)
        if self.labels:
            meant &= np.isin(split.rows["label"], [label for name in self.labels for label in _labels(draft, name)])
        for condition in self.where:
            meant &= condition.holds(split.rows)
        if self.globs or self.listed is not None:
            matches = [_pattern(glob).match for glob in self.globs]
            meant &= np.fromiter((self._is_key(key, matches) for key in split.keys), np.bool_, len(split))
        found = np.flatnonzero(meant)
        if self.share is not None and len(found):
            count = math.ceil(self.share * len(found))
            found = found[np.sort(Permutation(len(found), self.seed, 0)(np.arange(count)))]
        return found

    def _is_key(self, key: bytes, matches: Sequence[Callable[[bytes], object]]) -> bool:
        if self.listed is not None and key not in self.listed:
            return False
        return not matches or any(match(key) for match in matches)

    def describe(self) -> dict[str, Any]:
        return {
            "labels": _told([str(label) for label in self.labels]),
            "keys": _told([os.fsdecode(glob) for glob in self.globs]),
            "where": [str(condition) for condition in self.where],
            "list_sha256": None if self.listed is None else hash_of(sorted(self.listed)),
            "random": self.share,
            "seed": self.seed,
        }


def _told(names: list[str]) -> list[str] | dict[str, Any]:
    """Returns names as a provenance has them: a manifest is no place for thousands."""
    if len(names) <= _MOST_TOLD:
        return names
    return {"count": len(names), "sha256": hash_of([os.fsencode(name) for name in names])}


def _pattern(glob: bytes) -> re.Pattern[bytes]:
    return re.compile(fnmatch.translate(glob.decode("latin-1")).encode("latin-1"))  # as fnmatch does it for bytes


def _labels(draft: Draft, name: str | int) -> list[int]:
    if not (found := find_labels(draft, name)):
        raise ConvertError(f"label: {describe_unknown(draft, name)}")
    return found


def plan_choice(draft: Draft, splits: Sequence[str], choice: Choice, *, drop: bool) -> Draft:
    """Returns the set of the chosen samples of these splits, or of the others, and of all other splits."""
    chosen = {name: choice.samples(draft, draft.splits[name]) for name in splits}
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
    samples = np.asarray(indices)
    if samples.ndim == 1 and samples.dtype == np.bool_:
        if len(samples) != len(content):
            raise SourceError(f"{where}: expected a mask of {len(content):,} samples, found {len(samples):,}")
        samples = np.flatnonzero(samples)
    if samples.ndim != 1 or samples.dtype.kind not in "iu":
        raise SourceError(
            f"{where}: expected one row of integers, or a mask, found {samples.dtype} of shape {samples.shape}"
        )
    if len(samples) and not (samples.min() >= 0 and samples.max() < len(content)):
        raise SourceError(
            f"{where}: expected numbers of samples from 0 to {len(content) - 1}, found {samples.min()} to "
            f"{samples.max()}"
        )
    samples = samples.astype(np.int64)
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
    draft, arguments = parent.draft, choice.describe()
    is_all = not (choice.labels or choice.globs or choice.where or choice.listed is not None or choice.share)
    if indices is not None:
        if not is_all:
            raise ValueError("indices say which samples are meant: leave the other conditions out")
        name = choose_split(parent, split, "indices are")
        is_file = isinstance(indices, (str, os.PathLike))
        numbers = open_array(Path(os.fspath(indices))) if is_file else np.asarray(indices)  # type: ignore[arg-type]
        made = plan_indices(draft, name, numbers, drop=drop, where=str(indices) if is_file else "indices")
        arguments = {"indices_sha256": hash_of([np.asarray(numbers).tobytes()]), "split": [name]}
        made = _without_empty(made, ())
    else:
        splits = choose_splits(parent, split)
        if is_all and not (drop and split is not None):
            raise ValueError(f"{operation}: say which samples: by labels, keys, conditions, a list or indices")
        made = _without_empty(plan_choice(draft, splits, choice, drop=drop), splits if is_all else ())
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
