"""Interprets names in SRC: recognizes clutter and the names of splits, and numbers the labels.

A set always calls these splits train, val and test, so the same images give the same set, whatever words SRC uses.
"""

from __future__ import annotations

import operator
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from shardio.errors import SourceError, counted
from shardio.format.layout import MAX_CLASSES

T = TypeVar("T")

# --- what is left out ------------------------------------------------------------------------------------------------

_MOST_EXAMPLES = 3
_ignoring = threading.Lock()


class Ignored(Counter[str]):
    """Counts the files, folders and rows in SRC that are not converted, by reason such as "hidden". Thread safe."""

    def __init__(self, root: str | Path = "") -> None:
        super().__init__()
        self._root = root
        self.examples: dict[str, list[str]] = {}
        """Up to three examples for each reason, with different suffixes, as paths in SRC."""
        self.left_out: dict[str, list[str]] = {}
        """The keys of images that the options leave out, by reason. They are counted, too."""

    def add(self, reason: str, example: str | bytes, count: int = 1) -> None:
        """Adds `count` files, folders or rows with this reason. `example` is the path or key of one of them."""
        path = os.fsdecode(example)
        with _ignoring:
            self[reason] += count
            found, suffix = self.examples.setdefault(reason, []), os.path.splitext(path)[1]
            if len(found) < _MOST_EXAMPLES and suffix not in [os.path.splitext(one)[1] for one in found]:
                found.append(path.removeprefix(os.path.join(self._root, "")))

    def leave_out(self, reason: str, keys: Sequence[bytes]) -> None:
        self.add(reason, keys[0], len(keys))
        self.left_out.setdefault(reason, []).extend(map(os.fsdecode, keys))

    def copy(self) -> Ignored:
        made = Ignored(self._root)
        made.update(self)
        made.examples = {reason: [*some] for reason, some in self.examples.items()}
        made.left_out = {reason: [*keys] for reason, keys in self.left_out.items()}
        return made


# --- clutter, which systems and programs leave in folders -------------------------------------------------------------

# In lower case. Names that begin with a dot (.DS_Store, .ipynb_checkpoints, AppleDouble's ._*) need no list.
_SYSTEM_NAMES = frozenset(
    (
        *("__macosx", "icon\r"),  # macOS, and zip files made there
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),  # Windows
        *("@eadir", "@tmp", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "~snapshot"),  # file servers
        "lost+found",  # ext4
    )
)


def clutter(path: str) -> str:
    """Returns "hidden" or "of the system" if a name in the path is of a hidden or a system's file; otherwise ""."""
    for name in path.split("/"):
        if name.startswith("."):
            return "hidden"
        if name.lower() in _SYSTEM_NAMES:
            return "of the system"
    return ""


def entries(folder: Path, ignored: Ignored | None = None) -> Iterator[os.DirEntry[str]]:
    """Yields the entries of a folder, unsorted and without clutter. Counts clutter by kind in `ignored`."""
    with os.scandir(folder) as found:
        for entry in found:
            if not (kind := clutter(entry.name)):
                yield entry
            elif ignored is not None:
                ignored.add(kind, entry.path)


