"""Assigns labels to samples by their keys, and renumbers classes."""

from __future__ import annotations

import contextlib
import csv
import os
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardio.changes.draft import Draft
from shardio.errors import ConvertError, SourceError, show
from shardio.format.layout import MAX_CLASSES
from shardio.format.parse import check_text, first_repeated
from shardio.sets.given import as_key, hash_of, open_parquet, read_batches, show_key, some_keys
from shardio.sets.selection import describe_unknown, find_labels, has_numbers_as_names
from shardio.system.opening import open_untrusted

Labels = str | os.PathLike[str] | Mapping[str | bytes, str | int] | Mapping[str, str | int] | Mapping[bytes, str | int]
Classes = Literal["used", "new"] | Sequence[str]
"""Which classes the new set has. "used": only classes with samples. "new": the old classes, then the new names in the
labels. A sequence: exactly these classes, in this order."""

# The label of a sample that has none yet: below all that files may give.
_NONE = np.iinfo(np.int64).min

_DIGITS = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?", re.ASCII)
_KEY_COLUMNS = ("key", "path")
_LABEL_COLUMNS = ("label", "class")


@dataclass(frozen=True)
class Assignment:
    """New labels of samples, by key of the sample. Errors name `where`, the file of the labels."""

    labels: Mapping[bytes, str | int]
    where: str = "labels"

    def describe(self) -> dict[str, Any]:
        """Returns {"sha256": hash of keys and labels, "count": number of labels}, for the manifest's provenance."""
        parts = (part for key in sorted(self.labels) for part in (key, os.fsencode(str(self.labels[key]))))
        return {"sha256": hash_of(parts), "count": len(self.labels)}


def assign(draft: Draft, splits: Sequence[str], assignment: Assignment, classes: Classes | None) -> Draft:
    """Returns a draft with the labels of `assignment` for samples of `splits`. Other samples keep their labels.

    Raises SourceError if a key belongs to no sample, a label is no class, or a split would be labeled only in part;
    ConvertError if `classes` leaves out a class that has samples; ValueError if `classes` is invalid.
    """
    assignment = _trimmed(draft, assignment, () if isinstance(classes, str) or classes is None else classes)
    known = _with_more_classes(draft, assignment, classes)
    numbers: dict[str | int, int] = {}
    for key, label in assignment.labels.items():
        if label not in numbers:
            numbers[label] = _number(known, key, label, assignment.where)
    by_key = {key: numbers[label] for key, label in assignment.labels.items()}
    places, made = dict[bytes, tuple[str, int]](), dict(known.splits)
    for name in splits:
        split = known.splits[name]
        found = np.full(len(split), _NONE) if split.labels is None else split.labels.copy()
        crc32s = split.rows["crc32"].tolist()
        for sample, key in enumerate(split.keys if by_key else ()):
            if (number := by_key.get(key)) is not None:
                found[sample] = number
                if places.setdefault(key, (name, crc32s[sample])) != (name, crc32s[sample]):
                    are_splits = places[key][0] != name
                    there = f"{places[key][0]} and {name}" if are_splits else name
                    way = "choose one by `--split` (`split=`)" if are_splits else "give labels before a merge"
                    raise SourceError(
                        f"{assignment.where}: {show_key(key)}: expected a key of one sample, found different samples "
                        f"of {there}: {way}"
                    )
        if split.labels is not None or (found != _NONE).any():
            made[name] = split.with_labels(found)
        if split.labels is None and 0 < (lacking := np.flatnonzero(found == _NONE)).size < len(split):
            raise SourceError(
                f"{assignment.where}: expected a label for each sample of the split {name!r}, which has no labels yet, "
                f"found none for {lacking.size:,} samples: "
                f"{some_keys([split.keys[sample] for sample in lacking.tolist()])}"
            )
    if missing := [key for key in by_key if key not in places]:
        raise SourceError(
            f"{assignment.where}: {len(missing):,} of {len(by_key):,} keys belong to no sample: {some_keys(missing)}. "
            "Give the keys of the index: paths relative to the converted folder"
        )
    result = replace(known, splits=made)
    if classes == "used" and result.classes:
        labels = [split.labels for split in made.values() if split.labels is not None]
        used = np.unique(np.concatenate(labels)).tolist() if labels else []
        classes = [result.classes[label] for label in used]
    return result if classes is None or isinstance(classes, str) else result.with_classes(classes)


def read_labels(labels: Labels) -> Assignment:
    """Returns the labels in a CSV or parquet file with columns `key` and `label`, or in a mapping of keys to labels.

    Raises SourceError if the file is anything else.
    """
    if not isinstance(labels, (str, os.PathLike)):
        return Assignment({as_key(key): label for key, label in labels.items()})
    path = Path(labels)
    with open_untrusted(path, refusal=SourceError) as file:
        is_parquet = file.read(4) == b"PAR1"
    found: dict[bytes, str | int] = {}
    with contextlib.closing(_parquet_rows(path) if is_parquet else _csv_rows(path)) as rows:
        for where, key, label in rows:
            if _stripped(found.setdefault(key, label)) != _stripped(label):
                both = f"{found[key]!r} and {label!r}"
                raise SourceError(f"{path}, {where}: expected one label for {show_key(key)}, found {both}")
    if not found:
        raise SourceError(f"{path}: expected at least one row with a key and a label, found none")
    return Assignment(found, str(path))


