"""Encoded bytes -> a mask (height, width), strictly: the numbers that were stored, never colours.

A PNG has them as grey values of 8 or 16 bits, as 0 and 1 of one bit, or as palette indices; a lossless WebP, which has
no grey, as three equal channels. All else is refused, for it may have been changed on the way.
"""

from __future__ import annotations

import io
import re

import numpy as np
from numpy.typing import NDArray
from PIL import PngImagePlugin, WebPImagePlugin

from shardio.conversion.images import png, webp
from shardio.conversion.images.decode import check_pixels
from shardio.errors import DecodeError, Reason

Mask = NDArray[np.uint8] | NDArray[np.uint16]

_TAKEN = "expected a PNG of 8 or 16 bits of grey, of 1 bit or with a palette, or a lossless WebP"
_COLOUR_TYPES = {png.COLOUR: "colour", 4: "grey with alpha", 6: "colour with alpha"}


def decode_mask(data: bytes) -> Mask:
    """Returns the mask: uint16 of a PNG with 16 bits, otherwise uint8. Raises DecodeError, which names no file."""
    try:
        if png.is_png(data):
            return _decode_png(data)
        if webp.is_webp(data):
            return _decode_webp(data)
    except DecodeError as error:
        raise DecodeError(error.reason, f"mask: {error.detail}") from None
    except MemoryError as error:
        raise DecodeError("too large", f"mask: no memory to decode it: {error}") from None
    except Exception as error:  # as decoders raise on damaged files: see `decode_image`
        reason: Reason = "too large" if re.search("too large|MAX_TEXT_", str(error), re.IGNORECASE) else "damaged"
        raise DecodeError(reason, f"mask: {type(error).__name__}: {error}") from None
    found = f"bytes that begin {data[:8].hex(' ')}" if data else "an empty file"
    raise DecodeError("unsupported" if data else "empty", f"mask: {_TAKEN}, found {found}")


def read_dtype(data: bytes) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Returns the type of what `decode_mask` returns for these bytes, from the header alone. Raises DecodeError."""
    if png.is_png(data) and png.read_header(data).depth == 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint8)


def _decode_png(data: bytes) -> Mask:
    header = png.read_header(data)
    check_pixels(header.width, header.height)
    if header.colour_type not in (png.GREY, png.PALETTE):
        kind = _COLOUR_TYPES.get(header.colour_type, f"colour type {header.colour_type}")
        raise DecodeError("unsupported", f"{_TAKEN}, found a PNG of {kind}")
    if header.colour_type == png.GREY and header.depth in (2, 4):
        # Optimisers make them of eight bits, and scale what they mean; other programs write numbers.
        raise DecodeError("unsupported", f"{_TAKEN}, found a PNG of {header.depth} bits of grey")
    with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
        image.verify()  # the checksums of all chunks: see `decode_image`
    with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
        image.load()
        found = np.asarray(image)
    mask: Mask = found.astype(np.uint16) if header.depth == 16 else found.astype(np.uint8)
    if mask.ndim != 2 or (mask != found).any():
        raise DecodeError("damaged", f"expected numbers of {mask.dtype}, found {found.dtype} {found.shape}")
    return mask


def _decode_webp(data: bytes) -> NDArray[np.uint8]:
    check_pixels(*webp.read_size(data))
    if not webp.is_lossless(data):
        raise DecodeError("unsupported", f"{_TAKEN}, found a WebP that is lossy, or moves")
    with WebPImagePlugin.WebPImageFile(io.BytesIO(data)) as image:
        image.load()
        if image.mode != "RGB":
            raise DecodeError("unsupported", f"{_TAKEN}, found a WebP with alpha")
        colours = np.asarray(image)
    mask = colours[:, :, 0].copy()
    if any((colours[:, :, channel] != mask).any() for channel in (1, 2)):
        raise DecodeError("unsupported", f"{_TAKEN}, found a WebP of colour")
    return mask
