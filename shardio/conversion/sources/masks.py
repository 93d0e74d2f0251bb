"""Masks in a separate folder: one for each picture, at the same relative path, as a PNG or WebP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from shardio.conversion.images.mask import read_dtype
from shardio.conversion.sources.collection import Collection, Given, Origin, Source, identify, read_file
from shardio.errors import DecodeError, SourceError

_SUFFIXES = (".png", ".webp", ".PNG", ".WEBP")
# Pictures whose masks are looked for before the folder counts as a wrong one.
_MOST_TRIED = 1000


def _paths_of(source: Source) -> Iterator[str]:
    """Yields the paths at which the source's mask may be, relative to the folder of masks and without suffix."""
    for path in (source.key, source.place):  # the key says `train` even where the folder is called otherwise
        if isinstance(path, bytes):
            stem = os.path.splitext(os.fsdecode(path))[0]
            if "\0" not in stem and not os.path.isabs(stem) and os.pardir not in stem.split("/"):
                yield stem


@dataclass(frozen=True)
class MaskedOrigin(Origin):
    """Reads pictures from another origin, and their masks from a folder."""

    pictures: Origin
    folder: Path
    """The absolute path of the folder of masks."""

    def read(self, source: Source) -> bytes | Given:
        return self.pictures.read(source)

    def read_mask(self, source: Source) -> bytes:
        """Returns the encoded mask. Raises DecodeError if the mask is missing or unreadable; OSError like `read`."""
        path = self._find(source)
        if path is None:
            name = next(_paths_of(source), None)
            missing = f"{name}.png or {name}.webp" if name else "a picture below SRC, as its path names the mask"
            raise DecodeError("incomplete", f"expected {missing}, found none")
        return read_file(path)

    def _find(self, source: Source) -> str | None:
        for stem in _paths_of(source):
            for suffix in _SUFFIXES:
                path = os.path.join(self.folder, stem + suffix)
                try:
                    os.stat(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError:
                    pass  # reading it will tell
                return path
        return None

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        pictures = self.pictures.fingerprints(sources)
        return [
            f"{picture}\0{'no mask' if path is None else f'{os.path.splitext(path)[1]} {identify(path)}'}"
            for picture, path in zip(pictures, map(self._find, sources), strict=True)
        ]

    def nbytes(self, sources: Sequence[Source]) -> int | None:
        return self.pictures.nbytes(sources)

    def with_copies_in(self, folder: Path) -> Origin:
        return replace(self, pictures=self.pictures.with_copies_in(folder))

    def copies_nbytes(self) -> int:
        return self.pictures.copies_nbytes()

    def prepare(self, report: Callable[[int], None]) -> None:
        self.pictures.prepare(report)

    def check_sendable(self) -> None:
        self.pictures.check_sendable()


def with_masks(collection: Collection, folder: Path) -> tuple[Collection, np.dtype[Any]]:
    """Returns the collection with the masks in `folder`, and the dtype of the first mask that can be read.

    Raises SourceError if none of the first thousand pictures has a mask.
    """
    origin = MaskedOrigin(collection.origin, folder)
    first: DecodeError | None = None
    for source in islice(chain.from_iterable(collection.splits.values()), _MOST_TRIED):
        try:
            return replace(collection, origin=origin), read_dtype(origin.read_mask(source))
        except DecodeError as error:
            first = first or error
    detail = first.detail if first else "no picture"
    raise SourceError(
        f"{folder}: expected a mask for each picture, at the same path below this folder as below SRC; for the first: "
        f"{detail}; and none for the others that were tried"
    )
