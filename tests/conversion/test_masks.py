"""Masks beside pictures: each pixel of a stored mask belongs to that pixel of the picture, or there is no sample."""

from __future__ import annotations

import contextlib
import shutil
import struct
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import rejects
from folders import hashes
from numpy.typing import NDArray
from pictures import encode, needs_avif, random_picture
from PIL import Image

from shardio.conversion.convert import convert
from shardio.conversion.estimate import estimate
from shardio.conversion.images.fit import Fit
from shardio.conversion.images.mask import decode_mask
from shardio.conversion.repair import repair
from shardio.conversion.sources.collection import UNREADABLE
from shardio.conversion.sources.table import Table
from shardio.errors import ConvertError, DecodeError, SourceError
from shardio.reading.shardset import ShardSet, open_shards
from shardio.sets.verify import verify

SIZES = [(24, 24), (37, 20), (20, 37), (16, 90), (9, 11), (61, 64)]
"""(height, width) of pictures: smaller and larger than the samples, wide, tall and square."""


def gray(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def make_tree(folder: Path, deep: bool = False) -> tuple[Path, Path, dict[str, NDArray[Any]]]:
    """Makes pictures and their masks. Returns (src, masks, mask by key)."""
    masks = {}
    for i, (height, width) in enumerate(SIZES):
        key = f"{'ab'[i % 2]}/{i}"
        mask: NDArray[Any] = gray(i, height, width)
        mask = mask * np.uint16(257) + np.uint16(i) if deep else mask
        put(folder / "src" / f"{key}.png", encode(random_picture(np.random.default_rng(i), height, width), "PNG"))
        put(folder / "masks" / f"{key}.png", encode(mask, "PNG"))
        masks[f"{key}.png"] = mask
    return folder / "src", folder / "masks", masks


def plain_nearest(mask: NDArray[Any], fit: Fit) -> NDArray[Any]:
    """Computes the sample's mask pixel by pixel, in fractions: where the center of each pixel lies in the picture."""
    (height, width), placed = mask.shape[:2], fit.placement(*mask.shape[:2])
    sample = np.zeros(fit.size, mask.dtype)
    for row in range(fit.size[0]):
        for column in range(fit.size[1]):
            y = (row + placed.top + Fraction(1, 2)) * height / placed.resized[0]
            x = (column + placed.left + Fraction(1, 2)) * width / placed.resized[1]
            if 0 <= y < height and 0 <= x < width:
                sample[row, column] = mask[int(y), int(x)]
    return sample


def masks_of(shards: ShardSet) -> dict[str, NDArray[Any]]:
    return {key.decode(): shards[i].arrays["mask"] for i, key in enumerate(shards.index["key"])}


def check_masks(out: Path, masks: dict[str, NDArray[Any]], fit: Fit = Fit((16, 16))) -> None:  # noqa: B008
    """`masks` are those of all pictures of the set."""
    found = masks_of(open_shards(out))
    assert found.keys() == masks.keys()
    for key, mask in masks.items():
        assert found[key].dtype == mask.dtype
        assert np.array_equal(found[key], plain_nearest(mask, fit)), key


@pytest.mark.parametrize(("mode", "size"), [("crop", (16, 16)), ("squash", (12, 20)), ("pad", (12, 20))])
def test_a_mask_is_cropped_and_resized_as_its_picture_is(tmp_path: Path, mode: Any, size: tuple[int, int]) -> None:
    src, folder, masks = make_tree(tmp_path)
    convert(src, tmp_path / "out", masks=folder, size=size, fit=mode, workers=1)
    check_masks(tmp_path / "out", masks, Fit(size, mode))
    assert verify(tmp_path / "out").ok


WHITE, SEVEN = np.zeros((40, 64, 3), np.uint8), np.zeros((40, 64), np.uint8)
WHITE[:20, :32], SEVEN[:20, :32] = 255, 7
"""A quadrant of the picture is white, and of the mask 7: they are the same one, whichever way the picture turns."""


def are_turned(folder: Path, rotate: bool, max_bad: int = 0) -> dict[str, bool]:
    """Converts the pictures in a folder, and returns whether each has turned with its mask."""
    out, masks = folder / str(rotate), folder / "masks"
    convert(folder / "src", out, masks=masks, size=20, fit="squash", exif_rotate=rotate, workers=1, max_bad=max_bad)
    for sample in (shards := open_shards(out)):
        assert np.array_equal(sample.image[::19, ::19, 0] > 128, sample.arrays["mask"][::19, ::19] == 7)
    return {key: mask[0, 0] != 7 for key, mask in masks_of(shards).items()}


def test_a_mask_turns_with_its_picture(tmp_path: Path) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for name, kind in (("a.jpg", "JPEG"), ("b.png", "PNG"), ("c.tif", "TIFF")):
            put(tmp_path / "src" / f"{orientation}{name}", encode(WHITE, kind, exif=exif))
            put(tmp_path / "masks" / f"{orientation}{name[0]}.png", encode(SEVEN, "PNG"))
    for rotate in (False, True):
        found = are_turned(tmp_path, rotate)
        assert len(found) == 24
        # Orientation 5 exchanges rows and columns alone.
        assert found == {key: (rotate or key[1] == "c") and key[0] not in "15" for key in found}


def test_a_mask_with_another_orientation_than_its_picture_is_refused(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    png = encode(SEVEN, "PNG", exif=exif)
    webp = encode(np.stack([SEVEN] * 3, axis=2), "WEBP", lossless=True, exif=exif)
    for name, own, mask, data in (
        ("same.jpg", {"exif": exif}, "same.png", png),
        ("same too.png", {"exif": exif}, "same too.webp", webp),
        ("none.jpg", {}, "none.png", png),
        ("none.tif", {"tiffinfo": {274: 3}}, "none.webp", webp),
    ):
        kind = {"jpg": "JPEG", "png": "PNG", "tif": "TIFF"}[name[-3:]]
        put(tmp_path / "src" / name, encode(WHITE, kind, **own))
        put(tmp_path / "masks" / mask, data)
    for rotate in (False, True):
        assert are_turned(tmp_path, rotate, max_bad=2) == {"same.jpg": rotate, "same too.png": rotate}
        refused = {one["key"]: one["detail"] for one in rejects(tmp_path / str(rotate))}
        assert sorted(refused) == ["none.jpg", "none.tif"]
        assert all("orientation of the picture, " in detail for detail in refused.values())


@needs_avif
def test_a_mask_may_have_the_orientation_of_its_avif(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    put(tmp_path / "src" / "same.avif", encode(WHITE, "AVIF", exif=exif))
    put(tmp_path / "masks" / "same.png", encode(SEVEN, "PNG", exif=exif))
    for rotate in (False, True):
        assert are_turned(tmp_path, rotate) == {"same.avif": rotate}


def test_masks_of_reduced_pictures_are_those_of_whole_ones(tmp_path: Path) -> None:
    put(tmp_path / "src" / "0.jpg", encode(random_picture(np.random.default_rng(0), 301, 403), "JPEG"))
    put(tmp_path / "masks" / "0.png", encode(mask := gray(0, 301, 403), "PNG"))
    for quality in ("exact", "fast"):
        options: dict[str, Any] = {"quality": quality, "workers": 1, "size": 16}
        convert(tmp_path / "src", tmp_path / quality, masks=tmp_path / "masks", **options)
        check_masks(tmp_path / quality, {"0.jpg": mask})


def indexed(indices: NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(indices, "P")
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image


def test_masks_hold_the_numbers_that_were_stored() -> None:
    ids = gray(0, 7, 9)
    bits, deep = ids % 2 == 0, ids * np.uint16(257) + np.uint16(1)
    stacked = np.stack([ids] * 3, axis=2)
    stored: list[tuple[Any, bytes]] = [
        (ids, encode(indexed(ids), "PNG", transparency=3)),
        (ids % 16, encode(indexed(ids % 16), "PNG", bits=4)),
        (ids % 2, encode(indexed(ids % 2), "PNG", bits=1)),
        (ids, encode(stacked, "WEBP", lossless=True)),
        (ids, encode(np.dstack([stacked, 0 * ids + 255]), "PNG")),
        (ids, encode(ids, "GIF")),
        *((deep, encode(deep, kind)) for kind in ("PNG", "TIFF")),
    ]
    for kind in ("PNG", "TIFF", "BMP"):
        stored += ((ids, encode(image, kind)) for image in (ids, indexed(ids), stacked))
        stored.append((bits, encode(Image.fromarray(bits), kind)))
    for numbers, data in stored:
        found = decode_mask(data)
        assert found.dtype == (np.uint16 if numbers is deep else np.uint8)
        assert np.array_equal(found, numbers)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


DEEP_COLOR = b"\x89PNG\r\n\x1a\n" + b"".join(
    (
        chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)),
        chunk(b"IDAT", zlib.compress(bytes(7))),
        chunk(b"IEND", b""),
    )
)


BLACK, NINE, COLORS = Image.new("L", (4, 4)), Image.new("L", (4, 4), 9), random_picture(np.random.default_rng(0), 8, 8)
SEVERAL: dict[str, Any] = {"save_all": True, "append_images": [NINE]}


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (encode(np.uint8([[[1, 1, 2]]]), "PNG"), "unsupported: .*found a PNG of color: its channels differ"),
        (encode(np.zeros((4, 4, 4), np.uint8), "PNG"), "unsupported: .*found a PNG with transparency"),
        (encode(Image.new("LA", (4, 4)), "PNG"), "unsupported: .*found a PNG with transparency"),
        (DEEP_COLOR, "unsupported: .*found a PNG of color"),
        (encode(BLACK, "JPEG"), "unsupported: .*found a JPEG"),
        (encode(BLACK, "TIFF", tiffinfo={274: 3}), "unsupported: .*a TIFF of several pictures .*orientation"),
        (encode(BLACK, "TIFF", tiffinfo={262: 0}), "unsupported: .*where 0 is white"),
        (encode(Image.new("CMYK", (4, 4)), "TIFF"), "unsupported: .*a TIFF of color"),
        (encode(BLACK, "GIF", **SEVERAL), "unsupported: .*a GIF of several pictures"),
        (encode(Image.fromarray(COLORS).quantize(9), "GIF"), "unsupported: .*of color"),
        (encode(BLACK, "PNG", **SEVERAL), "unsupported: .*a PNG of several pictures"),
        (b"P5 1 1 255\n\0", "unsupported: .*found another file"),
        (encode(np.zeros((4, 4, 3), np.uint8), "WEBP"), "unsupported: .*a WebP that is lossy"),
        (encode(COLORS, "WEBP", lossless=True), "unsupported: .*of color"),
        (encode(gray(0, 64, 64), "PNG")[:2000], "damaged: .*Error: "),
        (encode(BLACK, "PNG")[:20], "damaged: .*an IHDR chunk"),
        (encode(gray(0, 64, 64), "PNG").replace(b"IDATx", b"IDATy"), "damaged: .*Error: "),
        (encode(BLACK, "PNG")[:16] + b"\x40\0\0\0" * 2 + bytes(20), "too large: .*expected at most"),
        (b"", "empty: .*an empty file"),
        (b"<html>", "unsupported: .*found another file"),
    ],
)
def test_what_is_no_mask_is_refused_with_a_reason(data: bytes, detail: str) -> None:
    with pytest.raises(DecodeError, match=f"^{detail}"):
        decode_mask(data)


