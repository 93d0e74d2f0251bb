"""Encoded bytes -> (height, width, 3) uint8, strictly: either the picture that was stored or a DecodeError.

Content decides what a file is, never its name. JPEG goes through strict simplejpeg and never falls back to Pillow,
which decodes most damaged JPEGs without a word. PNG and WebP go through Pillow; a PNG's checksums are verified first.
The claims of a header are checked before anything is allocated for them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageColor, PngImagePlugin, WebPImagePlugin

from shardio.conversion.images import jpeg, png, webp
from shardio.conversion.images.exif import UPRIGHT, read_orientation
from shardio.errors import DecodeError, Reason

# 256 MiB of RGB. It is also where Pillow begins to warn of decompression bombs. Decoding and resizing take up to 16
# bytes a pixel (an animation decoder's two canvases of RGBA, a frame and Pillow's copy of it), so 1.4 GB.
MAX_PIXELS = (256 << 20) // 3
# The weights of a resampling filter take up to 48 bytes for each pixel of a side.
MAX_SIDE_PIXELS = 1 << 20
# Encoders write about ten scans and optimisers a few dozen; thousands are a bomb that costs hours.
MAX_SCANS = 100
# A picture of MAX_PIXELS stored as RGB without any compression fits, with room for metadata.
MAX_SOURCE_NBYTES = 288 << 20

JUNK = "junk in the header left out"
"""How the warning of a JPEG begins that had to be mended."""

# Pillow's pictures are converted so many pixels at a time: a whole one would be there in several forms at once.
_STRIP_PIXELS = 1 << 18
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
# The least side of a reduced picture. Below it, sizes do not tell simplejpeg which reduction is meant, and little time
# is saved.
_LEAST_SIDE = 8

Pixel = TypeVar("Pixel", bound=np.generic)

Colour = tuple[int, int, int]
"""Red, green, blue, each from 0 to 255."""


@dataclass(frozen=True)
class DecodeOptions:
    """`exif_rotate` turns pictures as their Exif orientation says. `background` is what transparent pixels show.

    The default is white: noise is often hidden under transparent pixels, and most viewers show white.
    """

    exif_rotate: bool = False
    background: Colour = (255, 255, 255)

    def __post_init__(self) -> None:
        if type(self.exif_rotate) is not bool:
            raise ValueError(f"exif_rotate must be True or False; found {self.exif_rotate!r}")
        if len(self.background) != 3 or not all(type(n) is int and 0 <= n <= 255 for n in self.background):
            raise ValueError(f"background must be (red, green, blue), each from 0 to 255; found {self.background!r}")


def parse_colour(text: str) -> Colour:
    """Returns the colour that `R,G,B`, `#rrggbb` or one of CSS's names stands for. Raises ValueError otherwise."""
    text = text.strip().lower()
    if match := re.fullmatch(r"(\d{1,3}), *(\d{1,3}), *(\d{1,3})", text, re.ASCII):
        red, green, blue = map(int, match.groups())
        if max(red, green, blue) <= 255:
            return red, green, blue
    elif re.fullmatch(r"#[0-9a-f]{6}", text) or text in ImageColor.colormap:
        red, green, blue = ImageColor.getrgb(text)[:3]
        return red, green, blue
    raise ValueError(f"expected a colour such as 255,255,255, #ffffff or white; found {text!r}")


@dataclass(frozen=True)
class Decoded:
    """`pixels` is (height, width, 3) uint8, RGB. `warning` tells what had to be mended, or is empty."""

    pixels: NDArray[np.uint8]
    warning: str = ""
    reduction: int = 1
    """1, 2, 4 or 8: each pixel stands for so many rows and columns of the image. The last ones may stand for fewer."""
    reduced_from: tuple[int, int] | None = None
    orientation: int = UPRIGHT
    """By which of Exif's orientations the picture was turned after it was decoded."""

    @property
    def source_size(self) -> tuple[int, int]:
        """Returns (height, width) of the image as it was before it was reduced, if it was."""
        return self.reduced_from or (self.pixels.shape[0], self.pixels.shape[1])


_DEFAULTS = DecodeOptions()


