"""Reads what a WebP says of itself before it is decoded: the size of its canvas, and its Exif block (RFC 9649)."""

from __future__ import annotations

from shardio.errors import DecodeError

_HAS_EXIF = 0x08


def is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def _bits(data: bytes, start: int, stop: int) -> int:
    return int.from_bytes(data[start:stop], "little")


def read_size(data: bytes) -> tuple[int, int]:
    """Returns (width, height) as the first chunk claims.

    Raises DecodeError if that is of no kind that has a size, or the file is shorter than its header claims.
    """
    claimed = _bits(data, 4, 8) + 8
    if claimed > len(data):
        raise DecodeError("damaged", f"expected {claimed} bytes, found {len(data)}")
    chunk = data[12:16]
    if chunk == b"VP8X":  # canvas size minus one, 24 bits each
        return _bits(data, 24, 27) + 1, _bits(data, 27, 30) + 1
    if chunk == b"VP8L":  # after a signature byte: size minus one, 14 bits each
        return (_bits(data, 21, 25) & 0x3FFF) + 1, (_bits(data, 21, 25) >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":  # after the frame tag and start code: 14 bits each, with two of scaling
        return _bits(data, 26, 28) & 0x3FFF, _bits(data, 28, 30) & 0x3FFF
    raise DecodeError("damaged", f"expected a VP8, VP8L or VP8X chunk, found {chunk!r}")


def is_lossless(data: bytes) -> bool:
    """Whether the file holds one picture, and that exactly as it was."""
    return data[12:16] == b"VP8L" or (data[12:16] == b"VP8X" and _find_chunk(data, b"VP8L") is not None)


def exif_block(data: bytes) -> bytes:
    """Returns the content of the EXIF chunk, if the flags announce one, or b""."""
    if data[12:16] != b"VP8X" or not _bits(data, 20, 21) & _HAS_EXIF:
        return b""
    return _find_chunk(data, b"EXIF") or b""


def _find_chunk(data: bytes, name: bytes) -> bytes | None:
    position = 12
    while position + 8 <= len(data):
        start = position + 8
        nbytes = _bits(data, position + 4, start)
        if data[position : position + 4] == name:
            return data[start : start + nbytes]
        position = start + nbytes + nbytes % 2  # chunks begin at even offsets
    return None
