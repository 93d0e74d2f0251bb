"""What the cells of tables mean: labels that are classes, numbers or several classes, and columns of numbers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import as_float32
from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.sources.doubt import UNLABELED, DoubtError, Reading
from shardio.conversion.sources.names import in_split_order, is_number, numbers_up_to, whole_numbers
from shardio.conversion.sources.table import LABEL_NAMES, Contents, Row, column_reading
from shardio.errors import SourceError, counted, first_of

_INT64 = -(1 << 63), (1 << 63) - 1, "integers that fit in int64"
# float64 holds integers exactly up to here.
_EXACT = -(1 << 53), 1 << 53, "-2**53 to 2**53, as other cells are fractions or empty"
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)

_AS_CLASSES = Reading("the labels are classes", {"--labels": "classes"})
_AS_NUMBERS = Reading("the labels are numbers", {"--labels": "numbers"})
_SEVERAL = "a cell may have several labels"
_SEPARATORS = ("|", ";", ",", " ")
# A column that is only the one that is left may have so many different texts, or half as many as rows.
_MOST_TEXTS = 20
_MOST_IN_A_VECTOR = 10_000
_NO_TEXT = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8
_ODD: Sequence[tuple[Callable[[str], object], str]] = (
    (re.compile(r"""(?s)"[^"]*"|'[^']*'|[^"]*"([^"]*"[^"]*")*[^"]*""").fullmatch, "a label without stray quotes"),
    (re.compile(r"[\r\n]").search, "a label in one line"),
    (re.compile(r"[+-]?\d+,\d+").fullmatch, "a decimal point, or several labels with `--label-separator ,`"),
    (
        re.compile(r"(?s)\[.*\]").fullmatch,
        "a label (lists are read from JSON and parquet, vectors also from several columns)",
    ),
    (has_image_suffix, "a label, and not the path of an image (`--labels none` ignores it)"),
)
"""Functions that are true for texts that are probably no labels, and what was expected instead."""
_AS_FLOAT = re.compile("[.eE]")
_AS_CODE = re.compile("[.eE]|^0[0-9]")

LabelsOfRows = tuple[tuple[str, ...] | None, Sequence[str | tuple[float, ...] | None]]


def read_labels(contents: Sequence[Contents], listed: Sequence[tuple[str, Row]]) -> LabelsOfRows:
    """Returns (classes, label of each row) for the tables `contents`; `listed` has (split, row) of each row. Adds
    errors to the tables' faults.

    If labels are class names or integers, the returned labels are texts; the classes are None if `Listing.collect` is
    to number them. For other numbers, labels are tuples of float32 numbers, and the classes name the elements, or are
    () for a single column. Raises DoubtError if it is ambiguous whether labels are classes, numbers or several classes.
    """
    labeled, rows = [content for content in contents if content.label_names], [row for _, row in listed]
    if len({content.label_names if len(content.label_names) > 1 else () for content in labeled}) > 1:
        expected, found = (", ".join(one.label_names) for one in (labeled[0], labeled[-1]))
        raise SourceError(f"{labeled[-1].path}: expected labels from {expected}, as in other tables, found {found}")
    if others := [one for one in labeled if one.table.label_separator != labeled[0].table.label_separator]:
        expected, found = (repr(one.table.label_separator or None) for one in (labeled[0], others[0]))
        raise SourceError(
            f"{others[0].path}: expected the label_separator {expected}, as other tables have, found {found}"
        )
    for row in rows:
        if isinstance(row.label, dict):  # of JSON; its text would be a class name
            row.refuse("a name, a number or a list of them as label", row.label)
        elif isinstance(row.label, str) and _NO_TEXT.search(row.label):
            row.refuse("a label in UTF-8 (save the table as UTF-8)", row.label)
        elif isinstance(row.label, str) and not row.contents.table.label_separator and (expected := _odd(row.label)):
            row.refuse(expected, row.label)
    if len(labeled[0].label_names) > 1:
        return labeled[0].label_names, _vectors(rows)
    first, option = labeled[0], labeled[0].labels
    lists = [row.label for row in rows if isinstance(row.label, (list, tuple))]
    parts = {part for part in chain.from_iterable(lists) if isinstance(part, str)}
    have_names = option == "classes" or (parts and not any(is_number(one) and _AS_FLOAT.search(one) for one in parts))
    if option != "numbers" and (first.table.label_separator or (lists and have_names)):
        return _several(rows, first)
    texts = [None if row.label is None else _text(row.label) for row in rows]
    spelled: dict[str, str] = {}  # as in the first row, by what is the same in NFC and NFD
    texts = [text and spelled.setdefault(unicodedata.normalize("NFC", text), text) for text in texts]
    distinct = {text for text in texts if text}
    numbers = whole_numbers(distinct)
    splits = in_split_order(split for (split, _), text in zip(listed, texts, strict=True) if text)
    known = {text for (split, _), text in zip(listed, texts, strict=True) if text and split == splits[0]}
    if not lists and option is None:
        _doubt(first, rows, texts, numbers, known)
    if lists or option == "numbers" or (option is None and not numbers and distinct and all(map(is_number, distinct))):
        return (), _vectors(rows)
    if option == "classes" and (not numbers or _written_apart(numbers)):
        return tuple(sorted(known)), texts
    return None, [str(numbers[text]) if text in numbers else text for text in texts]


@cache
def _odd(text: str) -> str:
    return next((expected for is_odd, expected in _ODD if is_odd(text)), "")


def _written_apart(numbers: Mapping[str, int]) -> bool:
    """Whether a number is written in several ways in `numbers` (text -> number), such as "01" and "1". What follows a
    decimal point is ignored: "1" and "1.0" are the same."""
    return len({text.partition(".")[0] for text in numbers}) > len(set(numbers.values()))


def _doubt(
    content: Contents, rows: Sequence[Row], written: Sequence[str | None], numbers: Mapping[str, int], known: Set[str]
) -> None:
    """Raises DoubtError if labels may mean several things. `written` has the text of each row's label, or None;
    `numbers` is what `whole_numbers` returns for these texts, and `known` are the texts in the first split."""
    texts = set(filter(None, written))
    path, name = content.path, content.label_names[0]
    some, are_numbers = first_of(sorted(texts), 3, repr), all(map(is_number, texts))
    kinds = counted(len(texts), "different number" if are_numbers else "different text") + f" such as {some}"
    is_unlike = are_numbers or not 1 < len(texts) <= max(_MOST_TEXTS, len(rows) // 2)
    parts = ((one, text) for text in texts for one in _SEPARATORS if {part.strip() for part in text.split(one)} < texts)
    separator, whole = next(((one, text) for one, text in parts if one in text), ("", ""))
    several = Reading(_SEVERAL, {"--label-separator": separator})
    numeric = [text for text in texts if is_number(text) and not text.startswith("-")]
    num_names = sum(not is_number(text) and not _odd(text) for text in texts)
    codes = [one for one in numeric if not are_numbers and (len(numeric) <= num_names or _AS_CODE.search(one))]
    code = rows[written.index(min(codes))] if codes else None
    where = f"such as {code.label!r} in {code.contents.faults.word} {code.line}" if code else ""
    where += "" if known >= {*codes} else ": write the names of classes instead"
    # Integers in a column with a label's name may have gaps: a part of a collection has not all classes.
    is_unclear = any(map(_AS_FLOAT.search, texts)) or name.strip().lower() not in LABEL_NAMES
    values = set(numbers.values())
    has_gap = bool(values) and (min(values) not in (0, 1) or len(values) <= max(values) - min(values))
    of_whole = rows[written.index(whole)].contents.path if whole else path
    of_code = code.contents.path if code else path
    doubts = (
        (content.guess and texts and is_unlike, path, kinds, (column_reading(name), UNLABELED)),
        (whole, of_whole, f"{whole!r} beside its parts", (_AS_CLASSES, several)),
        (code, of_code, f"numbers among names, {where}", [_AS_CLASSES] * (known >= {*codes})),
        (min(values, default=0) < 0, path, f"negative numbers such as {some}", (_AS_NUMBERS, UNLABELED)),
        (_written_apart(numbers), path, f"a number written in several ways, as in {some}", (_AS_CLASSES, _AS_NUMBERS)),
        (is_unclear and has_gap, path, f"whole numbers with gaps, such as {some}", (_AS_CLASSES, _AS_NUMBERS)),
    )
    for is_doubt, path, found, readings in doubts:
        if is_doubt:
            raise DoubtError(path, f"expected labels in the column {name!r}, found {found}", readings)


def _several(rows: Sequence[Row], content: Contents) -> LabelsOfRows:
    """Returns (classes, label of each row) for cells of several labels. A label is a vector with 1.0 for each class in
    the cell, and 0.0 for the other classes; None for an empty cell. Raises DoubtError for labels such as 01 and 1."""
    separator = content.table.label_separator
    found: list[frozenset[str] | None] = []
    for row in rows:
        cells = row.label if isinstance(row.label, (list, tuple)) else [row.label]
        if any(isinstance(cell, (dict, list)) for cell in cells):
            row.refuse("a list of names or numbers as label", row.label)
        texts = [_text(cell) for cell in cells if cell is not None]
        parts = chain.from_iterable(text.split(separator) if separator else [text] for text in texts)
        found.append(frozenset(unicodedata.normalize("NFC", part.strip()) for part in parts if part.strip()) or None)
    names: Sequence[str] = sorted(frozenset().union(*filter(None, found)))
    if content.labels is None and _written_apart(whole_numbers(frozenset(names))):
        doubt = f"expected labels, found a number written in several ways, as in {first_of(names, 3, repr)}"
        raise DoubtError(content.path, doubt, [_AS_CLASSES])
    if all(name.isdecimal() and name == str(int(name)) for name in names):
        names = numbers_up_to(0, max(map(int, names), default=-1))
    if not 2 <= len(names) <= _MOST_IN_A_VECTOR:
        expected = f"2 to {_MOST_IN_A_VECTOR:,} different labels for vectors of 0 and 1"
        raise SourceError(f"{content.path}: expected {expected}, found {len(names):,}: check `--label-separator`")

    @cache  # rows share the vectors
    def vector(mine: frozenset[str]) -> tuple[float, ...]:
        return tuple(float(name in mine) for name in names)

    return tuple(names), [None if mine is None else vector(mine) for mine in found]


def _text(cell: Any) -> str:
    return str(int(cell) if isinstance(cell, bool) else cell)


def _vectors(rows: Iterable[Row]) -> list[tuple[float, ...] | None]:
    labels: list[tuple[float, ...] | None] = []
    width = 0
    for row in rows:
        labels.append(None)
        if row.label is None:
            continue
        values = row.label if isinstance(row.label, (list, tuple)) else (row.label,)
        try:
            numbers = [_parse(value) if isinstance(value, str) else value for value in values]
            found = as_float32(list(map(float, numbers)))
            if not (len(found) and np.isfinite(found).all()):
                raise ValueError
            if lost := [
                one for one, kept in zip(numbers, found, strict=True) if isinstance(one, int) and one != int(kept)
            ]:
                row.refuse("whole numbers that float32 holds (`--column` stores others as an array)", lost[0])
        except (TypeError, ValueError, OverflowError):
            row.refuse("numbers as labels" + " (fill in empty cells)" * (None in values), row.label)
            continue
        labels[-1] = tuple(map(float, found))
        width = width or len(found)
        if len(found) != width:
            row.refuse(f"{width} numbers, as in other rows", row.label)
    return labels


def read_column(name: str, number: int, rows: Sequence[Row]) -> NDArray[np.int64] | NDArray[np.float64]:
    """Returns the numbers in the column `name`, which has the index `number` in `Row.numbers`: int64, or float64 with
    NaN for empty cells. Raises SourceError for text, and for integers that do not fit."""
    found: list[int | float] = []
    try:
        for row in rows:
            found.append(_parse(row.numbers[number]))
        are_floats = any(isinstance(value, float) for value in found)
        least, most, expected = _EXACT if are_floats else _INT64
        for place, value in enumerate(found):
            if isinstance(value, int) and not least <= value <= most:
                row = rows[place]
                raise ValueError(f"expected {expected}, found {value}")
    except ValueError as error:
        where = f"{row.contents.path}, {row.contents.faults.word} {row.line}"
        raise SourceError(f"{where}: column {name!r}: {error}") from None
    values = np.array(found, "<f8" if are_floats else "<i8")
    if are_floats:
        values[np.isnan(values)] = np.nan  # all with the same bytes
    return values


def _parse(cell: Any) -> int | float:
    """Returns the number in a cell; NaN for an empty cell. Raises ValueError for other text."""
    text = "" if cell is None else _text(cell).strip()
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        if not text.isascii() or "_" in text:  # which Python's float would take
            raise ValueError
        return float(text or "nan")
    except ValueError:
        raise ValueError(f"expected a number or an empty cell, found {text[:80]!r}") from None
