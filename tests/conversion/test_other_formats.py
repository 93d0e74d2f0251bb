"""GIF, TIFF, AVIF, BMP and Netpbm: the exact first picture and a word about the others, or a refusal."""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import decode_or_refuse
from numpy.typing import NDArray
from pictures import HAS_AVIF, encode, needs_avif, random_picture
from PIL import Image

from shardio.conversion.images import others
from shardio.conversion.images.decode import DecodedImage, decode_image
from shardio.conversion.images.headers import holds_image
from shardio.errors import DecodeError

RNG = np.random.default_rng(0)
RGB = random_picture(RNG, 23, 37)
GRAY = RGB[:, :, 0]
BITS = GRAY > 127
ALPHA = random_picture(RNG, 23, 37)[:, :, 0]
DEEP = (GRAY.astype(np.uint16) << 8) + 77
BEHIND = (200, 100, 50)


pytestmark = pytest.mark.usefixtures("nothing_printed")


def over(colors: NDArray[Any], alpha: NDArray[Any]) -> NDArray[Any]:
    share = alpha[:, :, None] / 255
    return np.asarray(colors * share + np.array(BEHIND) * (1 - share))


def gray(values: NDArray[Any]) -> NDArray[Any]:
    return np.repeat(np.asarray(values)[:, :, None], 3, axis=2)


def quantized() -> Image.Image:
    return Image.fromarray(RGB).quantize(13)


def tiff(tags: dict[int, tuple[int, ...]], pixels: bytes, order: str = "<") -> bytes:
    """An uncompressed TIFF of one strip, with these tags, of LONGs, and the tags that are the same for all."""
    tags = {256: (37,), 257: (23,), 273: (8,), 279: (len(pixels),)} | tags
    tags = {name: numbers for name, numbers in tags.items() if numbers}
    extra = 8 + len(pixels) + 2 + 12 * len(tags) + 4
    entries, more = b"", b""
    for name, numbers in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
        place = packed if len(numbers) == 1 else struct.pack(order + "I", extra + len(more))
        entries += struct.pack(order + "HHI", name, 4, len(numbers)) + place
        more += packed if len(numbers) > 1 else b""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(pixels))
    return head + pixels + struct.pack(order + "H", len(tags)) + entries + bytes(4) + more


def bmp(bits: int, pixels: bytes, *masks: int, height: int = 23, palette: bytes = b"", compression: int = 0) -> bytes:
    """A BMP 37 pixels wide, with a header of 124 bytes if it has masks, otherwise of 40 bytes."""
    nbytes = 124 if masks else 40
    head = struct.pack("<IiiHHI", nbytes, 37, height, 1, bits, 3 if masks else compression)
    head += struct.pack("<IIIII", 0, 0, 0, len(palette) // 4, 0) + struct.pack(f"<{len(masks)}I", *masks)
    offset = 14 + nbytes + len(palette)
    return b"BM" + struct.pack("<III", offset + len(pixels), 0, offset) + head.ljust(nbytes, b"\0") + palette + pixels


def padded_rows(values: NDArray[Any]) -> bytes:
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))).tobytes()


def in_planes(pixels: NDArray[Any], packed: bool, *extra: int, meaning: int = 2) -> bytes:
    """A TIFF of one strip for each plane; `extra` says what a further band is."""
    planes = [zlib.compress(plane) if packed else plane for plane in map(np.ndarray.tobytes, pixels.transpose(2, 0, 1))]
    count, sizes = len(planes), tuple(map(len, planes))
    tags = {258: (8 * pixels.itemsize,) * count, 259: (8 if packed else 1,), 262: (meaning,), 277: (count,), 284: (2,)}
    return tiff(tags | {273: tuple(8 + sum(sizes[:i]) for i in range(count)), 279: sizes, 338: extra}, b"".join(planes))


RGBA = np.dstack([RGB, ALPHA])
DEEP_RGB = (RGB.astype(np.uint16) << 8) + 200
WHITE_IS_0, BLACK_IS_0, COLORS = {262: (0,)}, {262: (1,)}, {262: (2,), 258: (8, 8, 8), 277: (3,)}
PLAIN = b"\n".join(b" ".join(b"%d" % value for value in row) for row in GRAY)
COMPRESSIONS = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits")
EXPECTED_QUANTIZED = np.asarray(quantized().convert("RGB"))