def test_mutated_masks_are_decoded_or_refused() -> None:
    rng = np.random.default_rng(0)
    kinds = (gray(0, 9, 9), indexed(gray(1, 9, 9)), gray(2, 9, 9).astype(np.uint16))
    originals = [encode(image, "PNG") for image in kinds]
    originals.append(encode(np.stack([gray(3, 9, 9)] * 3, axis=2), "WEBP", lossless=True))
    for _ in range(300):
        data = bytearray(originals[rng.integers(len(originals))])
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        with contextlib.suppress(DecodeError):
            assert decode_mask(bytes(data)).ndim == 2


def test_a_picture_without_a_sound_mask_is_refused_and_listed(tmp_path: Path) -> None:
    src, folder, masks = make_tree(tmp_path)
    (folder / "a" / "0.png").unlink()
    (folder / "b" / "1.png").write_bytes(b"")
    put(folder / "a" / "2.png", encode(gray(0, 37, 20), "PNG"))  # turned
    (folder / "b" / "3.png").unlink()
    (folder / "b" / "3.png").mkdir()
    with pytest.raises(ConvertError, match="expected at most 0 refused images of 6, found"):
        convert(src, tmp_path / "mended", masks=folder, size=16, workers=1, max_bad=0)
    report = convert(src, tmp_path / "out", masks=folder, size=16, workers=1, max_bad=4)
    assert report.refused == {"incomplete": 1, "empty": 1, "damaged": 1, UNREADABLE: 1}
    details = {reject["key"]: reject["detail"] for reject in rejects(tmp_path / "out")}
    assert details["a/0.png"] == "mask: the image has no mask: expected a/0.png, found none"
    assert details["a/2.png"] == "mask: expected 37 x 20 pixels, the size of the picture, found 20 x 37"
    check_masks(tmp_path / "out", {key: masks[key] for key in ("a/4.png", "b/5.png")})
    (folder / "b" / "3.png").rmdir()
    for key in masks:
        put(folder / key, encode(masks[key], "PNG"))
    convert(src, tmp_path / "mended", masks=folder, size=16, workers=1, max_bad=0)
    check_masks(tmp_path / "mended", masks)


