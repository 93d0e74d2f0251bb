"""Reads and checks the header of an image before the image is decoded: its format, size, scans and orientation.

A header decides how much memory and time a decoder takes, so these are checked first: the size in pixels, the bits per
channel, and the number of scans (a progressive JPEG costs scans x pixels, however small its file).
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardio.errors import DecodeError, Reason
from shardio.system.opening import open_file

# 256 MiB of RGB. It is also where Pillow begins to warn of decompression bombs. Decoding and resizing take up to 16
# bytes per pixel (an animation decoder's two canvases of RGBA, a frame and Pillow's copy of it), so 1.4 GB.
MAX_PIXELS = (256 << 20) // 3
# The weights of a resampling filter take up to 48 bytes for each pixel of a side.
MAX_SIDE_PIXELS = 1 << 20
# Encoders write about ten scans and optimizers a few dozen; thousands are a bomb that costs hours.
MAX_SCANS = 100
# Segments of a JPEG, chunks of a PNG or a WebP, blocks of a GIF, strips of a TIFF, comments of a PPM. Each costs a
# decoder about a hundred bytes and a few microseconds, however few bytes it takes in the file.
MAX_PARTS = 100_000
# A picture of MAX_PIXELS stored as RGB without any compression fits, with room for metadata.
MAX_SOURCE_NBYTES = 288 << 20

UPRIGHT = 1
"""The Exif orientation of a picture that needs no rotation or mirroring."""

_FORMATS = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<WebP>RIFF.{4}WEBP)|(?P<GIF>GIF8[79]a)|(?P<TIFF>II\*\0|MM\0\*)"
    # Text may begin with the first two bytes: with more of the header, no number from text gets into a message.
    rb"|(?P<BMP>BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0)|(?P<PPM>P[1-6][\s#])",
    re.DOTALL,
)
# The kinds that Pillow or people take for pictures: what distinguishes their first bytes, also from text, and their
# suffixes. Files called .pcd are point clouds, more often than Photo CDs.
_OTHER_PICTURES = {
    "a HEIC": (rb"....ftyp(?:hei[cxms]|hev[cxms]|mif1|msf1)", ".heic .heif .hif"),
    "a JPEG 2000": (rb"\0\0\0\x0cjP|\xff\x4f\xff\x51", ".jp2 .j2k .j2c .jpc .jpf .jpx"),
    "a JPEG XL": (rb"\xff\x0a|\0\0\0\x0cJXL ", ".jxl"),
    "a BigTIFF": (rb"II\+\0|MM\0\+", ""),
    "a raw picture": (rb"....ftypcrx|FUJIFILMCCD-RAW|IIU\0|IIR[OS]", ".cr2 .cr3 .nef .arw .dng .raf .rw2 .orf"),
    "a PSD": (rb"8BPS\0", ".psd .psb"),
    "a DDS": (rb"DDS \x7c\0\0\0", ".dds"),
    "an ICO": (rb"\0\0[\x01\x02]\0[\x01-\x40]\0...\0", ".ico .cur"),
    "a PCX": (rb"\x0a[\0\x02-\x05]\x01[\x01\x02\x04\x08]|\xb1\x68\xde\x3a", ".pcx .dcx"),
    "an EPS": (rb"\xc5\xd0\xd3\xc6|%!PS-Adobe-[0-9.]+ EPSF", ".eps"),
    "an SVG": (rb"(?:<\?xml[^>]*>)?\s*<svg", ".svg"),
    "another kind of picture": (
        rb"icns\0|\x01\xda[\0\x01][\x01\x02]|\x59\xa6\x6a\x95|qoif\0|\x76\x2f\x31\x01|SIMPLE  =|\xd7\xcd\xc6\x9a"
        rb"|/\* XPM \*/|II\xbc\x01|\x01\0\0\0.{36} EMF|BLP[12][\0-\x05]|FTEX\0|....[\x11\x12]\xaf|\x80\xe8\0\0",
        ".icns .sgi .bw .rgb .rgba .ras .qoi .exr .fits .fit .wmf .emf .xpm .xbm .jxr .wdp .hdp .blp .ftc .ftu .fli"
        " .flc .pxr .msp .im .gbr .pfm .jfif .mpo .apng .avifs .dib .tga .icb .vda .vst",
    ),
}
_OTHER_PICTURE = re.compile(b"|".join(start for start, _ in _OTHER_PICTURES.values()), re.DOTALL)
_OTHER_KINDS = {kind: start for kind, (start, _) in _OTHER_PICTURES.items()} | {
    "a TGA": rb".(?:\0[\x02\x03\x0a\x0b]\0{5}|\x01[\x01\x09].{5}).{8}[\x08\x0f\x10\x18\x20][\0-\x3f]",
    "a PDF": rb"%PDF",
    "a zip archive": rb"PK\x03\x04",
    "a gzip file": rb"\x1f\x8b",
}


SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".webp"),
    *(".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif"),
)
"""The suffixes of image files, in lower case."""
ALL_SUFFIXES = (*SUFFIXES, *" ".join(suffixes for _, suffixes in _OTHER_PICTURES.values()).split())
"""SUFFIXES, and the suffixes of pictures of other kinds, which are refused."""


def has_image_suffix(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


def holds_image(path: str) -> bool:
    """Whether a file has the suffix or the first bytes of an image, also of a kind that is refused.

    A file that cannot be read counts as an image, so the conversion refuses and lists it.
    """
    if path.lower().endswith(ALL_SUFFIXES):
        return True
    try:
        with open_file(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as file:
            first = file.read(64)
    except OSError:
        return True
    # Text may begin like a BMP or a PPM.
    return format_of(first) not in ("", "BMP", "PPM") or _OTHER_PICTURE.match(first) is not None


def format_of(data: bytes) -> str:
    """Returns the format of an image file that begins with `data`, such as "JPEG"; "" if we decode no such format."""
    if (match := _FORMATS.match(data)) is not None:
        return match.lastgroup or ""
    brands = data[8 : min(72, int.from_bytes(data[:4], "big"))]  # ISO/IEC 23000-22: of a picture, of a sequence
    return "AVIF" if data[4:8] == b"ftyp" and (b"avif" in brands or b"avis" in brands) else ""


def check_pixels(width: int, height: int) -> None:
    """Raises DecodeError if a picture has no pixels, more than MAX_PIXELS, or a side longer than MAX_SIDE_PIXELS."""
    if width <= 0 or height <= 0:
        raise DecodeError(
            "damaged", f"expected at least one pixel, found a header that claims {width} x {height} pixels"
        )
    if width * height > MAX_PIXELS:
        raise DecodeError("too large", f"expected at most {MAX_PIXELS} pixels, found {width} x {height}")
    if max(width, height) > MAX_SIDE_PIXELS:
        raise DecodeError("too large", f"expected sides of at most {MAX_SIDE_PIXELS} pixels, found {width} x {height}")


def check_parts(count: int) -> None:
    """Raises DecodeError if `count`, the number of segments, chunks or blocks in a file, is more than MAX_PARTS."""
    if count > MAX_PARTS:
        raise DecodeError("too large", f"expected at most {MAX_PARTS} segments, chunks or blocks, found more")


def describe_unsupported(data: bytes) -> tuple[Reason, str]:
    """Returns the (reason, detail) of the DecodeError for a file with the bytes `data`, in no supported format. The
    detail is published in rejects.jsonl. So it quotes none of the bytes: a link in SRC may lead to a private file."""
    if not data:
        return "empty", "the file has no bytes"
    found = next((kind for kind, start in _OTHER_KINDS.items() if re.match(start, data, re.DOTALL)), "")
    if not found and data[:64].lstrip().startswith((b"<", b"{")):
        found = "text (an error page saved as an image?)"
    found = f"{found}: convert it to PNG" if found in (*_OTHER_PICTURES, "a TGA") else found or "something else"
    return "unsupported", f"expected a JPEG, PNG, WebP, GIF, TIFF, AVIF, BMP or PPM, found {found}"


def read_orientation(data: bytes, header: JpegHeader | None = None) -> int:
    """Returns the Exif orientation of a JPEG, PNG or WebP, 1 to 8; 1 (upright) if there is no valid orientation. A
    broken Exif block is ignored, as viewers do. `header` is the JPEG's header, if the caller has read it already."""
    kind, exif = format_of(data), None
    if kind == "JPEG":
        segments = (
            data[one.start + 4 : one.end] for one in (header or read_jpeg_header(data)).segments if one.marker == _APP1
        )
        exif = next((content for content in segments if content.startswith(b"Exif\0\0")), None)
    elif kind == "PNG":
        exif = find_chunk(data, b"eXIf")
    elif data[12:16] == b"VP8X" and _number(data, 20, 21) & _HAS_EXIF:
        exif = find_chunk(data, b"EXIF")
    tiff = (exif or b"").removeprefix(b"Exif\0\0")
    with contextlib.suppress(KeyError, struct.error):
        order = BYTE_ORDERS[tiff[:4]]
        for tag, type_, count, at in tags_in(tiff, order, *struct.unpack_from(f"{order}I", tiff, 4)):
            if tag == ORIENTATION:
                (value,) = struct.unpack_from(f"{order}H", tiff, at + 8)
                return value if (type_, count) == (_SHORT, 1) and 1 <= value <= 8 else UPRIGHT
    return UPRIGHT


