"""Encoded bytes -> pixels: the right picture or a DecodeError, nothing else, and nothing printed."""

from __future__ import annotations

import csv
import io
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHARED, random_picture
from mutate_images import claimed_sizes, mutate
from numpy.typing import NDArray
from PIL import Image

from shardio.decode import MAX_PIXELS, Decoded, check_pixels, decode_image
from shardio.errors import DecodeError
from shardio.tree import scan_tree

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def nothing_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Decoders are quick to talk on stderr; a conversion of a million images must not."""
    yield
    assert capfd.readouterr() == ("", "")


def encode(image: Image.Image | NDArray[Any], kind: str, **options: Any) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(seed: int = 0, height: int = 33, width: int = 47) -> NDArray[np.uint8]:
    return random_picture(np.random.default_rng(seed), height, width)


def over_white(rgb: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.float64]:
    share = alpha[..., None] / 255
    return np.asarray(rgb * share + 255 * (1 - share))


# --- the collection of odd and damaged images -------------------------------------------------------------------------


def expectations() -> dict[str, str]:
    manifest = SHARED / "badimages" / "manifest.csv"
    if not manifest.exists():
        return {}
    with manifest.open(newline="") as lines:
        return {row["file"]: row["expected"] for row in csv.DictReader(lines)}


EXPECTED = expectations()

# Under a limit of 3 GiB of address space: "<height> <width> <warning>", or the reason of the refusal and its detail.
_DECODE_APART = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from shardio.decode import decode_image
from shardio.errors import DecodeError
try:
    decoded = decode_image(sys.stdin.buffer.read())
    print(*decoded.pixels.shape[:2], decoded.warning)
except DecodeError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def decode_apart(data: bytes) -> tuple[str, int]:
    """What came of it, and the peak of resident memory in MiB; in a process of its own, for bombs."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _DECODE_APART], input=data, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    outcome, _, peak = done.stdout.decode().rstrip("\n").rpartition("\n")
    return outcome, int(peak) // 1024


@pytest.mark.parametrize("name", [name for name in EXPECTED if "bomb" not in name and EXPECTED[name] != "skip"])
def test_each_odd_image_gives_what_its_list_says(bad_images: Path, name: str) -> None:
    data = (bad_images / name).read_bytes()
    if EXPECTED[name] == "bad":
        with pytest.raises(DecodeError, match=r"^(damaged|too large|unsupported|empty): .+"):
            decode_image(data)
        return
    decoded = decode_image(data)
    assert decoded.pixels.dtype == np.uint8
    with Image.open(io.BytesIO(data)) as image:
        assert decoded.pixels.shape == (image.height, image.width, 3)
        if image.mode in ("RGB", "L", "CMYK"):  # without alpha or deep grey, where Pillow's own conversion is right
            assert np.abs(decoded.pixels.astype(int) - np.asarray(image.convert("RGB"))).max() <= 2
    assert bool(decoded.warning) == (EXPECTED[name] == "ok-warn")


@pytest.mark.parametrize("name", [name for name in EXPECTED if "bomb" in name])
def test_each_bomb_is_refused_in_bounded_memory(bad_images: Path, name: str) -> None:
    assert EXPECTED[name] == "bad"
    outcome, peak = decode_apart((bad_images / name).read_bytes())
    assert re.match("(damaged|too large|unsupported): ", outcome), outcome
    assert "no memory" not in outcome
    assert peak < 1024


def test_hidden_files_of_the_collection_are_ignored_by_the_scan(bad_images: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "odd").symlink_to(bad_images)
    tree = scan_tree(tmp_path / "tree")
    listed = {source.key.decode().removeprefix("odd/") for source in tree.splits["train"]}
    hidden = {name for name in EXPECTED if EXPECTED[name] == "skip"}
    assert hidden
    assert not listed & hidden
    assert set(EXPECTED) - hidden <= listed
    assert tree.ignored["hidden"] == len(hidden)


