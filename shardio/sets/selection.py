"""Chooses samples of a set by class, key, condition, list of keys or sample number, or at random, for all commands."""

from __future__ import annotations

import fnmatch
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SourceError, did_you_mean
from shardio.format.layout import has_label
from shardio.order.orders import as_array, as_integer
from shardio.order.permutation import Permutation
from shardio.sets.given import ArrayFile, Keys, as_key, hash_of, read_keys

Numbers = Mapping[str, Callable[[], NDArray[Any]]]
"""By name of each array of shape (): a function that returns the array's values, one per sample of the split."""
Indices = str | os.PathLike[str] | NDArray[Any] | Sequence[int]

# A manifest is no place for thousands of names.
_MOST_DESCRIBED = 1000
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
    """A comparison of a number of each sample with a fixed number, such as "year >= 2000"."""

    name: str
    operator: str
    number: int | float

    def __str__(self) -> str:
        return f"{self.name} {self.operator} {self.number}"

    def holds(self, rows: NDArray[np.void], numbers: Numbers) -> NDArray[np.bool_]:
        """Returns which samples meet the condition, bool (samples,). `rows` is the index of the split.

        Raises ValueError if neither the index nor `numbers` has the condition's name.
        """
        names = [*(name for name in rows.dtype.names or () if name != "key"), *numbers]
        if self.name not in names:
            hint = did_you_mean(self.name, names)
            raise ValueError(f"condition {self}: expected a name, one of {', '.join(names)}, found {self.name!r}{hint}")
        values = numbers[self.name]() if self.name in numbers else rows[self.name]
        number = self.number
        if values.dtype.kind in "fb":
            values = values.astype(np.float64)  # or NumPy would round the number to float16 or float32
        elif isinstance(number, float) and number.is_integer():
            number = int(number)  # or NumPy would round large integers to float64
        found: NDArray[np.bool_] = _COMPARISONS[self.operator](values, number)
        return found


def parse_condition(text: str) -> Condition:
    """Returns the condition in a text such as "year >= 2000". Raises ValueError for any other text."""
    match = _CONDITION.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        name, operator, number = match.groups()
        whole = re.fullmatch(r"([+-]?[0-9]{1,30})(\.0*)?", number)
        value = int(whole[1]) if whole else float(number)
    except ValueError:
        raise ValueError(
            f"a condition must be NAME, one of == != < <= > >=, and a number, such as 'year >= 2000'; found {text!r}"
        ) from None
    return Condition(name, operator, value)


