"""Pictures in a terminal, as half blocks of color."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from unicodedata import combining, east_asian_width

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.drawing.sheet import as_image
from shardio.errors import printable

# A picture of fewer cells would only be spots of color.
_MIN_CELLS = 20
_MAX_LINES = 4


def in_blocks(
    pictures: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    width: int,
    *,
    group: int = 1,
) -> Iterator[str]:
    """Yields lines of text that show pictures in rows, with their captions below.

    The terminal has `width` cells. Each picture is at least 20 cells wide, or as wide as the terminal. A row has whole
    groups of `group` pictures; a group that is longer than a row is divided into rows of equal length.
    """
    most = max(1, min((width + 1) // (_MIN_CELLS + 1), -(-len(pictures) // group) * group))
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
    """Yields the lines of several parts side by side."""
    for lines in zip_longest(*parts, fillvalue=empty):
        yield " ".join(lines).rstrip()


def _cells(text: str) -> int:
    """Returns the width of a text in terminal cells."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _folded(text: str, cells: int) -> Iterator[str]:
    """Yields the lines of a text wrapped to `cells` cells, at most four."""
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
    """Yields lines of half blocks: the upper pixel is the text color, the lower one the background."""
    size = width, max(2, round(image.height * width / image.width) // 2 * 2)
    enlarged = Image.Resampling.NEAREST if width > image.width else Image.Resampling.LANCZOS
    pixels = np.asarray(image.convert("RGB").resize(size, enlarged))
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{a};{b};{c}m\x1b[48;2;{d};{e};{f}m\u2580"
            for (a, b, c), (d, e, f) in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"
