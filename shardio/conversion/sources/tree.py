"""Lists a folder tree: images in class folders, or images without labels in one folder. Each split may be a folder.

Labels and the order of images are the same as in torchvision's ImageFolder, so a model that was trained with
ImageFolder can be evaluated with the shard set, and the other way round.
"""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Iterator, MutableSequence, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Literal

from shardio.conversion.images.headers import has_image_suffix, holds_image
from shardio.conversion.images.mask import look
from shardio.conversion.options import Labels
from shardio.conversion.sources.collection import Collection, FileOrigin
from shardio.conversion.sources.containers import RECIPE, find_container
from shardio.conversion.sources.doubt import DoubtError, Reading
from shardio.conversion.sources.listing import Listing
from shardio.conversion.sources.meaning import TABLES, Disk, Layout, Part, describes, has_word, split_in
from shardio.conversion.sources.names import (
    DEFAULT_SPLIT,
    Ignored,
    Outside,
    by_split,
    in_split_order,
    known_split,
    sorted_entries,
)
from shardio.conversion.sources.parquet import is_parquet
from shardio.conversion.sources.rows import read_rows
from shardio.conversion.sources.table import is_split_like
from shardio.errors import SourceError, first_of

_Noun = Literal["images", "arrays", "files"]
"""The files of a tree that are sources: images, arrays (NPY files), or both ("files")."""

_PACKED = (".zip", ".tar", ".tgz", ".gz", ".7z", ".rar")
_ABOUT = "annotations?|labels?|info|bbox|devkit"
"""Words in the names of archives that have no images."""
_TEXTS = (".txt", ".json")
_MOST_TEXTS = 100
"""More texts next to images are captions, one for each image, and no tables."""
_START_NBYTES = 1 << 16
_MOST_BESIDE = 8
"""The maximum number of folders next to the folders of splits that are searched for images."""


def _is_array(path: str) -> bool:
    return path.endswith(".npy")


def holds_only_arrays(root: Path) -> bool:
    """Whether there are NPY files and no images in or below a folder. Stops reading at the first image."""
    scan = Scan(root, "files")
    with contextlib.suppress(SourceError):  # the scan of the tree raises it again
        are_arrays = (_is_array(name) for _, name in scan.files(root, ()))
        return next(are_arrays, False) and all(are_arrays)
    return False


def list_tree(
    root: Path,
    labels: Labels | None = None,
    noun: _Noun = "images",
    told: Set[str] | None = None,
    has_masks: bool = False,
    scan: Scan | None = None,
) -> Listing:
    """Returns the Listing of the images (or arrays) in a tree, with the names of their class folders as labels.

    `root` holds class folders, or images without labels, or a folder for each split that holds either. Keys begin with
    the set's name for the split, such as val for the folder Validation. Raises SourceError for definite errors; an
    ambiguous layout is described in the Listing's `doubts` and `readings`.

    - `told`: the splits whose labels are in a table, so their folders are no classes; None without tables
    - `has_masks`: whether `root` is also the folder of masks, so masks may be among the images
    - `scan`: finds the images, if `root` is an archive or a folder of archives
    """
    if scan is None and not root.is_dir():
        instead = "a file" if root.exists() else "nothing"
        raise SourceError(f"{root}: expected a folder of {noun}, found {instead}")
    scan = scan or Scan(root, noun)
    parts, folders = _find_parts(scan, labels)
    unpacked = {"", *(part.split or DEFAULT_SPLIT for part in parts)}
    if packed := [name for name in scan.packed if split_in(name) not in unpacked and not has_word(name, _ABOUT)]:
        scan.doubts.append(f"expected all {noun} unpacked, found {packed[0]!r}, which would be left out")
    parts = _with_classes(parts, labels)
    asked = [part for part in parts if not told or part.split not in ("", *told)]
    where, labeled = parts[0].path if len(parts) == 1 else root, [part for part in asked if part.full]
    if not any(part.images or part.full for part in parts):
        if inner := [name for name in folders if is_parquet(root / name)]:
            ways = [Reading(f"{name} is the collection", {"--source": None}, root / name) for name in inner[:3]]
            raise DoubtError(root, f"expected {noun}, found parquet files in {inner[0]!r}", ways)
        inside = (container := find_container(root)) and f"{container}: {RECIPE}"
        raise SourceError(f"{where}: expected {noun}, or class folders with {noun}, found {inside or 'none'}")
    if labels in ("folders", "leaf") and asked and not labeled:
        raise SourceError(f"{where}: expected class folders with {noun}, found {noun} alone: pass `--labels none`")
    doubts: Sequence[str] = ()
    readings: Sequence[Reading] = ()
    if labels is None and asked:
        disk = scan.disk if told is None else scan.disk._replace(tables=lambda folder: ())  # others are of no interest
        layout = Layout(root, asked, noun, disk, has_masks)
        if doubts := [*scan.doubts, *layout.doubts()]:
            readings = tuple(layout.readings())
    classes = tuple(labeled[0].classes) if labeled else ()
    for part in labeled if labels != "none" else ():
        if part.images:
            example = os.path.join(part.path, os.fsdecode(part.images[0]))
            scan.ignored.add("outside of class folders", example, len(part.images))
        unknown = [name for name in part.classes if name not in labeled[0].classes]
        if unknown and not doubts:
            raise SourceError(
                f"{part.path / unknown[0]}: expected only classes that {labeled[0].path.name!r} has, too, found the "
                f"unknown class {unknown[0]!r} ({len(unknown):,} unknown in all): move their folders elsewhere, or "
                "convert the splits separately"
            )
    notes = scan.outside.notes
    if classes and labels != "none" and all(map(str.isdecimal, classes)) and [*classes] != sorted(classes, key=int):
        odd = next(name for name, other in zip(classes, sorted(classes, key=int), strict=True) if name != other)
        notes += (f"classes are sorted as texts, as in ImageFolder: the label of {odd!r} is {classes.index(odd)}",)
    return Listing(
        root,
        {part.split: found for part in parts if (found := list(part.found(labels != "none" and part in asked)))},
        Collection(FileOrigin(root), ignored=scan.ignored, notes=notes),
        classes,
        doubts=doubts,
        readings=readings,
        has_class_folders=True,
    )


