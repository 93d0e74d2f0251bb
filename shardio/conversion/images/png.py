"""Reads what a PNG says of itself before it is decoded: its first chunk, and chunks by name (PNG, third edition)."""

from __future__ import annotations

from dataclasses import dataclass

from shardio.errors import DecodeError

_MAGIC = b"\x89PNG\r\n\x1a\n"
_IHDR_NBYTES = 13

GREY, COLOUR, PALETTE = 0, 2, 3
"""Colour types whose transparency, if any, is told by a tRNS chunk; the others have an alpha channel."""


@dataclass(frozen=True)
class PngHeader:
    width: int
    height: int
    depth: int
    """Bits of a channel, or of a palette index."""
    colour_type: int


def is_png(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def read_header(data: bytes) -> PngHeader:
    """Raises DecodeError if the first chunk is no whole IHDR. Nothing is checked that a decoder will check."""
    if data[8:16] != _IHDR_NBYTES.to_bytes(4, "big") + b"IHDR" or len(data) < 16 + _IHDR_NBYTES:
        raise DecodeError("damaged", f"expected an IHDR chunk at the beginning of the PNG, found {data[8:16].hex(' ')}")
    return PngHeader(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"), data[24], data[25])


def find_chunk(data: bytes, name: bytes) -> bytes | None:
    """Returns the content of the first chunk of this name, as far as it is there; None if there is none."""
    position = len(_MAGIC)
    while position + 8 <= len(data):
        start = position + 8
        end = start + int.from_bytes(data[position : position + 4], "big")
        if data[position + 4 : start] == name:
            return data[start:end]
        position = end + 4  # behind the checksum
    return None
