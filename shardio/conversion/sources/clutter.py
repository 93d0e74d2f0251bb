"""Clutter that systems and programs leave in folders: never an image to convert, wherever it lies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# In lower case. Names that begin with a dot (.DS_Store, .ipynb_checkpoints, AppleDouble's ._*) need no list.
_SYSTEM_NAMES = frozenset(
    (
        *("__macosx", "icon\r"),  # macOS, and zip files made there
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),  # Windows
        *("@eadir", "@tmp", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "~snapshot"),  # file servers
        "lost+found",  # ext4
    )
)


def clutter(name: str) -> str:
    """Returns "hidden" or "of the system" for an entry of a folder that is clutter, by its name alone; else ""."""
    if name.startswith("."):
        return "hidden"
    return "of the system" if name.lower() in _SYSTEM_NAMES else ""


def clutter_in(path: str) -> str:
    """Returns the kind of the first folder or file of a path that is clutter; "" if none is."""
    return next(filter(None, map(clutter, path.split("/"))), "")


def entries(folder: Path, ignored: Counter[str] | None = None) -> Iterator[os.DirEntry[str]]:
    """Yields what is in a folder, unsorted, but for clutter, which is counted in `ignored` by its kind."""
    with os.scandir(folder) as found:
        for entry in found:
            if not (kind := clutter(entry.name)):
                yield entry
            elif ignored is not None:
                ignored[kind] += 1