# --- JPEG (ITU-T T.81, annex B) ---------------------------------------------------------------------------------------

_SOI = b"\xff\xd8"
_EOI = b"\xff\xd9"
_SOS = 0xDA
# Start of frame: C0-CF but for DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = frozenset({0xC0, 0xC1, 0xC9})
_LOSSLESS_OR_HIERARCHICAL = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF})
# Inside a scan ff is followed by 00 or a restart number, or by another ff, and anything else is a marker.
_IN_SCAN_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_HEADER_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
# ff, the marker, and the length of the segment without these two bytes.
_MARKER = struct.Struct(">BBH")
# Markers that stand alone, without a length: TEM and the restarts.
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
# Decoding needs: frames, DHT, DAC, DQT, DNL, DRI, SOS, and the two segments that tell the color space.
_NEEDED = _FRAMES | {0xC4, 0xCC, 0xDB, 0xDC, 0xDD, _SOS}
_APP0, _APP1, _APP14 = 0xE0, 0xE1, 0xEE
_APP2 = b"\xff\xe2"
# The Adobe segment is 12 bytes: name, version, two flags, color transform. A shorter one tells nothing.
_ADOBE_NBYTES = 12
# What all scans lack of a component that none of them has. A scan may lack 13 bits.
NOTHING = bytes([14]) * 64


