"""Lists a folder tree: images in class folders, or in one folder without labels; or either in folders of splits.

Labels and order are the same as in torchvision's ImageFolder, so a model trained with one can be evaluated with the
other.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardio.conversion.images.headers import holds_image
from shardio.conversion.options import Labels
from shardio.conversion.sources.collection import Collection, FileOrigin
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import by_split, in_split_order, known_split, sorted_entries
from shardio.errors import SourceError

_Noun = Literal["images", "arrays", "files"]
"""The files of a tree that are sources. "files" are both."""


def _is_array(path: str) -> bool:
    return path.endswith(".npy")


def holds_only_arrays(root: Path) -> bool:
    """Whether there are arrays in or below a folder, and no images. Stops reading at the first image."""
    scan = _Scan(root, "files")
    with contextlib.suppress(SourceError):  # the scan of the tree raises it again
        are_arrays = (_is_array(name) for _, name in scan.files(root, ()))
        return next(are_arrays, False) and all(are_arrays)
    return False


def list_tree(root: Path, labels: Labels | None = None, noun: _Noun = "images") -> Listing:
    """Returns the images (or arrays) in the class folders of `root`, or in `root` itself; or in such folders of splits.

    All splits have the classes of the first split that has some. A folder without class folders has no labels. With
    "none", no image has a label, and all images below the folder are taken. Keys begin with the name of the split in
    the set, such as val for the folder Validation. Raises SourceError for definite mistakes.
    """
    if not root.is_dir():
        instead = "a file" if root.exists() else "nothing"
        raise SourceError(f"{root}: expected a folder of {noun}, found {instead}")
    scan = _Scan(root, noun)
    folders, images = scan.list(root)
    named = [name for name in folders if known_split(name)]
    all_named = len(named) == len(folders) and labels != "folders"
    if not named or not (all_named or any(scan.has_folders(root / name) for name in named)):
        parts = [scan.part(root, "", folders, images)]
    else:
        folder_of = by_split(root, {name: root / name for name in named})
        if strangers := [*(name for name in folders if name not in named), *images]:
            scan.ignored["beside the folders of splits"] += len(strangers)
            instead = f"found {strangers[0]!r} ({len(strangers):,} in all), which would be left out"
            scan.doubts.append(f"expected only folders of splits next to {named[0]!r}, {instead}")
        parts = [
            scan.part(folder_of[split], split, *scan.list(folder_of[split])) for split in in_split_order(folder_of)
        ]
    where, labeled = parts[0].path if len(parts) == 1 else root, [part for part in parts if part.full]
    if not any(part.images or part.full for part in parts):
        raise SourceError(f"{where}: expected {noun}, or class folders with {noun}, found none")
    if labels == "folders" and not labeled:
        raise SourceError(f"{where}: expected class folders with {noun}, found {noun} alone: pass `--labels none`")
    scan.doubt(parts)
    classes = tuple(labeled[0].classes) if labeled else ()
    for part in labeled if labels != "none" else ():
        scan.ignored["outside of class folders"] += len(part.images)
        if unknown := [name for name in part.classes if name not in labeled[0].classes]:
            raise SourceError(
                f"{part.path / unknown[0]}: expected only classes of {labeled[0].path.name!r}, found the unknown "
                f"class {unknown[0]!r} ({len(unknown)} in all): move it elsewhere, or convert the splits separately"
            )
    return Listing(
        root,
        {part.split: found for part in parts if (found := list(part.found(is_labeled=labels != "none")))},
        Collection(FileOrigin(root), ignored=scan.ignored),
        classes,
        doubts=scan.doubts,
        has_class_folders=True,
    )


@dataclass(frozen=True)
class _Part:
    """The images of SRC, or of the folder of a split, by their paths in it."""

    path: Path
    split: str
    """"" if SRC is not a folder of splits."""
    images: Sequence[bytes]
    """The images directly in the folder."""
    classes: Mapping[str, Sequence[bytes]]
    """The images below each folder in it."""
    deep: str
    """A folder with images inside one of these folders; "" if there is none."""

    @property
    def full(self) -> Sequence[str]:
        """The folders with images."""
        return [name for name, paths in self.classes.items() if paths]

    def found(self, is_labeled: bool) -> Iterator[Found]:
        """Yields the images of the class folders; without class folders or unlabeled, all images."""
        is_labeled = is_labeled and bool(self.full)
        prefix, above = (os.fsencode(f"{name}/") if self.split else b"" for name in (self.split, self.path.name))
        for name, paths in ((None, [] if is_labeled else self.images), *self.classes.items()):
            for path in paths:
                yield Found(prefix + path, name if is_labeled else None, above + path if above != prefix else None)


class _Scan:
    """Scans one tree. Not thread safe."""

    def __init__(self, root: Path, noun: _Noun) -> None:
        self.root = root
        self.noun = noun
        self.ignored: Counter[str] = Counter()
        self.doubts: list[str] = []

    def part(self, folder: Path, split: str, folders: list[str], images: list[str]) -> _Part:
        """Reads a folder, whose content `folders` and `images` are, as `list` returns them."""
        above = tuple(_identity(place) for place in (self.root, folder))
        start = len(str(folder).rstrip("/")) + 1
        classes = {}
        deep = ""
        for name in folders:
            found = sorted(self.files(folder / name, above))
            deep = deep or next((path for path, _ in found if path != str(folder / name)), "")
            classes[name] = [os.fsencode(f"{path}/{file}"[start:]) for path, file in found]
        return _Part(folder, split, list(map(os.fsencode, images)), classes, deep)

    def doubt(self, parts: list[_Part]) -> None:
        """Adds to `doubts` what the layout of the parts leaves open."""
        noun = self.noun
        flat, labeled = ([p for p in parts if p.images and not p.full], [p for p in parts if p.full])
        for part in parts:
            if part.images and part.full:
                found = f"{len(part.images):,} in it, and folders with {noun} such as {part.full[0]!r}"
                self.doubts.append(f"expected {noun} in {str(part.path)!r} or in folders in it, found {found}")
            elif not part.images and not part.full:
                self.doubts.append(f"expected {noun} in {str(part.path)!r}, found none: the split would be left out")
        if flat and labeled:
            expected = f"class folders in {flat[0].path.name!r}, as in {labeled[0].path.name!r}"
            self.doubts.append(f"expected {expected}, found {len(flat[0].images):,} {noun} without")
        full = sorted({name for part in labeled for name in part.full})
        deep = next((part.deep for part in labeled if part.deep), "")
        if len(full) == 1:
            place = labeled[0].path / full[0]
            inside = f". Give {place} as SRC if the folders in it are classes or splits" if deep else ""
            self.doubts.append(f"expected at least two classes, found one, {full[0]!r}{inside}")
        elif deep:
            self.doubts.append(f"expected {noun} directly in the class folders, found some deeper, in {deep!r}")

    def list(self, folder: Path) -> tuple[list[str], list[str]]:
        """Returns the names of the folders and of the images in a folder. Counts everything else in `ignored`."""
        folders, images = [], []
        for entry in sorted_entries(folder, self.ignored):
            if _kind(entry) == "folder":
                folders.append(entry.name)
            elif self._is_image(entry):
                images.append(entry.name)
        return folders, images

    def has_folders(self, folder: Path) -> bool:
        return any(_kind(entry) == "folder" for entry in sorted_entries(folder, Counter()))

    def _is_image(self, entry: os.DirEntry[str]) -> bool:
        """Whether a source is to be made of the entry, which is no folder. Counts it in `ignored` otherwise."""
        if _kind(entry) == "other":
            self.ignored["not a regular file"] += 1
        elif (self.noun != "images" and _is_array(entry.path)) or (self.noun != "arrays" and holds_image(entry.path)):
            return True
        else:
            self.ignored[f"not an {self.noun.removesuffix('s')}"] += 1
        return False

    def files(self, top: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
        """Yields (folder, file name) of all images in or below `top`. `above` identifies the folders above."""
        pending = [(top, above)]  # and no recursion: folders may be nested deeper than Python calls functions
        while pending:
            folder, above = pending.pop()
            here = _identity(folder)
            if here in above:  # a symbolic link to a folder that holds it
                self.ignored["symlink loop"] += 1
                continue
            for entry in sorted_entries(folder, self.ignored):
                if _kind(entry) == "folder":
                    pending.append((Path(entry.path), (*above, here)))
                elif self._is_image(entry):
                    yield str(folder), entry.name


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
