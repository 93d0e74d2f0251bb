"""Pictures as PNGs, which lose nothing."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def png_of(picture: NDArray[Any]) -> bytes | None:
    """Returns the PNG of a picture, (height, width) or (height, width, channels), with the very same numbers; None if
    PNG has no such pictures.

    It has uint8 of one to four channels, uint16 of one, and bool, as 0 and 1.
    """
    if picture.dtype == np.bool_:
        picture = picture.view(np.uint8)
    if picture.ndim == 3 and picture.shape[2] == 1:
        picture = picture[:, :, 0]
    is_grey = picture.ndim == 2 and picture.dtype in (np.uint8, np.uint16)
    is_colour = picture.ndim == 3 and picture.dtype == np.uint8 and picture.shape[2] in (2, 3, 4)
    if not (is_grey or is_colour):
        return None
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, "PNG")
    return buffer.getvalue()
