"""Reads what a JPEG says of itself before it is decoded, by a walk over its marker segments (ITU-T T.81, annex B).

A decoder allocates and works by what the header claims, so the claims are read first: the size in pixels, the sample
precision, and the number of scans (a progressive file costs scans x pixels, however few bytes it has).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

from shardio.errors import DecodeError

_SOI = b"\xff\xd8"
_EOI = b"\xff\xd9"
_SOS = 0xDA
# Start of frame: C0-CF but for DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = frozenset({0xC0, 0xC1, 0xC9})
_LOSSLESS_OR_HIERARCHICAL = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF})
# Inside a scan ff is followed by 00 or a restart number, or by another ff, and anything else is a marker.
_IN_SCAN_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
# ff, the marker, and the length of the segment without these two bytes.
_MARKER = struct.Struct(">BBH")
# Markers that stand alone, without a length: TEM and the restarts.
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
# Decoding needs: frames, DHT, DAC, DQT, DNL, DRI, SOS, and the two segments that tell the colour space.
_NEEDED = _FRAMES | {0xC4, 0xCC, 0xDB, 0xDC, 0xDD, _SOS}
_APP0, _APP1, _APP14 = 0xE0, 0xE1, 0xEE
# The Adobe segment is 12 bytes: name, version, two flags, colour transform. A shorter one tells nothing.
_ADOBE_NBYTES = 12


class Segment(NamedTuple):
    """A marker segment at data[start:end], its two marker bytes included."""

    marker: int
    start: int
    end: int


@dataclass(frozen=True)
class JpegHeader:
    width: int
    height: int
    precision: int
    frame: int
    num_scans: int
    segments: tuple[Segment, ...]


def is_jpeg(data: bytes) -> bool:
    return data[:3] == b"\xff\xd8\xff"


def _next_marker(data: bytes, start: int) -> int:
    """Returns where the next marker begins at or after `start`. Junk before it is skipped, as decoders do."""
    position = data.find(b"\xff", start)
    while 0 <= position < len(data) - 1:
        if data[position + 1] not in (0x00, 0xFF):
            return position
        position = data.find(b"\xff", position + 1)
    raise DecodeError("damaged", "the JPEG ends before its first scan")


def read_header(data: bytes) -> JpegHeader:
    """Walks `data` up to its first scan. Raises DecodeError if there is no complete header."""
    segments: list[Segment] = []
    frame: Segment | None = None
    position = len(_SOI)
    while True:
        start = position
        lead, marker, nbytes = _MARKER.unpack_from(data, start) if start + 4 <= len(data) else (0, 0, 0)
        if lead != 0xFF or marker in (0x00, 0xFF):  # junk, or the end: nearly always one segment follows another
            start = _next_marker(data, position)
            marker, nbytes = data[start + 1], int.from_bytes(data[start + 2 : start + 4], "big")
        if marker in _ALONE:
            position = start + 2
            continue
        if marker in _SOI or marker in _EOI:
            raise DecodeError("damaged", f"marker ff{marker:02x} at byte {start}, before the first scan")
        end = start + 2 + nbytes
        if nbytes < 2 or end > len(data):
            raise DecodeError("damaged", f"segment ff{marker:02x} at byte {start} runs past the end of the file")
        segment = Segment(marker, start, end)
        segments.append(segment)
        if marker in _FRAMES and frame is None:
            frame = segment
        position = end
        if marker == _SOS:
            break
    if frame is None or frame.end - frame.start < 10:
        raise DecodeError("damaged", "the JPEG has no frame header before its first scan")
    body = data[frame.start + 4 : frame.end]
    # A sequential frame whose first scan has all components has no other: decoders refuse a second one.
    single_scan = frame.marker in _SEQUENTIAL and data[segments[-1].start + 4] == body[5]
    return JpegHeader(
        width=int.from_bytes(body[3:5], "big"),
        height=int.from_bytes(body[1:3], "big"),
        precision=body[0],
        frame=frame.marker,
        num_scans=1 if single_scan else _count_scans(data, segments[-1].start),
        segments=tuple(segments),
    )


def _count_scans(data: bytes, first: int) -> int:
    """Counts the scans of the picture whose first scan begins there, up to its end: not those of MPO or gain maps."""
    scans = 0
    position = first
    while match := _IN_SCAN_MARKER.search(data, position):
        marker = match[0][1]
        if marker in _EOI:
            break
        scans += marker == _SOS
        if marker in _ALONE:
            position = match.end()
            continue
        # Segments are stepped over whole: what lies inside of them is no marker.
        position = match.start() + 2 + int.from_bytes(data[match.start() + 2 : match.start() + 4], "big")
    return scans


def is_supported(header: JpegHeader) -> bool:
    """Whether libjpeg-turbo decodes it to bytes: 8-bit baseline, extended or progressive, Huffman or arithmetic."""
    return header.precision == 8 and header.frame not in _LOSSLESS_OR_HIERARCHICAL


def without_junk(data: bytes, header: JpegHeader) -> bytes:
    """Returns the picture with nothing in its header but what decoding needs: no junk between segments, no metadata.

    From the first scan on, `data` is kept byte for byte: damage there must stay visible to a strict decoder.
    """
    kept: list[bytes | memoryview] = [_SOI]
    for segment in header.segments:
        body = data[segment.start : segment.end]
        colour = (segment.marker == _APP0 and body[4:9] == b"JFIF\0") or (
            segment.marker == _APP14 and body[4:9] == b"Adobe" and len(body) - 4 >= _ADOBE_NBYTES
        )
        if segment.marker in _NEEDED or colour:
            kept.append(body)
    # A view, because a copy would be one more of what may be hundreds of megabytes.
    return b"".join([*kept, memoryview(data)[header.segments[-1].end :]])


def exif_block(data: bytes, header: JpegHeader) -> bytes:
    """Returns the first Exif block (Exif 2.32, an APP1 segment), or b""."""
    for segment in header.segments:
        if segment.marker == _APP1 and data[segment.start + 4 : segment.start + 10] == b"Exif\0\0":
            return data[segment.start + 4 : segment.end]
    return b""