def decode_image(image: object, options: DecodeOptions = _DEFAULTS, *, least_size: LeastSize | None = None) -> Decoded:
    """Decodes one image: the bytes of a JPEG, PNG or WebP, or what `check_object` takes.

    Pixels are a copy. Arrays of one channel are grey, and the last of four is alpha, laid over the background. PIL
    images are converted as those that Pillow decodes here. Neither is turned: a decoded picture does not tell whether
    that was done already.

    With `least_size` a JPEG may be decoded to a half, a quarter or an eighth of its size, by leaving out the finest of
    its frequencies, which takes a fraction of the time.

    Raises DecodeError with a reason class if the image cannot be decoded, TypeError as `check_object`, and nothing
    else.
    """
    image = check_object(image)
    try:
        if isinstance(image, bytes):
            return _decode_bytes(image, options, least_size)
        if isinstance(image, np.ndarray):
            return Decoded(_array_to_rgb(image, options.background))
        return Decoded(_pil_to_rgb(image, options.background))
    except DecodeError:
        raise
    except MemoryError as error:
        raise DecodeError("too large", f"no memory to decode it: {error}") from None
    except Exception as error:
        # Decoders raise a dozen types on damaged files: ValueError, OSError, SyntaxError, EOFError, struct.error...
        # A PIL image may be a file that is decoded only now.
        # Only the message, in the words of its version, tells that a PNG's metadata expand beyond Pillow's limits.
        reason: Reason = "too large" if re.search("too large|MAX_TEXT_", str(error), re.IGNORECASE) else "damaged"
        raise DecodeError(reason, f"{type(error).__name__}: {error}") from None


def _decode_bytes(data: bytes, options: DecodeOptions, least_size: LeastSize | None) -> Decoded:
    orientation = read_turn(data, options)
    if jpeg.is_jpeg(data):
        # The last pixels of a reduced picture may stand for fewer rows than others: a turn must not make them first.
        decoded = _decode_jpeg(data, least_size if orientation == UPRIGHT else None)
    elif png.is_png(data):
        decoded = Decoded(_decode_png(data, options.background))
    elif webp.is_webp(data):
        decoded = Decoded(_decode_webp(data, options.background))
    else:
        raise DecodeError(*_describe_unsupported(data))
    return replace(decoded, pixels=turn(decoded.pixels, orientation), orientation=orientation)


def read_size(data: bytes, options: DecodeOptions = _DEFAULTS) -> tuple[int, int]:
    """Returns (height, width) of what `decode_image` makes of an image that it takes, from the header alone."""
    if jpeg.is_jpeg(data):
        frame = jpeg.read_header(data)
        width, height = frame.width, frame.height
    elif png.is_png(data):
        head = png.read_header(data)
        width, height = head.width, head.height
    else:
        width, height = webp.read_size(data)
    turned = options.exif_rotate and _orientation(data) in _SIDES_SWAPPED
    return (width, height) if turned else (height, width)


def check_object(image: object) -> bytes | Image.Image | NDArray[np.uint8]:
    """Returns the image. Raises TypeError unless `decode_image` takes it: bytes, PIL, uint8 (height, width[, C])."""
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


def _pil_to_rgb(image: Image.Image, background: Colour) -> NDArray[np.uint8]:
    check_pixels(*image.size)
    if image.mode in ("F", "I"):
        numbers = np.asarray(image)
        # Mode I is what Pillow makes of 16 bits, but has room for more.
        if image.mode == "F" or (numbers.size and not 0 <= numbers.min() <= numbers.max() < 1 << 16):
            raise DecodeError("unsupported", f"expected 8 or 16 bits, found more in a PIL image of mode {image.mode}")
    return _to_rgb(image, background)


def _array_to_rgb(array: NDArray[np.uint8], background: Colour) -> NDArray[np.uint8]:
    if not array.size:
        raise DecodeError("empty", f"found an array of shape {array.shape}")
    check_pixels(array.shape[1], array.shape[0])
    if array.ndim == 3 and array.shape[2] == 4:
        return _to_rgb(Image.fromarray(np.ascontiguousarray(array)), background)
    # A copy in any case: the array is the dataset's, which may use its memory again for the next item.
    return np.array(np.broadcast_to(array.reshape(*array.shape[:2], -1), (*array.shape[:2], 3)))


def _describe_unsupported(data: bytes) -> tuple[Reason, str]:
    if not data:
        return "empty", "the file has no bytes"
    for magic, kind in _OTHER_KINDS.items():
        if data.startswith(magic):
            return "unsupported", f"expected a JPEG, PNG or WebP, found {kind}"
    if data[:64].lstrip().startswith((b"<", b"{")):
        return "unsupported", "expected a JPEG, PNG or WebP, found text (an error page saved as an image?)"
    return "unsupported", f"expected a JPEG, PNG or WebP, found bytes that begin {data[:8].hex(' ')}"