class HasClasses(Protocol):
    """A set with classes: a manifest, or the draft of a new set."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...


def find_labels(of: HasClasses, name: str | int) -> list[int]:
    """Returns the labels of the class `name`; without such a class, those of the classes with this readable name;
    without any, the label with this number. Returns [] if the set has none of these.

    A text is no number if a class has a number as its name: 1 would be the name of one class and the label of another.
    """
    if isinstance(name, str):
        if name in of.classes:
            return [of.classes.index(name)]
        if same := [label for label, other in enumerate(of.class_names) if other == name]:
            return same
        if not _NUMBER.fullmatch(name) or has_numbers_as_names(of):
            return []
    number = int(name)
    is_label = 0 <= number < len(of.classes) if of.classes else -(1 << 63) <= number < 1 << 63
    return [number] if is_label else []


def has_numbers_as_names(of: HasClasses) -> bool:
    return _has_number(of.classes) or _has_number(of.class_names)


@functools.lru_cache(maxsize=2)  # it is asked for each of many names
def _has_number(names: tuple[str, ...]) -> bool:
    return any(map(_NUMBER.fullmatch, names))


def describe_unknown(of: HasClasses, name: str | int) -> str:
    """Returns an error text about a `name` for which `find_labels` returns []."""
    if not of.classes:
        return f"expected an integer label, as the set has no classes, found {name!r}"
    hint = did_you_mean(str(name), [*of.class_names, *of.classes])
    named = isinstance(name, str) and has_numbers_as_names(of)
    number = ", by name, as some names are numbers" if named else f", or its number from 0 to {len(of.classes) - 1}"
    return f"expected a class of the set{number}, found {name!r}{hint}"


def check_share(name: str, share: float, seed: int) -> None:
    """Raises ValueError unless 0 < `share` <= 1 and `seed` is a uint64. `name` is the argument that holds the share."""
    if not 0 < share <= 1:
        raise ValueError(f"`{name}` must be a fraction of the samples, more than 0 and at most 1; found {share}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1; found {seed}")


def size_of_share(num_samples: int, share: float) -> int:
    """Returns ceil(`share` * `num_samples`). A float counts as the fraction that it is meant to be: 0.07, or 5 / 6."""
    written = Fraction(str(share + 0.0))
    simple = written.limit_denominator(10**6)
    return math.ceil((simple if abs(simple - written) <= written / 2**52 else written) * num_samples)


def draw_share(num_samples: int, share: float, seed: int, number: int = 0) -> NDArray[np.int64]:
    """Returns `size_of_share` random samples of 0 to `num_samples` - 1: int64, distinct, ascending.

    Equal arguments give equal samples. For the same seed, each `number`, such as a shard's, gives an independent draw.
    """
    return np.sort(Permutation(num_samples, seed, number)(np.arange(size_of_share(num_samples, share))))


class Selection:
    """Chooses the samples that match every condition given. Reads files in the constructor.

    - `classes`: have one of these classes, given by name, readable name or number
    - `keys`: have a key that matches one of these patterns, with * and ?
    - `where`: meet each of these comparisons, such as "year >= 2000" (see `Condition`)
    - `listed`: have a key in this sequence, text file (a key per line), NPY or NPZ file
    - `random`: are in this fraction of the samples that match the rest, drawn by `seed`
    - `indices`: sample numbers in the wanted order, or a mask; array or NPY file; excludes other conditions

    Raises ValueError for an invalid condition, SourceError for an invalid file.
    """

    def __init__(
        self,
        *,
        classes: Sequence[str | int] | str | int = (),
        keys: Sequence[str | bytes] | str | bytes = (),
        where: Sequence[str] | str = (),
        listed: Keys | None = None,
        random: float | None = None,
        seed: int = 0,
        indices: Indices | None = None,
    ) -> None:
        check_share("random", 1 if random is None else random, seed)
        names: Any = classes if isinstance(classes, Iterable) and not isinstance(classes, (str, bytes)) else (classes,)
        self.classes = tuple(one if isinstance(one, str) else as_integer("a class's number", one) for one in names)
        self.globs = tuple(map(as_key, (keys,) if isinstance(keys, (str, bytes)) else keys))
        self.where = tuple(map(parse_condition, (where,) if isinstance(where, str) else where))
        self.listed = None if listed is None else frozenset(read_keys(listed))
        self.share = random
        self.seed = seed
        self._file = os.fspath(indices) if isinstance(indices, (str, os.PathLike)) else None
        self.indices: NDArray[Any] | None = None
        if indices is not None:
            if not self.is_all:
                raise ValueError("`indices` cannot be combined with other conditions: leave the others out")
            self.indices = as_array("indices", indices) if self._file is None else ArrayFile(Path(self._file))[:]

    @property
    def is_all(self) -> bool:
        """Whether no condition was given, so every sample matches."""
        has_list = self.listed is not None or self.indices is not None
        return not (self.classes or self.globs or self.where or self.share or has_list)

    def samples(self, rows: NDArray[np.void], of: HasClasses, numbers: Numbers) -> NDArray[np.int64]:
        """Returns the samples that match, int64: ascending, or in the order of `indices`.

        `rows` is the split's index, `of` has the set's classes, and `numbers` a function that reads each array, by
        name. Raises ValueError if the set lacks a class, number or sample of the conditions; SourceError if `indices`
        from a file do not fit.
        """
        if self.indices is not None:
            return self._numbers(self.indices, len(rows))
        matches = np.ones(len(rows), np.bool_)
        if self.classes:
            if not has_label(rows.dtype):
                raise ValueError(
                    f"class {self.classes[0]!r}: expected integer labels in the split, found none: leave out the class"
                )
            labels: list[int] = []
            for name in self.classes:
                if not (same := find_labels(of, name)):
                    raise ValueError(f"class: {describe_unknown(of, name)}")
                labels += same
            matches &= np.isin(rows["label"], labels)
        for condition in self.where:
            matches &= condition.holds(rows, numbers)
        if self.globs or self.listed is not None:
            patterns = [_pattern(glob).match for glob in self.globs]
            # Only those that are left: a key costs more than a number.
            left = np.flatnonzero(matches)
            keys = rows["key"][left].tolist()
            is_wanted = (
                (self.listed is None or key in self.listed) and (not patterns or any(match(key) for match in patterns))
                for key in keys
            )
            matches[left] = np.fromiter(is_wanted, np.bool_, len(left))
        found = np.flatnonzero(matches)
        return found if self.share is None or not len(found) else found[draw_share(len(found), self.share, self.seed)]

    def _numbers(self, indices: NDArray[Any], count: int) -> NDArray[np.int64]:
        where, error = ("indices", ValueError) if self._file is None else (self._file, SourceError)
        if indices.ndim == 1 and indices.dtype == np.bool_:
            if len(indices) != count:
                raise error(
                    f"{where}: expected a mask with {count:,} values, one per sample, found {len(indices):,} values"
                )
            return np.flatnonzero(indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise error(
                f"{where}: expected a one-dimensional array of integers or bools, found {indices.dtype} of shape "
                f"{indices.shape}"
            )
        if len(indices) and not (indices.min() >= 0 and indices.max() < count):
            raise error(
                f"{where}: expected sample numbers from 0 to {count - 1}, found {indices.min()} to {indices.max()}"
            )
        return indices.astype(np.int64)

    def describe(self) -> dict[str, Any]:
        """Returns the selection as the JSON object that a provenance records. It contains no paths."""
        facts = {
            "classes": _described([str(name) for name in self.classes]),
            "keys": _described([os.fsdecode(glob) for glob in self.globs]),
            "where": [str(condition) for condition in self.where],
            "list_sha256": None if self.listed is None else hash_of(sorted(self.listed)),
            "random": self.share,
            "seed": None if self.share is None else self.seed,
            "indices_sha256": None if self.indices is None else hash_of([self.indices.tobytes()]),
        }
        return {name: fact for name, fact in facts.items() if fact not in (None, [])}

    def describe_none(self, keys: Sequence[bytes]) -> str:
        """Returns a text on why no sample matches. For a pattern that no key in `keys` matches, it suggests keys."""
        for glob in self.globs:
            core = glob.strip(b"*")
            if any(map(_pattern(glob).match, keys)):
                continue
            near = [os.fsdecode(key) for key in islice((key for key in keys if core and core in key), 3)]
            hint = f": did you mean {', '.join(near)}?" if near else ""
            hint = hint or did_you_mean(os.fsdecode(core), map(os.fsdecode, keys))
            hint = hint or "".join(f"; a key is {os.fsdecode(key)}" for key in keys[:1])
            return f"no key matches {os.fsdecode(glob)!r} (* stands for anything){hint}"
        return "no sample matches"


def _described(names: list[str]) -> list[str] | dict[str, Any]:
    if len(names) <= _MOST_DESCRIBED:
        return names
    return {"count": len(names), "sha256": hash_of([os.fsencode(name) for name in names])}


def _pattern(glob: bytes) -> re.Pattern[bytes]:
    return re.compile(fnmatch.translate(glob.decode("latin-1")).encode("latin-1"))  # as fnmatch does it for bytes
