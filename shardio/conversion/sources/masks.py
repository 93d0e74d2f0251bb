"""Masks in a separate folder: one for each picture, at the same relative path, as a PNG or WebP."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from shardio.conversion.images.mask import read_dtype
from shardio.conversion.sources.collection import Collection
from shardio.errors import DecodeError, SourceError

# Pictures whose masks are looked for before the folder counts as a wrong one.
_MOST_TRIED = 1000


def with_masks(collection: Collection, folder: Path) -> tuple[Collection, np.dtype[Any]]:
    """Returns the collection with the masks in `folder`, and the dtype of the first mask that can be read.

    Raises SourceError if none of the first thousand pictures has a mask.
    """
    origin = replace(collection.origin, masks=folder)
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