def test_the_first_mask_decides_about_sixteen_bits(tmp_path: Path) -> None:
    src, folder, masks = make_tree(tmp_path, deep=True)
    put(folder / "b" / "5.png", encode(gray(5, *SIZES[5]), "PNG"))
    convert(src, tmp_path / "deep", masks=folder, size=16, workers=1)
    check_masks(tmp_path / "deep", {**masks, "b/5.png": gray(5, *SIZES[5]).astype(np.uint16)})
    src, folder, masks = make_tree(tmp_path)
    put(folder / "b" / "1.png", encode(np.full(SIZES[1], 255, np.uint16), "PNG"))
    put(folder / "b" / "3.png", encode(np.full(SIZES[3], 256, np.uint16), "PNG"))
    report = convert(src, tmp_path / "out", masks=folder, size=16, workers=1, max_bad=1)
    assert report.refused == {"unsupported": 1}
    (reject,) = rejects(tmp_path / "out")
    assert reject["key"] == "b/3.png"
    assert "expected numbers of 8 bits, as in the first mask, found 256" in reject["detail"]
    assert (masks_of(open_shards(tmp_path / "out"))["b/1.png"] == 255).all()


def test_a_wrong_folder_of_masks_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    src, folder, _ = make_tree(tmp_path)
    with pytest.raises(SourceError, match=r"elsewhere: expected a folder of masks"):
        convert(src, tmp_path / "out", masks=tmp_path / "elsewhere", size=16)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"readable mask.*a/0.png.*--mask-suffix"):
        convert(src, tmp_path / "out", masks=tmp_path / "empty", size=16)
    with pytest.raises(ConvertError, match="one inside the other"):
        convert(src, folder / "out", masks=folder, size=16)
    assert not (tmp_path / "out").exists()


