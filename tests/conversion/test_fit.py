"""The arithmetic of where a picture goes; and the pixels that the kernel makes, which are those of torch or Pillow."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import printed_by
from conversions import MODES, RESAMPLES
from folders import put
from numpy.typing import NDArray
from pictures import random_picture
from PIL import Image

from shardio.conversion.convert import convert
from shardio.conversion.images.fit import Fit, Placement
from shardio.conversion.images.headers import MAX_PIXELS
from shardio.conversion.options import FitMode, Resample
from shardio.errors import DecodeError
from shardio.kernels import _resample
from shardio.kernels import resample as kernel
from shardio.reading.shardset import open_shards

NUM_FORMS = len(_resample.FORMS)
SHAPES = [(1, 1), (1, 2), (2, 1), (3, 5), (16, 16), (17, 40), (40, 17), (80, 31), (1, 300), (300, 1)]
"""Sizes of pictures."""
TARGETS = [(1, 1), (7, 7), (32, 32), (8, 24), (24, 8), (31, 33)]


def torchvision_boxes(height: int, width: int, size: int) -> tuple[tuple[int, int], int, int]:
    """Resize(size), then CenterCrop(size), as torchvision's transforms compute them: ((height, width), top, left)."""
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = size, int(size * long / short)
    new_width, new_height = (new_short, new_long) if width <= height else (new_long, new_short)
    top = round((new_height - size) / 2.0)
    left = round((new_width - size) / 2.0)
    return (new_height, new_width), top, left


# --- boxes ------------------------------------------------------------------------------------------------------------


def test_square_crop_boxes_are_those_of_torchvision() -> None:
    small = [(*sides, size) for size in (1, 7, 32) for sides in itertools.product(range(1, 81), repeat=2)]
    large = (2 ** np.random.default_rng(0).uniform(0, 16, (20_000, 3))).astype(int).tolist()
    for height, width, size in (*small, *large):
        expected = Placement(*torchvision_boxes(height, width, size))
        assert Fit((size, size), "crop").placement(height, width) == expected, (height, width, size)