def _find_parts(scan: Scan, labels: Labels | None) -> tuple[list[Part], list[str]]:
    """Returns the Part of each split, or of the whole tree if it has no folders of splits; and the names of the folders
    in the root. Counts what lies beside folders of splits in `scan.ignored`."""
    root, noun = scan.root, scan.noun
    folders, images = scan.list(root)
    named = [name for name in folders if known_split(name)]
    if named and len(folders) - len(named) <= _MOST_BESIDE:  # lists and annotations often lie beside the splits
        others = [name for name in folders if name not in named]
        for name in [name for name in others if not scan.has_images(root / name)]:
            folders.remove(name)
            scan.ignored.add(f"folder without {noun}", name)
    all_named = len(named) == len(folders) and labels not in ("folders", "leaf")
    if not named or not (all_named or any(scan.has_folders(root / name) for name in named)):
        return [scan.part(root, "", folders, images)], folders
    folder_of = by_split(root, {name: root / name for name in named})
    if strangers := [*(name for name in folders if name not in named), *images]:
        scan.ignored.add("beside the folders of splits", strangers[0], len(strangers))
        instead = f"found {first_of(strangers, 2, repr)}, which would be left out"
        scan.doubts.append(f"expected only folders of splits next to {named[0]!r}, {instead}")
    splits = in_split_order(folder_of)
    return [scan.part(folder_of[split], split, *scan.list(folder_of[split])) for split in splits], folders


def has_splits(table: Path) -> bool:
    """Whether a table next to class folders has a column of splits. A JSON document, which may be large, has none."""
    with contextlib.suppress(SourceError, OSError):
        return table.suffix != ".json" and any(map(is_split_like, read_rows(table, ("split",))[0]))
    return False


def tables_of(folder: Path, names: Sequence[str]) -> list[str]:
    """Returns which of the files `names` in `folder`, next to images, may be tables: by their names, and of texts only
    those that name an image at their beginning."""
    texts = [name for name in names if name.endswith(_TEXTS)]
    texts = [name for name in texts if describes(name) or split_in(name)] if len(texts) <= _MOST_TEXTS else []
    lists = {name for name in texts if _names_images(folder / name)}
    return [name for name in names if name.endswith(TABLES) or name in lists]


def _names_images(text: Path) -> bool:
    with contextlib.suppress(OSError):
        if text.is_file():
            with text.open("rb") as file:
                words = re.split(r"[\s,;\"']+", file.read(_START_NBYTES).decode("latin-1"))
            return any(map(has_image_suffix, words))
    return False


def _with_classes(parts: Sequence[Part], labels: Labels | None) -> list[Part]:
    """Returns the parts with their images by class. The class is the name of the top folder or, if `labels` is "leaf",
    of the deepest folder. Names that differ only in their Unicode form (NFC, NFD) are one class. Raises SourceError if
    only a few of the deepest folders have the same name."""
    spelled: dict[str, str] = {}
    found = []
    for part in parts:
        classes: dict[str, list[bytes]] = {}
        folders = sorted(part.deepest().items()) if labels == "leaf" else list(part.classes.items())
        # Each patient or each domain may have a folder of each class. A few folders of the same name are a doubt.
        are_sure = len(folders) >= 2 * len({os.path.basename(folder) for folder, _ in folders})
        for folder, paths in folders:
            name = os.path.basename(folder)
            name = spelled.setdefault(unicodedata.normalize("NFC", name), name)
            classes.setdefault(name, []).extend(paths)
            if labels == "leaf" and len(classes[name]) > len(paths) and not are_sure:
                first = os.fsdecode(os.path.dirname(classes[name][0]))
                raise SourceError(
                    f"{part.path}: expected different names of the deepest folders, found {first!r} and {folder!r}: "
                    "rename one of them, or list the images and their classes in a table: see `--table`"
                )
        found.append(replace(part, classes=dict(sorted(classes.items())) if labels == "leaf" else classes))
    return found


