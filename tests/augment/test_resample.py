"""Boxes are resampled as torch interpolates them, and as operations of torch resample boxes with fractional sides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import as_batch, random_pictures
from torch.nn.functional import interpolate

from shardio.augment.batch import computed
from shardio.augment.boxes import Boxes
from shardio.augment.resample import UNCAST, Cast, Filter, Interpolation
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


def resample_by_torch(
    images: torch.Tensor, boxes: Boxes, flips: NDArray[np.bool_], size: tuple[int, int], how: Filter
) -> torch.Tensor:
    rows, columns = (
        _weights(*map(torch.from_numpy, span), limit, side, how)
        for span, limit, side in (
            ((boxes.tops, boxes.heights), images.shape[2], size[0]),
            ((boxes.lefts, boxes.widths), images.shape[3], size[1]),
        )
    )
    columns = torch.where(torch.from_numpy(flips)[:, None, None], columns.flip(1), columns)
    # (B, H, W, C) is resampled along the lines first, then along the columns.
    pixels = images.permute(0, 2, 3, 1).double()
    lines = _to_levels(torch.einsum("bxw,bhwc->bhxc", columns, pixels))
    return _to_levels(torch.einsum("byh,bhxc->byxc", rows, lines)).to(torch.uint8).permute(0, 3, 1, 2)


def _to_levels(sums: torch.Tensor) -> torch.Tensor:
    """Rounds `sums` in place to whole numbers from 0 to 255, halves up. Returns `sums`."""
    return sums.add_(0.5).floor_().clamp_(0, 255)


def _weights(starts: torch.Tensor, lengths: torch.Tensor, limit: int, size: int, how: Filter) -> torch.Tensor:
    """Returns the weight of each input pixel for each output pixel along one axis, (B, size, limit).

    The weights of an image are rounded to multiples of 2^-n, with the largest n for which they fit in 16 bits. With
    `how.antialias`, the filter widens if the scale is above 1, and leaves out pixels outside of the box. Otherwise
    the pixels at the box's edges are repeated outside.
    """
    starts, scale = starts[:, None], lengths[:, None] / size
    low, high = torch.floor(starts + 1e-9), (starts + lengths[:, None] - 1e-9).ceil().clamp(max=limit)
    stretch = scale.clamp(min=1.0) if how.antialias else torch.ones_like(scale)
    centers = starts + (torch.arange(size) + 0.5) * scale
    firsts = torch.floor(centers - how.radius * stretch + 0.5)
    lasts = torch.floor(centers + how.radius * stretch + 0.5)
    taps = int(2 * how.radius * stretch.max()) + 2
    places = firsts[:, :, None] + torch.arange(taps)
    weights = _filter((places - centers[:, :, None] + 0.5) * (1 / stretch)[:, :, None], how)
    weights = weights * (places < lasts[:, :, None])
    if how.antialias:
        weights = weights * ((places >= low[:, :, None]) & (places < high[:, :, None]))
    places = torch.minimum(torch.maximum(places, low[:, :, None]), high[:, :, None] - 1).long()
    dense = torch.zeros(len(starts), size, limit, dtype=starts.dtype).scatter_add_(2, places, weights)
    # Added one after the other, as in C: sums of doubles depend on the order.
    total = torch.zeros_like(weights[:, :, 0])
    for tap in range(taps):
        total = total + weights[:, :, tap]
    shares = torch.nan_to_num(dense / total[:, :, None])
    largest = shares.abs().amax(dim=(1, 2), keepdim=True)
    unit = torch.ones_like(largest)
    for n in range(1, 23):
        unit = torch.where(largest * 2.0**n + 0.5 < 2**15, 2.0**n, unit)
    return (shares.abs() * unit + 0.5).floor() * shares.sign() / unit


def _filter(x: torch.Tensor, how: Filter) -> torch.Tensor:
    x = x.abs()
    if how.interpolation == "bilinear":
        return (1.0 - x).clamp(min=0.0)
    # Keys, "Cubic convolution interpolation for digital image processing", 1981.
    a = -0.5 if how.antialias else -0.75
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


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
            expected = interpolate(
                cut, (tall, wide), mode=how.interpolation, align_corners=False, antialias=how.antialias
            )
            assert torch.equal(found[i], expected[0].flip(2) if flips[i] else expected[0]), (
                height,
                width,
                tall,
                wide,
                i,
            )


@ways
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_boxes_that_are_no_whole_pixels_are_resampled_as_by_torch_to_the_bit(how: Filter, channels: int) -> None:
    rng = np.random.default_rng(channels)
    images = torch.from_numpy(rng.integers(0, 256, (40, channels, 50, 61), dtype=np.uint8))
    heights, widths = rng.uniform(0.3, 50, 40), rng.uniform(0.3, 61, 40)
    given = Boxes(rng.uniform(0, 50 - heights), rng.uniform(0, 61 - widths), heights, widths), rng.random(40) < 0.5
    assert torch.equal(resample(images, *given, (33, 20), how), resample_by_torch(images, *given, (33, 20), how))


@pytest.mark.parametrize("channels", [1, 3])
def test_normalized_pixels_are_those_of_whole_gray_levels(channels: int) -> None:
    rng = np.random.default_rng(5)
    images = torch.from_numpy(rng.integers(0, 256, (9, channels, 50, 61), dtype=np.uint8))
    given = images, drawn_boxes(rng, 9, 50, 61), rng.random(9) < 0.5, (20, 33), Filter()
    statistics = mean, std = [0.4, 0.5, 0.6][:channels], [0.2, 0.3, 0.25][:channels]
    gray, found = resample(*given), resample(*given, Cast(statistics))
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = (gray / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        cast = resample(*given, Cast(statistics, dtype))
        assert cast.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(cast, found.to(dtype)), dtype
        assert torch.equal(resample(*given, Cast(dtype=dtype)), gray.to(dtype)), dtype


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_whole_picture_at_its_own_size_is_the_picture(interpolation: Interpolation) -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 17, 23), dtype=np.uint8))
    whole, flips = Boxes.whole(3, 17, 23), np.zeros(3, bool)
    assert torch.equal(resample(images, whole, flips, (17, 23), Filter(interpolation)), images)


@pytest.mark.parametrize(
    "box", [(-1, 0, 5, 5), (0, -0.1, 5, 5), (6, 0, 5, 5), (0, 6, 5, 5), (0, 0, 0, 5), (0, 0, 5, -1), (0, 0, np.nan, 5)]
)
def test_a_box_that_is_not_inside_its_picture_is_refused(box: tuple[float, ...]) -> None:
    images, boxes = torch.zeros(1, 3, 10, 10, dtype=torch.uint8), Boxes(*np.array(box, float)[:, None])
    with pytest.raises(IndexError, match="not inside its image"):
        resample(images, boxes, np.zeros(1, bool), (4, 4), Filter())
