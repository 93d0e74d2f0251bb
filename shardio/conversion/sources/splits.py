"""The names of splits, and the words that people have for them.

Folders, tars, parquet files, lists and dicts of datasets tell a split by a word. A set calls the known ones train, val
and test, so that the same images give the same set whichever word their storage has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SPLIT_NAMES = ("train", "val", "test")

DEFAULT_SPLIT = "train"
"""The split of sources that know of no splits."""

_SPLIT_OF: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def known_split(word: str) -> str:
    """Returns the known split that a word means, in any case of letters; "" if it means none."""
    return _SPLIT_OF.get(word.lower(), "")


def split_name(word: str) -> str:
    """Returns the split that is meant: "Validation" is val, and an unknown word is a split of its own."""
    return known_split(word) or word


def two_words(words: Iterable[str]) -> tuple[str, str] | None:
    """Returns the first two different words for the same split, whose author may mean two splits; None without such."""
    first: dict[str, str] = {}
    for word in words:
        if (other := first.setdefault(split_name(word), word)) != word:
            return other, word
    return None


def in_split_order(names: Iterable[str]) -> list[str]:
    """Returns distinct names: train, val, test, then the others sorted."""
    names = set(names)
    return [*(name for name in SPLIT_NAMES if name in names), *sorted(names - set(SPLIT_NAMES))]
