"""Pictures in a terminal: by the graphics of those that have them, or else by half blocks of colour."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal
from unicodedata import combining, east_asian_width

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.drawing.sheet import as_image
from shardio.errors import printable

Graphics = Literal["kitty", "iterm", "blocks"]

# Kitty takes so many characters in one sequence at most.
_CHUNK = 4096
# Of a picture that is to be more than spots of colour.
_LEAST_CELLS = 20
_MOST_LINES = 4


def graphics_of(environ: Mapping[str, str]) -> Graphics:
    """Returns the graphics of the terminal that these variables tell; half blocks if they tell none."""
    program, term = environ.get("TERM_PROGRAM", ""), environ.get("TERM", "")
    if "TMUX" in environ or term.startswith("screen"):
        return "blocks"  # what does not pass through is lost
    if "KITTY_WINDOW_ID" in environ or term in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    return "iterm" if program in ("iTerm.app", "WezTerm", "vscode") else "blocks"


def in_terminal(image: Image.Image, graphics: Literal["kitty", "iterm"]) -> Iterator[str]:
    """Yields lines that show the image in a terminal with graphics."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    if graphics == "iterm":
        yield f"\x1b]1337;File=inline=1;size={len(buffer.getvalue())}:{data}\x07"
        return
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
    parts = []
    for number, chunk in enumerate(chunks):
        keys = ("a=T,f=100," if number == 0 else "") + f"m={int(number < len(chunks) - 1)}"
        parts.append(f"\x1b_G{keys};{chunk}\x1b\\")
    yield "".join(parts)


def in_blocks(
    pictures: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    width: int,
    *,
    columns: int | None = None,
    group: int = 1,
) -> Iterator[str]:
    """Yields lines that show pictures in rows of `columns`, made of half blocks, with their captions as text.

    By default as many are in a row as leave each 20 cells of the `width` of the terminal. Rows do not cut groups of
    `group` pictures, unless a group is longer than a row.
    """
    most = max(1, min((width + 1) // (_LEAST_CELLS + 1), -(-len(pictures) // group) * group))
    per_row = columns or max(count for count in range(1, most + 1) if count % group == 0 or group % count == 0)
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
    """Returns how many cells of a terminal a text takes."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _folded(text: str, cells: int) -> Iterator[str]:
    """Yields a text in lines of so many cells, four at most."""
    for number in range(_MOST_LINES):
        end = len(text)
        while end > 1 and _cells(text[:end]) > cells:
            end -= 1
        if number == _MOST_LINES - 1 and end < len(text):
            text, end = text[: max(0, end - 3)] + "...", end
        yield text[:end]
        text = text[end:]
        if not text:
            return


def _blocks(image: Image.Image, width: int) -> Iterator[str]:
    """Yields lines of half blocks: two pixels in each, the upper in the colour of the text, the lower behind it."""
    size = width, max(2, round(image.height * width / image.width) // 2 * 2)
    enlarged = Image.Resampling.NEAREST if width > image.width else Image.Resampling.LANCZOS
    pixels = np.asarray(image.convert("RGB").resize(size, enlarged))
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{a};{b};{c}m\x1b[48;2;{d};{e};{f}m\u2580"
            for (a, b, c), (d, e, f) in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"