def sorted_entries(folder: Path, ignored: Ignored) -> list[os.DirEntry[str]]:
    """Returns `entries` sorted by name. Raises SourceError if the folder cannot be read."""
    try:
        return sorted(entries(folder, ignored), key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(f"{folder}: cannot read the folder: {error.strerror}") from None


class Outside:
    """Counts the images whose paths lead out of the folder of the images, by links or by `..`."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.join(os.path.realpath(folder), "")
        self._real = cache(os.path.realpath)
        self._count = 0
        self._first = ""

    def look(self, path: str, is_link: bool) -> None:
        """Counts the image at `path` if the path leads out. `is_link`: whether the file itself is a symbolic link."""
        above, name = os.path.split(path)
        real = os.path.realpath(path) if is_link else os.path.join(self._real(above), name)
        if not real.startswith(self._folder):
            self._count += 1
            self._first = self._first or f"{path!r}, which is {real!r}"

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"{counted(self._count, 'image')} outside of SRC, such as {self._first}",) if self._count else ()


# --- splits -----------------------------------------------------------------------------------------------------------

SPLIT_NAMES = ("train", "val", "test")

DEFAULT_SPLIT = "train"
"""The split of images for which SRC names no split."""

_SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


@lru_cache(1000)
def known_split(word: str) -> str:
    """Returns "train", "val" or "test" if `word` is a name for that split, in any case; otherwise "".

    A year may follow the name, as in COCO's train2017.
    """
    return _SPLIT_OF.get(re.sub(r"[-_]?(19|20)[0-9]{2}$", "", word.lower()), "")


def split_name(word: str) -> str:
    """Returns the set's name for a split, such as "val" for "Validation". Returns an unknown word unchanged."""
    return known_split(word) or word


def by_split(where: object, given: Mapping[str, T]) -> dict[str, T]:
    """Returns `given`, whose keys are SRC's words for splits, with the set's names for the splits as keys.

    Raises SourceError, whose message begins with `where`, if two words name the same split, such as val and dev.
    """
    words: dict[str, str] = {}
    for word in given:
        name = split_name(word)
        if (other := words.setdefault(name, word)) != word:
            found = f"found {other!r} and {word!r}: rename one of them, or convert them separately"
            raise SourceError(f"{where}: expected one name for the split {name!r}, {found}")
    return {name: given[word] for name, word in words.items()}


def in_split_order(names: Iterable[str]) -> list[str]:
    """Returns the distinct names of splits: train, val and test first, then the other names, sorted."""
    names = set(names)
    return [*(name for name in SPLIT_NAMES if name in names), *sorted(names - set(SPLIT_NAMES))]


# --- labels -----------------------------------------------------------------------------------------------------------

_MAX_NAME_NBYTES = 1024

_DIGITS = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
_NUMBER = re.compile(_DIGITS, re.ASCII)
# [0.1, 0.9], or 0.1;0.9 without brackets.
_VECTOR = re.compile(rf"[\[(]\s*{_DIGITS}([\s,;|]+{_DIGITS})*[\s,;]*[\])]|{_DIGITS}(\s*[,;|]\s*{_DIGITS})+", re.ASCII)

NO_VECTORS = "to convert vectors of numbers as labels, put them into columns of a table: see `--table`"


@dataclass(frozen=True)
class Numbering:
    """The classes of a collection, the number of each valid label, and what was expected for the invalid labels."""

    classes: tuple[str, ...]
    labels: Mapping[str, int] = field(default_factory=dict)
    """The number of each valid label, by the label's text in SRC."""
    expected: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """For each invalid label, by (split, the label's text): a description of the labels that are valid instead."""
    unknown: str = ""
    """A description of valid labels, for the invalid labels that are not in `expected`."""


def numbers_up_to(least: int, most: int) -> tuple[str, ...]:
    """Returns the classes "0", "1", ..., `most` for integer labels from `least` to `most`; () if these are no classes,
    because `least` is negative or `most` is too large."""
    return tuple(map(str, range(most + 1))) if least >= 0 and most < MAX_CLASSES else ()


def number_labels(written: Set[tuple[str, str]]) -> Numbering:
    """Returns the Numbering of the labels in SRC. `written` has the (split, text) of each label.

    An integer is its own number. Class names are numbered in sorted order, and each must occur in the first split.
    If SRC has both, class names are valid only if there are more distinct class names than distinct integers. Of texts
    that are the same integer, such as 1 and 01, one is valid.
    """
    everything = {text for _, text in written}
    integers = {text for text in everything if re.fullmatch(r"[0-9]{1,18}", text) and int(text) < MAX_CLASSES}
    names = {text for text in everything if _is_name(text)}
    first = next(iter(in_split_order(split for split, _ in written)), "")
    are_integers = len(integers) >= len(names)
    if are_integers:
        written_as = {int(text): text for text in sorted(integers, key=len, reverse=True)}
        labels = {text: number for number, text in written_as.items()}
        classes = numbers_up_to(0, max(labels.values(), default=-1))
    else:
        classes = tuple(sorted(name for name in names if (first, name) in written))
        labels = {name: label for label, name in enumerate(classes)}
    expected = {}
    for split, text in written:
        if text in labels:
            continue
        if text in integers and are_integers:
            expected[split, text] = f"{written_as[int(text)]}, as other labels write this number"
        elif text in integers or (text in names and are_integers):
            expected[split, text] = f"{'an integer' if are_integers else 'a class name'}, as other labels are"
        elif text in names:
            expected[split, text] = f"one of the classes of {first!r}"
        else:
            expected[split, text] = f"a class name, or an integer from 0 to {MAX_CLASSES - 1:,}{_hint(text)}"
    return Numbering(classes, labels, expected)


def is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def whole_numbers(texts: Set[str]) -> dict[str, int]:
    """Returns the number of each text, such as 3 for 3, 03, 3.0 and 3e0; {} if one is not a whole number."""
    if not all(is_number(text) and float(text).is_integer() for text in texts):
        return {}
    return {text: int(float(text) if re.search("[.eE]", text) else text) for text in texts}


def _hint(text: str) -> str:
    if _VECTOR.fullmatch(text):
        return f" ({NO_VECTORS})"
    return " (without a decimal point: 3 and not 3.0)" if _NUMBER.fullmatch(text) and re.search("[.eE]", text) else ""


def _is_name(text: str) -> bool:
    # -1, 3.0 and [0.1, 0.9] are no names: a mark of what has no label, an integer lost to floating point, a soft label.
    return (
        text.strip() not in ("", ".", "..")
        and not _NUMBER.fullmatch(text)
        and not _VECTOR.fullmatch(text)
        and not re.search(r"[\0\n\r]", text)
        and len(text.encode("utf-8", "surrogateescape")) <= _MAX_NAME_NBYTES
    )


def check_label(label: Any) -> int:
    """Returns an integer label of any type, such as np.int64, as an int. Raises TypeError for other labels."""
    try:
        return operator.index(label)
    except TypeError:
        if getattr(label, "shape", ()) or isinstance(label, (list, tuple)):
            found = f"{type(label).__name__} of length {len(label)}: for vectors, pass labels=('float32', {len(label)})"
        else:
            found = f"{label!r:.80} ({type(label).__name__}): pass int(label) if it is a whole number"
        raise TypeError(f"label must be an integer, found {found}") from None