class Segment(NamedTuple):
    """A marker segment of a JPEG at data[start:end], including its two marker bytes."""

    marker: int
    start: int
    end: int


@dataclass(frozen=True)
class JpegHeader:
    """The size, format and segments of a JPEG up to its first scan, and its number of scans."""

    width: int
    height: int
    precision: int
    """Bits per channel."""
    frame: int
    """The second byte of the frame's marker, such as 0xC0 for baseline or 0xC2 for progressive."""
    num_scans: int
    segments: tuple[Segment, ...]
    lacking: tuple[bytes, ...] = ()
    """For each component, how many low bits the scans lack of its 64 coefficients; () if one scan has all."""

    @property
    def is_supported(self) -> bool:
        """Whether libjpeg-turbo decodes such a JPEG: 8 bits per channel; baseline, extended or progressive."""
        return self.precision == 8 and self.frame not in _LOSSLESS_OR_HIERARCHICAL


def read_jpeg_header(data: bytes) -> JpegHeader:
    """Returns the header of a JPEG. Raises DecodeError if the header is incomplete, or the file has too many parts."""
    check_parts(data.count(_APP2))  # libjpeg keeps all of them, also after the first scan
    segments: list[Segment] = []
    frame: Segment | None = None
    position = len(_SOI)
    while not segments or segments[-1].marker != _SOS:
        start = position
        lead, marker, nbytes = _MARKER.unpack_from(data, start) if start + 4 <= len(data) else (0, 0, 0)
        if lead != 0xFF or marker in (0x00, 0xFF):  # junk, or the end: nearly always one segment follows another
            if (match := _HEADER_MARKER.search(data, position)) is None:
                raise DecodeError("damaged", "the JPEG ends before its first scan")
            start = match.start()
            marker, nbytes = data[start + 1], int.from_bytes(data[start + 2 : start + 4], "big")
        if marker in _ALONE:
            position = start + 2
            continue
        if marker in _SOI or marker in _EOI:
            raise DecodeError(
                "damaged", f"expected a first scan, found marker ff{marker:02x} at byte {start} of the JPEG"
            )
        position = start + 2 + nbytes
        if nbytes < 2 or position > len(data):
            raise DecodeError("damaged", f"segment ff{marker:02x} at byte {start} runs past the end of the file")
        segments.append(Segment(marker, start, position))
        check_parts(len(segments))
        if marker in _FRAMES and frame is None:
            frame = segments[-1]
    if frame is None or frame.end - frame.start < 10:
        raise DecodeError("damaged", "the JPEG has no frame header before its first scan")
    precision, height, width, num_components = struct.unpack_from(">BHHB", data, frame.start + 4)
    # A sequential frame whose first scan has all components has no other: decoders refuse a second one.
    if frame.marker in _SEQUENTIAL and data[segments[-1].start + 4] == num_components:
        return JpegHeader(width, height, precision, frame.marker, 1, tuple(segments))
    num_scans, bits = _read_scans(data, segments[-1].start, frame.marker in _SEQUENTIAL)
    lacking = tuple(bits.get(component, NOTHING) for component in data[frame.start + 10 : frame.end : 3])
    return JpegHeader(width, height, precision, frame.marker, num_scans, tuple(segments), lacking)


