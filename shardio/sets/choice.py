"""Which samples are meant: by class, key, columns of the index, a list of keys, or numbers. Every command that chooses
samples chooses them by these words."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.errors import did_you_mean
from shardio.order.permutation import Permutation

_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
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
        """Returns for each row of an index whether it does. Raises ValueError if the index has no such column."""
        names = [name for name in rows.dtype.names or () if name != "key"]
        if self.column not in names:
            hint = did_you_mean(self.column, names)
            raise ValueError(
                f"{self}: expected a column of the index ({', '.join(names)}), found {self.column!r}{hint}"
            )
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


class HasClasses(Protocol):
    """A set, or one that is to be made."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...


def find_labels(of: HasClasses, name: str | int) -> list[int]:
    """Returns the labels that `name` stands for: one, or several if classes have the same name for people; none if the
    set has no such class.

    The name of a class comes first, then its name for people, then its number.
    """
    if isinstance(name, str):
        if name in of.classes:
            return [of.classes.index(name)]
        if same := [label for label, other in enumerate(of.class_names) if other == name]:
            return same
        if not _NUMBER.fullmatch(name):
            return []
    number = int(name)
    is_label = 0 <= number < len(of.classes) if of.classes else -(1 << 63) <= number < 1 << 63
    return [number] if is_label else []


def describe_unknown(of: HasClasses, name: str | int) -> str:
    """Returns what was expected and what was found where `find_labels` finds nothing."""
    if not of.classes:
        return f"expected a number, as the set has no classes, found {name!r}"
    hint = did_you_mean(str(name), [*of.class_names, *of.classes])
    return f"expected a class of the set, or a number from 0 to {len(of.classes) - 1}, found {name!r}{hint}"


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

    @property
    def is_all(self) -> bool:
        """Whether nothing is given, and all samples are meant."""
        return not (self.labels or self.globs or self.where or self.listed is not None or self.share)

    def samples(self, rows: NDArray[np.void], of: HasClasses) -> NDArray[np.int64]:
        """Returns the samples of a split in ascending order, by its index and the set's classes. Raises ValueError if
        there is no such class or column."""
        meant = np.ones(len(rows), np.bool_)
        if self.labels:
            meant &= np.isin(rows["label"], [label for name in self.labels for label in _labels(of, name)])
        for condition in self.where:
            meant &= condition.holds(rows)
        if self.globs or self.listed is not None:
            matches = [_pattern(glob).match for glob in self.globs]
            # Those that are left: a key costs more than a number.
            left = np.flatnonzero(meant)
            keys = rows["key"][left].tolist()
            meant[left] = np.fromiter((self._is_key(key, matches) for key in keys), np.bool_, len(left))
        found = np.flatnonzero(meant)
        if self.share is not None and len(found):
            count = math.ceil(self.share * len(found))
            found = found[np.sort(Permutation(len(found), self.seed, 0)(np.arange(count)))]
        return found

    def _is_key(self, key: bytes, matches: Sequence[Callable[[bytes], object]]) -> bool:
        if self.listed is not None and key not in self.listed:
            return False
        return not matches or any(match(key) for match in matches)


def _pattern(glob: bytes) -> re.Pattern[bytes]:
    return re.compile(fnmatch.translate(glob.decode("latin-1")).encode("latin-1"))  # as fnmatch does it for bytes


def _labels(of: HasClasses, name: str | int) -> list[int]:
    if not (found := find_labels(of, name)):
        raise ValueError(f"label: {describe_unknown(of, name)}")
    return found


def make_choice(labels: Sequence[str], keys: Sequence[str], where: Sequence[str]) -> Choice:
    """Returns the choice that these words make. Raises ValueError if a condition is none."""
    return Choice(tuple(labels), tuple(map(os.fsencode, keys)), tuple(map(parse_condition, where)))


def describe_none(choice: Choice, keys: Sequence[bytes]) -> str:
    """Returns in words that a choice meant no sample of those with these keys, and which keys are like its own."""
    for glob in choice.globs:
        core = glob.strip(b"*")
        is_like = _pattern(glob).match
        if any(map(is_like, keys)):
            continue
        near = [os.fsdecode(key) for key in islice((key for key in keys if core and core in key), 3)]
        hint = f": did you mean {', '.join(near)}?" if near else ""
        hint = hint or did_you_mean(os.fsdecode(core), map(os.fsdecode, keys))
        hint = hint or "".join(f"; a key is {os.fsdecode(key)}" for key in keys[:1])
        return f"no key is like {os.fsdecode(glob)!r}, in which * stands for anything{hint}"
    return "no such sample"


def check_numbers(indices: NDArray[Any], count: int, where: str) -> NDArray[np.int64]:
    """Returns the numbers of samples in `indices`, which has numbers, in any order, or a mask of all `count`. Raises
    ValueError, which begins with `where`, if it is neither."""
    samples = np.asarray(indices)
    if samples.ndim == 1 and samples.dtype == np.bool_:
        if len(samples) != count:
            raise ValueError(f"{where}: expected a mask of {count:,} samples, found {len(samples):,}")
        samples = np.flatnonzero(samples)
    if samples.ndim != 1 or samples.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: expected one row of integers, or a mask, found {samples.dtype} of shape {samples.shape}"
        )
    if len(samples) and not (samples.min() >= 0 and samples.max() < count):
        raise ValueError(
            f"{where}: expected numbers of samples from 0 to {count - 1}, found {samples.min()} to {samples.max()}"
        )
    return samples.astype(np.int64)
