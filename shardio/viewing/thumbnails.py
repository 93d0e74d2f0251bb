"""Small pictures for a page, each as the address that holds its bytes."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, features

from shardio.viewing.alike import as_image

SIDE = 96
"""The longer side of a thumbnail, at most. Smaller pictures stay as they are."""

_QUALITY = 60


def thumbnail(picture: NDArray[np.uint8]) -> str:
    """Returns a picture (height, width, channels) as a data URL, with sides of at most SIDE pixels."""
    image = as_image(picture).convert("RGB")
    longer = max(image.size)
    if longer > SIDE:
        width, height = (max(1, round(side * SIDE / longer)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BOX, reducing_gap=2.0)
    # WebP takes three quarters of a JPEG's bytes; not every build of Pillow has it.
    kind = "webp" if features.check("webp") else "jpeg"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=_QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
