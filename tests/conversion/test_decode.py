"""Encoded bytes -> pixels: the right picture or a DecodeError, nothing else, and nothing printed."""

from __future__ import annotations

import ast
import csv
import io
import pickle
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import decode_or_refuse
from numpy.typing import NDArray
from pictures import encode, random_picture
from PIL import Image, ImageOps
from places import DATA, SHARED

from shardio.conversion.images.decode import DecodedImage, decode_image, parse_color
from shardio.conversion.images.headers import MAX_PIXELS, MAX_SIDE_PIXELS, check_pixels
from shardio.errors import DecodeError

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


pytestmark = pytest.mark.usefixtures("nothing_printed")


def picture(seed: int = 0, height: int = 33, width: int = 47) -> NDArray[np.uint8]:
    return random_picture(np.random.default_rng(seed), height, width)


BEHIND = (200, 100, 50)


def over(rgb: NDArray[Any], alpha: NDArray[Any], behind: tuple[int, int, int] = BEHIND) -> NDArray[np.float64]:
    """Lays a color over a background. Color and alpha are from 0 to 1, the result from 0 to 255."""
    return np.asarray((rgb * alpha + np.array(behind) / 255 * (1 - alpha)) * 255)


# --- the collection of odd and damaged images -------------------------------------------------------------------------


MANIFEST = SHARED / "badimages" / "manifest.csv"
ROWS = csv.DictReader(MANIFEST.read_text().splitlines() if MANIFEST.exists() else ())
LISTED = {row["file"]: row for row in ROWS}
# The list was written when a GIF was refused, and before the first picture of several came with a warning.
SEVERAL = {"animated.gif": "ok-warn", "apng_num_plays.png": "ok-warn"} if LISTED else {}
EXPECTED = {name: row["expected"] for name, row in LISTED.items()} | SEVERAL

# The reason why an image is refused. Images that are not listed here are damaged.
REASONS = {
    "monkey12.jpg": "unsupported",
    "made_html_404.JPEG": "unsupported",
    "decompression_bomb.gif": "too large",
    "made_zero_byte.JPEG": "empty",
    "made_bomb_65500.jpg": "too large",
    "made_bomb_3000scans.jpg": "too large",
    "made_bomb_2e9.png": "too large",
    "made_bomb_13300.png": "too large",
    "png_decompression_dos.png": "too large",
}


