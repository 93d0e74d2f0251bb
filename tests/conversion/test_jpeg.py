"""The walk over a JPEG's segments, and the outcome for headers that lie, end early or hold junk."""

from __future__ import annotations

import io

import numpy as np
import pytest
from conversions import decode_or_refuse
from numpy.typing import NDArray
from pictures import encode, random_picture
from PIL import Image

from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.headers import MAX_SCANS, read_jpeg_header, without_junk
from shardio.errors import DecodeError

SOI, EOI = b"\xff\xd8", b"\xff\xd9"


def picture(seed: int, height: int = 67, width: int = 90) -> NDArray[np.uint8]:
    return random_picture(np.random.default_rng(seed), height, width)


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body


KINDS: dict[str, bytes] = {
    "baseline": encode(picture(1), "JPEG", quality=90),
    "4:4:4": encode(picture(2), "JPEG", quality=95, subsampling=0),
    "progressive": encode(picture(3), "JPEG", quality=85, progressive=True),
    "gray": encode(Image.fromarray(picture(4)).convert("L"), "JPEG"),
    "gray progressive": encode(Image.fromarray(picture(5)).convert("L"), "JPEG", progressive=True),
    "cmyk": encode(Image.fromarray(picture(6)).convert("CMYK"), "JPEG", subsampling=0),
    "restarts": encode(picture(7), "JPEG", restart_marker_rows=1),
    "with metadata": encode(
        picture(8), "JPEG", comment=b"a comment", exif=b"Exif\0\0" + bytes(40), icc_profile=bytes(200)
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


# --- what the header says ---------------------------------------------------------------------------------------------


@each_kind
def test_header_agrees_with_pillow(kind: str) -> None:
    data = KINDS[kind]
    header = read_jpeg_header(data)
    with Image.open(io.BytesIO(data)) as image:
        assert (header.width, header.height) == image.size
    assert header.precision == 8
    assert header.frame == (0xC2 if "progressive" in kind else 0xC0)
    assert (header.num_scans > 1) == ("progressive" in kind)
    assert header.is_supported


@each_kind
def test_a_header_cut_at_any_byte_is_refused(kind: str) -> None:
    data = KINDS[kind]
    for length in range(3, read_jpeg_header(data).segments[-1].end):
        with pytest.raises(DecodeError, match=r"before its first scan|past the end of the file") as caught:
            read_jpeg_header(data[:length])
        assert caught.value.reason == "damaged", length


def test_fill_bytes_and_lone_markers_between_segments_are_stepped_over() -> None:
    data = KINDS["baseline"]
    header = read_jpeg_header(data)
    for filling in (b"\xff", b"\xff" * 9, b"\xff\x01", b"\xff\xd0\xff\xd7", b"\xff\x00\x13"):
        for one in header.segments[1:]:
            filled = read_jpeg_header(data[: one.start] + filling + data[one.start :])
            assert (filled.width, filled.height, filled.num_scans) == (header.width, header.height, 1)
            assert [s.marker for s in filled.segments] == [s.marker for s in header.segments]


def test_a_header_that_cannot_be_is_refused() -> None:
    data = KINDS["baseline"]
    segments = read_jpeg_header(data).segments
    start = segments[2].start
    frameless = b"".join(data[s.start : s.end] for s in segments if s.marker != 0xC0) + EOI
    short_frame = segment(0xC0, b"\x08\0\x10\0\x10")
    for header, what in (
        (data[:start] + b"\xff\xd8" + data[start:], f"expected a first scan, found marker ffd8 at byte {start}"),
        (data[:start] + b"\xff\xd9" + data[start:], f"expected a first scan, found marker ffd9 at byte {start}"),
        *(
            (SOI + b"\xff\xe0" + length + data[20:], "segment ffe0 at byte 2")
            for length in (b"\0\0", b"\0\1", b"\xea`")
        ),
        (SOI + frameless, "no frame header"),
        (SOI + short_frame + frameless, "no frame header"),
    ):
        with pytest.raises(DecodeError, match=rf"^damaged: .*{what}"):
            read_jpeg_header(header)


def test_supported_are_8_bits_of_baseline_extended_progressive_and_their_arithmetic_twins() -> None:
    data = KINDS["gray"]
    frame = data.index(b"\xff\xc0")
    for marker in (m for m in range(0xC0, 0xD0) if m not in (0xC4, 0xC8, 0xCC)):
        for bits in (0, 1, 7, 8, 9, 12, 16):
            changed = (
                data[: frame + 1] + bytes([marker]) + data[frame + 2 : frame + 4] + bytes([bits]) + data[frame + 5 :]
            )
            header = read_jpeg_header(bytes(changed))
            assert (header.frame, header.precision) == (marker, bits)
            assert header.is_supported == (bits == 8 and marker in (0xC0, 0xC1, 0xC2, 0xC9, 0xCA))
            if not header.is_supported:
                with pytest.raises(DecodeError, match=f"^unsupported: .*found {bits} bits and the frame ff{marker:x}"):
                    decode_image(bytes(changed))


# --- scans ------------------------------------------------------------------------------------------------------------


def legal_scans(count: int, between: bytes = b"") -> bytes:
    """A gray 8 x 8 progressive JPEG of `count` scans, each of them legal; `between` stands after the first scan.

    A coefficient may be sent bit by bit, from bit 13 down to 0, and every one of the 63 on its own.
    """
    parts = [SOI, segment(0xDB, b"\0" + b"\x01" * 64), segment(0xC2, b"\x08\0\x08\0\x08\x01\x01\x11\0")]
    # One code of one bit: "no difference" for the first coefficient, "end of block" for the others.
    parts += [segment(0xC4, table + b"\x01" + bytes(15) + b"\0") for table in (b"\x00", b"\x10")]
    parts.append(segment(0xDA, b"\x01\x01\x00\x00\x00\x00") + b"\x7f")
    parts.append(between)
    steps = [(k, high, low) for k in range(1, 64) for high, low in [(0, 13), *((n + 1, n) for n in range(12, -1, -1))]]
    for k, high, low in steps[: count - 1]:
        parts.append(segment(0xDA, bytes([1, 1, 0, k, k, high << 4 | low])) + b"\x7f")
    return b"".join(parts) + EOI


def test_no_more_scans_than_allowed_are_decoded() -> None:
    data = legal_scans(MAX_SCANS)
    assert read_jpeg_header(data).num_scans == MAX_SCANS
    decoded = decode_image(data)
    assert decoded.warning == ""
    assert decoded.pixels.shape == (8, 8, 3)
    assert (decoded.pixels == 128).all()
    with pytest.raises(DecodeError, match=f"^too large: .*{MAX_SCANS} scans, found {MAX_SCANS + 1}"):
        decode_image(legal_scans(MAX_SCANS + 1))


@pytest.mark.parametrize(
    "between",
    [
        segment(0xFE, b"ab" + EOI + b"cd"),
        segment(0xE1, EOI * 20),
        b"\xff\x01",  # TEM, which has no length: a marker follows
        b"\xff\x01\xff\x01",
        b"\xff\xd0",
        b"\xff" * 7,
        b"\xff\xff\x01",
    ],
    ids=["end in a comment", "ends in metadata", "TEM", "two TEM", "restart", "fill bytes", "filled TEM"],
)
def test_nothing_between_scans_hides_those_that_follow(between: bytes) -> None:
    assert decode_image(legal_scans(50, between)).pixels.shape == (8, 8, 3)
    with pytest.raises(DecodeError, match=rf"^too large: expected at most {MAX_SCANS} scans, found 800"):
        decode_image(legal_scans(800, between))


def test_only_scans_of_the_first_picture_count() -> None:
    data = KINDS["progressive"]
    assert read_jpeg_header(data + data * 30).num_scans == read_jpeg_header(data).num_scans
    np.testing.assert_array_equal(decode_image(data + data * 30).pixels, decode_image(data).pixels)
    data = KINDS["baseline"]
    data = data[:2] + segment(0xE1, b"Exif\0\0" + segment(0xDA, bytes(6)) * 500) + data[2:]
    assert read_jpeg_header(data).num_scans == 1
    assert decode_image(data).warning == ""


def test_scans_that_are_missing_are_noted() -> None:
    data = KINDS["progressive"]
    whole = decode_image(data)
    assert whole.facts == ()
    scans = [
        i for i in range(len(data)) if data[i : i + 2] == b"\xff\xda" and data[i + 2 : i + 4] in (b"\0\x08", b"\0\x0c")
    ]
    assert len(scans) == read_jpeg_header(data).num_scans == 10
    for number, start in enumerate(scans[1:], start=1):
        cut = data[:start] + EOI
        assert read_jpeg_header(cut).num_scans == number
        assert decode_image(cut).facts == ("blurred",)


@pytest.mark.parametrize("frame", [0xC0, 0xC2])
def test_a_component_without_a_scan_is_damage(frame: int) -> None:
    # Three components of one block, a scan each: the mean only, of one code of one bit.
    parts = [SOI, segment(0xDB, b"\0" + b"\x01" * 64)]
    parts.append(segment(frame, b"\x08\0\x08\0\x08\x03" + b"".join(bytes([n, 0x11, 0]) for n in (1, 2, 3))))
    parts += [segment(0xC4, table + b"\x01" + bytes(15) + b"\0") for table in (b"\x00", b"\x10")]
    last = 63 if frame == 0xC0 else 0
    scans = [segment(0xDA, bytes([1, n, 0, 0, last, 0])) + b"\x3f" for n in (1, 2, 3)]
    assert (decode_image(b"".join([*parts, *scans, EOI])).pixels == 128).all()
    for number in (1, 2):
        with pytest.raises(DecodeError, match=f"^damaged: .*component, found none of {3 - number}"):
            decode_image(b"".join([*parts, *scans[:number], EOI]))


# --- junk in the header -----------------------------------------------------------------------------------------------


@each_kind
def test_junk_between_header_segments_is_mended_with_identical_pixels(kind: str) -> None:
    data = KINDS[kind]
    expected = decode_image(data)
    assert expected.warning == ""
    for number, one in enumerate(read_jpeg_header(data).segments[1:]):
        junk = (b"\0", b"junk", bytes(range(200)))[number % 3]
        decoded = decode_image(data[: one.start] + junk + data[one.start :])
        assert decoded.warning.startswith("junk in the header left out: "), one
        np.testing.assert_array_equal(decoded.pixels, expected.pixels, err_msg=str(one))


@each_kind
def test_without_junk_keeps_the_picture_and_nothing_else(kind: str) -> None:
    data = KINDS[kind]
    header = read_jpeg_header(data)
    once = without_junk(data, header)
    np.testing.assert_array_equal(decode_image(once).pixels, decode_image(data).pixels)
    left = read_jpeg_header(once)
    markers = {s.marker for s in left.segments}
    assert markers <= {0xC0, 0xC2, 0xC4, 0xDA, 0xDB, 0xDD, 0xE0, 0xEE}
    assert markers >= {0xEE if kind == "cmyk" else 0xE0}  # Adobe or JFIF, which tell the colors
    assert once[left.segments[-1].end :] == data[header.segments[-1].end :]
    assert without_junk(once, left) == once


def test_a_color_segment_that_is_too_short_to_tell_anything_is_left_out() -> None:
    data = KINDS["baseline"]
    expected = decode_image(data).pixels
    start = read_jpeg_header(data).segments[1].start
    decoded = decode_image(data[:start] + segment(0xEE, b"Adobe\0d") + b"junk" + data[start:])
    assert decoded.warning
    np.testing.assert_array_equal(decoded.pixels, expected)


def test_junk_inside_the_picture_is_not_mended() -> None:
    data = KINDS["restarts"]
    restarts = [i for i in range(len(data) - 1) if data[i] == 0xFF and 0xD0 <= data[i + 1] <= 0xD7]
    assert len(restarts) >= 3
    for start in restarts:
        with pytest.raises(DecodeError, match=r"^damaged: "):
            decode_image(data[:start] + b"junk" * 8 + data[start:])


def test_damage_behind_a_header_with_junk_is_refused() -> None:
    data = KINDS["progressive"]
    start = read_jpeg_header(data).segments[1].start
    with pytest.raises(DecodeError, match=r"^damaged: "):
        decode_image(data[:start] + b"junk" + data[start : len(data) * 2 // 3])


# --- cut short --------------------------------------------------------------------------------------------------------


@each_kind
def test_a_truncated_jpeg_is_refused_or_lacks_no_pixel(kind: str) -> None:
    data = KINDS[kind]
    expected = decode_image(data).pixels
    for twentieth in range(20):
        with pytest.raises(DecodeError) as caught:
            decode_image(data[: len(data) * twentieth // 20])
        assert caught.value.reason == ("damaged" if twentieth else "empty")
    for missing in range(1, 40):
        outcome = decode_or_refuse(data[:-missing])
        if isinstance(outcome, DecodeError):
            assert outcome.reason == "damaged", missing
        else:
            np.testing.assert_array_equal(outcome.pixels, expected, err_msg=f"{missing} bytes missing")
    end = read_jpeg_header(data).segments[-1].end
    half = end + (len(data) - end) // 2
    with pytest.raises(DecodeError, match=r"^damaged: "):
        decode_image(data[:half] + bytes(len(data) - half))
