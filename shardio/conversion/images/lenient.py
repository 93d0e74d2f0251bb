"""Decodes what a damaged image still shows, by Pillow, which forgives more than a conversion does."""

from __future__ import annotations

import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from shardio.conversion.images import jpeg
from shardio.conversion.images.decode import MAX_SCANS, check_pixels

# Formats whose decoders are at work in browsers every day. A conversion takes the first three.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


def decode_leniently(data: bytes, side: int) -> NDArray[np.uint8] | None:
    """Returns what a damaged image still shows, at most `side` pixels a side; None if that is nothing.

    Not thread safe: the switch by which Pillow forgives damage is one for the whole process.
    """
    strict, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, True
    try:
        if jpeg.is_jpeg(data) and jpeg.read_header(data).num_scans > MAX_SCANS:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                check_pixels(*image.size)
                image.draft("RGB", (side, side))
                shown = image.convert("RGBA") if image.has_transparency_data else image.convert("RGB")
                shown.thumbnail((side, side))
                white = Image.new("RGB", shown.size, (255, 255, 255))
                white.paste(shown, mask=shown if shown.mode == "RGBA" else None)
                return np.asarray(white)
    except Exception:  # decoders raise a dozen types on damaged files
        return None
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = strict
