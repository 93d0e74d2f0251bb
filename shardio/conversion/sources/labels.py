"""Labels as people write them down -> classes and numbers.

Labels are integers or class names. Integers are labels as they stand, and the classes are 0 to the largest. Names are
numbered in sorted order, as class folders are.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from shardio.format.layout import MAX_CLASSES

_MAX_NAME_NBYTES = 1024

_DIGITS = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
_NUMBER = re.compile(_DIGITS, re.ASCII)
# [0.1, 0.9], or 0.1;0.9 without brackets.
_VECTOR = re.compile(rf"[\[(]\s*{_DIGITS}([\s,;|]+{_DIGITS})*[\s,;]*[\])]|{_DIGITS}(\s*[,;|]\s*{_DIGITS})+", re.ASCII)

NO_VECTORS = "a set has one class for each image and no soft labels: give the place of the largest number"


@dataclass(frozen=True)
class Numbering:
    """The meaning of the labels of a collection."""

    classes: tuple[str, ...]
    labels: Mapping[str, int]
    """Label as written -> label."""
    faults: Mapping[tuple[str, str], str]
    """(split, label as written) -> what was expected instead. These are not in `labels`."""


def number_labels(written: Mapping[str, AbstractSet[str]]) -> Numbering:
    """Returns the meaning of the labels in each split. Class names in later splits must be among those of the first.

    If a collection has both integers and names, the rarer ones are at fault.
    """
    everything = frozenset().union(*written.values())
    integers = {text for text in everything if _is_integer(text)}
    names = {text for text in everything if _is_name(text)}
    first = next((split for split, texts in written.items() if texts), "")
    labels: dict[str, int]
    if are_integers := len(integers) >= len(names):
        labels = {text: int(text) for text in integers}
        classes = tuple(map(str, range(max(labels.values(), default=-1) + 1)))
    else:
        classes = tuple(sorted(names & written[first]))
        labels = {name: label for label, name in enumerate(classes)}
    faults = {}
    for split, texts in written.items():
        for text in texts - labels.keys():
            if text in integers or (text in names and are_integers):
                faults[split, text] = f"{'an integer' if are_integers else 'a class name'}, as other labels are"
            elif text in names:
                faults[split, text] = f"one of the classes of {first!r}"
            else:
                faults[split, text] = f"a class name, or an integer from 0 to {MAX_CLASSES - 1:,}{_hint(text)}"
    return Numbering(classes, labels, faults)


def _hint(text: str) -> str:
    if _VECTOR.fullmatch(text):
        return f" ({NO_VECTORS})"
    return " (without a decimal point: 3 and not 3.0)" if _NUMBER.fullmatch(text) and re.search("[.eE]", text) else ""


def check_label(label: Any) -> int:
    """Returns an integer of any type as int. Raises TypeError for anything else."""
    try:
        return operator.index(label)
    except TypeError:
        if getattr(label, "shape", ()) or isinstance(label, (list, tuple)):
            found = f"a {type(label).__name__} of {len(label)}: {NO_VECTORS}, and keep the vectors beside the set"
        else:
            found = f"{label!r:.80} ({type(label).__name__}): give int(label) if it is a whole number"
        raise TypeError(f"label must be an integer, found {found}") from None


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", text) is not None and int(text) < MAX_CLASSES


def _is_name(text: str) -> bool:
    # -1, 3.0 and [0.1, 0.9] are no names: a mark of what has no label, an integer lost to floating point, a soft label.
    return (
        text.strip() not in ("", ".", "..")
        and not _NUMBER.fullmatch(text)
        and not _VECTOR.fullmatch(text)
        and not re.search(r"[\0\n\r]", text)
        and len(text.encode("utf-8", "surrogateescape")) <= _MAX_NAME_NBYTES
    )