def test_keys_say_where_masks_are_whatever_the_pictures_are_stored_in(tmp_path: Path) -> None:
    """A list whose pictures lie elsewhere has keys that lead out of its folder, so that they have no mask."""
    src, folder, masks = make_tree(tmp_path)
    listed = tmp_path / "lists" / "list.txt"
    put(listed, "".join(f"{key} {i % 2}\n" for i, key in enumerate(masks)).encode())
    shutil.copytree(src, listed.parent, dirs_exist_ok=True)
    put(listed.parent / "away.txt", f"{src / 'a' / '0.png'} 0\nb/1.png 1\n".encode())
    convert(listed, tmp_path / "out", masks=folder, size=16, workers=1)
    check_masks(tmp_path / "out", masks)
    away = Table(listed.parent / "away.txt", root=listed.parent)
    report = convert(away, tmp_path / "away", masks=folder, size=16, workers=1, max_bad=1)
    assert report.refused == {"incomplete": 1}
    assert "expected a path below SRC" in rejects(tmp_path / "away")[0]["detail"]


def test_folders_of_splits_that_are_called_otherwise_have_masks_under_either_name(tmp_path: Path) -> None:
    for split in ("Training", "val"):
        src, folder, _ = make_tree(tmp_path / "made" / split)
        for what, where in ((src, "src"), (folder, "masks")):
            (tmp_path / where).mkdir(exist_ok=True)
            what.rename(tmp_path / where / split)
    for name in ("Training", "train"):
        convert(tmp_path / "src", tmp_path / f"out-{name}", masks=tmp_path / "masks", size=16, workers=1)
        if name == "Training":
            (tmp_path / "masks" / "Training").rename(tmp_path / "masks" / "train")
    assert hashes(tmp_path / "out-Training") == hashes(tmp_path / "out-train")


def test_masks_in_the_folders_of_the_pictures_are_no_pictures(tmp_path: Path) -> None:
    src, _, masks = make_tree(tmp_path)
    for key, mask in masks.items():
        put(src / f"{key[:-4]}_mask.tif", encode(mask, "TIFF"))
    report = convert(src, tmp_path / "out", masks=src, mask_suffix="_mask", size=16, workers=1, max_bad=0)
    assert report.ignored == {"mask of another picture": len(masks)}
    check_masks(tmp_path / "out", masks)
    (tmp_path / "link").symlink_to(src)
    for folder in (src, tmp_path / "link"):
        with pytest.raises(ValueError, match="its own mask"):
            convert(src, tmp_path / "own", masks=folder, labels="folders", size=16)
    with pytest.raises(ValueError, match="pass `masks`"):
        convert(src, tmp_path / "own", mask_suffix="_mask", size=16)


