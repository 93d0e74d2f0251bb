"""Decodes WebP, GIF, TIFF, AVIF, BMP, PPM, PGM and PBM with Pillow, after the checks that Pillow and libtiff leave out.

Pillow allocates memory for the pixels only when it loads an image, so the size is checked after the image is opened and
before it is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import BmpImagePlugin, GifImagePlugin, Image, PpmImagePlugin, WebPImagePlugin, features
from PIL import TiffImagePlugin as Tiff

from shardio.conversion.images.headers import (
    BYTE_ORDERS,
    ORIENTATION,
    UPRIGHT,
    check_parts,
    check_pixels,
    read_orientation,
    read_webp_size,
    tags_in,
)
from shardio.errors import DecodeError


class Picture(NamedTuple):
    """The first picture of a file. `has_more` says that the file has more pictures."""

    image: Image.Image
    has_more: bool = False
    orientation: int = UPRIGHT
    """The Exif orientation in the file. Pillow has applied it to a TIFF, and not to an AVIF or a WebP."""
    is_deep: bool = False
    """Whether the file has more than 8 bits per channel."""
    is_scaled: bool = False
    """Whether gray values are not the stored numbers, because the file has 2 or 4 bits, or 0 for white."""
    has_band: bool = False
    """Whether the file has a fourth band, which is no color and not declared as transparency, and was left out."""


def check_palette(image: Image.Image, num_colors: int) -> None:
    """Raises DecodeError if a pixel's index is not below `num_colors`. Pillow would show such a pixel as black."""
    largest = int(np.asarray(image.getextrema()).max())
    if largest >= num_colors:
        raise DecodeError("damaged", f"expected palette indices below {num_colors}, found {largest}")


def _decode_webp(data: bytes) -> Picture:
    check_pixels(*read_webp_size(data))  # before Pillow opens it, which allocates two whole pictures
    with WebPImagePlugin.WebPImageFile(io.BytesIO(data)) as image:
        image.load()
        return Picture(image, image.is_animated, read_orientation(data))


# --- GIF (89a) --------------------------------------------------------------------------------------------------------


def _palette_size(flags: int) -> int:
    return 2 << (flags & 7) if flags & 0x80 else 0


def _gif_frames(data: bytes) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """Yields ((left, top, right, bottom) in pixels, number of colors in the palette) for each frame of a GIF. Raises
    IndexError or struct.error if the GIF is truncated."""
    shared = _palette_size(data[10])
    at, blocks = 13 + 3 * shared, 0
    while (block := data[at : at + 1]) in (b",", b"!"):
        if is_frame := block == b",":
            left, top, width, height, flags = struct.unpack_from("<4HB", data, at + 1)
            check_pixels(left + width, top + height)
        at += 11 + 3 * _palette_size(flags) if is_frame else 2
        while data[at]:
            at += 1 + data[at]
            blocks += not is_frame  # Pillow keeps the parts of comments
        check_parts(blocks := blocks + 1)
        at += 1
        if is_frame:
            yield (left, top, left + width, top + height), _palette_size(flags) or shared


def _decode_gif(data: bytes) -> Picture:
    check_pixels(*struct.unpack_from("<HH", data, 6))
    frames = _gif_frames(data)
    box, num_colors = next(frames, ((0, 0, 0, 0), 0))
    check_pixels(box[2] - box[0], box[3] - box[1])
    with GifImagePlugin.GifImageFile(io.BytesIO(data)) as image:
        check_pixels(*image.size)
        image.load()
        frame = image.crop(box)
    check_palette(frame, num_colors)
    if frame.size != image.size:  # what the frame does not cover is transparent
        whole = Image.new("RGBA", image.size)
        whole.paste(frame.convert("RGBA"), box)
        frame = whole
    return Picture(frame, sum(1 for _ in frames) > 0)


# --- TIFF (6.0) -------------------------------------------------------------------------------------------------------

