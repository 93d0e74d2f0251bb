"""Boxes are resampled as torch interpolates them, natively and by torch alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pictures import as_batch, random_pictures
from resampling_by_torch import resample
from torch.nn.functional import interpolate

from shardio.augment.boxes import Boxes
from shardio.augment.resample import Interpolation, Resampling

WAYS = [False, True]


def drawn_boxes(rng: np.random.Generator, count: int, height: int, width: int) -> Boxes:
    heights, widths = rng.integers(1, height + 1, count), rng.integers(1, width + 1, count)
    tops, lefts = rng.integers(0, height - heights + 1), rng.integers(0, width - widths + 1)
    return Boxes(*np.stack([tops, lefts, heights, widths]).astype(float))


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_each_image_may_have_a_filter_of_its_own(native: bool, antialias: bool, times: int) -> None:
    rng = np.random.default_rng(times)
    images = as_batch(random_pictures(rng, 20, 50, 60))
    boxes, flips, cubic = (
        drawn_boxes(rng, 20 * times, 50, 60),
        rng.random(20 * times) < 0.5,
        rng.random(20 * times) < 0.5,
    )
    how = Resampling((24, 31), "random", antialias, cubic=cubic)
    found = resample(images, boxes, flips, how, native=native)
    ways = Resampling((24, 31), "bilinear", antialias), Resampling((24, 31), "bicubic", antialias)
    bilinear, bicubic = (resample(images, boxes, flips, one, native=native) for one in ways)
    assert torch.equal(found[cubic], bicubic[cubic])
    assert torch.equal(found[~cubic], bilinear[~cubic])
    assert not torch.equal(bilinear, bicubic)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_whole_boxes_are_what_torch_interpolates_to_the_bit(
    native: bool, antialias: bool, interpolation: Interpolation
) -> None:
    rng = np.random.default_rng(4)
    for _ in range(30):
        (height, width), size = rng.integers(1, 120, 2).tolist(), tuple(rng.integers(1, 120, 2).tolist())
        images = torch.from_numpy(rng.integers(0, 256, (4, height, width, 3), dtype=np.uint8)).permute(0, 3, 1, 2)
        boxes, flips = drawn_boxes(rng, 4, height, width), rng.random(4) < 0.5
        how = Resampling(size, interpolation, antialias)
        found = resample(images, boxes, flips, how, native=native)
        assert found.is_contiguous(memory_format=torch.channels_last)
        for i in range(4):
            top, left, tall, wide = (int(values[i]) for values in vars(boxes).values())
            cut = images[i : i + 1, :, top : top + tall, left : left + wide].contiguous(
                memory_format=torch.channels_last
            )
            expected = interpolate(cut, size, mode=interpolation, align_corners=False, antialias=antialias)
            expected = expected[0].flip(2) if flips[i] else expected[0]
            assert torch.equal(found[i], expected), (height, width, size, i)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_both_ways_agree_to_the_bit_about_boxes_that_are_no_whole_pixels(
    interpolation: Interpolation, antialias: bool, channels: int
) -> None:
    rng = np.random.default_rng(channels)
    images = rng.integers(0, 256, (40, channels, 50, 61), dtype=np.uint8)
    heights, widths = rng.uniform(0.3, 50, 40), rng.uniform(0.3, 61, 40)
    boxes = Boxes(rng.uniform(0, 50 - heights), rng.uniform(0, 61 - widths), heights, widths)
    flips = rng.random(40) < 0.5
    how = Resampling((33, 20), interpolation, antialias)
    one, other = (resample(torch.from_numpy(images), boxes, flips, how, native=native) for native in (True, False))
    assert torch.equal(one, other)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("channels", [1, 3])
def test_normalized_pixels_are_those_of_whole_gray_levels(native: bool, channels: int) -> None:
    rng = np.random.default_rng(5)
    images = torch.from_numpy(rng.integers(0, 256, (9, channels, 50, 61), dtype=np.uint8))
    boxes, flips = drawn_boxes(rng, 9, 50, 61), rng.random(9) < 0.5
    mean, std = [0.4, 0.5, 0.6][:channels], [0.2, 0.3, 0.25][:channels]
    gray = resample(images, boxes, flips, Resampling((20, 33)), native=native)
    found = resample(images, boxes, flips, Resampling((20, 33), statistics=(mean, std)), native=native)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = (gray / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        cast = resample(images, boxes, flips, Resampling((20, 33), statistics=(mean, std), dtype=dtype), native=native)
        assert cast.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(cast, found.to(dtype)), dtype
        levels = resample(images, boxes, flips, Resampling((20, 33), dtype=dtype), native=native)
        assert torch.equal(levels, gray.to(dtype)), dtype


@pytest.mark.parametrize("native", WAYS)
def test_the_whole_picture_at_its_own_size_is_the_picture(native: bool) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 3, 17, 23), dtype=np.uint8)
    whole = Boxes(*(np.full(3, value, float) for value in (0, 0, 17, 23)))
    for how in (Resampling((17, 23)), Resampling((17, 23), "bicubic")):
        found = resample(torch.from_numpy(images), whole, np.zeros(3, bool), how, native=native)
        assert np.array_equal(found.numpy(), images)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize(
    "box", [(-1, 0, 5, 5), (0, -0.1, 5, 5), (6, 0, 5, 5), (0, 6, 5, 5), (0, 0, 0, 5), (0, 0, 5, -1), (0, 0, np.nan, 5)]
)
def test_a_box_that_is_not_inside_its_picture_is_refused(native: bool, box: tuple[float, ...]) -> None:
    boxes = Boxes(*np.array(box, float)[:, None])
    with pytest.raises(IndexError, match="not inside its image"):
        resample(
            torch.zeros(1, 3, 10, 10, dtype=torch.uint8), boxes, np.zeros(1, bool), Resampling((4, 4)), native=native
        )
