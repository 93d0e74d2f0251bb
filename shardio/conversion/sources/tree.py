"""Lists a folder tree of classes, or of splits with class folders, without opening a file.

Labels and order are the same as in torchvision's ImageFolder, so a model trained with one can be evaluated with the
other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from shardio.conversion.sources.collection import Collection, FileOrigin, Source
from shardio.conversion.sources.names import (
    DEFAULT_SPLIT,
    check_split_words,
    in_split_order,
    known_split,
    sorted_entries,
)
from shardio.errors import SourceError


def scan_tree(root: Path) -> Collection:
    """Returns the images of class folders, or of class folders inside folders of splits: train, Validation, dev, ...

    Classes are numbered in the order of their sorted names, with or without images. All splits use the numbers of the
    first split. Keys begin with the name of the split in the set, such as val for the folder Validation. Every regular
    file is a source, except clutter. The collection's `doubts` name possible mistakes in the layout. Raises SourceError
    for definite mistakes.
    """
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        raise SourceError(f"{root}: expected a folder of images, found {found}")
    scan = _Scan(root)
    folders = _folders(root, scan.ignored)
    named = {name: split for name in folders if (split := known_split(name))}
    if not any(_folders(root / name, Counter()) for name in named):
        classes, sources = scan.split(root, folders)
        splits = {DEFAULT_SPLIT: sources}
    else:
        classes, splits = _scan_splits(scan, folders, named)
    if not any(splits.values()):
        where = root if len(named) != 1 else root / next(iter(named))
        raise SourceError(
            f"{where}: expected class folders with images ({where.name}/CLASS/IMAGE), found no image in any"
        )
    full = {source.label for sources in splits.values() for source in sources}
    scan.doubt([classes[label] for label in sorted(full)])
    return Collection(FileOrigin(root), classes, splits, scan.ignored, doubts=tuple(scan.doubts))


def _scan_splits(
    scan: _Scan, folders: list[str], named: dict[str, str]
) -> tuple[tuple[str, ...], dict[str, tuple[Source, ...]]]:
    """Returns (classes, sources of each split). `named` maps the folders of splits to the names of the splits."""
    check_split_words(scan.root, named, "Rename one of the folders, or move it elsewhere")
    if strangers := [name for name in folders if name not in named]:
        scan.ignored["folder beside the splits"] += len(strangers)
        scan.doubts.append(
            f"expected only split folders next to {next(iter(named))!r}, found {strangers[0]!r} ({len(strangers):,} in "
            "all), which would be left out. If all of them are classes, give a list of images and labels as SRC"
        )
    folder_of = {split: name for name, split in named.items()}
    first: tuple[str, tuple[str, ...]] | None = None
    splits: dict[str, tuple[Source, ...]] = {}
    for split in in_split_order(folder_of):
        name = folder_of[split]
        folder = scan.root / name
        classes, sources = scan.split(folder, _folders(folder, scan.ignored), split, first)
        if sources:
            first = first or (name, classes)
            splits[split] = sources
        else:
            scan.doubts.append(
                f"expected class folders with images in {name!r} ({name}/CLASS/IMAGE), found no image in any: the "
                "split would be left out"
            )
    return first[1] if first else (), splits


class _Scan:
    """Scans one tree. Not thread safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ignored: Counter[str] = Counter()
        self.doubts: list[str] = []
        self._inside: dict[Path, list[str]] = {}
        """The names of the folders inside each class folder that has folders."""

    def doubt(self, full: list[str]) -> None:
        """Adds possible mistakes in the classes to `doubts`. `full` are the classes that have images."""
        if len(full) == 1:
            hint = ""
            if len(self._inside) == 1:
                ((folder, names),) = self._inside.items()
                hint = (
                    f". Give {folder} as SRC if its folders ({names[0]!r}, {len(names):,} in all) are classes or splits"
                )
            self.doubts.append(f"expected at least two classes, found one, {full[0]!r}{hint}")
            return
        for folder, names in self._inside.items():
            words = [name for name in names if known_split(name)]
            if len(set(map(known_split, words))) > 1:
                self.doubts.append(
                    f"expected class folders, found {str(folder)!r} with folders named like splits, {words[0]!r} and "
                    f"{words[1]!r}, which would be one class. Give the folder of one collection as SRC, or a list with "
                    "a column `split`"
                )
                return

    def split(
        self, folder: Path, found: list[str], split: str = "", classes_of: tuple[str, tuple[str, ...]] | None = None
    ) -> tuple[tuple[str, ...], tuple[Source, ...]]:
        """Returns the classes and sources of a folder. `found` are its class folders.

        If `classes_of` is given, raises SourceError for a class folder that is not in it. Keys begin with `split`
        instead of the folder's own name.
        """
        first, classes = classes_of or (folder.name, tuple(found))
        unknown = sorted(set(found) - set(classes))
        if unknown:
            raise SourceError(
                f"{folder / unknown[0]}: expected only classes of {first!r}, found the unknown class "
                f"{unknown[0]!r} ({len(unknown)} unknown in all). Move folders that are not classes elsewhere, or "
                "convert the splits separately"
            )
        labels = {name: label for label, name in enumerate(classes)}
        above = tuple(_identity(place) for place in (self.root, folder))
        start = len(str(folder).rstrip("/")) + 1
        prefix = os.fsencode(f"{split}/") if split else b""
        renamed = split not in ("", folder.name)
        sources: list[Source] = []
        for name in found:
            for path, file in sorted(self._files(folder / name, above)):
                below = os.fsencode(f"{path}/{file}"[start:])
                place = os.fsencode(f"{folder.name}/") + below if renamed else None
                sources.append(Source(prefix + below, labels[name], place))
        return classes, tuple(sources)

    def _files(self, top: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
        """Yields (folder, file name) of all files in or below `top`. `above` identifies the folders above."""
        inside = []
        pending = [(top, above)]  # and no recursion: folders may be nested deeper than Python calls functions
        while pending:
            folder, above = pending.pop()
            here = _identity(folder)
            if here in above:  # a symbolic link to a folder that holds it
                self.ignored["symlink loop"] += 1
                continue
            for entry in sorted_entries(folder, self.ignored):
                kind = _kind(entry)
                if kind == "folder":
                    if folder == top:
                        inside.append(entry.name)
                    pending.append((Path(entry.path), (*above, here)))
                elif kind == "file":
                    yield str(folder), entry.name
                else:
                    self.ignored["not a regular file"] += 1
        if inside:
            self._inside[top] = inside


def _folders(folder: Path, ignored: Counter[str]) -> list[str]:
    """Returns the names of the folders in a folder. Counts everything else in `ignored`."""
    names = []
    for entry in sorted_entries(folder, ignored):
        if _kind(entry) == "folder":
            names.append(entry.name)
        else:
            ignored["outside of class folders"] += 1
    return names


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _kind(entry: os.DirEntry[str]) -> Literal["folder", "file", "other"]:
    """Returns the kind of an entry, or of the target of a link. A broken link is a file, which will be refused."""
    try:
        if entry.is_dir():
            return "folder"
        # Neither call raises if a link's target is missing, but for links to themselves and through files.
        return "file" if entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)) else "other"
    except OSError:
        return "file"