class Scan:
    """Scans one tree, and collects counts of ignored files and descriptions of ambiguous layouts."""

    def __init__(self, root: Path, noun: _Noun) -> None:
        self.root = root
        self.noun = noun
        self.ignored = Ignored(root)
        self.outside = Outside(root)
        self.doubts: list[str] = []
        self.packed: list[str] = []
        """The sorted names of archives in `root`."""
        self.tables: dict[Path, list[str]] = {}
        """The sorted names of the tables in each folder that `list` has listed."""
        self.disk = Disk(os.path.exists, look, lambda folder: self.tables.get(folder, []), has_splits)

    def part(self, folder: Path, split: str, folders: list[str], images: list[str]) -> Part:
        """Returns the images in and below the folder of a split. `folders` and `images` come from `list(folder)`."""
        above = tuple(self.identity(place) for place in (self.root, folder))
        start = len(str(folder).rstrip("/")) + 1
        classes = {
            name: [os.fsencode(f"{path}/{file}"[start:]) for path, file in sorted(self.files(folder / name, above))]
            for name in folders
        }
        return Part(folder, split, list(map(os.fsencode, images)), classes)

    def list(self, folder: Path) -> tuple[list[str], list[str]]:
        """Returns the names of the folders in `folder`, and of its images. Counts other entries in `ignored`."""
        found: tuple[list[str], list[str]] = ([], [])
        others: list[str] = []
        for name, is_image in self.entries(folder, others):
            found[is_image].append(name)
        self.tables.setdefault(folder, tables_of(folder, others))
        if folder == self.root:
            self.packed = [name for name in others if name.endswith(_PACKED)]
        return found

    def entries(self, folder: Path, others: MutableSequence[str] | None = None) -> Iterator[tuple[str, bool]]:
        """Yields (name, whether it is an image) of the folders and images in `folder`, sorted. Adds the names of its
        other files to `others`."""
        for entry in sorted_entries(folder, self.ignored):
            if _kind(entry) == "folder":
                yield entry.name, False
            elif self._is_image(entry):
                yield entry.name, True
            elif others is not None:
                others.append(entry.name)

    def has_images(self, folder: Path) -> bool:
        """Whether there are images in or below `folder`. Counts nothing."""
        return any(Scan(self.root, self.noun).files(folder, ()))

    def has_folders(self, folder: Path) -> bool:
        return any(_kind(entry) == "folder" for entry in sorted_entries(folder, Ignored()))

    def identity(self, folder: Path) -> object:
        """Returns a value that is the same for two paths exactly if they are paths of the same folder."""
        status = folder.stat()
        return status.st_dev, status.st_ino

    def _is_image(self, entry: os.DirEntry[str]) -> bool:
        """Whether the entry, which is not a folder, is a source. If not, counts the entry in `ignored`."""
        if _kind(entry) == "other":
            self.ignored.add("not a regular file", entry.path)
        elif (self.noun != "images" and _is_array(entry.path)) or (self.noun != "arrays" and holds_image(entry.path)):
            self.outside.look(entry.path, entry.is_symlink())
            return True
        else:
            self.ignored.add(f"not an {self.noun.removesuffix('s')}", entry.path)
        return False

    def files(self, top: Path, above: tuple[object, ...]) -> Iterator[tuple[str, str]]:
        """Yields (folder, file name) of all images in or below `top`. `above` has the `identity` of folders above
        `top`. A folder that is below itself, by a symbolic link, is skipped, and counted in `ignored`."""
        pending = [(top, above)]  # and no recursion: folders may be nested deeper than Python calls functions
        while pending:
            folder, above = pending.pop()
            here = self.identity(folder)
            if here in above:  # a symbolic link to a folder that holds it
                self.ignored.add("symlink loop", str(folder))
                continue
            for name, is_image in self.entries(folder):
                if is_image:
                    yield str(folder), name
                else:
                    pending.append((folder / name, (*above, here)))


def _kind(entry: os.DirEntry[str]) -> Literal["folder", "file", "other"]:
    """Returns the kind of an entry, or of a link's target. A broken link is a "file", which the conversion refuses."""
    try:
        if entry.is_dir():
            return "folder"
        # Neither call raises if a link's target is missing, but for links to themselves and through files.
        return "file" if entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)) else "other"
    except OSError:
        return "file"
