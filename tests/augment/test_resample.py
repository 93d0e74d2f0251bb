"""Boxes are resampled as torch interpolates them; boxes with fractional sides by the same definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import as_batch, random_pictures
from plain_yuv420 import plain_weights
from torch.nn.functional import interpolate

from shardio.augment.batch import computed
from shardio.augment.boxes import Boxes
from shardio.augment.resample import UNCAST, Cast, Filter
from shardio.augment.stage import Stage

ways = pytest.mark.parametrize(
    "how", [Filter(kind, wide) for kind in ("bilinear", "bicubic") for wide in (True, False)]
)


def resample(
    images: torch.Tensor,
    boxes: Boxes,
    flips: NDArray[np.bool_],
    size: tuple[int, int],
    how: Filter,
    cast: Cast = UNCAST,
) -> torch.Tensor:
    source = (images.shape[2], images.shape[3], images.shape[1])
    return computed(images, (Stage(source, size, boxes, boxes, flips, how),), cast, len(flips))


def resample_plainly(
    images: torch.Tensor, boxes: Boxes, flips: NDArray[np.bool_], size: tuple[int, int], how: Filter
) -> torch.Tensor:
    kind = "cubic" if how.interpolation == "bicubic" else "bilinear"
    made = []
    for image, box, flip in zip(images.permute(0, 2, 3, 1).numpy(), boxes.sides.tolist(), flips, strict=True):
        for axis in (1, 0):  # along the lines first
            start, length, limit = box[axis], box[axis + 2], images.shape[axis + 2]
            span = start, length / size[axis], math.floor(start), min(math.ceil(start + length), limit)
            weights, bits = plain_weights(span, limit, size[axis], kind, how.antialias, False)
            sums = np.tensordot(weights, np.moveaxis(image, axis, 0).astype(np.int64), 1)
            image = np.moveaxis(((sums + (1 << bits >> 1)) >> bits).clip(0, 255), 0, axis)
        made.append(image[:, ::-1] if flip else image)
    return torch.from_numpy(np.stack(made).astype(np.uint8)).permute(0, 3, 1, 2)


def drawn_boxes(rng: np.random.Generator, count: int, height: int, width: int) -> Boxes:
    heights, widths = rng.integers(1, height + 1, count), rng.integers(1, width + 1, count)
    tops, lefts = rng.integers(0, height - heights + 1), rng.integers(0, width - widths + 1)
    return Boxes(*np.stack([tops, lefts, heights, widths]).astype(float))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_each_image_may_have_a_filter_of_its_own(antialias: bool, times: int) -> None:
    rng, count = np.random.default_rng(times), 20 * times
    images = as_batch(random_pictures(rng, 20, 50, 60))
    boxes, flips, cubic = drawn_boxes(rng, count, 50, 60), rng.random(count) < 0.5, rng.random(count) < 0.5
    found, bilinear, bicubic = (
        resample(images, boxes, flips, (24, 31), how)
        for how in (Filter("random", antialias, cubic), Filter("bilinear", antialias), Filter("bicubic", antialias))
    )
    assert torch.equal(found[cubic], bicubic[cubic])
    assert torch.equal(found[~cubic], bilinear[~cubic])
    assert not torch.equal(bilinear, bicubic)


@ways
def test_whole_boxes_are_what_torch_interpolates_to_the_bit(how: Filter) -> None:
    rng = np.random.default_rng(4)
    for _ in range(30):
        (height, width), (tall, wide) = rng.integers(1, 120, 2).tolist(), rng.integers(1, 120, 2).tolist()
        images = torch.from_numpy(rng.integers(0, 256, (4, height, width, 3), dtype=np.uint8)).permute(0, 3, 1, 2)
        boxes, flips = drawn_boxes(rng, 4, height, width), rng.random(4) < 0.5
        found = resample(images, boxes, flips, (tall, wide), how)
        assert found.is_contiguous(memory_format=torch.channels_last)
        for i, (top, left, h, w) in enumerate(boxes.sides.astype(int).tolist()):
            cut = images[i : i + 1, :, top : top + h, left : left + w].contiguous(memory_format=torch.channels_last)
            (expected,) = interpolate(
                cut, (tall, wide), mode=how.interpolation, align_corners=False, antialias=how.antialias
            )
            assert torch.equal(found[i], expected.flip(2) if flips[i] else expected), (cut.shape, tall, wide)


@ways
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_boxes_that_are_no_whole_pixels_are_resampled_as_defined_to_the_bit(how: Filter, channels: int) -> None:
    rng = np.random.default_rng(channels)
    images = torch.from_numpy(rng.integers(0, 256, (20, channels, 50, 61), dtype=np.uint8))
    heights, widths = rng.uniform(0.3, 50, 20), rng.uniform(0.3, 61, 20)
    boxes = Boxes(rng.uniform(0, 50 - heights), rng.uniform(0, 61 - widths), heights, widths)
    given = images, boxes, rng.random(20) < 0.5, (33, 20), how
    assert torch.equal(resample(*given), resample_plainly(*given))


@pytest.mark.parametrize("channels", [1, 3])
def test_normalized_pixels_are_those_of_whole_gray_levels(channels: int) -> None:
    rng = np.random.default_rng(5)
    images = torch.from_numpy(rng.integers(0, 256, (9, channels, 50, 61), dtype=np.uint8))
    given = images, drawn_boxes(rng, 9, 50, 61), rng.random(9) < 0.5, (20, 33), Filter()
    statistics = mean, std = [0.4, 0.5, 0.6][:channels], [0.2, 0.3, 0.25][:channels]
    gray, found = resample(*given), resample(*given, Cast(statistics))
    assert found.dtype == torch.float32
    expected = (gray / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        cast = resample(*given, Cast(statistics, dtype))
        assert cast.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(cast, found.to(dtype)), dtype
        assert torch.equal(resample(*given, Cast(dtype=dtype)), gray.to(dtype)), dtype


@pytest.mark.parametrize(
    "box", [(-1, 0, 5, 5), (0, -0.1, 5, 5), (6, 0, 5, 5), (0, 6, 5, 5), (0, 0, 0, 5), (0, 0, 5, -1), (0, 0, np.nan, 5)]
)
def test_a_box_that_is_not_inside_its_picture_is_refused(box: tuple[float, ...]) -> None:
    images, boxes = torch.zeros(1, 3, 10, 10, dtype=torch.uint8), Boxes(*np.array(box, float)[:, None])
    with pytest.raises(IndexError, match="not inside its image"):
        resample(images, boxes, np.zeros(1, bool), (4, 4), Filter())
