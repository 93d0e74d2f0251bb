"""Images stored as yuv420: made of RGB, and resampled to RGB, both as plain arithmetic has it, to the bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from plain_yuv420 import Pixels, plain_picture, plain_yuv420

from shardio.kernels import _resample
from shardio.kernels import resample as kernel
from shardio.kernels.resample import Planes, to_yuv420
from shardio.kernels.rowcopy import Windows

NUM_FORMS = len(_resample.FORMS)


def planes_of(images: Pixels) -> Planes:
    """The planes of whole images as they are stored, (B, height * 3 / 2, width)."""
    count, lines, width = images.shape
    return Planes.packed(images, Windows.whole(count, lines * 2 // 3, width), 3, halved=True)


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


@pytest.mark.parametrize("form", range(NUM_FORMS))
def test_pictures_become_yuv420_as_the_definition_has_it(form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_FORM", form)
    rng = np.random.default_rng(3)
    for height, width in [(2, 2), (2, 130), (70, 2), (6, 64), (34, 66), (20, 200)]:
        images = rng.integers(0, 256, (3, height, width, 3), dtype=np.uint8)
        images[1] = (images[1] >> 7) * 255
        images[2] = np.array([(0, 0, 255), (255, 0, 0)]).repeat(height * width // 2, 0).reshape(images[2].shape)
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


def test_pictures_and_planes_of_other_shapes_are_refused() -> None:
    images = np.zeros((1, 4, 6, 3), np.uint8)
    for shape in ((1, 5, 6), (1, 6, 4), (2, 6, 6), (1, 36)):
        with pytest.raises(ValueError, match="expected"):
            to_yuv420(images, np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="expected"):
        to_yuv420(np.zeros((1, 4, 6, 4), np.uint8), np.zeros((1, 6, 6), np.uint8))
    with pytest.raises(ValueError, match="found 72 bytes"):
        Planes.packed(images, Windows.whole(3, 4, 6), 3, halved=True)
    with pytest.raises(ValueError, match="found 24 bytes"):
        planes_of(np.zeros((1, 4, 6), np.uint8))