def _read_scans(data: bytes, start: int, is_sequential: bool) -> tuple[int, dict[int, bytes]]:
    """Returns the number of scans of a JPEG from byte `start` on, without the scans of further pictures in the file;
    and `JpegHeader.lacking` of the components in them, by their numbers."""
    scans, lacking = 0, dict[int, bytes]()
    position = start
    while (match := _IN_SCAN_MARKER.search(data, position)) and (marker := match[0][1]) not in _EOI:
        scans += marker == _SOS
        position = match.end()
        if marker == _SOS and scans <= MAX_SCANS:
            count, *body = data[position + 2 : position + 520].ljust(518, b"\0")
            first, last, bits = (0, 63, 0) if is_sequential else body[2 * count : 2 * count + 3]
            for component in body[: 2 * count : 2]:
                before = lacking.get(component, NOTHING)
                lacking[component] = before[:first] + bytes([bits & 15]) * (last + 1 - first) + before[last + 1 :]
        if marker not in _ALONE:  # segments are stepped over whole: what lies inside of them is no marker
            position += int.from_bytes(data[position : position + 2], "big")
    return scans, lacking


def without_junk(data: bytes, header: JpegHeader) -> bytes:
    """Returns the JPEG with only the header segments that decoding needs: no junk between segments, no metadata.

    From the first scan on, `data` is kept byte for byte, so a strict decoder still detects damage there.
    """
    kept: list[bytes | memoryview] = [_SOI]
    for segment in header.segments:
        body = data[segment.start : segment.end]
        color = (segment.marker == _APP0 and body[4:9] == b"JFIF\0") or (
            segment.marker == _APP14 and body[4:9] == b"Adobe" and len(body) - 4 >= _ADOBE_NBYTES
        )
        if segment.marker in _NEEDED or color:
            kept.append(body)
    # A view, because a copy would be one more of what may be hundreds of megabytes.
    return b"".join([*kept, memoryview(data)[header.segments[-1].end :]])