EXACT: dict[str, tuple[bytes, NDArray[Any]]] = {
    **{
        f"TIFF of bits, {c}": (encode(Image.fromarray(BITS), "TIFF", compression=c), gray(BITS * 255))
        for c in COMPRESSIONS
    },
    **{f"TIFF of gray, {c}": (encode(GRAY, "TIFF", compression=c), gray(GRAY)) for c in COMPRESSIONS},
    **{f"TIFF of 16 bits, {c}": (encode(DEEP, "TIFF", compression=c), gray(DEEP / 257)) for c in COMPRESSIONS},
    **{f"TIFF of RGB, {c}": (encode(RGB, "TIFF", compression=c), RGB) for c in COMPRESSIONS},
    **{f"TIFF of RGBA, {c}": (encode(RGBA, "TIFF", compression=c), over(RGB, ALPHA)) for c in COMPRESSIONS},
    **{f"TIFF, palette, {c}": (encode(quantized(), "TIFF", compression=c), EXPECTED_QUANTIZED) for c in COMPRESSIONS},
    "TIFF in strips": (encode(RGB, "TIFF", strip_size=300), RGB),
    "TIFF in strips with differences": (
        encode(RGB, "TIFF", compression="tiff_lzw", tiffinfo={317: 2}, strip_size=500),
        RGB,
    ),
    "TIFF of gray and alpha": (encode(np.dstack([GRAY, ALPHA]), "TIFF"), over(gray(GRAY), ALPHA)),
    "TIFF in tiles": (
        tiff(
            BLACK_IS_0
            | {258: (8,), 322: (16,), 323: (16,), 273: (), 279: ()}
            | {324: tuple(8 + 256 * tile for tile in range(6)), 325: (256,) * 6},
            np.pad(GRAY, ((0, 9), (0, 11))).reshape(2, 16, 3, 16).swapaxes(1, 2).tobytes(),
        ),
        gray(GRAY),
    ),
    "TIFF, white is 0": (tiff(WHITE_IS_0 | {258: (8,)}, (255 - GRAY).tobytes()), gray(GRAY)),
    "TIFF, 4 bits": (
        tiff(BLACK_IS_0 | {258: (4,)}, (np.pad(GRAY, ((0, 0), (0, 1)))[:, ::2] & 0xF0).tobytes()),
        gray(0 * GRAY),
    ),
    "TIFF of planes": (in_planes(RGB, False), RGB),
    **{
        f"TIFF of planes, {name}": (in_planes(pixels, packed, *extra, meaning=meaning), expected)
        for name, pixels, packed, extra, meaning, expected in (
            ("deflated", RGB, True, (), 2, RGB),
            ("16 bits, deflated", DEEP_RGB, True, (), 2, RGB),
            ("alpha", RGBA, False, (2,), 2, over(RGB, ALPHA)),
            ("alpha of 16 bits, deflated", RGBA * np.uint16(257), True, (2,), 2, over(RGB, ALPHA)),
            ("inks", np.dstack([255 - RGB, 0 * GRAY]), False, (), 5, RGB),
        )
    },
    "TIFF, 16 bits, big endian": (tiff(BLACK_IS_0 | {258: (16,)}, DEEP.astype(">u2").tobytes(), ">"), gray(DEEP / 257)),
    "TIFF, colors of 16 bits": (tiff(COLORS | {258: (16,) * 3}, DEEP_RGB.astype("<u2").tobytes()), RGB),
    "TIFF with a band of no declared meaning": (tiff(COLORS | {258: (8,) * 4, 277: (4,)}, RGBA.tobytes()), RGB),
    "TIFF with a band": (tiff(COLORS | {258: (8,) * 4, 277: (4,), 338: (0,)}, RGBA.tobytes()), RGB),
    "TIFF with transparency": (tiff(COLORS | {258: (8,) * 4, 277: (4,), 338: (2,)}, RGBA.tobytes()), over(RGB, ALPHA)),
    "TIFF with inks": (encode(Image.fromarray(255 - RGB).convert("CMYK"), "TIFF"), 255 - RGB),
    "GIF": (encode(quantized(), "GIF"), EXPECTED_QUANTIZED),
    "GIF in four passes": (encode(quantized(), "GIF", interlace=1), EXPECTED_QUANTIZED),
    "GIF of gray": (encode(GRAY, "GIF"), gray(GRAY)),
    "BMP of bits": (encode(Image.fromarray(BITS), "BMP"), gray(BITS * 255)),
    "BMP of gray": (encode(GRAY, "BMP"), gray(GRAY)),
    "BMP, palette": (encode(quantized(), "BMP"), EXPECTED_QUANTIZED),
    "BMP": (encode(RGB, "BMP"), RGB),
    "BMP from the top": (bmp(24, padded_rows(RGB[:, :, ::-1]), height=-23), RGB),
    "BMP with alpha": (bmp(32, RGBA[::-1].tobytes(), 0xFF, 0xFF00, 0xFF0000, 0xFF000000), over(RGB, ALPHA)),
    "BMP with empty alpha": (
        bmp(32, (RGBA * [1, 1, 1, 0])[::-1].astype(np.uint8).tobytes(), 0xFF, 0xFF00, 0xFF0000, 0xFF000000),
        RGB,
    ),
    "BMP, 32 bits": (bmp(32, RGBA[::-1, :, [2, 1, 0, 3]].tobytes()), RGB),
    "PPM": (encode(RGB, "PPM"), RGB),
    "PGM": (encode(GRAY, "PPM"), gray(GRAY)),
    "PBM": (encode(Image.fromarray(BITS), "PPM"), gray(BITS * 255)),
    "PGM of 16 bits": (b"P5 37 23 65535\n" + DEEP.astype(">u2").tobytes(), gray(DEEP / 257)),
    "PGM of 12 bits": (b"P5 37 23 4095\n" + (DEEP >> 4).astype(">u2").tobytes(), gray((DEEP >> 4) / 4095 * 255)),
    "PPM of 16 bits": (b"P6\n# a comment\n37 23\n65535\n" + DEEP_RGB.astype(">u2").tobytes(), DEEP_RGB / 257),
    "PPM of 100 levels": (b"P6 37 23 99\n" + (RGB // 3).tobytes(), RGB // 3 / 99 * 255),
    "plain PGM": (b"P2 37 23 255\n" + PLAIN + b"\n", gray(GRAY)),
    "plain PBM": (b"P1\n37 23\n" + b"".join(b"%d" % (not bit) for bit in BITS.flat), gray(BITS * 255)),
}


@pytest.mark.parametrize("kind", EXACT)
def test_every_kind_gives_the_picture_that_its_values_mean(kind: str) -> None:
    data, expected = EXACT[kind]
    decoded = decode_image(data, background=BEHIND)
    assert (decoded.pixels.dtype, decoded.warning) == (np.uint8, "")
    # Exact, but for the last bit of a product of two values, and of the upper 8 of 16 bits of color.
    if kind == "TIFF, 4 bits":
        values = (np.pad(GRAY, ((0, 0), (0, 1)))[:, ::2] >> 4) * 17
        expected = gray(np.stack([values, 0 * values], axis=2).reshape(23, -1)[:, :37])
    assert np.abs(decoded.pixels - expected).max() <= (1 if "A" in kind or "alpha" in kind else 0.5), kind


FACTS: dict[tuple[str, ...], list[bytes]] = {
    (): [encode(RGB, "JPEG"), encode(RGB, "PNG"), encode(RGBA | np.uint8([0, 0, 0, 255]), "PNG"), EXACT["BMP"][0]],
    ("transparent",): [EXACT["TIFF with transparency"][0], encode(RGBA, "PNG"), encode(RGBA, "WEBP")],
    ("band",): [EXACT["TIFF with a band"][0], EXACT["TIFF with a band of no declared meaning"][0]],
    ("deep",): [encode(DEEP, "PNG"), EXACT["PPM of 16 bits"][0], EXACT["TIFF, colors of 16 bits"][0]],
    ("deep", "dark"): [encode(DEEP // 4, "PNG"), encode(DEEP // 16, "TIFF")],
    ("transparent", "not turned"): [
        encode(RGBA, "PNG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\3\0" + bytes(6))
    ],
}


@pytest.mark.parametrize("facts", FACTS)
def test_facts_of_a_picture_are_noted(facts: tuple[str, ...]) -> None:
    for data in FACTS[facts]:
        assert decode_image(data).facts == facts


@pytest.mark.parametrize("kind", EXACT)
def test_a_file_cut_at_any_byte_is_refused_or_the_same(kind: str) -> None:
    data, _ = EXACT[kind]
    expected = decode_image(data).pixels
    for length in {*range(0, len(data), max(1, len(data) // 50)), *range(len(data) - 12, len(data))}:
        outcome = decode_or_refuse(data[:length])
        if isinstance(outcome, DecodedImage):  # without the padding or the terminator
            assert length >= len(data) - 5
            np.testing.assert_array_equal(outcome.pixels, expected)


@needs_avif
def test_avif_decodes_as_with_pillow_and_is_refused_when_cut() -> None:
    for image in (RGB, RGBA, GRAY):
        data = encode(image, "AVIF", quality=100, subsampling="4:4:4")
        channels = np.atleast_3d(image)
        expected = over(RGB, ALPHA) if channels.shape[2] == 4 else np.broadcast_to(channels, RGB.shape)
        assert np.abs(decode_image(data, background=BEHIND).pixels.astype(int) - expected).max() <= 6
        for length in range(1, len(data), 29):
            assert not isinstance(decode_or_refuse(data[:length]), DecodedImage)


def test_avif_without_a_decoder_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.features.check", lambda name: False)
    with pytest.raises(DecodeError, match=r"^unsupported: .*AVIF.*install Pillow"):
        decode_image(b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(100))


FRAMES = [Image.fromarray(random_picture(np.random.default_rng(seed), 12, 18)).quantize(16) for seed in range(3)]
ANIMATED = ["GIF", "TIFF", "PNG", "WEBP", *(["AVIF"] if HAS_AVIF else [])]


def animation(kind: str) -> bytes:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "AVIF" else {}
    frames = [frame.convert("RGB") if kind in ("PNG", "WEBP", "AVIF") else frame for frame in FRAMES]
    return encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)


REFUSED: dict[str, tuple[bytes, str]] = {
    "TIFF of floats": (encode(GRAY.astype(np.float32), "TIFF"), "unsupported: .*mode F"),
    "TIFF of 32 bits": (encode(GRAY.astype(np.int32), "TIFF"), "unsupported: .*mode I"),
    "TIFF of 12 bits": (tiff(BLACK_IS_0 | {258: (12,)}, bytes(2000)), "unsupported: .*12"),
    "TIFF of 16 bits, white is 0": (tiff(WHITE_IS_0 | {258: (16,)}, bytes(2000)), "unsupported: .*0 is white"),
    "TIFF of five samples": (tiff(COLORS | {258: (8,) * 5, 277: (5,)}, bytes(5000)), "unsupported: .*found 5 bands"),
    "TIFF of nine bands": (tiff(BLACK_IS_0 | {258: (16,) * 9, 277: (9,)}, bytes(20000)), "unsupported: .*9 bands"),
    "TIFF of YCbCr": (
        encode(Image.fromarray(RGB).convert("YCbCr"), "TIFF", compression="tiff_lzw"),
        "unsupported: .*photometric 6",
    ),
    "TIFF of a JPEG": (encode(RGB, "TIFF", compression="jpeg"), "unsupported: .*jpeg"),
    "TIFF of a fax": (encode(Image.fromarray(BITS), "TIFF", compression="group4"), "unsupported: .*group4"),
    "TIFF of an unknown compression": (tiff(BLACK_IS_0 | {258: (8,), 259: (777,)}, bytes(2000)), "unsupported: .*777"),
    "TIFF of a camera": (tiff(BLACK_IS_0 | {254: (1,), 258: (8,)}, bytes(2000)), "unsupported: .*camera"),
    "TIFF of signed numbers": (tiff(BLACK_IS_0 | {258: (8,), 339: (2,)}, bytes(900)), "unsupported: .*signed"),
    "TIFF of bits in reverse": (tiff(WHITE_IS_0 | {258: (8,), 266: (2,)}, bytes(900)), "unsupported: .*raw mode"),
    **{
        f"TIFF of {number} planes, {bits} bits, packed {packed}, {extra}": (
            in_planes(np.zeros((23, 37, number), f"u{bits // 8}"), packed, *extra, meaning=1 + (number > 2)),
            f"unsupported: .*({number} separate planes of {bits} bits|string index)",
        )
        for number, bits, packed, extra in (
            *((3, 16, False, ()), (4, 16, False, (2,)), (2, 8, False, (2,)), (2, 8, True, (2,))),
            *((4, 8, False, ()), (4, 8, True, ()), (4, 8, False, (0,)), (4, 8, False, (1,)), (4, 16, True, (1,))),
        )
    },
    "TIFF without a meaning": (tiff({258: (8,)}, bytes(2000)), "unsupported: .*photometric"),
    "TIFF, strip outside of the file": (
        tiff(BLACK_IS_0 | {258: (8,), 273: (1 << 30,)}, bytes(900)),
        "damaged: .*strips",
    ),
    "TIFF with too few strips": (tiff(BLACK_IS_0 | {258: (8,), 278: (3,)}, bytes(900)), "damaged: .*8 strips"),
    "TIFF with strips of no rows": (tiff(BLACK_IS_0 | {258: (8,), 278: (0,)}, bytes(900)), "damaged: .*x 0"),
    "TIFF with too few bytes": (tiff(BLACK_IS_0 | {258: (8,)}, bytes(300)), "damaged: "),
    "TIFF with too few bytes in its strip": (tiff(BLACK_IS_0 | {258: (8,), 279: (850,)}, bytes(999)), "damaged: .*851"),
    "TIFF of a bad LZW code": (encode(RGB, "TIFF", compression="tiff_lzw").replace(b"\x80", b"\xff"), "damaged: "),
    "TIFF of few LZW codes": (tiff(BLACK_IS_0 | {258: (8,), 259: (5,)}, b"\x80\x00\x20\x20"), "damaged: "),
    "TIFF of bad Deflate": (tiff(BLACK_IS_0 | {258: (8,), 259: (8,)}, bytes(90)), "damaged: "),
    "TIFF of huge tiles": (
        tiff(BLACK_IS_0 | {258: (8,), 322: (65536,), 323: (65536,), 324: (8,), 325: (9,), 273: (), 279: ()}, bytes(9)),
        "unsupported: .*65536",
    ),
    "TIFF, index without a color": (tiff({262: (3,), 258: (8,), 320: (512,) * 6}, b"\2" * 851), "damaged: .*below 2"),
    "TIFF, palette of 8 bits": (
        tiff({262: (3,), 258: (8,), 320: (200,) * 768}, b"\2" * 851),
        "unsupported: .*palette of 8",
    ),
    "GIF without a palette": (
        b"GIF89a\x01\0\x01\0\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0;",
        "damaged: .*below 0",
    ),
    "GIF without a frame": (b"GIF89a\x01\0\x01\0\0\0\0;", "damaged: "),
    "GIF, index without a color": (
        b"GIF89a\x01\0\x01\0\x80\0\0" + bytes(6) + b",\0\0\0\0\x01\0\x01\0\0\x02\x02\x54\x01\0;",
        "damaged: .*below 2",
    ),
    "GIF that ends early": (
        b"GIF89a\x09\0\x09\0\x80\0\0" + bytes(6) + b",\0\0\0\0\x09\0\x09\0\0\x02\x02\x44\x01\0;",
        "damaged: ",
    ),
    "GIF cut in a later frame": (animation("GIF")[:-9], "damaged: "),
    "BMP of run lengths": (bmp(8, bytes(900), palette=bytes(1024), compression=1), "unsupported: .*run lengths"),
    "BMP of a PNG": (bmp(24, bytes(900), compression=5), "unsupported: .*compression"),
    "BMP of 2 bits": (bmp(2, bytes(900), palette=bytes(16)), "unsupported: .*depth"),
    "BMP of odd masks": (bmp(16, bytes(2000), 0xF00, 0xF0, 0xF, 0), "unsupported: .*bitfields"),
    "BMP of 8 bits, black and white": (bmp(8, bytes(1000), palette=b"\0\0\0\0\xff\xff\xff\0"), "unsupported: .*8 bits"),
    "BMP, index without a color": (bmp(8, b"\2" * 920, palette=b"\1\2\3\4" * 2), "damaged: .*below 2, found 2"),
    "BMP, pixels in the header": (
        bmp(24, bytes(3000))[:10] + b"\x14\0\0\0" + bmp(24, bytes(3000))[14:],
        "damaged: .*header",
    ),
    "BMP of another header": (b"BM" + bytes(12) + struct.pack("<I", 77) + bytes(200), "unsupported: .*something else"),
    "PGM of a number too large": (b"P5 37 23 99\n" + b"\x64" * 851, "damaged: .*99.*100"),
    "plain PGM of a number too large": (b"P2 2 1 9\n9 10\n", "damaged: .*PPM.*numbers"),
    "plain PGM that may be cut": (b"P2 2 1 9\n9 1", "damaged: .*may be truncated"),
    "plain PGM of a word": (b"P2 2 1 9\n9 x\n", "damaged: "),
    "PGM of floats": (b"Pf 2 1 1.0\n" + bytes(8), "unsupported: .*something else"),
    "PGM of no levels": (b"P5 2 1 0\n" + bytes(8), "damaged: "),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_damaged_or_unusual_is_refused_for_its_reason(kind: str) -> None:
    data, message = REFUSED[kind]
    with pytest.raises(DecodeError, match=f"^{message}"):
        decode_image(data)


# --- sizes ------------------------------------------------------------------------------------------------------------


def resized_avif(width: int, height: int) -> bytes:
    data = encode(RGB, "AVIF")
    return data.replace(struct.pack(">II", 37, 23), struct.pack(">II", width, height))


SIZED: dict[str, Callable[[int, int], bytes]] = {
    "GIF": lambda width, height: b"GIF89a" + struct.pack("<HH", width, height) + encode(quantized(), "GIF")[10:],
    "frame of a GIF": lambda width, height: encode(quantized(), "GIF").replace(
        b",\0\0\0\0" + struct.pack("<HH", 37, 23), b",\0\0\0\0" + struct.pack("<HH", width, height)
    ),
    "TIFF": lambda width, height: tiff(BLACK_IS_0 | {256: (width,), 257: (height,), 258: (8,)}, GRAY.tobytes()),
    "BMP": lambda width, height: encode(RGB, "BMP")[:18] + struct.pack("<II", width, height) + encode(RGB, "BMP")[26:],
    "PPM": lambda width, height: b"P6 %d %d 255\n" % (width, height) + RGB.tobytes(),
    **({"AVIF": resized_avif} if HAS_AVIF else {}),
}


@pytest.mark.parametrize("kind", SIZED)
def test_headers_that_claim_too_many_pixels_are_refused_before_memory_is_taken(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*args: object, **options: object) -> None:
        raise RuntimeError("memory was taken")

    sound, huge, empty = (SIZED[kind](*size) for size in ((37, 23), (9460, 9460), (0, 23)))
    assert decode_image(sound).pixels.shape == RGB.shape
    for place in ("PIL.Image.core.new", "PIL.Image.core.fill", "PIL.ImageFile.ImageFile.load"):
        monkeypatch.setattr(place, allocate)
    with pytest.raises(DecodeError, match=r"^too large: .*9460 x 9460"):
        decode_image(huge)
    with pytest.raises(DecodeError, match=r"^damaged: "):
        decode_image(empty)


# --- several pictures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ANIMATED)
def test_the_first_of_several_pictures_is_taken_with_a_warning(kind: str) -> None:
    decoded = decode_image(animation(kind))
    assert decoded.warning.lower() == f"{kind.lower()} of several pictures: the first one was taken"
    difference = np.abs(decoded.pixels.astype(int) - np.asarray(FRAMES[0].convert("RGB")))
    assert difference.mean() <= (0 if kind != "AVIF" else 10)


def test_a_gif_frame_lies_on_the_canvas_and_the_background_shows_elsewhere() -> None:
    frame = encode(FRAMES[0], "GIF")
    head, picture = frame[:6], frame[frame.index(b",") + 9 :]
    for left, top, expected in ((3, 2, (20, 30)), (25, 0, (20, 43))):  # the second one makes the canvas wider
        placed = b"," + struct.pack("<4H", left, top, 18, 12) + picture
        data = head + struct.pack("<HH", 30, 20) + frame[10 : frame.index(b",")] + placed
        pixels = decode_image(data, background=BEHIND).pixels
        assert pixels.shape[:2] == expected
        whole = np.full((*expected, 3), BEHIND)
        whole[top : top + 12, left : left + 18] = np.asarray(FRAMES[0].convert("RGB"))
        np.testing.assert_array_equal(pixels, whole)


def test_the_transparent_color_of_a_gif_shows_the_background() -> None:
    index = np.asarray(FRAMES[0])
    pixels = decode_image(encode(FRAMES[0], "GIF", transparency=int(index[0, 0])), background=BEHIND).pixels
    transparent = (np.asarray(FRAMES[0].convert("RGB")) == pixels[0, 0]).all(axis=2) | (index == index[0, 0])
    np.testing.assert_array_equal((pixels == BEHIND).all(axis=2), transparent)


# --- orientation, and names -------------------------------------------------------------------------------------------


@needs_avif
def test_the_orientation_of_an_avif_is_applied_where_it_is_asked_for() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(RGB, "AVIF", exif=exif)
    stored = decode_image(data)
    turned = decode_image(data, exif_rotate=True)
    assert (stored.orientation, turned.orientation) == (1, 6)
    np.testing.assert_array_equal(turned.pixels, np.rot90(stored.pixels, -1))


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_tiff_is_upright_in_any_case(compression: str) -> None:
    data = encode(RGB, "TIFF", tiffinfo={0x0112: 6}, compression=compression)
    for exif_rotate in (False, True):
        decoded = decode_image(data, exif_rotate=exif_rotate)
        assert (decoded.orientation, decoded.facts) == (6, ("turned",))
        np.testing.assert_array_equal(decoded.pixels, np.rot90(RGB, -1))


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP", "PPM", *(["AVIF"] if HAS_AVIF else [])])
def test_two_letters_do_not_make_an_image_but_longer_signatures_and_suffixes_do(kind: str, tmp_path: Path) -> None:
    for name, is_image in (("a", kind not in ("BMP", "PPM")), (f"a.{kind.lower()}", True)):
        (tmp_path / name).write_bytes(encode(RGB, kind))
        assert holds_image(str(tmp_path / name)) == is_image


# Pillow registers these, too: documents, films, tables of numbers, point clouds, and a kind that it only writes.
NO_PICTURES = (".bufr", ".grib", ".h5", ".hdf", ".iim", ".mpeg", ".mpg", ".palm", ".pcd", ".pdf", ".ps")


def test_pictures_of_all_kinds_that_pillow_knows_are_pictures_by_suffix_or_first_bytes(tmp_path: Path) -> None:
    Image.init()
    kinds = {*Image.registered_extensions(), ".heic", ".jxl", ".psd", ".cr3", ".svg"}
    no_text = (".txt", ".json", ".csv", ".xml", ".mat", ".npy", ".db", ".md", "")
    for suffix in (*kinds, *no_text):
        (tmp_path / f"a{suffix}").write_text("P6 a text; SIMPLE")
        assert holds_image(str(tmp_path / f"a{suffix}")) == (suffix in kinds.difference(NO_PICTURES)), suffix
    for kind in ("BLP", "DDS", "EPS", "ICNS", "ICO", "JPEG2000", "PCX", "QOI", "SGI"):
        if kind not in Image.SAVE:  # of this version
            continue
        (tmp_path / "b").write_bytes(encode(Image.new("P" if kind == "BLP" else "RGB", (20, 10)), kind))
        assert holds_image(str(tmp_path / "b")), kind


def test_a_mapped_file_whose_name_is_no_text_does_not_matter(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\x9b"
    with open(name, "wb+") as file:
        file.write(b"x")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            others._silence_tiff.cache_clear()
            assert decode_image(encode(RGB, "TIFF")).pixels.tolist() == RGB.tolist()
