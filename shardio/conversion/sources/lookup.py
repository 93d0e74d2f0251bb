"""Finds the pictures that the paths in a table mean, also where their names on the disk are written otherwise.

Two pictures that fit a path equally well are an error. What was done to paths is said in the notes of the table.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from shardio.errors import counted

if TYPE_CHECKING:
    from shardio.conversion.sources.table import Contents, Row

Change = Callable[[str], str]

_CHANGES: Sequence[tuple[str, Change]] = (
    ("", os.path.normpath),
    ("backslashes are read as slashes", lambda path: os.path.normpath(path.replace("\\", "/"))),
    ("blanks around names are ignored", lambda path: "/".join(map(str.strip, path.split("/")))),
    ("a slash at the beginning is ignored", lambda path: path.lstrip("/")),
    ("Unicode forms (NFC, NFD) are ignored", lambda path: unicodedata.normalize("NFC", path)),
    ("letter case is ignored", lambda path: unicodedata.normalize("NFC", path.lower())),
)
"""The fewer of these changes make a path and a picture's name equal, the better they fit."""
_BY_NAME = "pictures are found by their names alone"


def find_pictures(
    content: Contents,
    has: Callable[[str], bool],
    near: Callable[[Iterable[str]], Iterable[str]],
    everything: Callable[[], Iterable[str]],
    folders: Sequence[str] = ("",),
    identity: Callable[[str], Hashable] = str,
) -> list[str]:
    """Returns the path of each row's picture, or "" if there is none. Refuses a row that fits two pictures.

    - `has`: whether there is a picture at exactly this path
    - `near`: returns the paths of pictures that may fit paths of rows. If none does, `everything` is searched
    - `folders`: what the paths of rows are relative to
    - `identity`: the same for two paths of one picture
    """
    asked = [[f"{folder}/{row.path}" if folder else row.path for folder in folders] for row in content.rows]
    used: Counter[str] = Counter()

    def choose(row: Row, fitting: Iterable[str]) -> str:
        distinct = list({identity(path): path for path in fitting}.values())
        if len(distinct) > 1:
            row.refuse(f"the path of one image, and not of {distinct[0]!r} and {distinct[1]!r}", row.path)
        return distinct[0] if distinct else ""

    def search(numbers: Sequence[int], pictures: Iterable[str], name_of: Change = str) -> None:
        fitting: dict[str, list[str]] = {fold(path): [] for number in numbers for path in asked[number]}
        for picture in pictures:
            name = fold(name_of(picture))
            for key in {name, os.path.splitext(name)[0]} & fitting.keys():
                fitting[key].append(picture)
        for number in numbers:
            pairs = ((path, picture) for path in asked[number] for picture in fitting[fold(path)])
            if fits := sorted((*_compare(path, name_of(picture)), picture) for path, picture in pairs):
                rank, ways, _ = fits[0]
                found[number] = choose(content.rows[number], [picture for other, _, picture in fits if other == rank])
                used.update([*ways, *([_BY_NAME] if name_of is os.path.basename else ())])

    found = [choose(row, filter(has, paths)) for row, paths in zip(content.rows, asked, strict=True)]
    if missing := [number for number, path in enumerate(found) if not path]:
        search(missing, near(chain.from_iterable(asked[number] for number in missing)))
    for name_of in (str, os.path.basename):
        if found and not any(found):
            search(range(len(found)), everything(), name_of)
    content.notes.extend(f"in {counted(used[way], 'row')}, {way}" for way in used)
    return found


def tidy(path: str, changes: Sequence[tuple[str, Change]] = _CHANGES[:4]) -> str:
    """Returns a relative path, with slashes and without blanks around names."""
    for _, change in changes:
        path = change(path)
    return path


def fold(path: str) -> str:
    """Returns what is equal for paths that may mean the same picture."""
    return tidy(path, _CHANGES)


def _compare(path: str, name: str) -> tuple[int, list[str]]:
    """Returns (how badly a path fits a picture's name, the changes that make them equal). A suffix may lack."""
    ways: list[str] = []
    for rank, (way, change) in enumerate(_CHANGES):
        changed = change(path), change(name)
        ways += [way] if way and changed != (path, name) else []
        path, name = changed
        if path in (name, os.path.splitext(name)[0]):
            return 2 * rank + (path != name), ways
    return 2 * len(_CHANGES), ways
