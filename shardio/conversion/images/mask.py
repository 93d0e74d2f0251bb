"""Decodes the bytes of a mask strictly into an array (height, width) of the stored numbers, never of colors.

The numbers are gray values of 8 or 16 bits, bits (0 and 1), three equal channels, or the indices of a palette, except
in GIFs. Other files are refused, because their numbers may have changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.conversion.images.decode import as_decode_error, load_png
from shardio.conversion.images.headers import (
    GRAY,
    UPRIGHT,
    check_pixels,
    find_chunk,
    format_of,
    read_png_header,
)
from shardio.conversion.images.others import DECODERS, Picture
from shardio.errors import DecodeError

Mask = NDArray[np.uint8] | NDArray[np.uint16]

_SUPPORTED = "expected a PNG, TIFF, BMP, GIF or lossless WebP of 8 or 16 bits of gray, of 1 bit, or with a palette"


def decode_mask(data: bytes) -> Mask:
    """Returns the stored numbers of an encoded mask, (height, width): uint16 for gray of 16 bits, otherwise uint8.
    Raises DecodeError if the mask is damaged, or of a kind whose numbers may have changed."""
    try:
        return _numbers(_decode(data), format_of(data))
    except Exception as error:
        raise as_decode_error(error) from None


def _refusal(found: str) -> DecodeError:
    return DecodeError("unsupported", f"{_SUPPORTED}, found {found}")


def _decode(data: bytes) -> Picture:
    kind = format_of(data)
    if kind == "PNG":
        header = read_png_header(data)
        check_pixels(header.width, header.height)
        # Optimizers make gray of 2 and 4 bits from eight, and scale what it means; other programs write numbers.
        is_scaled = header.color_type == GRAY and header.depth in (2, 4)
        image = load_png(data)
        picture = Picture(image, image.is_animated, is_deep=header.depth > 8, is_scaled=is_scaled)
    elif kind == "WebP" and (data[12:16] == b"VP8 " or find_chunk(data, b"VP8L") is None):
        raise _refusal("a WebP that is lossy or animated")
    elif kind in ("WebP", "GIF", "TIFF", "BMP"):
        picture = DECODERS[kind](data)
    else:
        found = f"a {kind}, which changes numbers when it is compressed" if kind in ("JPEG", "AVIF") else "another file"
        raise _refusal(found) if data else DecodeError("empty", f"{_SUPPORTED}, found an empty file")
    is_turned = kind == "TIFF" and picture.orientation != UPRIGHT  # others may have the orientation of their picture
    if picture.has_more or picture.has_band or is_turned or picture.is_scaled:
        what = "several pictures or bands, with an orientation, of 2 or 4 bits, or where 0 is white"
        raise _refusal(f"a {kind} of {what}")
    # Programs renumber the colors of a GIF, so its indices mean nothing, and its grays do.
    return picture._replace(image=picture.image.convert("RGBA")) if kind == "GIF" else picture


def _numbers(picture: Picture, kind: str) -> Mask:
    found: NDArray[Any] = np.asarray(picture.image)
    if found.ndim == 3:
        if picture.image.mode not in ("RGB", "RGBA", "LA") or picture.is_deep:
            raise _refusal(f"a {kind} of color")
        colors = found[:, :, :-1] if picture.image.mode[-1] == "A" else found
        if colors.shape != found.shape and found[:, :, -1].min() < 255:
            raise _refusal(f"a {kind} with transparency")
        if (colors != colors[:, :, :1]).any():
            raise _refusal(f"a {kind} of color: its channels differ")
        found = colors[:, :, 0]
    mask: Mask = found.astype(np.uint16) if picture.is_deep else found.astype(np.uint8)
    if (mask != found).any():
        raise DecodeError("damaged", f"expected one {mask.dtype} per pixel, found larger numbers of {found.dtype}")
    return mask


def look(path: Path | IO[bytes]) -> tuple[bool, tuple[int, int]] | None:
    """Returns (is gray, (width, height)) from a picture's header; None if the header cannot be read. A picture with a
    palette counts as gray, as masks may be either."""
    try:
        with Image.open(path) as image:
            return image.mode in ("1", "L", "LA", "P", "PA", "I", "I;16", "I;16B", "F"), image.size
    except Exception:
        return None
