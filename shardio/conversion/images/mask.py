"""Decodes the bytes of a mask strictly into an array (height, width) of the stored numbers, never of colors.

A PNG stores the numbers as gray values of 8 or 16 bits, as bits (0 and 1), or as palette indices. A lossless WebP,
which has no gray, stores them as three equal channels. Other files are refused, because their numbers may have changed.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import WebPImagePlugin

from shardio.conversion.images.decode import as_decode_error, load_png
from shardio.conversion.images.headers import (
    COLOR,
    GRAY,
    PALETTE,
    check_pixels,
    find_chunk,
    format_of,
    read_png_header,
    read_webp_size,
)
from shardio.errors import DecodeError

Mask = NDArray[np.uint8] | NDArray[np.uint16]

_SUPPORTED = "expected a PNG of 8 or 16 bits of gray, of 1 bit or with a palette, or a lossless WebP"
_COLOR_TYPES = {COLOR: "color", 4: "gray with alpha", 6: "color with alpha"}


def decode_mask(data: bytes) -> Mask:
    """Returns the numbers of an encoded mask, uint8 or (16-bit PNG) uint16, (height, width). Raises DecodeError."""
    try:
        if (kind := format_of(data)) == "PNG":
            return _decode_png(data)
        if kind == "WebP":
            return _decode_webp(data)
        found = "another file" if data else "an empty file"
        raise DecodeError("unsupported" if data else "empty", f"{_SUPPORTED}, found {found}")
    except Exception as error:
        raise as_decode_error(error) from None


def read_dtype(data: bytes) -> np.dtype[Any]:
    """Returns the dtype of `decode_mask`, from the header alone. Raises DecodeError for a damaged header of a PNG."""
    return np.dtype(np.uint16 if format_of(data) == "PNG" and read_png_header(data).depth == 16 else np.uint8)


def _decode_png(data: bytes) -> Mask:
    header = read_png_header(data)
    check_pixels(header.width, header.height)
    if header.color_type not in (GRAY, PALETTE):
        kind = _COLOR_TYPES.get(header.color_type, f"color type {header.color_type}")
        raise DecodeError("unsupported", f"{_SUPPORTED}, found a PNG of {kind}")
    if header.color_type == GRAY and header.depth in (2, 4):
        # Optimizers make them of eight bits, and scale what they mean; other programs write numbers.
        raise DecodeError("unsupported", f"{_SUPPORTED}, found a PNG of {header.depth} bits of gray")
    with load_png(data) as image:
        found = np.asarray(image)
    mask: Mask = found.astype(np.uint16) if header.depth == 16 else found.astype(np.uint8)
    if mask.ndim != 2 or (mask != found).any():
        raise DecodeError(
            "damaged", f"expected one {mask.dtype} per pixel, found an array of {found.dtype}, shape {found.shape}"
        )
    return mask


def _decode_webp(data: bytes) -> NDArray[np.uint8]:
    check_pixels(*read_webp_size(data))
    if data[12:16] == b"VP8 " or find_chunk(data, b"VP8L") is None:
        raise DecodeError("unsupported", f"{_SUPPORTED}, found a WebP that is lossy or animated")
    with WebPImagePlugin.WebPImageFile(io.BytesIO(data)) as image:
        image.load()
        if image.mode != "RGB":
            raise DecodeError("unsupported", f"{_SUPPORTED}, found a WebP with alpha")
        colors = np.asarray(image)
    mask = colors[:, :, 0].copy()
    if any((colors[:, :, channel] != mask).any() for channel in (1, 2)):
        raise DecodeError("unsupported", f"{_SUPPORTED}, found a WebP of color")
    return mask