@pytest.mark.parametrize(
    ("suffix", "picture", "mask", "row"),
    [("_mask", "a/{}.png", "a/{}_mask.png", "a/{}.png"), ("images/=masks/", "images/{}.png", "masks/{}.png", "{}")],
)
def test_masks_in_the_folders_of_the_pictures_need_no_rows_in_tables(
    tmp_path: Path, suffix: str, picture: str, mask: str, row: str
) -> None:
    for number in range(16):
        for name, content in ((picture, np.full((16, 16, 3), number, np.uint8)), (mask, np.full((16, 16), number))):
            put(tmp_path / "src" / name.format(number), encode(content.astype(np.uint8), "PNG"))
    table = Table(tmp_path / "table.csv", columns=["age"])
    table.path.write_text("id,age\n" + "".join(f"{row.format(number)},{7 * number}\n" for number in range(16)))
    options: dict[str, Any] = {"masks": tmp_path / "src", "mask_suffix": suffix, "size": 16, "workers": 1}
    options["labels"] = "none" if "=" in suffix else "folders"
    report = convert(tmp_path / "src", tmp_path / "out", table=table, val=0.4, **options)
    assert (report.num_converted, sum(report.ignored.values())) == (16, 16)
    samples = [sample for split in ("train", "val") for sample in open_shards(tmp_path / "out", split)]
    assert sorted(sample.arrays["age"] for sample in samples) == [7 * number for number in range(16)]
    for sample in samples:
        assert (sample.image == sample.arrays["age"] // 7).all()
        assert (sample.arrays["mask"] == sample.arrays["age"] // 7).all()


@pytest.mark.parametrize(
    ("suffix", "picture", "mask"),
    [("images/=masks/", "images/{}", "masks/{}"), ("rgb/x/_l=gt/_g", "rgb/x/{}_l", "gt/{}_g"), ("gt/", "{}", "gt/{}")],
)
def test_masks_in_a_folder_beside_the_pictures_of_each_split(
    tmp_path: Path, suffix: str, picture: str, mask: str
) -> None:
    src, _, masks = make_tree(tmp_path)
    whole = tmp_path / "whole"
    for key, content in masks.items():
        split, name = f"{'val' if key.endswith('1.png') else 'train'}/a", key[:-4].replace("/", "_")
        put(whole / f"{split}/{mask.format(name)}.png", encode(content, "PNG"))
        put(whole / f"{split}/{picture.format(name)}.png", (src / key).read_bytes())
        if "=" in suffix:
            put(whole / f"{split}/edges/{name}.png", (src / key).read_bytes())
    options: dict[str, Any] = {"masks": whole, "mask_suffix": suffix, "labels": "none", "size": 16, "workers": 1}
    report = convert(whole, tmp_path / "out", **options, max_bad=0)
    assert report.num_converted == len(masks)
    for split in ("train", "val"):
        for name, found in masks_of(open_shards(tmp_path / "out", split)).items():
            key = Path(name).name.replace("_l.png", ".png").replace("_", "/", 1)
            assert np.array_equal(found, plain_nearest(masks[key], Fit((16, 16))))


def test_masks_that_end_otherwise_are_another_set(tmp_path: Path) -> None:
    src, folder, masks = make_tree(tmp_path)
    for key, mask in masks.items():
        for i, ending in enumerate(("_a", "_b")):
            put(folder / f"{key[:-4]}{ending}.png", encode(mask // 2 + np.uint8(i), "PNG"))
    out, options = tmp_path / "out", {"masks": folder, "size": 16, "workers": 1}
    convert(src, out, mask_suffix="_a", **options)
    with pytest.raises(ConvertError, match="mask_suffix '_a', here '_b'"):
        convert(src, out, mask_suffix="_b", **options)
    file = next(out.glob("*mask*.npy"))
    made = file.read_bytes()
    file.unlink()
    repair(out, src, masks=folder, workers=1)
    assert file.read_bytes() == made


def test_plan_counts_masks_and_refuses_what_convert_would(tmp_path: Path) -> None:
    src, folder, _ = make_tree(tmp_path)
    (folder / "a" / "0.png").unlink()
    found = estimate(src, masks=folder, size=16, workers=1, seconds=0.05)
    assert found.refused in ({}, {"incomplete": 1})
    plain = estimate(src, size=16, workers=1, seconds=0.05)
    assert found.nbytes == plain.nbytes + 4096 * 2 + 4 * 6 + 6 * 16 * 16