# --- every kind that is taken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (9, 1), (33, 47)])
def test_lossless_images_come_back_exactly(kind: str, size: tuple[int, int]) -> None:
    pixels = picture(1, *size)
    decoded = decode_image(encode(pixels, kind, lossless=True))
    assert decoded.warning == ""
    np.testing.assert_array_equal(decoded.pixels, pixels)
    assert decoded.pixels.dtype == np.uint8
    assert decoded.pixels.flags.c_contiguous


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}, {"restart_marker_rows": 1}]
)
def test_jpeg_decodes_as_with_pillow(options: dict[str, Any]) -> None:
    data = encode(picture(2), "JPEG", **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(decode_image(data).pixels - expected).max() <= 2


def test_lossy_webp_decodes_as_with_pillow() -> None:
    data = encode(picture(3), "WEBP", quality=80)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(decode_image(data).pixels, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_grey_images_get_three_equal_channels(kind: str) -> None:
    grey = picture(4)[:, :, 0]
    pixels = decode_image(encode(Image.fromarray(grey, "L"), kind, lossless=True, quality=95)).pixels
    assert pixels.shape == (*grey.shape, 3)
    assert np.abs(pixels.astype(int) - grey[:, :, None]).max() <= (0 if kind != "JPEG" else 20)
    assert (pixels == pixels[:, :, :1]).all()


def test_cmyk_jpeg_gets_the_colours_of_its_inks() -> None:
    flat = {"white": (0, 0, 0, 0), "cyan": (255, 0, 0, 0), "red": (0, 255, 255, 0), "black": (0, 0, 0, 255)}
    expected = {"white": (255, 255, 255), "cyan": (0, 255, 255), "red": (255, 0, 0), "black": (0, 0, 0)}
    for name, inks in flat.items():
        data = encode(Image.new("CMYK", (20, 12), inks), "JPEG", quality=95, subsampling=0)
        pixels = decode_image(data).pixels
        assert pixels.shape == (12, 20, 3)
        assert np.abs(pixels.astype(int) - expected[name]).max() <= 3, name


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_palette_png_gets_its_colours(bits: int) -> None:
    rng = np.random.default_rng(bits)
    colours = rng.integers(0, 256, (1 << bits, 3), dtype=np.uint8)
    numbers = rng.integers(0, 1 << bits, (21, 34), dtype=np.uint8)
    image = Image.fromarray(numbers, "P")
    image.putpalette(colours.tobytes())
    np.testing.assert_array_equal(decode_image(encode(image, "PNG", bits=bits)).pixels, colours[numbers])


def test_transparent_palette_entries_are_laid_over_white() -> None:
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    pixels = decode_image(encode(image, "PNG", transparency=1)).pixels
    assert pixels.reshape(-1, 3).tolist() == [[10, 20, 30], [255] * 3, [70, 80, 90], [1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_is_laid_over_white(kind: str) -> None:
    rgb = picture(5)
    alpha = np.linspace(0, 255, rgb.shape[1]).astype(np.uint8)[None, :].repeat(rgb.shape[0], 0)
    # `exact` keeps WebP from clearing what lies under transparent pixels.
    data = encode(np.dstack([rgb, alpha]), kind, lossless=True, exact=True)
    pixels = decode_image(data).pixels
    assert np.abs(pixels - over_white(rgb, alpha)).max() <= 1
    assert (pixels[:, 0] == 255).all()
    np.testing.assert_array_equal(pixels[:, -1], rgb[:, -1])


def test_grey_with_alpha_is_laid_over_white() -> None:
    grey = picture(6)[:, :, 0]
    alpha = picture(7)[:, :, 1]
    pixels = decode_image(encode(np.dstack([grey, alpha]), "PNG")).pixels
    assert np.abs(pixels - over_white(grey[:, :, None], alpha)).max() <= 1


def test_a_transparent_colour_or_grey_value_is_laid_over_white() -> None:
    grey = np.array([[0, 100, 200]], np.uint8)
    assert decode_image(encode(grey, "PNG", transparency=100)).pixels[0, :, 1].tolist() == [0, 255, 200]
    rgb = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
    data = encode(rgb, "PNG", transparency=(4, 5, 6))
    assert decode_image(data).pixels.tolist() == [[[1, 2, 3], [255, 255, 255]]]
    bits = Image.fromarray(np.array([[0, 255, 0, 255]], np.uint8)).convert("1")
    assert decode_image(encode(bits, "PNG", transparency=0)).pixels[0, :, 0].tolist() == [255] * 4


def test_16_bit_grey_is_scaled_for_every_value() -> None:
    deep = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    pixels = decode_image(encode(deep, "PNG")).pixels
    np.testing.assert_array_equal(pixels[:, :, 0], np.rint(deep / 257))
    assert (pixels == pixels[:, :, :1]).all()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return PNG_MAGIC + head + b"".join(extra) + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def test_16_bit_colour_is_cut_to_8_bits_within_one_step() -> None:
    deep = np.random.default_rng(8).integers(0, 1 << 16, (5, 9, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in deep)
    pixels = decode_image(raw_png(9, 5, 16, 2, rows)).pixels
    assert np.abs(pixels - deep / 257).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_not_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = picture(9, 16, 40)
    plain = decode_image(encode(pixels, kind, lossless=True)).pixels
    turned = decode_image(encode(pixels, kind, lossless=True, exif=exif)).pixels
    assert turned.shape == (16, 40, 3)
    np.testing.assert_array_equal(turned, plain)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_the_first_frame_of_an_animation_is_taken(kind: str) -> None:
    frames = [Image.fromarray(picture(seed, 12, 18)) for seed in (10, 11, 12)]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True, duration=40)
    np.testing.assert_array_equal(decode_image(data).pixels, np.asarray(frames[0]))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_jpeg_is_reduced_by_whole_halves_to_no_less_than_asked(options: dict[str, Any]) -> None:
    for height, width in [(64, 64), (65, 127), (200, 130), (17, 300), (63, 64)]:
        data = encode(picture(height, height, width), "JPEG", quality=90, **options)
        whole = decode_image(data)
        assert (whole.reduction, whole.source_size) == (1, (height, width))
        for least in [(1, 1), (8, 8), (16, 16), (17, 17), (8, 33), (100, 65), (1000, 1)]:
            expected = 1
            for reduction in (2, 4, 8):
                if -(-height // reduction) >= max(least[0], 8) and -(-width // reduction) >= max(least[1], 8):
                    expected = reduction
            decoded = decode_image(data, lambda *size: least)  # noqa: B023
            assert decoded.reduction == expected, (height, width, least)
            assert decoded.source_size == (height, width)
            assert decoded.pixels.shape == (-(-height // expected), -(-width // expected), 3)
            if expected == 1:
                np.testing.assert_array_equal(decoded.pixels, whole.pixels)


def test_the_least_size_is_asked_for_the_size_of_the_image() -> None:
    asked = []

    def least_size(height: int, width: int) -> tuple[int, int]:
        asked.append((height, width))
        return height, width

    assert decode_image(encode(picture(1, 40, 90), "JPEG"), least_size).pixels.shape == (40, 90, 3)
    assert asked == [(40, 90)]


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_jpegs_are_reduced_too(mode: str) -> None:
    image = Image.fromarray(picture(4, 160, 240)).resize((240, 160)).convert(mode)
    decoded = decode_image(encode(image, "JPEG", quality=95), lambda *size: (20, 20))
    assert decoded.pixels.shape == (20, 30, 3)
    whole = decode_image(encode(image, "JPEG", quality=95)).pixels
    means = whole.reshape(20, 8, 30, 8, 3).mean((1, 3))
    assert np.abs(decoded.pixels - means).mean() < 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_other_images_are_never_reduced(kind: str) -> None:
    data = encode(picture(5, 64, 64), kind)
    decoded = decode_image(data, lambda *size: (1, 1))
    assert (decoded.reduction, decoded.pixels.shape) == (1, (64, 64, 3))


def test_a_damaged_jpeg_is_refused_when_it_is_reduced_too() -> None:
    data = encode(picture(6, 200, 200), "JPEG", quality=90)
    for tenth in range(1, 10):
        with pytest.raises(DecodeError):
            decode_image(data[: len(data) * tenth // 10], lambda *size: (8, 8))


def test_junk_in_the_header_is_left_out_when_a_jpeg_is_reduced_too() -> None:
    data = encode(picture(7, 64, 64), "JPEG")
    tables = data.index(b"\xff\xdb")
    decoded = decode_image(data[:tables] + b"junk" + data[tables:], lambda *size: (8, 8))
    assert "junk in the header" in decoded.warning
    assert (decoded.reduction, decoded.source_size) == (8, (64, 64))
    np.testing.assert_array_equal(decoded.pixels, decode_image(data, lambda *size: (8, 8)).pixels)


def test_bytes_after_the_end_are_no_fault() -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encode(picture(13), kind, lossless=True)
        decoded = decode_image(data + bytes(100))
        assert decoded.warning == ""
        np.testing.assert_array_equal(decoded.pixels, decode_image(data).pixels)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty: the file has no bytes"),
        (encode(picture(), "GIF"), "unsupported: expected a JPEG, PNG or WebP, found a GIF"),
        (encode(picture(), "BMP"), "unsupported: expected a JPEG, PNG or WebP, found a BMP"),
        (encode(picture(), "TIFF"), "unsupported: expected a JPEG, PNG or WebP, found a TIFF"),
        (b"%PDF-1.7\n", "unsupported: expected a JPEG, PNG or WebP, found a PDF"),
        (b"PK\x03\x04rest", "unsupported: expected a JPEG, PNG or WebP, found a zip archive"),
        (b"\x1f\x8b\x08", "unsupported: expected a JPEG, PNG or WebP, found a gzip file"),
        (b"<!DOCTYPE html>\n<p>404", "unsupported: expected a JPEG, PNG or WebP, found text (an error page"),
        (b"\r\n <html>", "unsupported: expected a JPEG, PNG or WebP, found text (an error page"),
        (b'{"error": 403}', "unsupported: expected a JPEG, PNG or WebP, found text (an error page"),
        (b"\0" * 1000, "unsupported: expected a JPEG, PNG or WebP, found bytes that begin 00 00 00 00 00 00 00 00"),
        (b"\xff\xd8", "unsupported: expected a JPEG, PNG or WebP, found bytes that begin ff d8"),
        (b"RIFF\x04\0\0\0WAVE", "unsupported: expected a JPEG, PNG or WebP, found bytes that begin 52 49 46 46 04"),
        (b"a", "unsupported: expected a JPEG, PNG or WebP, found bytes that begin 61"),
        (b"\xff\xd8\xff\xe0", "damaged: "),
        (PNG_MAGIC, "damaged: "),
        (b"RIFF\x04\0\0\0WEBP", "damaged: "),
    ],
)
def test_what_is_no_image_is_refused_and_named(data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=r"^" + re.escape(message)) as caught:
        decode_image(data)
    assert caught.value.reason == message.partition(":")[0]


PNGS: dict[str, bytes] = {
    "colour": encode(picture(20), "PNG"),
    "alpha": encode(np.dstack([picture(21), picture(22)[:, :, 0]]), "PNG"),
    "palette": encode(Image.fromarray(picture(23)).quantize(16), "PNG"),
    "deep": encode(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100, "PNG"),
}


def decode_or_refuse(data: bytes) -> Decoded | DecodeError:
    try:
        return decode_image(data)
    except DecodeError as error:
        return error


def same_or_refused(data: bytes, expected: NDArray[np.uint8], what: str) -> None:
    outcome = decode_or_refuse(data)
    if isinstance(outcome, Decoded):
        np.testing.assert_array_equal(outcome.pixels, expected, err_msg=what)


each_png = pytest.mark.parametrize("kind", PNGS)


@each_png
@pytest.mark.parametrize("twentieth", range(1, 20))
def test_a_truncated_png_is_refused(kind: str, twentieth: int) -> None:
    data = PNGS[kind]
    with pytest.raises(DecodeError):
        decode_image(data[: len(data) * twentieth // 20])


def test_a_png_cut_at_any_byte_is_refused_or_the_same() -> None:
    pixels = picture(26, 8, 9)
    data = encode(pixels, "PNG")
    for length in range(len(data)):
        same_or_refused(data[:length], pixels, f"cut at {length}")
    with pytest.raises(DecodeError, match=r"^damaged: "):
        decode_image(data[:-8])


def test_a_webp_cut_at_any_byte_is_refused() -> None:
    data = encode(picture(24, 10, 12), "WEBP", lossless=True)
    for length in range(12, len(data)):
        with pytest.raises(DecodeError, match=f"^damaged: expected {len(data)} bytes, found {length}"):
            decode_image(data[:length])


def test_a_png_with_any_one_bit_flipped_is_refused_or_the_same() -> None:
    pixels = picture(25, 8, 9)
    data = encode(pixels, "PNG")
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            same_or_refused(bytes(damaged), pixels, f"byte {position}, bit {bit}")


@each_png
def test_a_png_with_a_zeroed_stretch_is_refused_or_the_same(kind: str) -> None:
    data = PNGS[kind]
    expected = decode_image(data).pixels
    for start in range(0, len(data), 16):
        same_or_refused(data[:start] + bytes(16) + data[start + 16 :], expected, f"zeros from byte {start}")


# --- bombs ------------------------------------------------------------------------------------------------------------


def jpeg_of_size(width: int, height: int, **options: Any) -> bytes:
    data = encode(picture(30, 16, 16), "JPEG", **options)
    frame = re.search(rb"\xff[\xc0\xc2]\0\x11\x08(.{4})", data, re.DOTALL)
    assert frame
    return data[: frame.start(1)] + struct.pack(">HH", height, width) + data[frame.end(1) :]


def png_of_size(width: int, height: int) -> bytes:
    return raw_png(width, height, 8, 2, bytes(100))


def webp_of_size(width: int, height: int) -> bytes:
    """An animation whose canvas is as large as said, with one frame of 16 x 16."""
    frame = encode(picture(31, 16, 16), "WEBP", lossless=True)[12:]
    chunk = struct.pack("<II", 0, 0)[:6] + b"\x0f\0\0" * 2 + b"\x64\0\0\0" + frame
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + canvas
    body += b"ANIM" + struct.pack("<I", 6) + bytes(6) + b"ANMF" + struct.pack("<I", len(chunk)) + chunk
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_the_bombs_would_be_sound_if_small() -> None:
    assert decode_image(webp_of_size(16, 16)).pixels.shape == (16, 16, 3)
    assert decode_image(jpeg_of_size(16, 16)).pixels.shape == (16, 16, 3)
    assert decode_image(jpeg_of_size(16, 16, progressive=True)).pixels.shape == (16, 16, 3)
    assert decode_image(png_of_size(4, 4)).pixels.shape == (4, 4, 3)


@pytest.mark.parametrize("size", [(9460, 9460), (65500, 65500), (65535, 1366), (1366, 65535)])
@pytest.mark.parametrize("make", [jpeg_of_size, png_of_size, webp_of_size])
def test_headers_that_claim_too_many_pixels_are_refused_before_a_decoder_is_asked(
    make: Callable[[int, int], bytes], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*args: object, **options: object) -> None:
        raise RuntimeError("a decoder was asked")

    for decoder in ("simplejpeg.decode_jpeg", "PIL.ImageFile.ImageFile.load", "PIL._webp.WebPAnimDecoder"):
        monkeypatch.setattr(decoder, decode)
    with pytest.raises(DecodeError, match="a decoder was asked"):
        decode_image(make(16, 16))
    message = f"^too large: expected at most {MAX_PIXELS} pixels, found {size[0]} x {size[1]}$"
    with pytest.raises(DecodeError, match=message):
        decode_image(make(*size))


@pytest.mark.parametrize("width", [1 << 31, (1 << 31) - 1, 1 << 30])
def test_a_png_of_absurd_width_is_refused(width: int) -> None:
    with pytest.raises(DecodeError, match=r"^(too large|damaged): "):
        decode_image(png_of_size(width, 1))


@pytest.mark.parametrize(
    "data",
    [jpeg_of_size(9400, 9400), jpeg_of_size(9400, 7000, progressive=True), png_of_size(9400, 9400)],
    ids=["JPEG", "progressive JPEG", "PNG"],
)
def test_headers_just_below_the_limit_need_bounded_memory(data: bytes) -> None:
    outcome, peak = decode_apart(data)
    assert outcome.startswith("damaged: ")
    assert peak < 1024


def test_a_large_picture_with_alpha_needs_at_most_24_bytes_a_pixel() -> None:
    # An animation need not cover its canvas: this one is a sound picture of a small square in the corner.
    outcome, peak = decode_apart(webp_of_size(4700, 4700))
    assert outcome == "4700 4700 "
    assert peak < 100 + 24 * 4700 * 4700 / (1 << 20)


def test_a_png_with_a_text_chunk_that_expands_is_refused() -> None:
    text = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(64 << 20)))
    with pytest.raises(DecodeError, match=r"^(damaged|too large): "):
        decode_image(raw_png(2, 2, 8, 2, bytes(14), text))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("make", [jpeg_of_size, png_of_size])
def test_headers_that_claim_no_pixels_are_refused(make: Callable[[int, int], bytes], size: tuple[int, int]) -> None:
    with pytest.raises(DecodeError, match=r"^damaged: "):
        decode_image(make(*size))


def test_check_pixels_takes_exactly_up_to_the_limit() -> None:
    check_pixels(1, 1)
    check_pixels(MAX_PIXELS, 1)
    check_pixels(1, MAX_PIXELS)
    for width, height in ((MAX_PIXELS + 1, 1), (1, MAX_PIXELS + 1), (9460, 9460)):
        message = f"^too large: expected at most {MAX_PIXELS} pixels, found {width} x {height}"
        with pytest.raises(DecodeError, match=message):
            check_pixels(width, height)
    with pytest.raises(DecodeError, match=r"^damaged: the header claims 0 x 7 pixels"):
        check_pixels(0, 7)


def test_a_decoder_that_lacks_memory_refuses_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_jpeg(*args: object, **options: object) -> None:
        raise MemoryError("12 GiB")

    monkeypatch.setattr("simplejpeg.decode_jpeg", decode_jpeg)
    with pytest.raises(DecodeError, match=r"^too large: no memory to decode it: 12 GiB"):
        decode_image(encode(picture(), "JPEG"))


@pytest.mark.parametrize("error", [ValueError, OSError, SyntaxError, EOFError, struct.error, IndexError, KeyError])
def test_whatever_a_decoder_raises_becomes_a_decode_error(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def load(self: Image.Image) -> None:
        raise error("odd")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(DecodeError, match=f"^damaged: {error.__name__}: .*odd"):
        decode_image(PNGS["colour"])


# --- mutations --------------------------------------------------------------------------------------------------------

SEEDS: dict[str, list[bytes]] = {
    "JPEG": [
        encode(picture(40, 24, 31), "JPEG"),
        encode(picture(41, 24, 31), "JPEG", progressive=True),
        encode(Image.fromarray(picture(42, 24, 31)).convert("CMYK"), "JPEG"),
        encode(Image.fromarray(picture(43, 24, 31)).convert("L"), "JPEG", restart_marker_rows=1),
    ],
    "PNG": [encode(picture(44, 12, 15), "PNG"), *PNGS.values()],
    "WebP": [
        encode(picture(45, 24, 31), "WEBP"),
        encode(picture(46, 24, 31), "WEBP", lossless=True),
        encode(np.dstack([picture(47, 24, 31), picture(48, 24, 31)[:, :, :1]]), "WEBP"),
        webp_of_size(16, 16),
    ],
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", SEEDS)
def test_mutated_images_give_a_picture_of_the_claimed_size_or_a_decode_error(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    refused = 0
    for i in range(50):
        seeds = SEEDS[kind]
        data = mutate(rng, seeds[i % len(seeds)], seeds[(i + 1) % len(seeds)])
        outcome = decode_or_refuse(data)
        if isinstance(outcome, DecodeError):
            assert outcome.reason in ("damaged", "too large", "unsupported", "empty"), (seed, i)
            assert outcome.detail, (seed, i)
            refused += 1
        else:
            assert outcome.pixels.dtype == np.uint8, (seed, i)
            assert outcome.pixels.shape[2:] == (3,), (seed, i)
            assert outcome.pixels.shape[:2] in claimed_sizes(data), (seed, i)
    assert refused > 10  # or these are no mutations
