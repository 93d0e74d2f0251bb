"""A contact sheet: pictures in rows and columns, each with a caption below it, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

# Between black and white, so that what lies on it is seen on light and dark pages.
_GROUND = (40, 44, 52)
_INK = (225, 228, 232)
_GAP = 6
_LINE = 14
_FONT_SIZE = 11
_MOST_COLUMNS = 8
# The longer side of a picture on the sheet, unless it is asked for.
_LEAST_SIDE, _MOST_SIDE = 96, 224


def sheet(
    pictures: Sequence[NDArray[np.uint8]],
    captions: Sequence[str] = (),
    *,
    columns: int | None = None,
    side: int | None = None,
) -> Image.Image:
    """Returns the pictures, uint8 (height, width, channels) of any sizes, side by side in rows of `columns`.

    `captions` has lines of text for each, separated by newlines; lines that are too long end in "...". `side` is the
    longer side of each picture on the sheet, in pixels; by default pictures of 96 to 224 pixels are shown as they are,
    smaller ones in whole multiples, so that their pixels can be seen. Raises ValueError if there is no picture, or one
    has no pixel.
    """
    if not len(pictures):
        raise ValueError("expected at least one picture, found none")
    texts = [caption.split("\n") for caption in captions] or [[] for _ in pictures]
    if len(texts) != len(pictures):
        raise ValueError(f"expected a caption for each of the {len(pictures)} pictures, found {len(texts)}")
    images = [_shown(picture, side) for picture in pictures]
    per_row = min(len(images), columns or _MOST_COLUMNS)
    width = max(image.width for image in images)
    height = max(image.height for image in images)
    lines = max(map(len, texts), default=0)
    step = (width + _GAP, height + lines * _LINE + _GAP)
    rows = -(-len(images) // per_row)
    drawn = Image.new("RGB", (per_row * step[0] + _GAP, rows * step[1] + _GAP), _GROUND)
    draw = ImageDraw.Draw(drawn)
    font: Any = ImageFont.load_default(_FONT_SIZE)
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        left, top = _GAP + number % per_row * step[0], _GAP + number // per_row * step[1]
        drawn.paste(image, (left + (width - image.width) // 2, top + (height - image.height) // 2))
        for row, line in enumerate(text):
            draw.text((left, top + height + row * _LINE), _fitting(line, width, font), _INK, font)
    return drawn


def as_image(picture: NDArray[np.uint8]) -> Image.Image:
    """Returns a picture (height, width, channels) in colours if it has three or four channels; else the first, grey."""
    seen = picture[:, :, :3] if picture.shape[2] in (3, 4) else picture[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(seen))


def _shown(picture: NDArray[np.uint8], side: int | None) -> Image.Image:
    """Returns a picture as it stands on the sheet: in colours if it has them, or else in grey."""
    if picture.ndim != 3 or picture.dtype != np.uint8 or not picture.size:
        raise ValueError(f"expected uint8 pictures (height, width, channels), found {picture.dtype} {picture.shape}")
    image = as_image(picture).convert("RGB")
    longer = max(image.size)
    if side is None:
        side = longer * max(1, -(-_LEAST_SIDE // longer)) if longer <= _MOST_SIDE else _MOST_SIDE
    size = tuple(max(1, round(length * side / longer)) for length in image.size)
    # Enlarged pixels stay squares.
    return image.resize((size[0], size[1]), Image.Resampling.NEAREST if side > longer else Image.Resampling.LANCZOS)


def _fitting(line: str, width: int, font: Any) -> str:
    """Returns a line of text, or as much of it as fits with dots behind it."""
    # The font has no other characters; a box would stand for each.
    line = line.encode("ascii", "replace").decode()
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "...") > width:
        line = line[:-1]
    return line + "..."
