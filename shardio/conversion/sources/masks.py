"""Masks in a separate folder: one for each picture, at the same relative path, as a PNG or WebP."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from shardio.conversion.images.mask import read_dtype
from shardio.conversion.sources.collection import (
    Collection,
    Given,
    Origin,
    Source,
    find_beside,
    identify,
    read_file,
    stems_of,
)
from shardio.errors import DecodeError, SourceError

_SUFFIXES = (".png", ".webp", ".PNG", ".WEBP")
# Pictures whose masks are looked for before the folder counts as a wrong one.
_MOST_TRIED = 1000


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
        path = find_beside(self.folder, source, _SUFFIXES)
        if path is None:
            name = next(stems_of(source), None)
            missing = f"{name}.png or {name}.webp" if name else "a picture below SRC, as its path names the mask"
            raise DecodeError("incomplete", f"expected {missing}, found none")
        return read_file(path)

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        pictures = self.pictures.fingerprints(sources)
        masks = (find_beside(self.folder, source, _SUFFIXES) for source in sources)
        return [
            f"{picture}\0{'no mask' if path is None else f'{os.path.splitext(path)[1]} {identify(path)}'}"
            for picture, path in zip(pictures, masks, strict=True)
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