def sides_and_targets(seed: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    rng = np.random.default_rng(seed)
    drawn = (2 ** rng.uniform(0, 13, (3000, 4))).astype(int).tolist()
    small = [((h, w), target) for h, w in itertools.product(range(1, 24), repeat=2) for target in TARGETS]
    return small + [((a, b), (c, d)) for a, b, c, d in drawn]


@pytest.mark.parametrize("mode", ["crop", "pad"])
def test_crop_just_covers_the_target_and_pad_just_fits_inside_and_the_aspect_ratio_is_kept(mode: FitMode) -> None:
    for (height, width), size in sides_and_targets(0) + sides_and_targets(1):
        place = Fit(size, mode).placement(height, width)
        case = f"{height} x {width} to {size}"
        for side, before in ((0, place.top), (1, place.left)):
            margin = place.resized[side] - size[side]
            assert min(margin, 0) <= before <= max(margin, 0), case
            assert margin >= 0 if mode == "crop" else -size[side] < margin <= 0, case
            assert abs(2 * before - margin) <= 1, case
        assert place.resized[0] == size[0] or place.resized[1] == size[1], case
        # One side is exact; the other is what the ratio says, rounded down, and at least one pixel.
        by_width, by_height = place.resized[1] * height // width, place.resized[0] * width // height
        assert place.resized[0] == max(by_width, 1) or place.resized[1] == max(by_height, 1), case


def test_a_picture_of_the_targets_shape_is_placed_whole_by_every_mode() -> None:
    for size, factor, mode in itertools.product(TARGETS, (1, 2, 3, 10), MODES):
        assert Fit(size, mode).placement(size[0] * factor, size[1] * factor) == Placement(size, 0, 0)


def center_crop_arr(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """As guided_diffusion/image_datasets.py of ADM has it, and DiT, SiT, REPA and EDM2's dataset_tool after it."""
    while min(pixels.shape[:2]) >= 2 * size:
        pixels = by_pillow(pixels, (pixels.shape[0] // 2, pixels.shape[1] // 2), Image.Resampling.BOX)
    scale = size / min(pixels.shape[:2])
    sides = round(pixels.shape[0] * scale), round(pixels.shape[1] * scale)
    whole = by_pillow(pixels, sides, Image.Resampling.BICUBIC)
    top, left = (whole.shape[0] - size) // 2, (whole.shape[1] - size) // 2
    return whole[top : top + size, left : left + size]


def by_pillow(pixels: NDArray[np.uint8], sides: tuple[int, int], filter: Image.Resampling) -> NDArray[np.uint8]:
    """Along rows and then along columns, in two calls: Pillow 13 begins with the columns of tall pictures."""
    picture = Image.fromarray(pixels).resize((sides[1], pixels.shape[0]), filter)
    return np.asarray(picture.resize((sides[1], sides[0]), filter))


@pytest.mark.parametrize("size", [1, 7, 32])
def test_adm_gives_the_pixels_of_pillow(size: int) -> None:
    fit, rng = Fit((size, size), "adm"), np.random.default_rng(size)
    small = itertools.product(range(1, 12), repeat=2)
    for height, width in [*small, *SHAPES, (31, 33), (64, 64), (65, 129), (330, 500), (70, 300), (300, 70)]:
        pixels = random_pixels(rng, height, width)
        expected = center_crop_arr(pixels, size)
        np.testing.assert_array_equal(fit.apply(pixels), expected, err_msg=f"{height} x {width}")
        assert fit.apply_nearest(np.full((height, width), 7, np.uint8)).tolist() == [[7] * size] * size


def test_a_set_has_the_pixels_that_adm_reads_from_its_files(imagenet_sample: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(imagenet_sample.rglob("*.JPEG"))[::9]):
        put(tmp_path / "images", f"{number % 2}/{number}.JPEG", content=path.read_bytes())
    convert(tmp_path / "images", tmp_path / "out", size=64, fit="adm", workers=1)
    for sample, key in zip(shards := open_shards(tmp_path / "out"), shards.index["key"].tolist(), strict=True):
        with Image.open(tmp_path / "images" / key.decode()) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        np.testing.assert_array_equal(sample.image, center_crop_arr(pixels, 64), err_msg=str(key))
        for shape in ((len(pixels), len(pixels) // 4), (pixels.shape[1] // 4, pixels.shape[1])):
            cut = pixels[: shape[0], : shape[1]]
            np.testing.assert_array_equal(Fit((64, 64), "adm").apply(cut), center_crop_arr(cut, 64))


# --- pixels -----------------------------------------------------------------------------------------------------------


def test_a_picture_of_the_right_size_keeps_every_pixel() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (31, 33, 3), dtype=np.uint8)
    for mode, resample in itertools.product(MODES, RESAMPLES):
        np.testing.assert_array_equal(Fit((31, 33), mode, resample).apply(pixels), pixels)


def test_pictures_of_any_memory_layout_give_the_same_sample() -> None:
    pixels = random_picture(np.random.default_rng(5), 30, 44)
    expected = Fit((16, 16)).apply(pixels)
    np.testing.assert_array_equal(Fit((16, 16)).apply(np.asfortranarray(pixels)), expected)
    doubled = np.repeat(pixels, 2, axis=1)
    np.testing.assert_array_equal(Fit((16, 16)).apply(doubled[:, ::2]), expected)


@pytest.mark.parametrize(
    ("shape", "size", "mode", "resized"),
    [
        ((1, 20_000), 256, "crop", "5120000 x 256"),
        ((20_000, 1), 256, "crop", "256 x 5120000"),
        ((2, 65_000), 1024, "crop", "33280000 x 1024"),
        ((MAX_PIXELS // 256 + 1, 1), 256, "squash", f"256 x {MAX_PIXELS // 256 + 1}"),  # the form between
    ],
)
def test_long_thin_pictures_are_refused_and_not_allocated_where_they_are_enlarged(
    shape: tuple[int, int], size: int, mode: FitMode, resized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("squash", "pad"):
        assert Fit((256, 256), other).apply(np.full((1, 20_000, 3), 9, np.uint8)).max() == 9

    monkeypatch.delattr(kernel, "resample")
    message = f"^too large: {shape[1]} x {shape[0]} resized: expected at most {MAX_PIXELS} pixels, found {resized}$"
    with pytest.raises(DecodeError, match=message):
        Fit((size, size), mode).apply(np.zeros((*shape, 3), np.uint8))


_PEAKS_OF_RESIZING = """
import sys, numpy as np
from shardio.conversion.images.fit import Fit
def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
for height, width, mode in {}:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    pixels = np.ones((height, width, 3), np.uint8)
    Fit((256, 256), mode).apply(pixels)
    print(peak() - before)
    del pixels
"""


def test_resizing_takes_less_memory_than_decoding_whatever_the_picture() -> None:
    pictures = [(340_000, 1, "squash"), (85, 1 << 20, "pad"), (1 << 20, 85, "pad"), (9_400, 9_400, "crop")]
    peaks = printed_by("-c", _PEAKS_OF_RESIZING.format(pictures)).split()
    for (height, width, mode), peak in zip(pictures, peaks, strict=True):
        assert height * width * 3 * 0.9 < int(peak) * 1024 < 12 * MAX_PIXELS, (height, width, mode)


# --- reduced pictures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resample", RESAMPLES)
@pytest.mark.parametrize("reduction", [2, 4, 8])
def test_a_reduced_picture_lies_where_the_whole_one_would(reduction: int, resample: Resample) -> None:
    """Ramps, in both directions: a shift of a quarter of a pixel would be six steps of gray."""
    size, sides = (10, 10), range(reduction * 41 - reduction + 1, reduction * 41 + 1)
    for height, width in zip(sides, reversed(sides), strict=True):
        y, x = np.mgrid[:height, :width] + 0.5
        whole = np.dstack([255 * y / height, 255 * x / width, np.zeros_like(y)])
        padded = np.pad(whole, ((0, -height % reduction), (0, -width % reduction), (0, 0)), "edge")
        blocks = padded.reshape(padded.shape[0] // reduction, reduction, -1, reduction, 3)
        reduced = blocks.mean((1, 3)).round().astype(np.uint8)
        for mode in MODES:
            fit = Fit(size, mode, resample)
            expected = fit.apply(whole.round().astype(np.uint8)).astype(int)
            found = fit.apply(reduced, (height, width), reduction)
            assert np.abs(found - expected).max() <= 2, (height, width, mode)


# --- the kernel makes the bytes of torch ------------------------------------------------------------------------------


def by_torch(
    fit: Fit, pixels: NDArray[np.uint8], source_size: tuple[int, int] | None = None, reduction: int = 1
) -> NDArray[np.uint8]:
    """What `Fit.apply` is to return."""
    height, width = pixels.shape[:2] if source_size is None else source_size
    place, extent = fit.placement(height, width), (height / reduction, width / reduction)
    target: Any = {"size": place.resized}
    if extent != pixels.shape[:2]:  # slightly more than the quotients, as torch rounds the new sides down
        factors = [new / old * (1 + 2**-40) for new, old in zip(place.resized, extent, strict=True)]
        target = {"scale_factor": factors}
    batch = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(batch, mode=fit.resample, antialias=True, **target)
    shown = resized[0].permute(1, 2, 0).numpy()[max(0, place.top) :, max(0, place.left) :][: fit.size[0], : fit.size[1]]
    sample = np.zeros((*fit.size, 3), np.uint8)
    sample[max(0, -place.top) :, max(0, -place.left) :][: shown.shape[0], : shown.shape[1]] = shown
    return sample


def random_fit(rng: np.random.Generator) -> Fit:
    height, width = rng.integers(1, rng.choice([5, 20, 100]), 2).tolist()
    size = (height, height) if rng.random() < 0.3 else (height, width)
    return Fit(size, str(rng.choice(MODES)), str(rng.choice(RESAMPLES)))  # type: ignore[arg-type]


def random_pixels(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    # Black and white make filters overshoot.
    return pixels if rng.random() < 0.5 else (pixels >> 7) * np.uint8(255)


def test_random_pictures_are_as_torch_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for number in range(800):
        monkeypatch.setattr(kernel, "_FORM", number % NUM_FORMS)
        fit, (height, width) = random_fit(rng), rng.integers(1, rng.choice([5, 20, 100, 250]), 2).tolist()
        pixels = random_pixels(rng, height, width)
        np.testing.assert_array_equal(fit.apply(pixels), by_torch(fit, pixels), err_msg=f"{height} x {width}, {fit}")


def test_random_reduced_pictures_are_as_torch_makes_them() -> None:
    rng = np.random.default_rng(1)
    reduced = 0
    while reduced < 150:
        fit, reduction = random_fit(rng), int(rng.choice([2, 4, 8]))
        height, width = rng.integers(1, rng.choice([50, 400, 2000]), 2).tolist()
        shape = (math.ceil(height / reduction), math.ceil(width / reduction))
        if any(side < least for side, least in zip(shape, fit.least_size(height, width), strict=True)):
            continue
        reduced += 1
        picture = random_pixels(rng, *shape), (height, width), reduction
        np.testing.assert_array_equal(fit.apply(*picture), by_torch(fit, *picture), err_msg=f"{picture[1:]}, {fit}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 5000), (3, 3)),
        ((5000, 1), (3, 3)),
        ((2, 20_000), (64, 64)),
        ((20_000, 2), (64, 64)),
        ((3000, 2000), (1, 1)),
        ((3, 2), (1, 700)),
        ((700, 1), (350, 1)),
    ],
)
def test_extreme_shapes_are_as_torch_makes_them(shape: tuple[int, int], size: tuple[int, int], mode: FitMode) -> None:
    pixels = random_pixels(np.random.default_rng(2), *shape)
    fit = Fit(size, mode, "lanczos")
    np.testing.assert_array_equal(fit.apply(pixels), by_torch(fit, pixels))
