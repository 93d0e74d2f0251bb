"""Shows the images that a conversion refused, with a decoder that tolerates damage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.images.decode import decode_leniently
from shardio.conversion.sources.detect import scan
from shardio.conversion.writing.publish import Reject
from shardio.errors import DecodeError


def read_refused_pictures(
    src: str | os.PathLike[str], rejects: Sequence[Reject], side: int
) -> list[NDArray[np.uint8] | None]:
    """Returns a picture of each refused image of `src`: (height, width, 3), at most `side` pixels per side.

    None stands for an image that is missing, shows nothing, or was refused for its size. Raises SourceError as
    `convert` does.
    """
    collection = scan(Path(src), accept_layout=True, empty_classes="keep")
    wanted = {(reject.split, reject.key) for reject in rejects}
    sources = {
        (split, source.key): source
        for split, some in collection.splits.items()
        for source in some
        if (split, source.key) in wanted
    }
    pictures: list[NDArray[np.uint8] | None] = []
    for reject in rejects:
        source = sources.get((reject.split, reject.key))
        picture = None
        if source is not None and reject.reason not in ("too large", "empty"):
            try:
                data = collection.origin.read(source)
                picture = decode_leniently(data, side) if isinstance(data, bytes) else None
            except (DecodeError, OSError):
                pass
        pictures.append(picture)
    return pictures