# --- PNG (third edition) ----------------------------------------------------------------------------------------------

_IHDR_NBYTES = 13
# The name and the size of a chunk: the name is after the size in a PNG, and before it in a WebP.
_PNG_CHUNK, _WEBP_CHUNK = struct.Struct(">0sI4s"), struct.Struct("<4sI0s")

GRAY, COLOR, PALETTE = 0, 2, 3
"""The color types of a PNG that have a tRNS chunk if they have transparency; the others have an alpha channel."""


@dataclass(frozen=True)
class PngHeader:
    width: int
    height: int
    depth: int
    """The number of bits per channel, or per palette index."""
    color_type: int


def read_png_header(data: bytes) -> PngHeader:
    """Returns the header of a PNG. Raises DecodeError if the first chunk is not a complete IHDR.

    Does not check the values in the header: the decoder does.
    """
    if data[8:16] != _IHDR_NBYTES.to_bytes(4, "big") + b"IHDR" or len(data) < 16 + _IHDR_NBYTES:
        raise DecodeError("damaged", f"expected an IHDR chunk at byte 8 of the PNG, found bytes {data[8:16].hex(' ')}")
    return PngHeader(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"), data[24], data[25])


def find_chunk(data: bytes, name: bytes) -> bytes | None:
    """Returns the content of the first chunk of a PNG or WebP with this name, perhaps truncated; None if there is none.

    Raises DecodeError if there are more than MAX_PARTS chunks before it.
    """
    layout, position = (_PNG_CHUNK, 8) if format_of(data) == "PNG" else (_WEBP_CHUNK, 12)
    count = 0
    while position + 8 <= len(data):
        check_parts(count := count + 1)
        first, nbytes, second = layout.unpack_from(data, position)
        start = position + 8
        if first + second == name:
            return data[start : start + nbytes]
        # A PNG has a checksum after each chunk; chunks of a WebP begin at even offsets.
        position = start + nbytes + (4 if layout is _PNG_CHUNK else nbytes % 2)
    return None


# --- WebP (RFC 9649) --------------------------------------------------------------------------------------------------

_HAS_EXIF = 0x08


def _number(data: bytes, start: int, stop: int) -> int:
    return int.from_bytes(data[start:stop], "little")


def read_webp_size(data: bytes) -> tuple[int, int]:
    """Returns the (width, height) in pixels that the first chunk of a WebP claims.

    Raises DecodeError if the chunk has no size, the file is shorter than its header claims, or has too many chunks.
    """
    claimed = _number(data, 4, 8) + 8
    if claimed > len(data):
        raise DecodeError("damaged", f"expected {claimed} bytes, as the header says, found {len(data)} bytes")
    find_chunk(data, b"")  # counts all
    chunk = data[12:16]
    if chunk == b"VP8X":  # canvas size minus one, 24 bits each
        return _number(data, 24, 27) + 1, _number(data, 27, 30) + 1
    if chunk == b"VP8L":  # after a signature byte: size minus one, 14 bits each
        return (_number(data, 21, 25) & 0x3FFF) + 1, (_number(data, 21, 25) >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":  # after the frame tag and start code: 14 bits each, with two of scaling
        return _number(data, 26, 28) & 0x3FFF, _number(data, 28, 30) & 0x3FFF
    raise DecodeError("damaged", f"expected a VP8, VP8L or VP8X chunk, found {chunk!r}")


# --- Exif 2.32, in the layout of TIFF 6.0 -----------------------------------------------------------------------------

ORIENTATION = 0x0112
_SHORT = 3
BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
"""The sign for the byte order in `struct`, "<" or ">", by the first four bytes of a TIFF."""


def tags_in(tiff: bytes, order: str, start: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (tag, type, count, offset in `tiff`) of each entry in the directory of a TIFF that begins at byte `start`.
    The offset is of the entry's first byte. An entry that is cut off is left out. `order` is a value of BYTE_ORDERS."""
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    for at in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        yield *struct.unpack_from(f"{order}HHI", tiff, at), at