def reference(data: bytes) -> NDArray[np.float64]:
    """Returns Pillow's picture of the image: transparency lies over white, and 16 bits become 8 without clipping."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        if image.mode == "I;16":
            return np.repeat(np.asarray(image)[:, :, None] / 257, 3, axis=2)
        if image.has_transparency_data:
            rgba = np.asarray(image.convert("RGBA"))
            return over(rgba[:, :, :3] / 255, rgba[:, :, 3:] / 255, (255, 255, 255))
        return np.asarray(image.convert("RGB")).astype(float)


# Under a limit of 3 GiB of address space, each image in a process of its own: "<height> <width> <warning>", or the
# reason of the refusal and its detail; and the most MiB of memory that it took.
_DECODE_APART = """
import os, pickle, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from shardio.conversion.images.decode import decode_image
from shardio.errors import DecodeError
def peak():
    # Not getrusage, which knows the peak of the process that started this one.
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
for data in pickle.load(sys.stdin.buffer):
    if not os.fork():
        before = peak()
        try:
            decoded = decode_image(data)
            outcome = " ".join(map(str, (*decoded.pixels.shape[:2], decoded.warning)))
        except DecodeError as error:
            outcome = str(error)
        print(repr((outcome, (peak() - before) // 1024)), flush=True)
        os._exit(0)
    os.wait()
"""


def decode_apart(*images: bytes) -> list[tuple[str, int]]:
    """Decodes in processes of their own, for bombs. Returns the outcome of each image, and the MiB that it took."""
    command = [sys.executable, "-W", "error", "-c", _DECODE_APART]
    done = subprocess.run(command, input=pickle.dumps(images), capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    found = [ast.literal_eval(line) for line in done.stdout.decode().splitlines()]
    assert len(found) == len(images)
    return found


@pytest.mark.parametrize("name", [name for name in EXPECTED if EXPECTED[name] == "bad" and "bomb" not in name])
def test_each_bad_image_is_refused_for_its_reason(bad_images: Path, name: str) -> None:
    with pytest.raises(DecodeError, match=f"^{REASONS.get(name, 'damaged')}: .+"):
        decode_image((bad_images / name).read_bytes())


@pytest.mark.filterwarnings("ignore:Truncated File Read:UserWarning")  # older Pillow, of EXIF, in `reference`
@pytest.mark.parametrize("name", [name for name in EXPECTED if EXPECTED[name].startswith("ok")])
def test_each_good_image_gives_its_picture(bad_images: Path, name: str) -> None:
    data = (bad_images / name).read_bytes()
    decoded = decode_image(data)
    assert decoded.pixels.dtype == np.uint8
    height, width, _ = decoded.pixels.shape
    assert LISTED[name]["pillow_13.0.0"].removesuffix(" +warning") == f"ok {width}x{height}"
    steps = 2 if data.startswith(b"\xff\xd8") else 1
    assert np.abs(decoded.pixels - reference(data)).max() <= steps
    assert bool(decoded.warning) == (EXPECTED[name] == "ok-warn")
    upright = decode_image(data, exif_rotate=True).pixels
    with Image.open(io.BytesIO(data)) as image:
        if image.getexif().get(0x0112, 1) != 1:
            shown = np.asarray(ImageOps.exif_transpose(image).convert("RGB")).astype(int)
            assert np.abs(upright - shown).max() <= steps


def test_each_bomb_is_refused_in_bounded_memory(bad_images: Path) -> None:
    names = [name for name in EXPECTED if "bomb" in name]
    assert {EXPECTED[name] for name in names} == {"bad"}
    found = decode_apart(*((bad_images / name).read_bytes() for name in names))
    for name, (outcome, peak) in zip(names, found, strict=True):
        assert re.match(f"{REASONS.get(name, 'damaged')}: ", outcome), (name, outcome)
        assert "no memory" not in outcome
        assert peak < 1024, name


# --- every kind that is taken -----------------------------------------------------------------------------------------


CMYK = {"mode": "CMYK", "subsampling": 0}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"subsampling": 0}), ("JPEG", {"quality": 30})),
        *(("JPEG", {"restart_marker_rows": 1}), ("WEBP", {"quality": 80})),
        *(("JPEG", CMYK | {"quality": quality, "progressive": p}) for quality in (60, 95) for p in (False, True)),
    ],
)
def test_lossy_images_decode_as_with_pillow(kind: str, options: dict[str, Any]) -> None:
    pixels = picture(2) if "mode" not in options else np.dstack([picture(18), picture(19)[:, :, 0]])
    data = encode(Image.fromarray(pixels, options.pop("mode", None)), kind, **options)
    assert np.abs(decode_image(data).pixels - reference(data)).max() <= (2 if kind == "JPEG" else 0)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(
    width: int, height: int, depth: int, color: int, rows: bytes, *chunks: bytes, interlaced: bool = False
) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced))
    ends = png_chunk(b"IDAT", zlib.compress(rows, 1)), png_chunk(b"IEND", b"")
    return PNG_MAGIC + b"".join((head, *chunks, *ends))


# Adam7: the first column and row of each pass, and the steps between columns and between rows.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png_of(values: NDArray[Any], depth: int, color_type: int, *chunks: bytes, interlaced: bool = False) -> bytes:
    """A PNG of these channel values, (height, width, channels), each of so many bits; filter 0 in every row."""
    height, width, _ = values.shape

    def rows(part: NDArray[Any]) -> bytes:
        if depth == 16:
            packed = part.astype(">u2").reshape(len(part), -1).view(np.uint8)
        else:
            bits = np.unpackbits(part.astype(np.uint8).reshape(len(part), -1, 1), axis=2)[:, :, 8 - depth :]
            packed = np.packbits(bits.reshape(len(part), -1), axis=1)
        return np.hstack([np.zeros((len(part), 1), np.uint8), packed]).tobytes()

    parts = [values[top::down, left::right] for left, top, right, down in _PASSES] if interlaced else [values]
    data = b"".join(rows(part) for part in parts if part.size)
    return raw_png(width, height, depth, color_type, data, *chunks, interlaced=interlaced)


GRAY, COLOR, PALETTE, GRAY_ALPHA, COLOR_ALPHA = 0, 2, 3, 4, 6
CHANNELS = {GRAY: 1, COLOR: 3, PALETTE: 1, GRAY_ALPHA: 2, COLOR_ALPHA: 4}
DEPTHS = {GRAY: (1, 2, 4, 8, 16), COLOR: (8, 16), PALETTE: (1, 2, 4, 8), GRAY_ALPHA: (8, 16), COLOR_ALPHA: (8, 16)}


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("kind", "depth"), [(kind, depth) for kind in CHANNELS for depth in DEPTHS[kind]])
def test_every_kind_of_png_gives_the_picture_that_its_values_mean(kind: int, depth: int, interlaced: bool) -> None:
    rng = np.random.default_rng([kind, depth])
    colors = rng.integers(0, 256, (1 << min(depth, 8), 3), dtype=np.uint8)
    most = (1 << depth) - 1
    for height, width in ((1, 1), (1, 9), (5, 3), (23, 31)):
        values = rng.integers(0, most + 1, (height, width, CHANNELS[kind]))
        if kind == PALETTE:
            data = png_of(values, depth, kind, png_chunk(b"PLTE", colors.tobytes()), interlaced=interlaced)
            expected = colors[values[:, :, 0]].astype(float)
        else:
            data = png_of(values, depth, kind, interlaced=interlaced)
            alpha = values[:, :, -1:] / most if kind in (GRAY_ALPHA, COLOR_ALPHA) else np.ones((height, width, 1))
            rgb = values[:, :, : 3 if kind in (COLOR, COLOR_ALPHA) else 1] / most
            expected = over(rgb, alpha)
        pixels = decode_image(data, background=BEHIND).pixels
        assert pixels.shape == (height, width, 3)
        # The upper 8 of 16 bits of color, or of gray with alpha, are kept, and then two values are multiplied.
        steps = 0.5 if CHANNELS[kind] == 1 else 1 if depth == 8 or kind == COLOR else 2.5
        assert np.abs(pixels - expected).max() <= steps


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_one_transparent_gray_is_laid_over_the_background_for_every_value(depth: int) -> None:
    most = (1 << depth) - 1
    values = np.arange(most + 1).reshape(-1, min(most + 1, 256), 1)
    for transparent in {0, 1, most // 2, most - 1, most}:
        data = png_of(values, depth, GRAY, png_chunk(b"tRNS", struct.pack(">H", transparent)))
        pixels = decode_image(data, background=BEHIND).pixels
        np.testing.assert_array_equal((pixels == BEHIND).all(axis=2), values[:, :, 0] == transparent)
        opaque = values[:, :, 0] != transparent
        np.testing.assert_array_equal(pixels[opaque], decode_image(png_of(values, depth, GRAY)).pixels[opaque])


def test_one_transparent_color_is_laid_over_the_background() -> None:
    values = np.stack(np.meshgrid(*[np.arange(0, 256, 51)] * 3), axis=-1).reshape(6, -1, 3)
    data = png_of(values, 8, COLOR, png_chunk(b"tRNS", struct.pack(">HHH", 51, 102, 255)))
    pixels = decode_image(data, background=BEHIND).pixels
    transparent = (values == (51, 102, 255)).all(axis=2)
    assert transparent.sum() == 1
    np.testing.assert_array_equal(pixels, np.where(transparent[:, :, None], BEHIND, values))


def test_one_transparent_color_of_16_bits_is_refused_for_it_cannot_be_told_from_its_neighbors() -> None:
    values = np.array([[[0x1234, 0x5678, 0x9ABC], [0x1235, 0x5678, 0x9ABC]]])
    data = png_of(values, 16, COLOR, png_chunk(b"tRNS", struct.pack(">HHH", *values[0, 0].tolist())))
    with pytest.raises(DecodeError, match=r"^unsupported: expected no transparent color .* 16-bit color"):
        decode_image(data)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palette_entries_are_as_transparent_as_they_say(depth: int) -> None:
    rng = np.random.default_rng(depth)
    count = 1 << depth
    colors = rng.integers(0, 256, (count, 3), dtype=np.uint8)
    values = rng.integers(0, count, (20, 30, 1))
    for told in {1, count // 2, count}:  # entries behind those that tRNS tells of are opaque
        alpha = np.full(count, 255)
        alpha[:told] = rng.integers(0, 256, told)
        chunks = png_chunk(b"PLTE", colors.tobytes()), png_chunk(b"tRNS", bytes(alpha[:told].tolist()))
        pixels = decode_image(png_of(values, depth, PALETTE, *chunks), background=BEHIND).pixels
        expected = over(colors[values[:, :, 0]] / 255, alpha[values] / 255)
        assert np.abs(pixels - expected).max() <= 1


@pytest.mark.parametrize("colors", [0, 1, 6])
def test_pixels_without_a_color_in_the_palette_are_refused_and_not_shown_black(colors: int) -> None:
    palette = png_chunk(b"PLTE", bytes(range(3 * colors))) if colors else b""
    whole = np.arange(colors).reshape(1, -1, 1)
    if colors:
        assert decode_image(png_of(whole, 8, PALETTE, palette)).pixels.shape == (1, colors, 3)
    beyond = np.append(whole, [[[colors]]], axis=1)
    with pytest.raises(DecodeError, match=f"^damaged: expected palette indices below {colors}, found {colors}"):
        decode_image(png_of(beyond, 8, PALETTE, palette))


# --- the right way up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_where_it_is_asked_for(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = picture(9, 16, 40)
    data = encode(pixels, kind, lossless=True, exif=exif)
    stored = decode_image(encode(pixels, kind, lossless=True)).pixels
    np.testing.assert_array_equal(decode_image(data).pixels, stored)  # by default
    pixels = decode_image(data, exif_rotate=True).pixels
    assert pixels.flags.c_contiguous
    with Image.open(io.BytesIO(data)) as image:
        shown = np.asarray(ImageOps.exif_transpose(image).convert("RGB")).astype(int)
    assert pixels.shape == shown.shape
    assert np.abs(pixels - shown).max() <= (2 if kind == "JPEG" else 0)


@pytest.mark.parametrize("block", [b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0" + bytes(500)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_broken_exif_block_does_no_harm(kind: str, block: bytes) -> None:
    pixels = picture(9, 16, 40)
    plain = decode_image(encode(pixels, kind, lossless=True))
    decoded = decode_image(encode(pixels, kind, lossless=True, exif=block), exif_rotate=True)
    assert decoded.warning == ""
    np.testing.assert_array_equal(decoded.pixels, plain.pixels)


# --- backgrounds ------------------------------------------------------------------------------------------------------


def test_transparency_of_a_webp_is_laid_over_the_background() -> None:
    rgb, alpha = picture(14), picture(15)[:, :, 0]
    alpha[:5], alpha[-5:] = 0, 255
    data = encode(np.dstack([rgb, alpha]), "WEBP", lossless=True, exact=True)
    pixels = decode_image(data, background=BEHIND).pixels
    assert np.abs(pixels - over(rgb / 255, alpha[:, :, None] / 255)).max() <= 1
    assert (pixels[:5] == BEHIND).all()
    np.testing.assert_array_equal(pixels[-5:], rgb[-5:])


def test_colors_are_written_in_three_ways() -> None:
    assert [parse_color(text) for text in ("white", "Black", "rebeccapurple")] == [(255,) * 3, (0,) * 3, (102, 51, 153)]
    assert [parse_color(text) for text in ("#102030", "#FFfFff")] == [(16, 32, 48), (255, 255, 255)]
    assert [parse_color(text) for text in ("1,2,3", " 255, 0, 255 ")] == [(1, 2, 3), (255, 0, 255)]


def test_what_is_no_color_is_refused() -> None:
    texts = ("", "whitish", "#fff", "#12345", "#1234567", "#10203040", "1,2", "1,2,3,4", "1,2,256", "-1,2,3", "1.0,2,3")
    for text in (*texts, "rgb(1,2,3)", "hsl(0,0%,0%)", "\u0661,2,3", "1000000000000000000000,0,0"):
        with pytest.raises(ValueError, match="expected a color"):
            parse_color(text)


# --- rarer kinds ------------------------------------------------------------------------------------------------------

JPEGS = DATA / "jpeg"


@pytest.mark.parametrize("name", ["arithmetic.jpg", "arithmetic-progressive.jpg"])
def test_arithmetic_coded_jpeg_decodes_as_with_pillow_and_cut_short_is_refused(name: str) -> None:
    data = (JPEGS / name).read_bytes()
    assert np.abs(decode_image(data).pixels - reference(data)).max() <= 2
    for twentieth in range(20):
        with pytest.raises(DecodeError, match=r"^(damaged|empty): "):
            decode_image(data[: len(data) * twentieth // 20])


def test_jpeg_whose_sampling_has_no_name_is_unsupported_and_not_left_to_a_lenient_decoder() -> None:
    # The image is sound, and Pillow decodes it. But Pillow would also decode it when it is damaged.
    data = (JPEGS / "odd-sampling.jpg").read_bytes()
    assert reference(data).shape == (24, 40, 3)
    with pytest.raises(DecodeError, match=r"^unsupported: .*subsampling"):
        decode_image(data)


@pytest.mark.parametrize("progressive", [False, True])
def test_adobe_ycck_gets_the_colors_of_its_inks(progressive: bool) -> None:
    # Pillow writes CMYK, inverted, as Adobe does. Told to be YCCK, the first three planes are those of YCbCr; they are
    # of R, G and B, where R is 255 less the cyan that a reader must find inverted: the cyan itself.
    rng = np.random.default_rng(17)
    for inks in rng.integers(0, 256, (10, 4)):
        cyan, magenta, yellow, black = (int(ink) for ink in inks)
        luma = Image.new("RGB", (24, 16), (cyan, magenta, yellow)).convert("YCbCr")
        planes = [Image.eval(plane, lambda value: 255 - value) for plane in luma.split()]
        image = Image.merge("CMYK", (*planes, Image.new("L", (24, 16), black)))
        data = encode(image, "JPEG", quality=100, subsampling=0, progressive=progressive)
        adobe = data.index(b"Adobe") + 11
        assert data[adobe] == 0
        data = data[:adobe] + b"\x02" + data[adobe + 1 :]
        expected = (255 - np.array([cyan, magenta, yellow])) * (255 - black) / 255
        assert np.abs(decode_image(data).pixels - expected).max() <= 4, inks


def test_the_first_picture_of_an_mpo_is_taken() -> None:
    frames = [Image.fromarray(picture(seed, 24, 32)) for seed in (27, 28)]
    data = encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.n_frames) == ("MPO", 2)
        expected = np.asarray(image.convert("RGB")).astype(int)
    decoded = decode_image(data)
    assert decoded.warning == ""
    assert np.abs(decoded.pixels - expected).max() <= 2


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
            asked: list[tuple[int, int]] = []
            decoded = decode_image(data, least_size=lambda *size: (asked.append(size), least)[1])  # noqa: B023
            assert asked == [(height, width)]
            assert decoded.reduction == expected, (height, width, least)
            assert decoded.source_size == (height, width)
            assert decoded.pixels.shape == (-(-height // expected), -(-width // expected), 3)
            if expected == 1:
                np.testing.assert_array_equal(decoded.pixels, whole.pixels)
        for tenth in range(1, 10):
            with pytest.raises(DecodeError):
                decode_image(data[: len(data) * tenth // 10], least_size=lambda *size: (8, 8))
    assert decode_image(encode(picture(5), "PNG"), least_size=lambda *size: (1, 1)).pixels.shape == (33, 47, 3)


def test_what_is_turned_is_not_reduced() -> None:
    """The last pixels of a reduced picture stand for fewer of the image, and would become the first."""
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encode(picture(1, 65, 127), "JPEG", exif=exif)
        decoded = decode_image(data, exif_rotate=True, least_size=lambda *size: (8, 8))
        assert decoded.reduction == (8 if orientation == 1 else 1)
        assert decoded.source_size == ((65, 127) if orientation < 5 else (127, 65))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_gray_and_cmyk_jpegs_are_decoded_and_reduced_too(mode: str) -> None:
    data = encode(Image.fromarray(picture(4, 160, 240)).convert(mode), "JPEG", quality=95)
    whole, reduced = decode_image(data).pixels, decode_image(data, least_size=lambda *size: (20, 20)).pixels
    assert np.abs(whole - reference(data)).max() <= 2
    assert reduced.shape == (20, 30, 3)
    assert np.abs(reduced - whole.reshape(20, 8, 30, 8, 3).mean((1, 3))).mean() < 4


def test_a_picture_behind_a_mended_header_is_turned_and_reduced_as_any_other() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(picture(7, 64, 72), "JPEG", exif=exif)
    tables = data.index(b"\xff\xdb")
    ways: dict[tuple[int, int], dict[str, Any]] = {
        (72, 64): {"exif_rotate": True},
        (64, 72): {"least_size": lambda *size: (8, 8)},
    }
    for source_size, options in ways.items():
        sound = decode_image(data, **options)
        decoded = decode_image(data[:tables] + b"junk" + data[tables:], **options)
        assert (sound.warning, decoded.warning.partition(":")[0]) == ("", "junk in the header left out")
        assert decoded.source_size == source_size
        np.testing.assert_array_equal(decoded.pixels, sound.pixels)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_bytes_after_the_end_are_no_part_of_the_picture(kind: str) -> None:
    data = encode(picture(13), kind, lossless=True)
    gain_map = encode(Image.fromarray(picture(29)[::2, ::2, 0]), "JPEG")
    for more in (bytes(100), gain_map, gain_map[:-1], gain_map[:-50]):
        decoded = decode_image(data + more)
        assert decoded.warning == ""
        np.testing.assert_array_equal(decoded.pixels, decode_image(data, background=(0, 0, 0)).pixels)


# --- what is refused --------------------------------------------------------------------------------------------------

UNSUPPORTED = "unsupported: expected a JPEG, PNG, WebP, GIF, TIFF, AVIF, BMP or PPM, found"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty: the file has no bytes"),
        (b"II+\0\x08\0\0\0" + bytes(8), f"{UNSUPPORTED} a BigTIFF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", f"{UNSUPPORTED} a HEIC"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", f"{UNSUPPORTED} a JPEG 2000"),
        (b"\xff\x0a" + bytes(50), f"{UNSUPPORTED} a JPEG XL"),
        (encode(Image.new("RGB", (9, 9)), "TGA"), f"{UNSUPPORTED} a TGA"),
        (encode(Image.new("RGB", (9, 9)), "PCX"), f"{UNSUPPORTED} a PCX"),
        (encode(Image.new("RGB", (9, 9)), "ICO"), f"{UNSUPPORTED} an ICO"),
        (encode(Image.new("RGB", (9, 9)), "DDS"), f"{UNSUPPORTED} a DDS"),
        (b'<?xml version="1.0"?>\n<svg ', f"{UNSUPPORTED} an SVG"),
        (b"%PDF-1.7\n", f"{UNSUPPORTED} a PDF"),
        (b"PK\x03\x04rest", f"{UNSUPPORTED} a zip archive"),
        (b"\x1f\x8b\x08", f"{UNSUPPORTED} a gzip file"),
        (b"<!DOCTYPE html>\n<p>404", f"{UNSUPPORTED} text (an error page"),
        (b"\r\n <html>", f"{UNSUPPORTED} text (an error page"),
        (b'{"error": 403}', f"{UNSUPPORTED} text (an error page"),
        (b"\0" * 1000, f"{UNSUPPORTED} something else"),
        (b"\xff\xd8", f"{UNSUPPORTED} something else"),
        (b"RIFF\x04\0\0\0WAVE", f"{UNSUPPORTED} something else"),
        (b"a", f"{UNSUPPORTED} something else"),
        (b"BMW: the password of the garage is 1234", f"{UNSUPPORTED} something else"),
        (b"P1 password 1234", "damaged: expected a PPM, found an invalid header or invalid numbers"),
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
    "interlaced": png_of(picture(20).astype(int), 8, COLOR, interlaced=True),
    "animated": encode(
        Image.fromarray(picture(20)), "PNG", save_all=True, append_images=[Image.fromarray(picture(21))], duration=40
    ),
    "color": encode(picture(20), "PNG"),
    "alpha": encode(np.dstack([picture(21), picture(22)[:, :, 0]]), "PNG"),
    "palette": encode(Image.fromarray(picture(23)).quantize(16), "PNG"),
    "deep": encode(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100, "PNG"),
}


def same_or_refused(data: bytes, expected: NDArray[np.uint8], what: str) -> None:
    outcome = decode_or_refuse(data)
    if isinstance(outcome, DecodedImage):
        np.testing.assert_array_equal(outcome.pixels, expected, err_msg=what)


WEBPS: dict[str, bytes] = {
    "lossy": encode(picture(20), "WEBP"),
    "lossless": encode(picture(20), "WEBP", lossless=True),
    "WebP with alpha": encode(np.dstack([picture(21), picture(22)[:, :, 0]]), "WEBP"),
    "animated WebP": encode(
        Image.fromarray(picture(20)), "WEBP", save_all=True, append_images=[Image.fromarray(picture(21))], duration=40
    ),
}


@pytest.mark.parametrize("kind", [*PNGS, *WEBPS])
def test_a_truncated_png_or_webp_is_refused(kind: str) -> None:
    data = (PNGS | WEBPS)[kind]
    for twentieth in range(1, 20):
        with pytest.raises(DecodeError):
            decode_image(data[: len(data) * twentieth // 20])


@pytest.mark.parametrize("strip_pixels", [1, 47, 200, 33 * 47 - 1])
def test_pictures_are_the_same_however_few_rows_are_converted_at_a_time(
    strip_pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [*PNGS.values(), *WEBPS.values(), encode(Image.fromarray(picture(23)).quantize(9), "PNG", transparency=3)]
    whole = [decode_image(data, background=BEHIND).pixels for data in images]
    monkeypatch.setattr("shardio.conversion.images.decode._STRIP_PIXELS", strip_pixels)
    for data, expected in zip(images, whole, strict=True):
        np.testing.assert_array_equal(decode_image(data, background=BEHIND).pixels, expected)


def test_a_png_or_webp_cut_at_any_byte_is_refused_or_the_same() -> None:
    pixels = picture(26, 8, 9)
    data = encode(pixels, "PNG")
    for length in range(len(data)):
        same_or_refused(data[:length], pixels, f"cut at {length}")
    with pytest.raises(DecodeError, match=r"^damaged: "):
        decode_image(data[:-8])
    data = encode(pixels, "WEBP", lossless=True)
    for length in range(12, len(data)):
        with pytest.raises(DecodeError, match=f"^damaged: expected {len(data)} bytes, .* found {length}"):
            decode_image(data[:length])


def test_a_png_with_any_one_bit_flipped_is_refused_or_the_same() -> None:
    pixels = picture(25, 8, 9)
    data = encode(pixels, "PNG")
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            same_or_refused(bytes(damaged), pixels, f"byte {position}, bit {bit}")


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


@pytest.mark.parametrize("make", [jpeg_of_size, png_of_size, webp_of_size])
def test_headers_that_claim_too_many_pixels_are_refused_before_a_decoder_is_asked(
    make: Callable[[int, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*args: object, **options: object) -> None:
        raise RuntimeError("a decoder was asked")

    assert decode_image(make(16, 16) if make is not png_of_size else make(4, 4)).warning == ""  # sound if small
    for decoder in ("simplejpeg.decode_jpeg", "PIL.ImageFile.ImageFile.load", "PIL._webp.WebPAnimDecoder"):
        monkeypatch.setattr(decoder, decode)
    with pytest.raises(DecodeError, match="a decoder was asked"):
        decode_image(make(16, 16))
    for size in ((9460, 9460), (1366, 65535)):
        message = f"^too large: expected at most {MAX_PIXELS} pixels, found {size[0]} x {size[1]}$"
        with pytest.raises(DecodeError, match=message):
            decode_image(make(*size))
    for none in ((0, 5), (5, 0), (0, 0)):
        if make is not webp_of_size:  # which stores the size minus one
            with pytest.raises(DecodeError, match=r"^damaged: "):
                decode_image(make(*none))


def test_sizes_are_taken_exactly_up_to_the_limits() -> None:
    for width, height in ((1, 1), (MAX_PIXELS // 100, 100), (100, MAX_PIXELS // 100)):
        check_pixels(width, height)
    check_pixels(MAX_SIDE_PIXELS, 1)
    check_pixels(1, MAX_SIDE_PIXELS)
    for width, height in ((MAX_PIXELS // 100 + 1, 100), (100, MAX_PIXELS // 100 + 1), (MAX_PIXELS + 1, 1)):
        with pytest.raises(DecodeError, match=f"^too large: .*{MAX_PIXELS} pixels, found {width} x {height}"):
            check_pixels(width, height)
    for width, height in ((MAX_SIDE_PIXELS + 1, 1), (1, MAX_SIDE_PIXELS + 1)):
        with pytest.raises(DecodeError, match=f"^too large: .*sides.*{MAX_SIDE_PIXELS} pixels, found {width} x"):
            check_pixels(width, height)
    with pytest.raises(DecodeError, match=r"^damaged: .*0 x 7"):
        check_pixels(0, 7)
    for absurd in (1 << 31, (1 << 31) - 1, 1 << 30):
        with pytest.raises(DecodeError, match=r"^(too large|damaged): "):
            decode_image(png_of_size(absurd, 1))


def large_picture(channels: int) -> NDArray[np.uint8]:
    small = np.random.default_rng(32).integers(0, 256, (100, 100, channels), dtype=np.uint8)
    return np.ascontiguousarray(np.kron(small, np.ones((16, 16, 1), np.uint8)))


def large_images() -> list[bytes]:
    """For each kind of image the one of 1600 x 1600 that takes most."""
    color, other = Image.fromarray(large_picture(4)), Image.fromarray(large_picture(4)[::-1])
    return [
        encode(Image.fromarray(large_picture(4), "CMYK"), "JPEG", progressive=True, subsampling=0),
        png_of(np.random.default_rng(33).integers(0, 4, (1600, 1600, 4)) << 14, 16, 6, interlaced=True),
        encode(Image.fromarray(large_picture(3)).quantize(200), "PNG", transparency=bytes(range(200))),
        encode(color, "PNG", save_all=True, append_images=[other], compress_level=1),
        encode(color, "WEBP", lossless=True, quality=0, method=0),
        encode(color, "WEBP", quality=50, method=0),
        # An animation need not cover its canvas: this one is a sound picture of a small square in the corner.
        webp_of_size(1600, 1600),
    ]


def padded(kind: str, nbytes: int) -> bytes:
    """A small picture in a file of so many bytes."""
    data = (
        encode(np.dstack([picture(34), picture(35)[:, :, :1]]), kind) if kind != "JPEG" else encode(picture(34), kind)
    )
    if kind == "PNG":
        return data[:33] + png_chunk(b"ruBb", bytes(nbytes)) + data[33:]
    if kind == "WEBP":
        body = data[8:] + b"JUNK" + struct.pack("<I", nbytes) + bytes(nbytes)
        return b"RIFF" + struct.pack("<I", len(body)) + body
    tables = data.index(b"\xff\xdb")
    return data[:tables] + b"junk" + data[tables:] + bytes(nbytes)


def test_decoding_takes_no_more_memory_than_pixels_and_file_account_for() -> None:
    expanding, nbytes = zlib.compress(bytes(64 << 20)), 40 << 20
    metadata = (
        png_chunk(b"zTXt", b"Comment\0\0" + expanding),
        png_chunk(b"iTXt", b"Comment\0\1\0\0\0" + expanding),
        png_chunk(b"iCCP", b"profile\0\0" + expanding),
        png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 20))) * 80,
    )
    below_the_limit = jpeg_of_size(9400, 9400), jpeg_of_size(9400, 7000, progressive=True), png_of_size(9400, 9400)
    # The most MiB for each pixel or byte of the file. The other 16 MiB are for the strips in which a picture is
    # converted, and for a decoder's first use.
    cases: list[tuple[bytes, str, float]] = [
        *((data, "damaged: ", 1024) for data in below_the_limit),
        *((data, "1600 1600 ", 16 + 16 * 1600**2 / 2**20) for data in large_images()),
        *((padded(kind, nbytes), "33 47 ", 16 + 3 * nbytes / 2**20) for kind in ("JPEG", "PNG", "WEBP")),
        *((raw_png(2, 2, 8, 2, bytes(14), chunk), "too large: ", 100) for chunk in metadata),
    ]
    for number, (outcome, peak) in enumerate(decode_apart(*(data for data, *_ in cases))):
        _, expected, most = cases[number]
        assert outcome.startswith(expected), number
        assert peak < most, number


@pytest.mark.parametrize(
    "error", [ValueError, OSError, SyntaxError, EOFError, struct.error, IndexError, KeyError, MemoryError]
)
def test_whatever_a_decoder_raises_becomes_a_decode_error(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def load(self: Image.Image) -> None:
        raise error("odd")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    name = "too large: no memory" if error is MemoryError else f"damaged: {error.__name__}"
    with pytest.raises(DecodeError, match=f"^{name}.*odd"):
        decode_image(PNGS["color"])
