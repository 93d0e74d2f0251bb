"""Draws pictures with captions in rows, as an image or in a terminal, and thumbnails for HTML pages."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any
from unicodedata import combining, east_asian_width

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, features

from shardio.errors import printable

THUMBNAIL_SIDE = 96
"""Maximum length of the longer side of a thumbnail, in pixels. Smaller pictures keep their size."""

# Between black and white, so that the sheet can be seen on light and dark pages.
_GROUND = (40, 44, 52)
_INK = (225, 228, 232)
_GAP = 6
_LINE = 14
# The longer side of a picture on the sheet, by default.
_MIN_SIDE, _MAX_SIDE = 96, 224
_MAX_LINES = 4


def sheet(
    pictures: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    *,
    columns: int | None = None,
    side: int | None = None,
) -> Image.Image:
    """Returns a contact sheet: the pictures in rows of `columns` (default: 8), with their captions.

    `pictures` are uint8 (height, width, channels), of any sizes. `captions` has a text for each picture,
    with lines separated by newlines; a line that is too long ends in "...". `side` is the longer side of each picture
    on the sheet, in pixels. By default, pictures of 96 to 224 pixels keep their size, larger pictures are reduced to
    224, and smaller pictures are enlarged by whole multiples, so single pixels stay visible.
    """
    if not len(pictures):
        raise ValueError("expected at least one picture, found none")
    texts = [caption.split("\n") for caption in captions]
    images = [_shown(picture, side) for picture in pictures]
    per_row = min(len(images), columns or 8)
    width = max(image.width for image in images)
    height = max(image.height for image in images)
    lines = max(map(len, texts))
    step = (width + _GAP, height + lines * _LINE + _GAP)
    rows = -(-len(images) // per_row)
    drawn = Image.new("RGB", (per_row * step[0] + _GAP, rows * step[1] + _GAP), _GROUND)
    draw = ImageDraw.Draw(drawn)
    font: Any = ImageFont.load_default(11)
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        left, top = _GAP + number % per_row * step[0], _GAP + number // per_row * step[1]
        drawn.paste(image, (left + (width - image.width) // 2, top + (height - image.height) // 2))
        for row, line in enumerate(text):
            draw.text((left, top + height + row * _LINE), _fitting(line, width, font), _INK, font)
    return drawn


def as_image(picture: NDArray[np.uint8]) -> Image.Image:
    """Returns a picture (height, width, channels) as a PIL image.

    A picture of 3 or 4 channels becomes RGB, from its first three channels. Other pictures become gray, from channel 0.
    """
    pixels = picture[:, :, :3] if picture.shape[2] in (3, 4) else picture[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(pixels))


def thumbnail(picture: NDArray[np.uint8]) -> str:
    """Returns a picture (height, width, channels) as a data URL, with sides of at most THUMBNAIL_SIDE pixels."""
    image = as_image(picture).convert("RGB")
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX)
    # WebP takes three quarters of the bytes of a JPEG, but not every build of Pillow has it.
    kind = "webp" if features.check("webp") else "jpeg"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=60)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _shown(picture: NDArray[np.uint8], side: int | None) -> Image.Image:
    image = as_image(picture).convert("RGB")
    longer = max(image.size)
    if side is None:
        side = longer * max(1, -(-_MIN_SIDE // longer)) if longer <= _MAX_SIDE else _MAX_SIDE
    size = tuple(max(1, round(length * side / longer)) for length in image.size)
    # Enlarged pixels stay squares.
    return image.resize((size[0], size[1]), Image.Resampling.NEAREST if side > longer else Image.Resampling.LANCZOS)


def _fitting(line: str, width: int, font: Any) -> str:
    """Returns a line of text in ASCII. Truncates a line wider than `width` pixels, and ends it in "..."."""
    # The font has only these characters, and draws a box for any other.
    line = line.encode("ascii", "replace").decode()
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "...") > width:
        line = line[:-1]
    return line + "..."


# --- in a terminal, as half blocks of color ---------------------------------------------------------------------------


def in_blocks(
    pictures: Sequence[NDArray[np.uint8]], captions: Sequence[str], width: int, *, group: int
) -> Iterator[str]:
    """Yields lines of text that show pictures in rows, with their captions below.

    `width` is the width of the terminal, in cells. Each picture is at least 20 cells wide, if the terminal is: narrower
    pictures would only be spots of color. A row has whole groups of `group` pictures; a group that is longer than a row
    is divided into rows of equal length.
    """
    most = max(1, min((width + 1) // (20 + 1), -(-len(pictures) // group) * group))
    per_row = max(count for count in range(1, most + 1) if count % group == 0 or group % count == 0)
    cells = max(1, (width + 1) // per_row - 1)
    for begin in range(0, len(pictures), per_row):
        row = slice(begin, begin + per_row)
        texts = [
            [part for line in caption.split("\n") for part in _folded(printable(line), cells)]
            for caption in captions[row]
        ]
        yield from _beside([list(_blocks(as_image(picture), cells)) for picture in pictures[row]], " " * cells)
        yield from _beside([[line + " " * (cells - _cells(line)) for line in text] for text in texts], " " * cells)
        yield ""


def _beside(parts: Sequence[Sequence[str]], empty: str) -> Iterator[str]:
    for lines in zip_longest(*parts, fillvalue=empty):
        yield " ".join(lines).rstrip()


def _cells(text: str) -> int:
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _folded(text: str, cells: int) -> Iterator[str]:
    """Yields the lines of a text wrapped to a width of `cells` cells, at most four lines."""
    for number in range(_MAX_LINES):
        end = len(text)
        while end > 1 and _cells(text[:end]) > cells:
            end -= 1
        if number == _MAX_LINES - 1 and end < len(text):
            text, end = text[: max(0, end - 3)] + "...", end
        yield text[:end]
        text = text[end:]
        if not text:
            return


def _blocks(image: Image.Image, width: int) -> Iterator[str]:
    """Yields lines of half blocks `width` cells wide: the upper pixel is the text color, the lower the background."""
    size = width, max(2, round(image.height * width / image.width) // 2 * 2)
    enlarged = Image.Resampling.NEAREST if width > image.width else Image.Resampling.LANCZOS
    pixels = np.asarray(image.convert("RGB").resize(size, enlarged))
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{a};{b};{c}m\x1b[48;2;{d};{e};{f}m\u2580"
            for (a, b, c), (d, e, f) in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"
