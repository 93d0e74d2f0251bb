"""Encoded bytes -> (height, width, 3) uint8, strictly: either the picture that was stored or a DecodeError.

Content decides what a file is, never its name. JPEG goes through strict simplejpeg and never falls back to Pillow,
which decodes most damaged JPEGs without a word. PNG and WebP go through Pillow; a PNG's checksums are verified first.
What a header claims is checked before anything is allocated for it.
"""

from __future__ import annotations

import io
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


@dataclass(frozen=True)
class Decoded:
    """`pixels` is (height, width, 3) uint8, RGB. `warning` tells what had to be mended, or is empty."""

    pixels: NDArray[np.uint8]
    warning: str = ""


def decode_image(data: bytes) -> Decoded:
    """Decode one image of any supported kind. DecodeError with a reason class otherwise; no other exception."""
    try:
        if jpeg.is_jpeg(data):
            return _decode_jpeg(data)
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


def decode_object(image: object) -> Decoded:
    """An image as Python code gives it, copied. DecodeError as decode_image; TypeError as check_object.

    Encoded bytes are judged as a file's are, and PIL images converted as those that Pillow decodes here. Arrays of one
    channel are grey, and the last of four is alpha, laid over white.
    """
    image = check_object(image)
    if isinstance(image, bytes):
        return decode_image(image)
    try:
        return Decoded(_array_to_rgb(image) if isinstance(image, np.ndarray) else _pil_to_rgb(image))
    except DecodeError:
        raise
    except MemoryError as error:
        raise DecodeError("too large", f"no memory for it: {error}") from None
    except Exception as error:  # a PIL image may be a file that is decoded only now
        raise DecodeError("damaged", f"{type(error).__name__}: {error}") from None


def check_object(image: object) -> bytes | Image.Image | NDArray[np.uint8]:
    """The same image. TypeError unless `decode_object` takes it: bytes, PIL, uint8 (height, width[, 1 | 3 | 4])."""
    if isinstance(image, (bytes, Image.Image)):
        return image
    found = type(image).__name__
    if isinstance(image, np.ndarray):
        if image.dtype == np.uint8 and (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3, 4))):
            return image
        found = f"an array of {image.dtype}, shape {image.shape}"
    raise TypeError(
        "expected a PIL image, encoded bytes or a uint8 array (height, width) or (height, width, 1 | 3 | 4), found "
        f"{found}"
    )


def _pil_to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    check_pixels(*image.size)
    if image.mode in ("F", "I"):
        numbers = np.asarray(image)
        # Mode I is what Pillow makes of 16 bits, but has room for more.
        if image.mode == "F" or (numbers.size and not 0 <= numbers.min() <= numbers.max() < 1 << 16):
            raise DecodeError("unsupported", f"expected 8 or 16 bits, found more in a PIL image of mode {image.mode}")
    return _to_rgb(image)


def _array_to_rgb(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if not array.size:
        raise DecodeError("empty", f"found an array of shape {array.shape}")
    check_pixels(array.shape[1], array.shape[0])
    if array.ndim == 3 and array.shape[2] == 4:
        return _to_rgb(Image.fromarray(np.ascontiguousarray(array)))
    # A copy in any case: the array is the dataset's, which may use its memory again for the next item.
    return np.array(np.broadcast_to(array.reshape(*array.shape[:2], -1), (*array.shape[:2], 3)))


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


def _decode_jpeg(data: bytes) -> Decoded:
    header = jpeg.read_header(data)
    if not jpeg.is_supported(header):
        raise DecodeError(
            "unsupported",
            f"expected an 8-bit JPEG, found {header.precision} bits, frame ff{header.frame:02x}",
        )
    check_pixels(header.width, header.height)
    if header.num_scans > MAX_SCANS:
        raise DecodeError("too large", f"expected at most {MAX_SCANS} scans, found {header.num_scans}")
    try:
        return Decoded(_strict_jpeg(data))
    except ValueError as error:
        if "subsampling" in str(error):  # sound, but laid out in a way that the TurboJPEG API has no name for
            raise DecodeError("unsupported", str(error)) from None
        # A sound picture behind a faulty header decodes once the header is cut down to what decoding needs; damage
        # in the picture itself fails again.
        try:
            return Decoded(_strict_jpeg(jpeg.without_junk(data, header)), f"junk in the header left out: {error}")
        except ValueError as again:
            raise DecodeError("damaged", str(again)) from None


def _strict_jpeg(data: bytes) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=True)
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
