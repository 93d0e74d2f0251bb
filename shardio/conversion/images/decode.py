"""Decodes images strictly to (height, width, 3) uint8: returns the picture that was stored, or raises DecodeError.

The content decides the format of a file, never the name. JPEG goes through strict simplejpeg and never falls back to
Pillow, which silently decodes most damaged JPEGs. All else goes through Pillow; a PNG's checksums are verified first.
The claims of a header are checked before memory is allocated for the picture.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageFile, PngImagePlugin

from shardio.conversion.images.headers import (
    COLOR,
    GRAY,
    MAX_SCANS,
    NOTHING,
    PALETTE,
    UPRIGHT,
    JpegHeader,
    check_pixels,
    describe_unsupported,
    find_chunk,
    format_of,
    read_jpeg_header,
    read_orientation,
    read_png_header,
    without_junk,
)
from shardio.conversion.images.others import DECODERS, Picture, check_palette
from shardio.errors import DecodeError, Reason

FACTS = {
    "turned": "turned upright, as their orientation says",
    "not turned": "with an orientation that was not applied: see --exif-rotate",
    "transparent": "with transparent pixels, which have the color of --background",
    "band": "with a fourth band that is not transparency, which was left out",
    "deep": "of 16 bits, stored with 8",
    "dark": "that use at most a quarter of their 16 bits, and look dark",
    "blurred": "whose progressive JPEGs lack scans, and which may look blurred",
}
"""What may be true of a picture: its name in `DecodedImage.facts`, and words to put after "3 pictures"."""
JUNK = "junk in the header left out"
"""The beginning of the warning about a JPEG that was decoded after its header was repaired."""

# Pixels of Pillow's pictures to convert at a time: a whole picture would be in memory in several forms at once.
_STRIP_PIXELS = 1 << 18
_DEEP_MODES = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})
# A quarter of the levels: scanners and cameras store 10, 12 or 14 bits in 16, which look black.
_MOST_DARK = 64
# Formats of damaged images that may be shown: browsers use their decoders every day.
_SHOWN_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

LeastSize = Callable[[int, int], tuple[int, int]]
"""Takes the (height, width) of an image, and returns the minimum (height, width) to decode the image at."""

# libjpeg reduces blocks of 8 x 8 coefficients, to 4 x 4, 2 x 2 or 1 x 1.
_REDUCTIONS = (8, 4, 2)
# Shortest side of a reduced picture. Shorter sides do not tell simplejpeg which reduction is meant, and save little.
_MIN_SIDE = 8

Pixel = TypeVar("Pixel", bound=np.generic)

Color = tuple[int, int, int]
"""Red, green, blue, each from 0 to 255."""


# Noise is often hidden under transparent pixels, and most viewers show white.
WHITE = (255, 255, 255)


def parse_color(text: str) -> Color:
    """Returns the color of a text: `R,G,B`, `#rrggbb` or a CSS name. Raises ValueError for any other text."""
    text = text.strip().lower()
    numbers = re.fullmatch(r"(\d{1,3}), *(\d{1,3}), *(\d{1,3})", text, re.ASCII)
    if numbers or re.fullmatch(r"#[0-9a-f]{6}", text) or text in ImageColor.colormap:
        red, green, blue = map(int, numbers.groups() if numbers else ImageColor.getrgb(text)[:3])
        if max(red, green, blue) <= 255:
            return red, green, blue
    raise ValueError(f"expected a color such as 255,255,255, #ffffff or white; found {text!r}")


@dataclass(frozen=True)
class DecodedImage:
    """A decoded image: `pixels` is (height, width, 3) uint8, RGB. `warning` says what was repaired or left out."""

    pixels: NDArray[np.uint8]
    warning: str = ""
    reduction: int = 1
    """How many rows and columns of the image a pixel stands for: 1, 2, 4 or 8; fewer at the right and bottom edges."""
    reduced_from: tuple[int, int] | None = None
    """The (height, width) of the image if `pixels` are a reduced picture of it; otherwise None."""
    orientation: int = UPRIGHT
    """The Exif orientation that was applied, 1 to 8. 1 (UPRIGHT) changes nothing."""
    stored_orientation: int = UPRIGHT
    """The Exif orientation in the file, applied or not."""
    facts: tuple[str, ...] = ()
    """The names in FACTS that are true of the picture, such as ("turned", "deep")."""

    @property
    def source_size(self) -> tuple[int, int]:
        """The (height, width) of the image before any reduction."""
        return self.reduced_from or (self.pixels.shape[0], self.pixels.shape[1])


def decode_image(
    image: object, *, exif_rotate: bool = False, background: Color = WHITE, least_size: LeastSize | None = None
) -> DecodedImage:
    """Returns the decoded pixels of an image: the bytes of a file, a PIL image, or an array, which is copied.

    Arrays with one channel are gray. A fourth channel is alpha: the image is blended onto the background color. PIL
    images are taken as Pillow shows them, without the checks and corrections of files. With `exif_rotate`, pictures are
    turned upright, except PIL images and arrays, because they do not say whether their Exif orientation was applied.

    With `least_size`, a JPEG may be decoded to a half, a quarter or an eighth of its size, but not below the size that
    `least_size` returns. This leaves out the finest frequencies, and takes a fraction of the time.

    Raises DecodeError if the image cannot be decoded, and TypeError for an object that `check_object` refuses.
    """
    image = check_object(image)
    try:
        if isinstance(image, bytes):
            return _decode_bytes(image, exif_rotate, background, least_size)
        if isinstance(image, np.ndarray):
            return _array_to_rgb(image, background)
        return _pil_to_rgb(image, background)
    except Exception as error:  # a PIL image may be a file that is decoded only now
        raise as_decode_error(error) from None


def as_decode_error(error: Exception) -> DecodeError:
    """Returns the error of a decoder as a DecodeError with a reason and a detail.

    Decoders raise a dozen types for damaged files: ValueError, OSError, SyntaxError, EOFError, struct.error...
    """
    if isinstance(error, DecodeError):
        return error
    if isinstance(error, MemoryError):
        return DecodeError("too large", f"no memory to decode the image: {error}")
    # Only the message, in the words of its version, tells that a PNG's metadata expand beyond Pillow's limits, or that
    # Pillow cannot read a TIFF's layout.
    reason: Reason = "unsupported" if "unknown raw mode" in str(error) else "damaged"
    reason = "too large" if re.search("too large|MAX_TEXT_", str(error), re.IGNORECASE) else reason
    return DecodeError(reason, f"{type(error).__name__}: {error}")


def check_object(image: object) -> bytes | Image.Image | NDArray[np.uint8]:
    """Returns the object if `decode_image` takes it, otherwise raises TypeError.

    It takes encoded bytes, PIL images, and uint8 arrays (height, width) or (height, width, 1 | 3 | 4).
    """
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


def decode_leniently(data: bytes, side: int) -> NDArray[np.uint8] | None:
    """Returns the part of a damaged image that Pillow can decode, uint8 (height, width, 3); None if it can decode none.

    The picture is reduced to at most `side` pixels per side. Not thread safe: Pillow's switch for truncated images
    applies to the whole process.
    """
    strict, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, True
    try:
        if format_of(data) == "JPEG" and read_jpeg_header(data).num_scans > MAX_SCANS:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=_SHOWN_FORMATS) as image:
                check_pixels(*image.size)
                image.draft("RGB", (side, side))
                shown = image.convert("RGBA") if image.has_transparency_data else image.convert("RGB")
                shown.thumbnail((side, side))
                white = Image.new("RGB", shown.size, WHITE)
                white.paste(shown, mask=shown if shown.mode == "RGBA" else None)
                return np.asarray(white)
    except Exception:  # see as_decode_error
        return None
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = strict


# --- formats ----------------------------------------------------------------------------------------------------------


def _decode_bytes(data: bytes, exif_rotate: bool, background: Color, least_size: LeastSize | None) -> DecodedImage:
    kind = format_of(data)
    if kind == "JPEG":
        header = read_jpeg_header(data)
        orientation = read_orientation(data, header)
        # The last pixels of a reduced picture may stand for fewer rows than others: a turn must not make them first.
        decoded = _decode_jpeg(data, header, None if exif_rotate and orientation != UPRIGHT else least_size)
    elif kind == "PNG":
        orientation, decoded = read_orientation(data), _decode_png(data, background)
    elif kind:
        picture = DECODERS[kind](data)
        orientation, decoded = picture.orientation, _to_rgb(picture, background, kind)
    else:
        raise DecodeError(*describe_unsupported(data))
    if orientation not in range(2, 9):
        return decoded
    decoded = replace(decoded, stored_orientation=orientation)
    if not exif_rotate and kind != "TIFF":
        return replace(decoded, facts=(*decoded.facts, "not turned"))
    pixels = decoded.pixels if kind == "TIFF" else turn(decoded.pixels, orientation)  # Pillow turns TIFFs
    return replace(decoded, pixels=pixels, orientation=orientation, facts=(*decoded.facts, "turned"))


def _decode_jpeg(data: bytes, header: JpegHeader, least_size: LeastSize | None) -> DecodedImage:
    if not header.is_supported:
        raise DecodeError(
            "unsupported",
            "expected a JPEG of 8 bits with a baseline, extended or progressive frame (ffc0, ffc1, ffc2, ffc9, ffca), "
            f"found {header.precision} bits and the frame ff{header.frame:02x}",
        )
    check_pixels(header.width, header.height)
    if header.num_scans > MAX_SCANS:
        raise DecodeError("too large", f"expected at most {MAX_SCANS} scans, found {header.num_scans} scans")
    if missing := sum(bits[0] == NOTHING[0] for bits in header.lacking):
        raise DecodeError("damaged", f"expected a scan of each component, found none of {missing}")
    size = (header.height, header.width)
    reduction = 1 if least_size is None else _choose_reduction(size, least_size(*size))
    warning = ""
    try:
        pixels = _strict_jpeg(data, size, reduction)
    except ValueError as error:
        if "subsampling" in str(error):  # sound, but laid out in a way that the TurboJPEG API has no name for
            raise DecodeError("unsupported", str(error)) from None
        # A sound picture behind a faulty header decodes once the header is cut down to what decoding needs; damage
        # in the picture itself fails again.
        try:
            pixels = _strict_jpeg(without_junk(data, header), size, reduction)
        except ValueError as again:
            raise DecodeError("damaged", str(again)) from None
        warning = f"{JUNK}: {error}"
    facts = ("blurred",) if any(map(any, header.lacking)) else ()
    return DecodedImage(pixels, warning, reduction, None if reduction == 1 else size, facts=facts)


def _choose_reduction(size: tuple[int, int], least: tuple[int, int]) -> int:
    """Returns the largest reduction (1, 2, 4 or 8) after which no side of a picture is shorter than in `least`. `size`,
    of the picture, and `least` are (height, width). A reduced picture has sides of at least 8 pixels."""
    sides = [(side, max(enough, _MIN_SIDE)) for side, enough in zip(size, least, strict=True)]
    fitting = (n for n in _REDUCTIONS if all(_reduced(side, n) >= enough for side, enough in sides))
    return next(fitting, 1)


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


def _decode_png(data: bytes, background: Color) -> DecodedImage:
    header = read_png_header(data)
    check_pixels(header.width, header.height)
    transparent = find_chunk(data, b"tRNS")
    if header.depth == 16 and header.color_type == COLOR and transparent:
        # Pillow keeps the upper 8 bits of each channel alone, and the color is to be compared with all 16.
        raise DecodeError("unsupported", "expected no transparent color (tRNS) in a PNG of 16-bit color, found one")
    with load_png(data) as image:
        if header.color_type == PALETTE:
            check_palette(image, len(find_chunk(data, b"PLTE") or b"") // 3)
        if header.color_type == GRAY and header.depth < 8 and transparent:
            # Pillow has scaled the pixels to 8 bits, and may compare them with the value as it is stored.
            most = (1 << header.depth) - 1
            image.info["transparency"] = (transparent[-1] & most) * 255 // most
        return _to_rgb(Picture(image, image.is_animated, is_deep=header.depth > 8), background, "PNG")


def load_png(data: bytes) -> PngImagePlugin.PngImageFile:
    """Returns a decoded PNG as a PIL image. Verifies the checksums of all chunks before decoding."""
    find_chunk(data, b"IEND")  # counts the chunks
    # The plugin's own class and not Image.open: that would warn of large images on stderr before we can refuse them.
    with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
        # Walks all chunks and their checksums; load() alone does not look at those of the pixels. It uses up the file.
        image.verify()
    image = PngImagePlugin.PngImageFile(io.BytesIO(data))
    image.load()
    return image


# --- to RGB, and the right way up -------------------------------------------------------------------------------------


def _pil_to_rgb(image: Image.Image, background: Color) -> DecodedImage:
    check_pixels(*image.size)
    if image.mode in ("F", "I"):
        numbers = np.asarray(image)
        # Mode I is what Pillow makes of 16 bits, but has room for more.
        if image.mode == "F" or (numbers.size and not 0 <= numbers.min() <= numbers.max() < 1 << 16):
            raise DecodeError(
                "unsupported",
                f"expected integers from 0 to 65535, found other numbers in a PIL image of mode {image.mode}",
            )
    return _to_rgb(Picture(image, is_deep=image.mode[0] == "I"), background)


def _array_to_rgb(array: NDArray[np.uint8], background: Color) -> DecodedImage:
    if not array.size:
        raise DecodeError("empty", f"expected at least one pixel, found an array of shape {array.shape}")
    check_pixels(array.shape[1], array.shape[0])
    if array.ndim == 3 and array.shape[2] == 4:
        return _to_rgb(Picture(Image.fromarray(np.ascontiguousarray(array))), background)
    # A copy in any case: the array is the dataset's, which may use its memory again for the next item.
    return DecodedImage(np.array(np.broadcast_to(array.reshape(*array.shape[:2], -1), (*array.shape[:2], 3))))


def _to_rgb(picture: Picture, background: Color, kind: str = "") -> DecodedImage:
    image, is_transparent = picture.image, False
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip, target = image.crop((0, top, image.width, min(top + rows, image.height))), pixels[top : top + rows]
        if strip.mode in _DEEP_MODES:
            # convert("RGB") would clip at 255; 65535 / 255 = 257.
            deep = np.asarray(strip).astype(np.uint32)
            target[:] = np.repeat(((deep + 128) // 257).astype(np.uint8)[:, :, None], 3, axis=2)
            hidden = deep == strip.info.get("transparency", -1)
            target[hidden] = background
            is_transparent = is_transparent or bool(hidden.any())
            continue
        if strip.has_transparency_data:
            strip = strip.convert("RGBA")
            if strip.getchannel("A").getextrema() != (255, 255):
                is_transparent = True
                strip = Image.alpha_composite(Image.new("RGBA", strip.size, (*background, 255)), strip)
        target[:] = np.asarray(strip.convert("RGB"))
    warning = f"{kind} of several pictures: the first one was taken" if picture.has_more else ""
    is_dark = picture.is_deep and pixels.max() <= _MOST_DARK
    facts = {"transparent": is_transparent, "band": picture.has_band, "deep": picture.is_deep, "dark": is_dark}
    return DecodedImage(pixels, warning, facts=tuple(filter(facts.get, facts)))


def turn(pixels: NDArray[Pixel], orientation: int) -> NDArray[Pixel]:
    """Returns pixels (height, width, ...) rotated and mirrored upright, as a contiguous array of the same dtype.

    `orientation` is the Exif orientation of the pixels, 1 to 8. Orientations 5 to 8 swap height and width.
    """
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