_SUBFILE, _EXTRA, _FORMAT, _DNG = 254, 338, 339, 50706
_MOST_BANDS = 4
_COMPRESSIONS = frozenset({"raw", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits"})
_TIFF_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBX", "RGBA", "CMYK", "I;16", "I;16B"})
# Exif, GPS and interoperability; numbers of strips and tiles, which become Python's; the bytes of each type of number.
_DIRECTORIES = frozenset({34665, 34853, 40965})
_STRIPS = frozenset({Tiff.STRIPOFFSETS, Tiff.STRIPBYTECOUNTS, Tiff.TILEOFFSETS, Tiff.TILEBYTECOUNTS})
_TYPE_NBYTES = dict(enumerate((1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4), start=1))
_LONG = 4
# A tile may be larger than the picture, but takes memory for its own size.
_MOST_TILE_PIXELS = 1 << 20


def _decode_tiff(data: bytes) -> Picture:
    _silence_tiff()
    _check_tags(data)
    try:
        image = Tiff.TiffImageFile(io.BytesIO(data))
    except SyntaxError as error:
        is_odd = isinstance(error.__cause__, KeyError) or re.search("pixel mode|string index", str(error))
        raise DecodeError("unsupported" if is_odd else "damaged", f"TIFF: {error}") from None
    check_pixels(*image.size)

    def tag(name: int, default: int | tuple[int, ...]) -> NDArray[np.int64]:
        return np.atleast_1d(np.asarray(image.tag_v2.get(name, default), np.int64))

    bits, colors = tag(Tiff.BITSPERSAMPLE, 1), tag(Tiff.COLORMAP, 0)
    meaning, samples = tag(Tiff.PHOTOMETRIC_INTERPRETATION, -1)[0], tag(Tiff.SAMPLESPERPIXEL, 1)[0]
    has_more, extra = samples > {2: 3, 5: 4}.get(meaning, 1), tag(_EXTRA, -1)[0]
    # By what a further band is, whether Pillow reads separate planes right: most of its errors are without libtiff.
    is_raw, is_deep = image.info["compression"] == "raw", bits.max() > 8
    planes = {0: not is_raw, 1: not is_raw and not is_deep, 2: meaning > 1 and not (is_raw and is_deep)}
    for found, is_refused in {
        "a reduced picture or a camera's raw data": tag(_SUBFILE, 0)[0] & 1 or _DNG in image.tag_v2,
        f"compression {image.info['compression']}": image.info["compression"] not in _COMPRESSIONS,
        f"mode {image.mode}, photometric {meaning}": image.mode not in _TIFF_MODES or meaning not in (0, 1, 2, 3, 5),
        f"{bits.tolist()} bits": not set(bits.tolist()) <= {1, 2, 4, 8, 16},  # Pillow shows 12 bits as if they were 16
        "16 bits where 0 is white": image.mode.startswith("I") and meaning == 0,
        "a palette of 8 bits": 0 < colors.max() < 256,
        "signed numbers": not set(tag(_FORMAT, 1).tolist()) <= {1, 4},  # unsigned, undefined
        f"{samples} separate planes of {bits[0]} bits": (
            tag(Tiff.PLANAR_CONFIGURATION, 1)[0] == 2 and samples > 1 and not planes.get(extra if has_more else 2)
        ),
    }.items():
        if is_refused:
            raise DecodeError("unsupported", f"expected a TIFF of integers in a common layout, found {found}")
    _check_places(len(data), tag)
    # A band is transparency only if the file says of which kind: programs also write near infrared there.
    has_band = has_more and extra not in (1, 2)
    orientation = image.getexif().get(ORIENTATION, UPRIGHT)
    image.load()
    if image.mode == "P":
        check_palette(image, len(colors) // 3)
    picture = image.convert(image.mode[:-1]) if has_band and image.mode in ("LA", "RGBA") else image
    is_scaled = meaning == 0 or (meaning == 1 and bits[0] in (2, 4))
    return Picture(picture, image.is_animated, orientation, is_deep, is_scaled, has_band)


def _check_tags(data: bytes) -> None:
    """Raises DecodeError if a TIFF has too many strips or pages, or tags of more bytes than the file has.

    Pillow reads the tags of all pages, and before version 13 repeats bytes that tags share.
    """
    sign, nbytes, seen = BYTE_ORDERS[data[:4]], 0, {0}
    places = [4]  # of the offsets of directories
    for place in places:
        (start,) = struct.unpack_from(f"{sign}I", data, place)
        if start in seen or start + 2 > len(data):
            continue
        seen.add(start)
        check_parts(len(seen))
        for tag, kind, count, at in tags_in(data, sign, start):
            check_parts(count if tag in _STRIPS else 0)
            (bands,) = struct.unpack_from(sign + ("I" if kind == _LONG else "H"), data, at + 8)
            if tag == Tiff.SAMPLESPERPIXEL and bands > _MOST_BANDS and len(seen) == 2:  # of the first page
                raise DecodeError("unsupported", f"expected a TIFF of at most {_MOST_BANDS} bands, found {bands} bands")
            nbytes += 12 + (size if (size := count * _TYPE_NBYTES.get(kind, 0)) > 4 else 0)
            if nbytes > len(data):
                raise DecodeError(
                    "too large", f"expected TIFF tags no larger than the file, {len(data)} bytes, found more"
                )
            places += [at + 8] if tag in _DIRECTORIES else []
        end = start + 2 + 12 * struct.unpack_from(f"{sign}H", data, start)[0]
        places += [end] if end + 4 <= len(data) else []


def _check_places(num_bytes: int, tag: Callable[..., NDArray[np.int64]]) -> None:
    """Raises DecodeError if a TIFF of `num_bytes` bytes lacks strips or tiles: libtiff would guess where they are.
    `tag` takes the number of a tag and a default, and returns the tag's values."""
    width, height, samples = (int(tag(n, 1)[0]) for n in (Tiff.IMAGEWIDTH, Tiff.IMAGELENGTH, Tiff.SAMPLESPERPIXEL))
    planes = samples if tag(Tiff.PLANAR_CONFIGURATION, 1)[0] == 2 else 1
    across, down = width, min(int(tag(Tiff.ROWSPERSTRIP, height)[0]), height)
    places, sizes = tag(Tiff.STRIPOFFSETS, ()), tag(Tiff.STRIPBYTECOUNTS, ())
    if not (is_striped := places.size > 0):
        across, down = int(tag(Tiff.TILEWIDTH, 0)[0]), int(tag(Tiff.TILELENGTH, 0)[0])
        places, sizes = tag(Tiff.TILEOFFSETS, ()), tag(Tiff.TILEBYTECOUNTS, ())
        most = max(width * height, _MOST_TILE_PIXELS)
        if across % 16 or down % 16 or across * down > most:
            expected = f"sides of 16, 32, ... pixels and at most {most:,} pixels"
            raise DecodeError("unsupported", f"expected TIFF tiles with {expected}, found {across} x {down}")
    if across < 1 or down < 1:
        raise DecodeError("damaged", f"expected TIFF strips or tiles with pixels, found {across} x {down} pixels")
    count = planes * -(-width // across) * -(-height // down)
    if not len(places) == len(sizes) == count or (sizes < 1).any() or (places + sizes > num_bytes).any():
        raise DecodeError("damaged", f"expected a TIFF with {count} strips or tiles, found missing or truncated ones")
    row_nbytes = -(-across * (samples // planes) * int(tag(Tiff.BITSPERSAMPLE, 1)[0]) // 8)
    nbytes = row_nbytes * (planes * height if is_striped else count * down)
    if tag(Tiff.COMPRESSION, 1)[0] == 1 and sizes.sum() < nbytes:
        raise DecodeError("damaged", f"expected a TIFF with {nbytes} bytes of pixels, found {sizes.sum()} bytes")


@cache
def _silence_tiff() -> None:
    """Stops Pillow and libtiff from printing errors, which Pillow raises as exceptions anyway."""
    Tiff.logger.addHandler(logging.NullHandler())
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/maps", errors="surrogateescape") as maps:
        for path in {line.split()[-1] for line in maps if "/libtiff" in line}:
            ctypes.CDLL(path).TIFFSetErrorHandler(None)


# --- AVIF -------------------------------------------------------------------------------------------------------------


def _decode_avif(data: bytes) -> Picture:
    # Before version 13, Exif of a megabyte takes gigabytes.
    if int(PIL.__version__.partition(".")[0]) < 13 or not features.check("avif"):
        raise DecodeError("unsupported", "the installed Pillow does not decode AVIF safely: install Pillow 13 or later")
    from PIL import AvifImagePlugin

    image = AvifImagePlugin.AvifImageFile(io.BytesIO(data))
    check_pixels(*image.size)
    image.load()
    return Picture(image, getattr(image, "n_frames", 1) > 1, image.getexif().get(ORIENTATION, UPRIGHT))


# --- BMP --------------------------------------------------------------------------------------------------------------


def _decode_bmp(data: bytes) -> Picture:
    offset, nbytes = struct.unpack_from("<II", data, 10)
    (bits,) = struct.unpack_from("<H", data, 24 if nbytes == 12 else 28)
    try:
        image = BmpImagePlugin.BmpImageFile(io.BytesIO(data))
    except OSError as error:
        raise DecodeError("unsupported" if "nsupported" in str(error) else "damaged", f"BMP: {error}") from None
    check_pixels(*image.size)
    if image.tile[0][0] != "raw":
        raise DecodeError("unsupported", "expected a BMP without run lengths, found run-length encoding")
    # Pillow takes pixels of other sizes for pixels of 1 or 8 bits, if the palette is of grays.
    if bits != {"1": 1, "L": 8}.get(image.mode, bits):
        raise DecodeError(
            "unsupported", f"expected a BMP of {bits} bits with a palette of colors, found a palette of grays"
        )
    num_colors = len(image.palette.palette) // (3 if nbytes == 12 else 4) if image.palette else 256
    if offset < 14 + nbytes:
        raise DecodeError(
            "damaged", f"expected pixels after the {14 + nbytes} bytes of a BMP's header, found them at byte {offset}"
        )
    image.load()
    if image.mode == "P":
        check_palette(image, num_colors)
    # Alpha that is 0 everywhere was written by a program that knows of no alpha.
    lacks_alpha = image.mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0)
    return Picture(image.convert("RGB") if lacks_alpha else image)


# --- PPM, PGM and PBM (Netpbm) ----------------------------------------------------------------------------------------


# A longer header counts as truncated: Pillow takes half a second for a megabyte of comments.
_PNM_HEADER_NBYTES = 1 << 16


def _decode_pnm(data: bytes) -> Picture:
    if data[1] in b"23" and data[-1:].isdigit():
        raise DecodeError(
            "damaged", "expected a line break after the last number of a PPM, found a number that may be truncated"
        )
    check_parts(data.count(b"#") if data[1] in b"123" else 0)
    try:
        PpmImagePlugin.PpmImageFile(io.BytesIO(data[:_PNM_HEADER_NBYTES]))
        image = PpmImagePlugin.PpmImageFile(io.BytesIO(data))
        check_pixels(*image.size)
        if image.tile[0][0] != "ppm":
            image.load()
            return Picture(image)
    except ValueError as error:  # its text quotes the file, which may be no image
        if isinstance(error, DecodeError):
            raise
        raise DecodeError("damaged", "expected a PPM, found an invalid header or invalid numbers") from None
    arguments: Any
    _, _, start, arguments = image.tile[0]
    # Pillow takes numbers that are too large for the largest, and a second per million pixels.
    most = int(arguments[-1])
    shape = (image.height, image.width, 3) if image.mode == "RGB" else (image.height, image.width)
    values = np.frombuffer(data, ">u2" if most > 255 else np.uint8, np.prod(shape), start).reshape(shape)
    if values.max() > most:
        raise DecodeError("damaged", f"expected numbers up to {most} in a PPM, found {values.max()}")
    levels = ((np.arange(most + 1) * 255 + most // 2) // most).astype(np.uint8)
    return Picture(Image.fromarray(np.stack([levels[row] for row in values])), is_deep=most > 255)


DECODERS: Mapping[str, Callable[[bytes], Picture]] = {
    "WebP": _decode_webp,
    "GIF": _decode_gif,
    "TIFF": _decode_tiff,
    "AVIF": _decode_avif,
    "BMP": _decode_bmp,
    "PPM": _decode_pnm,
}
"""The decoder of each format, by the name that `format_of` returns."""
