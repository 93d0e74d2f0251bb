"""The orientation of Exif blocks, sound and broken, and where PNG and WebP keep them."""

from __future__ import annotations

import itertools
import struct

import pytest
from pictures import encode
from PIL import Image

from shardio.conversion.images.headers import read_orientation
from shardio.errors import DecodeError

BLACK = Image.new("RGB", (17, 9))

ORIENTATION, SHORT, LONG, ASCII = 0x0112, 3, 4, 2


def exif(
    orientation: int, order: str = "<", kind: int = SHORT, count: int = 1, before: int = 0, skip: int = 0
) -> bytes:
    """A block with the orientation after `before` other entries, in a directory `skip` bytes behind the header."""
    others = b"".join(struct.pack(f"{order}HHII", 0x0100 + i % 16, LONG, 1, 7) for i in range(before))
    value = struct.pack(f"{order}I" if kind == LONG else f"{order}HH", *([orientation] + [0] * (kind != LONG)))
    entry = struct.pack(f"{order}HHI", ORIENTATION, kind, count) + value
    header = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + skip)
    return header + bytes(skip) + struct.pack(f"{order}H", before + 1) + others + entry + bytes(4)


def orientation_in(block: bytes) -> int:
    """The orientation of an image with this block."""
    return read_orientation(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(block)) + b"eXIf" + block)


@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_every_orientation_is_read_in_both_byte_orders(order: str, prefix: bytes) -> None:
    for orientation, (before, skip) in itertools.product(range(1, 9), ((0, 0), (1, 0), (30, 0), (2, 100))):
        assert orientation_in(prefix + exif(orientation, order, before=before, skip=skip)) == orientation


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0",
        b"XX*\0" + exif(6)[4:],
        b"II\0*" + exif(6)[4:],
        exif(0),
        exif(9),
        exif(0xFFFF),
        exif(6, kind=LONG),
        exif(6, kind=ASCII),
        exif(6, count=2),
        exif(6, count=0),
        exif(6)[:4] + struct.pack("<I", 5000) + exif(6)[8:],
        exif(6)[:4] + b"\xff\xff\xff\xff" + exif(6)[8:],
        exif(6)[:8] + b"\0\0" + exif(6)[10:],
    ],
)
def test_a_block_that_is_broken_or_says_nothing_means_upright(block: bytes) -> None:
    assert orientation_in(block) == 1


def test_a_block_cut_at_any_byte_means_upright_or_what_it_said() -> None:
    block = exif(6, before=3)
    end = len(block) - 4  # behind the entry there is only the place of the next directory
    for length in range(len(block)):
        assert orientation_in(block[:length]) == (6 if length >= end else 1), length


# --- where blocks are -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_block_is_found_where_pillow_writes_it_unless_it_is_cut_off(kind: str) -> None:
    assert read_orientation(encode(BLACK, kind)) == 1
    for length in (0, 1):  # chunks of odd length are padded in WebP
        data = encode(BLACK, kind, exif=b"Exif\0\0" + exif(5) + bytes(length), lossless=True)
        assert read_orientation(data) == 5
    for length in range(30, len(data)):
        try:
            assert read_orientation(data[:length]) in (1, 5), length
        except DecodeError:
            assert kind == "JPEG"  # no header, so no picture


def test_the_first_block_counts_and_other_segments_of_its_kind_do_not() -> None:
    data = encode(BLACK, "JPEG")

    def app1(body: bytes) -> bytes:
        return b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body

    xmp = app1(b"http://ns.adobe.com/xap/1.0/\0<x/>")
    blocks = [app1(b"Exif\0\0" + exif(orientation)) for orientation in (3, 8)]
    assert read_orientation(data[:2] + xmp + b"".join(blocks) + data[2:]) == 3


def test_a_webp_that_does_not_announce_a_block_has_none() -> None:
    data = bytearray(encode(BLACK, "WEBP", exif=exif(5)))
    assert data[12:16] == b"VP8X"
    assert read_orientation(bytes(data)) == 5
    data[20] &= ~0x08
    assert read_orientation(bytes(data)) == 1
