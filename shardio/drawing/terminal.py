"""Pictures in a terminal: by the graphics of those that have them, or else by half blocks of colour."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from PIL import Image

Graphics = Literal["kitty", "iterm", "blocks"]

# Kitty takes so many characters in one sequence at most.
_CHUNK = 4096


def graphics_of(environ: Mapping[str, str]) -> Graphics:
    """Returns the graphics of the terminal that these variables tell; half blocks if they tell none."""
    program, term = environ.get("TERM_PROGRAM", ""), environ.get("TERM", "")
    if "TMUX" in environ or term.startswith("screen"):
        return "blocks"  # what does not pass through is lost
    if "KITTY_WINDOW_ID" in environ or term in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    return "iterm" if program in ("iTerm.app", "WezTerm", "vscode") else "blocks"


def in_terminal(image: Image.Image, graphics: Graphics, width: int) -> Iterator[str]:
    """Yields lines that show the image in a terminal of `width` columns."""
    if graphics == "blocks":
        yield from _blocks(image, width)
        return
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


def _blocks(image: Image.Image, width: int) -> Iterator[str]:
    """Yields lines of half blocks: two pixels in each, the upper in the colour of the text, the lower behind it."""
    scale = min(1.0, width / image.width)
    size = max(1, int(image.width * scale)), max(2, int(image.height * scale) // 2 * 2)
    pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{a};{b};{c}m\x1b[48;2;{d};{e};{f}m\u2580"
            for (a, b, c), (d, e, f) in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"
