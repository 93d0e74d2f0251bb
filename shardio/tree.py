"""A folder tree of classes, or of splits of classes, listed without opening a file.

The labels and the order are those of torchvision's ImageFolder, so that a model trained on either can be evaluated on
the other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from shardio.errors import SourceError
from shardio.sources import Collection, FileOrigin, Source

SPLIT_NAMES = ("train", "val", "test")
"""Folders of these names directly under SRC are splits if they hold class folders."""

DEFAULT_SPLIT = "train"
"""Of sources that know of no splits."""


def scan_tree(root: Path) -> Collection:
    """List SRC = class folders, or split folders (train, val, test) of class folders.

    Classes are numbered in the order of their sorted names; `val` and `test` use the numbers of `train`. Every
    regular file that is not hidden is a source, whatever its name. SourceError tells what is wrong with the layout.
    """
    root = Path(os.path.abspath(root))
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        raise SourceError(f"{root}: expected a folder of images, found {found}")
    scan = _Scan(root)
    folders = scan.folders(root)
    nested = [name for name in SPLIT_NAMES if name in folders and scan.folders(root / name, count=False)]
    if not nested:
        classes, sources = scan.split(root)
        return _checked(root, Collection(FileOrigin(root), classes, {DEFAULT_SPLIT: sources}, scan.ignored))
    strangers = [name for name in folders if name not in SPLIT_NAMES]
    if strangers:
        raise SourceError(
            f"{root}: expected only the split folders {', '.join(SPLIT_NAMES)} beside {nested[0]!r}, found "
            f"{strangers[0]!r}. Convert a folder that holds nothing else, or one of class folders only"
        )
    first, *others = (name for name in SPLIT_NAMES if name in folders)
    splits = {}
    classes, splits[first] = scan.split(root / first)
    for name in others:
        splits[name] = scan.split(root / name, classes_of=(first, classes))[1]
    return _checked(root, Collection(FileOrigin(root), classes, splits, scan.ignored))


def _checked(root: Path, tree: Collection) -> Collection:
    for name, sources in tree.splits.items():
        if not sources:
            where = root if len(tree.splits) == 1 else root / name
            raise SourceError(
                f"{where}: expected class folders with images ({where.name}/CLASS/IMAGE), found no image in any"
            )
    return tree


class _Scan:
    """The walk over one tree. Not thread safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._key_start = len(str(root).rstrip("/")) + 1
        self.ignored: Counter[str] = Counter()

    def _entries(self, folder: Path, count: bool = True) -> Iterator[os.DirEntry[str]]:
        """Entries of a folder, sorted by name, but for hidden ones (.DS_Store, AppleDouble's ._*, ...)."""
        try:
            with os.scandir(folder) as iterator:
                entries = sorted(iterator, key=lambda entry: entry.name)
        except OSError as error:
            raise SourceError(f"{folder}: expected a readable folder, found: {error.strerror}") from None
        for entry in entries:
            if not entry.name.startswith("."):
                yield entry
            elif count:
                self.ignored["hidden"] += 1

    def folders(self, folder: Path, count: bool = True) -> list[str]:
        names = []
        for entry in self._entries(folder, count):
            if _kind(entry) == "folder":
                names.append(entry.name)
            elif count:
                self.ignored["outside of class folders"] += 1
        return names

    def split(
        self, folder: Path, classes_of: tuple[str, tuple[str, ...]] | None = None
    ) -> tuple[tuple[str, ...], tuple[Source, ...]]:
        """The classes and sources of a folder of class folders, which must keep to the classes of `classes_of`."""
        found = self.folders(folder, count=folder != self.root)
        first, classes = classes_of or (folder.name, tuple(found))
        unknown = sorted(set(found) - set(classes))
        if unknown:
            raise SourceError(
                f"{folder / unknown[0]}: expected only classes of {first!r}, found the unknown class "
                f"{unknown[0]!r} ({len(unknown)} unknown in all)"
            )
        labels = {name: label for label, name in enumerate(classes)}
        sources: list[Source] = []
        for name in found:
            above = tuple(_identity(place) for place in (self.root, folder))
            files = sorted(self._files(folder / name, above))
            sources += [Source(os.fsencode(f"{path}/{file}"[self._key_start :]), labels[name]) for path, file in files]
        return classes, tuple(sources)

    def _files(self, top: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
        """(folder, file name) of all files at or below `top`. `above` identifies the folders on the way down."""
        pending = [(top, above)]  # and no recursion: folders may be nested deeper than Python calls functions
        while pending:
            folder, above = pending.pop()
            here = _identity(folder)
            if here in above:  # a symbolic link to a folder that holds it
                self.ignored["symlink loop"] += 1
                continue
            for entry in self._entries(folder):
                kind = _kind(entry)
                if kind == "folder":
                    pending.append((Path(entry.path), (*above, here)))
                elif kind == "file":
                    yield str(folder), entry.name
                else:
                    self.ignored["not a regular file"] += 1


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _kind(entry: os.DirEntry[str]) -> Literal["folder", "file", "other"]:
    """What an entry is or links to. A link to nothing counts as a file: it must be refused, not overlooked."""
    try:
        if entry.is_dir():
            return "folder"
        # Neither call raises if a link's target is missing, but for links to themselves and through files.
        return "file" if entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)) else "other"
    except OSError:
        return "file"