def _column(path: Path, names: Sequence[str], wanted: Sequence[str]) -> int:
    there = [number for name in wanted for number, other in enumerate(names) if other == name]
    # `extract` writes labels as numbers and as classes: somebody may have changed one of them only.
    if len(there) == 1 or (there and wanted is _KEY_COLUMNS and list(names).count(names[there[0]]) == 1):
        return there[0]
    found = ", ".join(map(str, names))[:200] or "no header"
    way_out = ": remove all but one" if there else ""
    raise SourceError(f"{path}: expected one column {' or '.join(map(repr, wanted))}, found {found}{way_out}")


def _csv_rows(path: Path) -> Generator[tuple[str, bytes, str | int], None, None]:
    # utf-8-sig, as spreadsheets begin their files with a byte order mark; keys need not be UTF-8.
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            key, label = _column(path, header, _KEY_COLUMNS), _column(path, header, _LABEL_COLUMNS)
            for row in reader:
                if not row:
                    continue  # an empty line
                if len(row) != len(header):
                    expected = f"expected {len(header)} cells, as in the first line, found {len(row)} cells"
                    raise csv.Error(f'{expected}: put cells that have commas into quotes, as in "a, b"')
                yield f"line {reader.line_num}", row[key].encode("utf-8", "surrogateescape"), row[label]
        except csv.Error as error:
            raise SourceError(f"{path}, line {reader.line_num}: {error}") from None


def _parquet_rows(path: Path) -> Generator[tuple[str, bytes, str | int], None, None]:
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        wanted = [names[_column(path, names, choices)] for choices in (_KEY_COLUMNS, _LABEL_COLUMNS)]
        number = 0
        for batch in read_batches(path, file, wanted):
            keys, labels = map(batch.column, wanted)
            keys = _values(path, keys, "(large_)?(string|binary)", "keys as text").cast("binary")
            labels = _values(path, labels, "(large_)?string|u?int.*", "labels as text or integers")
            for key, label in zip(keys.to_pylist(), labels.to_pylist(), strict=True):
                if key is None or label is None:
                    raise SourceError(f"{path}, row {number}: expected a key and a label, found an empty cell")
                yield f"row {number}", key, label
                number += 1


def _values(path: Path, column: Any, kinds: str, expected: str) -> Any:
    """Returns a parquet column, decoded if it has a dictionary. Raises SourceError, which says what was `expected`,
    unless the name of its type matches the pattern `kinds`."""
    if str(column.type).startswith("dictionary"):
        column = column.cast(column.type.value_type)
    if not re.fullmatch(kinds, str(column.type)):
        raise SourceError(f"{path}: expected a column with {expected}, found {column.type}")
    return column


def _stripped(label: str | int) -> str | int:
    return label.strip() if isinstance(label, str) else label


def _trimmed(draft: Draft, given: Assignment, more: Sequence[str]) -> Assignment:
    """Returns `given` without blanks around its texts, but for those that a class of the draft or of `more` has."""
    names = {*draft.classes, *draft.class_names, *more}
    found: dict[bytes, str | int] = {}
    for key, label in given.labels.items():
        found[key] = label if label in names else _stripped(label)
        if found[key] == "":
            raise SourceError(f"{given.where}: {show_key(key)}: expected a class, found an empty text")
    return replace(given, labels=found)


def _with_more_classes(draft: Draft, given: Assignment, classes: Classes | None) -> Draft:
    """Returns a draft with new names after its classes: those in `classes`, or in `given` if `classes` is "new"."""
    more: list[str] = []
    if isinstance(classes, str):
        if classes not in ("used", "new"):
            raise ValueError(f"classes must be 'used', 'new' or a list of names; found {classes!r}")
        unlabeled = all(split.labels is None for split in draft.splits.values())
        if classes == "new" and (draft.classes or unlabeled):
            distinct = sorted({label for label in given.labels.values() if isinstance(label, str)})
            more = [label for label in distinct if not find_labels(draft, label)]
            there = {*draft.classes, *draft.class_names}
            doubtful = [label for label in distinct if _DIGITS.fullmatch(label) and label not in there]
            if draft.classes and doubtful and not has_numbers_as_names(draft):
                raise SourceError(
                    f"{given.where}: {show(doubtful[0])} may be the number of a class, or the name of a new class: "
                    "give names, or list all classes (`--classes FILE`, from Python a list)"
                )
    elif classes is not None:
        check_text(classes, "classes")
        if (repeated := first_repeated(classes)) is not None:
            raise ValueError(f"classes must be distinct, found {repeated!r} twice")
        if not draft.classes:
            raise ConvertError(
                "classes cannot be listed for a set without class names, whose labels are numbers: leave `classes` out"
            )
        more = [name for name in classes if name not in set(draft.classes)]
    if len(draft.classes) + len(more) > MAX_CLASSES:
        raise ConvertError(
            f"expected at most {MAX_CLASSES:,} classes, found {len(draft.classes) + len(more):,} classes"
        )
    names = (*draft.class_names, *more) if draft.class_names else ()
    return replace(draft, classes=(*draft.classes, *more), class_names=names)


def _number(draft: Draft, key: bytes, label: str | int, where: str) -> int:
    if not isinstance(label, (str, int)) or isinstance(label, bool):
        raise TypeError(f"{where}: {show_key(key)}: expected a class or a number, found {label!r:.80}")
    found = find_labels(draft, label)
    if len(found) == 1:
        return found[0]
    if found:
        same = ", ".join(draft.classes[number] for number in found)
        raise SourceError(f"{where}: {show_key(key)}: {label!r} is the name of several classes: choose one of {same}")
    raise SourceError(
        f'{where}: {show_key(key)}: {describe_unknown(draft, label)} (`--classes new`, from Python `classes="new"`, '
        "adds new classes)"
    )