def check_pixels(width: int, height: int) -> None:
    """Raises DecodeError unless a picture may be so large."""
    if width <= 0 or height <= 0:
        raise DecodeError("damaged", f"the header claims {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise DecodeError("too large", f"expected at most {MAX_PIXELS} pixels, found {width} x {height}")
    if max(width, height) > MAX_SIDE_PIXELS:
        raise DecodeError("too large", f"expected sides of at most {MAX_SIDE_PIXELS} pixels, found {width} x {height}")


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
    warning = ""
    try:
        pixels = _strict_jpeg(data, size, reduction)
    except ValueError as error:
        if "subsampling" in str(error):  # sound, but laid out in a way that the TurboJPEG API has no name for
            raise DecodeError("unsupported", str(error)) from None
        # A sound picture behind a faulty header decodes once the header is cut down to what decoding needs; damage
        # in the picture itself fails again.
        try:
            pixels = _strict_jpeg(jpeg.without_junk(data, header), size, reduction)
        except ValueError as again:
            raise DecodeError("damaged", str(again)) from None
        warning = f"{JUNK}: {error}"
    return Decoded(pixels, warning, reduction, None if reduction == 1 else size)


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


def _decode_png(data: bytes, background: Colour) -> NDArray[np.uint8]:
    header = png.read_header(data)
    check_pixels(header.width, header.height)
    transparent = png.find_chunk(data, b"tRNS")
    if header.depth == 16 and header.colour_type == png.COLOUR and transparent:
        # Pillow keeps the upper 8 bits of each channel alone, and the colour is to be compared with all 16.
        raise DecodeError("unsupported", "a PNG of 16-bit colour with one transparent colour (tRNS)")
    # The plugin's own class and not Image.open: that would warn of large images on stderr before we can refuse them.
    with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
        # Walks all chunks and their checksums; load() alone does not look at those of the pixels. It uses up the file.
        image.verify()
    with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
        image.load()
        if header.colour_type == png.PALETTE:
            _check_palette(image, png.find_chunk(data, b"PLTE") or b"")
        if header.colour_type == png.GREY and header.depth < 8 and transparent:
            # Pillow has scaled the pixels to 8 bits, and may compare them with the value as it is stored.
            most = (1 << header.depth) - 1
            image.info["transparency"] = (transparent[-1] & most) * 255 // most
        return _to_rgb(image, background)


def _check_palette(image: Image.Image, colours: bytes) -> None:
    """Raises DecodeError if there are pixels without a colour, which Pillow shows as black."""
    largest = int(np.asarray(image.getextrema()).max())
    if largest >= len(colours) // 3:
        raise DecodeError("damaged", f"expected palette indices below {len(colours) // 3}, found {largest}")


def _decode_webp(data: bytes, background: Colour) -> NDArray[np.uint8]:
    check_pixels(*webp.read_size(data))  # before Pillow opens it, which allocates two whole pictures
    with WebPImagePlugin.WebPImageFile(io.BytesIO(data)) as image:
        image.load()
        return _to_rgb(image, background)


def _to_rgb(image: Image.Image, background: Colour) -> NDArray[np.uint8]:
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        pixels[top : top + rows] = _strip_to_rgb(strip, background)
    return pixels


def _strip_to_rgb(strip: Image.Image, background: Colour) -> NDArray[np.uint8]:
    if strip.mode in _DEEP_MODES:
        # convert("RGB") would clip at 255; 65535 / 255 = 257.
        deep = np.asarray(strip).astype(np.uint32)
        rgb = np.repeat(((deep + 128) // 257).astype(np.uint8)[:, :, None], 3, axis=2)
        rgb[deep == strip.info.get("transparency", -1)] = background
        return rgb
    if strip.has_transparency_data:
        below = Image.new("RGBA", strip.size, (*background, 255))
        strip = Image.alpha_composite(below, strip.convert("RGBA"))
    return np.asarray(strip.convert("RGB"))


# --- the right way up -------------------------------------------------------------------------------------------------

# Orientations that show the stored rows as columns; rows in reverse order; columns in reverse order.
_SIDES_SWAPPED = frozenset({5, 6, 7, 8})
_ROWS_REVERSED = frozenset({3, 4, 7, 8})
_COLUMNS_REVERSED = frozenset({2, 3, 6, 7})


def read_turn(image: object, options: DecodeOptions) -> int:
    """Returns by which of Exif's orientations `decode_image` turns such an image, which it takes."""
    return _orientation(image) if options.exif_rotate and isinstance(image, bytes) else UPRIGHT


def _orientation(data: bytes) -> int:
    if jpeg.is_jpeg(data):
        block = jpeg.exif_block(data, jpeg.read_header(data))
    elif png.is_png(data):
        block = png.find_chunk(data, b"eXIf") or b""
    else:
        block = webp.exif_block(data)
    return read_orientation(block)


def turn(pixels: NDArray[Pixel], orientation: int) -> NDArray[Pixel]:
    """Returns (height, width, ...) pixels that are stored in this orientation the right way up, contiguous."""
    if orientation in _SIDES_SWAPPED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in _ROWS_REVERSED:
        pixels = pixels[::-1]
    if orientation in _COLUMNS_REVERSED:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
