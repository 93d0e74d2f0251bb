"""Encoded bytes -> (height, width, 3) uint8, strictly: either the picture that was stored or a DecodeError.

Content decides what a file is, never its name. JPEG goes through strict simplejpeg and never falls back to Pillow,
which decodes most damaged JPEGs without a word. PNG and WebP go through Pillow; a PNG's checksums are verified first.
What a header claims is checked before anything is allocated for it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin, WebPImagePlugin

from shardio import jpeg
from shardio.errors import DecodeError

# 256 MiB of RGB. It is also where Pillow begins to warn of decompression bombs.
MAX_PIXELS = (256 << 20) // 3
# Encoders write about ten scans and optimisers a few dozen; thousands are a bomb that costs hours.
MAX_SCANS = 100
# A picture of MAX_PIXELS stored without any compression fits.
MAX_SOURCE_NBYTES = 512 << 20

# Transparent pixels are laid over white: what is hidden under them is often noise, and most viewers show white.
_BACKGROUND = (255, 255, 255)
_DEEP_MODES = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})

_OTHER_KINDS = {
    b"GIF8": "a GIF",
    b"BM": "a BMP",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip file",
    b"\0\0\0\x0cjP": "a JPEG 2000",
    b"\xff\x0a": "a JPEG XL",
}


LeastSize = Callable[[int, int], tuple[int, int]]
"""From the (height, width) of an image to the least (height, width) that its picture may be reduced to."""

# libjpeg reduces blocks of 8 x 8 coefficients, to 4 x 4, 2 x 2 or 1 x 1.
_MOST_REDUCTION = 8
# Of a reduced picture. Below it, sizes would not tell simplejpeg which reduction is meant, nor would it save time.
_LEAST_SIDE = 8


@dataclass(frozen=True)
class Decoded:
    """`pixels` is (height, width, 3) uint8, RGB. `warning` tells what had to be mended, or is empty."""

    pixels: NDArray[np.uint8]
    warning: str = ""
    reduction: int = 1
    """1, or 2, 4 or 8: each pixel stands for so many rows and columns of the image; those at the end may for fewer."""
    reduced_from: tuple[int, int] | None = None

    @property
    def source_size(self) -> tuple[int, int]:
        """(height, width) of the image, reduced or not."""
        return self.reduced_from or (self.pixels.shape[0], self.pixels.shape[1])


def decode_image(data: bytes, least_size: LeastSize | None = None) -> Decoded:
    """Decode one image of any supported kind. DecodeError with a reason class otherwise; no other exception.

    With `least_size` a JPEG may be decoded to a half, a quarter or an eighth of its size, by leaving out the finest of
    its frequencies, which takes a fraction of the time.
    """
    try:
        if jpeg.is_jpeg(data):
            return _decode_jpeg(data, least_size)
        if data[:8] == b"\x89PNG\r\n\x1a\n":
            return Decoded(_decode_png(data))
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return Decoded(_decode_webp(data))
    except DecodeError:
        raise
    except MemoryError as error:
        raise DecodeError("too large", f"no memory to decode it: {error}") from None
    except Exception as error:
        # Decoders raise a dozen types on damaged files: ValueError, OSError, SyntaxError, EOFError, struct.error...
        raise DecodeError("damaged", f"{type(error).__name__}: {error}") from None
    raise DecodeError(*_describe_unsupported(data))


def _describe_unsupported(data: bytes) -> tuple[str, str]:
    if not data:
        return "empty", "the file has no bytes"
    for magic, kind in _OTHER_KINDS.items():
        if data.startswith(magic):
            return "unsupported", f"expected a JPEG, PNG or WebP, found {kind}"
    if data[:64].lstrip().startswith((b"<", b"{")):
        return "unsupported", "expected a JPEG, PNG or WebP, found text (an error page saved as an image?)"
    return "unsupported", f"expected a JPEG, PNG or WebP, found bytes that begin {data[:8].hex(' ')}"


def check_pixels(width: int, height: int) -> None:
    if width <= 0 or height <= 0:
        raise DecodeError("damaged", f"the header claims {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise DecodeError("too large", f"expected at most {MAX_PIXELS} pixels, found {width} x {height}")


def _decode_jpeg(data: bytes, least_size: LeastSize | None) -> Decoded:
    header = jpeg.read_header(data)
    if not jpeg.is_supported(header):
        raise DecodeError(
            "unsupported",
            f"expected an 8-bit JPEG, found {header.precision} bits, frame ff{header.frame:02x}",
        )
    check_pixels(header.width, header.height)
    if header.num_scans > MAX_SCANS:
        raise DecodeError("too large", f"expected at most {MAX_SCANS} scans, found {header.num_scans}")
    size = (header.height, header.width)
    reduction = 1 if least_size is None else _most_reduction(size, least_size(*size))
    reduced_from = None if reduction == 1 else size
    try:
        return Decoded(_strict_jpeg(data, size, reduction), "", reduction, reduced_from)
    except ValueError as error:
        if "subsampling" in str(error):  # sound, but laid out in a way that the TurboJPEG API has no name for
            raise DecodeError("unsupported", str(error)) from None
        # A sound picture behind a faulty header decodes once the header is cut down to what decoding needs; damage
        # in the picture itself fails again.
        try:
            pixels = _strict_jpeg(jpeg.without_junk(data, header), size, reduction)
        except ValueError as again:
            raise DecodeError("damaged", str(again)) from None
        return Decoded(pixels, f"junk in the header left out: {error}", reduction, reduced_from)


def _most_reduction(size: tuple[int, int], least: tuple[int, int]) -> int:
    reduction = 1
    while reduction < _MOST_REDUCTION and all(
        _reduced(side, 2 * reduction) >= max(enough, _LEAST_SIDE) for side, enough in zip(size, least, strict=True)
    ):
        reduction *= 2
    return reduction


def _reduced(side: int, reduction: int) -> int:
    return -(-side // reduction)


def _strict_jpeg(data: bytes, size: tuple[int, int], reduction: int) -> NDArray[np.uint8]:
    reduced = (_reduced(size[0], reduction), _reduced(size[1], reduction))
    # simplejpeg takes the smallest number of eighths that gives these sides or more, and without them all eight.
    least = {} if reduction == 1 else {"min_height": reduced[0], "min_width": reduced[1]}
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=True, **least)
    if pixels.shape[:2] != reduced:
        raise ValueError(f"expected {reduced[1]} x {reduced[0]} pixels, decoded {pixels.shape[1]} x {pixels.shape[0]}")
    return pixels


def _decode_png(data: bytes) -> NDArray[np.uint8]:
    # The plugin's own class and not Image.open: that would warn of large images on stderr before we can refuse them.
    with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
        check_pixels(*image.size)
        # Walks all chunks and their checksums; load() alone does not look at those of the pixels. It uses up the file.
        image.verify()
    with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
        return _to_rgb(image)


def _decode_webp(data: bytes) -> NDArray[np.uint8]:
    claimed = int.from_bytes(data[4:8], "little") + 8
    if claimed > len(data):
        raise DecodeError("damaged", f"expected {claimed} bytes, found {len(data)}")
    check_pixels(*_webp_size(data))  # before Pillow opens it, which allocates two whole pictures
    with WebPImagePlugin.WebPImageFile(io.BytesIO(data)) as image:
        return _to_rgb(image)


def _webp_size(data: bytes) -> tuple[int, int]:
    """(width, height) that the first chunk claims, by the WebP container specification (RFC 9649)."""

    def bits(start: int, stop: int) -> int:
        return int.from_bytes(data[start:stop], "little")

    chunk = data[12:16]
    if chunk == b"VP8X":  # canvas size minus one, 24 bits each
        return bits(24, 27) + 1, bits(27, 30) + 1
    if chunk == b"VP8L":  # after a signature byte: size minus one, 14 bits each
        return (bits(21, 25) & 0x3FFF) + 1, (bits(21, 25) >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":  # after the frame tag and start code: 14 bits each, with two of scaling
        return bits(26, 28) & 0x3FFF, bits(28, 30) & 0x3FFF
    raise DecodeError("damaged", f"expected a VP8, VP8L or VP8X chunk, found {chunk!r}")


def _to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    image.load()
    if image.mode in _DEEP_MODES:
        # convert("RGB") would clip at 255; 65535 / 255 = 257.
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257
        return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        background = Image.new("RGBA", rgba.size, (*_BACKGROUND, 255))
        return np.array(Image.alpha_composite(background, rgba).convert("RGB"))
    return np.array(image.convert("RGB"))
