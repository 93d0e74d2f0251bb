"""Where images come from: a folder tree of classes, or of splits of classes, listed without opening a file.

The labels and the order are those of torchvision's ImageFolder, so that a model trained on either can be evaluated on
the other. A key is a source's path relative to SRC, as bytes: file names need not be UTF-8.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardio.decode import MAX_SOURCE_NBYTES
from shardio.errors import DecodeError, SourceError

SPLIT_NAMES = ("train", "val", "test")
"""Folders of these names directly under SRC are splits if they hold class folders."""

_DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class Source:
    """One image to convert."""

    key: bytes
    label: int


@dataclass(frozen=True)
class SourceTree:
    """What a scan found. `ignored` counts, by kind, what lies in the tree and is not an image to convert."""

    classes: tuple[str, ...]
    splits: Mapping[str, tuple[Source, ...]]
    ignored: Mapping[str, int]

    @property
    def num_sources(self) -> int:
        return sum(map(len, self.splits.values()))


def scan_tree(root: Path) -> SourceTree:
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
        found_classes, sources = scan.split(root)
        return _checked(root, SourceTree(found_classes, {_DEFAULT_SPLIT: sources}, scan.ignored))
    strangers = [name for name in folders if name not in SPLIT_NAMES]
    if strangers:
        raise SourceError(
            f"{root}: expected only the split folders {', '.join(SPLIT_NAMES)} beside {nested[0]!r}, found "
            f"{strangers[0]!r}. Convert a folder that holds nothing else, or one of class folders only"
        )
    classes: tuple[str, ...] | None = None
    splits = {}
    for name in (name for name in SPLIT_NAMES if name in folders):
        found_classes, splits[name] = scan.split(root / name, classes)
        classes = classes or found_classes
    assert classes is not None
    return _checked(root, SourceTree(classes, splits, scan.ignored))


def _checked(root: Path, tree: SourceTree) -> SourceTree:
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
            if entry.is_dir():
                names.append(entry.name)
            elif count:
                self.ignored["outside of class folders"] += 1
        return names

    def split(self, folder: Path, classes: tuple[str, ...] | None = None) -> tuple[tuple[str, ...], tuple[Source, ...]]:
        """The classes and sources of one folder of class folders; `classes` are those it must keep to, if given."""
        found = self.folders(folder, count=folder != self.root)
        if classes is not None:
            unknown = [name for name in found if name not in set(classes)]
            if unknown:
                raise SourceError(
                    f"{folder / unknown[0]}: expected only classes of {SPLIT_NAMES[0]!r}, found the unknown class "
                    f"{unknown[0]!r} ({len(unknown)} unknown in all)"
                )
        classes = tuple(found) if classes is None else classes
        labels = {name: label for label, name in enumerate(classes)}
        sources: list[Source] = []
        for name in found:
            files = sorted(self._files(folder / name, ()))
            sources += [Source(os.fsencode(f"{path}/{file}"[self._key_start :]), labels[name]) for path, file in files]
        return classes, tuple(sources)

    def _files(self, folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
        """(folder, file name) of all files at or below `folder`. `above` identifies the folders on the way down."""
        status = folder.stat()
        here = (status.st_dev, status.st_ino)
        if here in above:  # a symbolic link to a folder that holds it
            self.ignored["symlink loop"] += 1
            return
        for entry in self._entries(folder):
            if entry.is_dir():
                yield from self._files(Path(entry.path), (*above, here))
            elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
                # A dangling link counts: somebody meant an image there, and it must be refused, not overlooked.
                yield str(folder), entry.name
            else:
                self.ignored["not a regular file"] += 1


def identify(path: Path) -> str:
    """Changes when a source is replaced, rewritten, mended or lost: its size and its time of modification."""
    try:
        status = path.stat()
    except OSError:
        return "unreadable"
    return f"{status.st_size}:{status.st_mtime_ns}"


def read_source(path: Path) -> bytes:
    """Read one source. DecodeError if it cannot be read, is not a regular file, or is too large to be an image."""
    try:
        # Non-blocking, so that a FIFO that took the place of a file since the scan does not stop us for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError("unreadable", "not a regular file")
            if status.st_size > MAX_SOURCE_NBYTES:
                raise DecodeError("too large", f"expected at most {MAX_SOURCE_NBYTES} bytes, found {status.st_size}")
            return file.read()
    except OSError as error:
        raise DecodeError("unreadable", error.strerror or str(error)) from None
