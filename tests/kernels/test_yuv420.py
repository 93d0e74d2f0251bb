"""Images stored as yuv420: made of RGB, and resampled to RGB, both as plain arithmetic has it, to the bit."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray
from plain_yuv420 import Pixels, plain_picture, plain_rgb, plain_window, plain_yuv420

from shardio.kernels import _resample
from shardio.kernels import resample as kernel
from shardio.kernels.resample import Planes, to_yuv420
from shardio.kernels.rowcopy import Windows

NUM_FORMS = len(_resample.FORMS)


def planes_of(images: Pixels) -> Planes:
    """The planes of whole images as they are stored, (B, height * 3 / 2, width)."""
    count, lines, width = images.shape
    return Planes.packed(images, Windows.whole(count, lines * 2 // 3, width), 3, halved=True)


# Pictures and boxes that are drawn.


def drawn_sample(rng: np.random.Generator, height: int, width: int) -> Pixels:
    shape = height * 3 // 2, width
    if rng.random() < 0.3:  # where filters overshoot, and colors that are none
        return rng.integers(0, 2, shape, dtype=np.uint8) * np.uint8(255)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def drawn_axis(rng: np.random.Generator, side: int, resized: int) -> tuple[float, float, int, int]:
    kind = rng.choice(["whole", "copy", "pixels", "fraction"])
    start, length = 0.0, float(side)
    if kind == "copy" and resized <= side:
        start, length = float(rng.integers(side - resized + 1)), float(resized)
    elif kind == "pixels":
        length = float(rng.integers(1, side + 1))
        start = float(rng.integers(side - int(length) + 1))
    elif kind == "fraction":
        length = rng.uniform(0.3, side)
        start = rng.uniform(0, side - length)
    low, high = math.floor(start), math.ceil(start + length)
    if rng.random() < 0.5:
        low, high = int(rng.integers(low + 1)), int(rng.integers(high, side + 1))
    return start, length / resized, low, high


def check_drawn_batch(rng: np.random.Generator) -> None:
    """Checks the results of a drawn batch in each form, alone, in several threads, and normalized."""
    count = int(rng.integers(1, 4))
    sides = rng.integers(1, rng.choice([3, 8, 24]), (count, 2)) * 2
    is_row, is_one = rng.random(2) < 0.5
    if is_row or is_one:
        sides[:] = sides[0]
    samples = [drawn_sample(rng, *side) for side in sides.tolist()]
    windows = Windows(*np.pad(sides, [(0, 0), (2, 0)]).T)
    if is_row:
        order = rng.permutation(count + 1)[:count]
        rows = np.zeros((count + 1, samples[0].size), np.uint8)
        rows[order] = [sample.ravel() for sample in samples]
        planes = Planes.of_rows(rows, order, windows, (*sides[0].tolist(), 3), halved=True)
    else:
        planes = Planes.packed(np.concatenate([sample.ravel() for sample in samples]), windows, 3, halved=True)
    resized = tuple(rng.integers(1, rng.choice([5, 50]), 2).tolist())
    size, first = resized, (0, 0)
    if rng.random() < 0.4:
        size = tuple(rng.integers(1, 60, 2).tolist())
        first = tuple(int(rng.integers(1 - n, of)) for n, of in zip(size, resized, strict=True))
    axes = np.array([[drawn_axis(rng, *pair) for pair in zip(side, resized, strict=True)] for side in sides.tolist()])
    if is_one:
        axes[:] = axes[0]
    flips, antialias, wide = rng.random(count) < 0.5, bool(rng.random() < 0.7), bool(rng.random() < 0.2)
    kinds = rng.choice(["bilinear", "cubic"], count) if rng.random() < 0.7 else [rng.choice(["box", "lanczos"])] * count
    how = {"cubic": np.equal(kinds, "cubic"), "box": kinds[0] == "box", "lanczos": kinds[0] == "lanczos", "wide": wide}
    how |= {"antialias": antialias, "resized": resized, "first": first}
    given = f"{sides.tolist()} {axes.tolist()} {flips} {kinds} {size} {how}"

    expected = np.stack(
        [
            plain_window(plain_rgb(*pair, resized, kind, antialias, wide), size, first, flip)
            for *pair, kind, flip in zip(samples, axes, kinds, flips.tolist(), strict=True)
        ]
    )

    def make(form: int, dtype: Any = np.uint8, some: slice = slice(None), **more: Any) -> NDArray[Any]:
        out = np.zeros((len(flips[some]), *size, 3), dtype)
        with mock.patch.object(kernel, "_FORM", form):
            kernel.resample(planes[some], axes[some], flips[some], out, **how | {"cubic": how["cubic"][some]}, **more)
        return out

    affine = rng.normal(size=(2, 3)).astype(np.float32)
    dtype = rng.choice([np.float32, np.uint16, np.float16])
    copy = np.array([[(0, 1, 0, side) for side in size]] * count, np.float64)
    normalized = np.zeros(expected.shape, dtype)
    kernel.resample(Planes.of_images(expected), copy, np.zeros(count, bool), normalized, affine, cubic=False)
    for form in range(NUM_FORMS):
        np.testing.assert_array_equal(make(form), expected, err_msg=f"{form} {given}")
        made = make(form, dtype, affine=affine)
        np.testing.assert_array_equal(made.view(np.uint8), normalized.view(np.uint8), err_msg=f"{form} {given}")
        for i in range(count):
            np.testing.assert_array_equal(make(form, some=slice(i, i + 1))[0], expected[i], err_msg=f"{form} {given}")
    if rng.random() < 0.1:
        with ThreadPoolExecutor(4) as pool:
            for made in pool.map(make, [0] * 8):
                np.testing.assert_array_equal(made, expected, err_msg=given)


def test_results_are_as_the_definition_has_them() -> None:
    seed = int(np.random.default_rng().integers(2**32))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(300):
        check_drawn_batch(rng)


@pytest.mark.parametrize("form", range(NUM_FORMS))
def test_a_crop_is_a_slice_of_the_whole_picture(form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_FORM", form)
    sample = np.random.default_rng(1).integers(0, 256, (9, 8), dtype=np.uint8)
    whole = plain_picture(sample)
    copied = np.zeros((1, 6, 8, 3), np.uint8)
    planes = planes_of(sample[None])
    planes.copy_images(copied)
    np.testing.assert_array_equal(copied[0], whole)
    edges = [[(a, b) for a in range(side) for b in range(a + 1, side + 1)] for side in (6, 8)]
    for (top, bottom), (left, right), flip in product(*edges, (False, True)):
        axes = np.array([[(top, 1, top, bottom), (left, 1, left, right)]])
        made = np.zeros((1, bottom - top, right - left, 3), np.uint8)
        kernel.resample(planes, axes, np.array([flip]), made, cubic=flip)
        part = whole[top:bottom, left:right]
        np.testing.assert_array_equal(made[0], part[:, ::-1] if flip else part, err_msg=f"{axes} {flip}")


def test_gray_stays_gray() -> None:
    rng = np.random.default_rng(2)
    gray = rng.integers(0, 256, (1, 26, 34, 1), dtype=np.uint8)
    sample = np.zeros((1, 39, 34), np.uint8)
    to_yuv420(np.broadcast_to(gray, (1, 26, 34, 3)).copy(), sample)
    assert (sample[0, 26:] == 128).all()
    np.testing.assert_array_equal(sample[:, :26], gray[..., 0])
    for size, cubic in product([(26, 34), (13, 17), (20, 31), (60, 70)], (False, True)):
        axes = np.array([[(0, side / n, 0, side) for side, n in zip((26, 34), size, strict=True)]])
        colors, light = np.zeros((1, *size, 3), np.uint8), np.zeros((1, *size, 1), np.uint8)
        kernel.resample(planes_of(sample), axes, np.ones(1, bool), colors, cubic=cubic)
        kernel.resample(Planes.of_images(gray), axes, np.ones(1, bool), light, cubic=cubic)
        np.testing.assert_array_equal(colors, np.broadcast_to(light, colors.shape))


# RGB to yuv420.


@pytest.mark.parametrize("form", range(NUM_FORMS))
def test_pictures_become_yuv420_as_the_definition_has_it(form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_FORM", form)
    rng = np.random.default_rng(3)
    for height, width in [(2, 2), (2, 130), (70, 2), (6, 64), (34, 66), (20, 200)]:
        images = rng.integers(0, 256, (3, height, width, 3), dtype=np.uint8)
        images[1] = (images[1] >> 7) * 255
        images[2] = (
            np.array([(0, 0, 255), (255, 0, 0)], np.uint8).repeat(height * width // 2, 0).reshape(height, width, 3)
        )
        out = np.zeros((3, height * 3 // 2, width), np.uint8)
        to_yuv420(images, out)
        np.testing.assert_array_equal(out, np.stack([plain_yuv420(picture) for picture in images]))


def test_the_bytes_of_a_small_picture() -> None:
    """As they were made when the format was new: stored pixels must never be read otherwise."""
    picture = (np.arange(4 * 6 * 3) * 37 % 251).astype(np.uint8).reshape(1, 4, 6, 3)
    sample, whole, small = np.zeros((1, 6, 6), np.uint8), np.zeros_like(picture), np.zeros((1, 3, 4, 3), np.uint8)
    to_yuv420(picture, sample)
    planes = planes_of(sample)
    planes.copy_images(whole)
    axes = np.array([[(0.5, 1, 0, 4), (1, 1.25, 1, 6)]])
    kernel.resample(planes, axes, np.ones(1, bool), small, cubic=True)
    assert sample.tobytes().hex() == GOLDEN["sample"]
    assert whole.tobytes().hex() == GOLDEN["whole"]
    assert small.tobytes().hex() == GOLDEN["small"]


GOLDEN = {
    "sample": ("1e8d4c70c353c236a56488476bbe4ebd31a05f83d666b94999846f6f79796aa98f8f7070"),
    "whole": (
        "00254a858ab06f375ca1576ee2b7ae684e35b0c6dd32344bbd97ae8355609a837551472e736960c4bdb54e4f47b9c1b4"
        "29382395a990745a418d836acbdfc650745aa3c7ad33573d"
    ),
    "small": ("735940b78385a35378605e836d7158726a5f977e8479747a5f83696a8e747fa085a9a389"),
}


# Memory, and what is refused.


def test_no_byte_is_read_behind_a_row_of_a_mapped_file(tmp_path: Path) -> None:
    path, shape = tmp_path / "rows", (64, 128, 3)  # a row is three pages
    rng = np.random.default_rng(4)
    rng.integers(0, 256, (3, 64 * 192), dtype=np.uint8).tofile(path)
    rows = np.memmap(path, np.uint8, "r", shape=(3, 64 * 192))
    kept, windows = np.array(rows[:1]).reshape(1, 96, 128), Windows.whole(1, *shape[:2])
    with path.open("r+b") as file:
        file.truncate(rows.shape[1])
    boxes = [(0, 64 / 50, 0, 64), (0, 128 / 70, 0, 128)], [(7, 1, 7, 57), (58, 1, 58, 128)]
    for axes, flip in product(np.array(boxes)[:, None], np.array([[False], [True]])):
        made, expected = np.zeros((2, 1, 50, 70, 3), np.uint8)
        there, lost = (Planes.of_rows(rows, np.array([i]), windows, shape, halved=True) for i in range(2))
        kernel.resample(there, axes, flip, made, cubic=False)
        kernel.resample(planes_of(kept), axes, flip, expected, cubic=False)
        np.testing.assert_array_equal(made, expected)
        with pytest.raises(OSError, match="a page of image 0 of 1"):
            kernel.resample(lost, axes, flip, made, cubic=False)
    with pytest.raises(OSError, match="a page of image 0 of 1"):
        lost.copy_images(np.zeros((1, *shape), np.uint8))


@pytest.mark.parametrize(
    ("images", "out"),
    [
        ((1, 4, 6, 3), (1, 5, 6)),
        ((1, 4, 6, 3), (1, 6, 4)),
        ((1, 4, 6, 3), (2, 6, 6)),
        ((1, 4, 6, 3), (1, 36)),
        ((1, 4, 6, 4), (1, 6, 6)),
        ((1, 4, 5, 3), (1, 6, 5)),
        ((1, 3, 4, 3), (1, 4, 4)),
        ((1, 0, 4, 3), (1, 0, 4)),
    ],
)
def test_pictures_of_other_shapes_are_refused(images: tuple[int, ...], out: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        to_yuv420(np.zeros(images, np.uint8), np.zeros(out, np.uint8))


def test_planes_of_other_sizes_are_refused() -> None:
    rows = np.zeros((2, 36), np.uint8)
    with pytest.raises(ValueError, match="found 72 bytes"):
        Planes.packed(rows, Windows.whole(3, 4, 6), 3, halved=True)
    with pytest.raises(ValueError, match="found 24 bytes"):
        planes_of(np.zeros((1, 4, 6), np.uint8))
