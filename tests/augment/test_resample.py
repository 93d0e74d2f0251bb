"""Boxes are resampled as torch interpolates them, natively and by torch alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import as_batch, random_pictures
from torch.nn.functional import interpolate

from shardio.augment.batch import computed
from shardio.augment.boxes import Boxes
from shardio.augment.resample import Interpolation, Resampling, axes_of, make_spans, normalized
from shardio.augment.stage import Stage


def resample(
    images: torch.Tensor, boxes: Boxes, flips: NDArray[np.bool_], how: Resampling, *, native: bool = True
) -> torch.Tensor:
    """Returns the boxes of `images` resampled to `how.size`, by the kernel or by torch, and mirrored where `flips`."""
    if native:
        plain = replace(how, statistics=None, dtype=None)
        source = (images.shape[2], images.shape[3], images.shape[1])
        return computed(images, (Stage(len(flips), source, how.size, boxes, None, flips, plain),), how, len(flips))
    images = torch.cat([images] * (len(flips) // len(images)))
    return resample_by_torch(images, make_spans(boxes, boxes, *images.shape[2:]), flips, how)


def resample_by_torch(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    """Returns the boxes with `spans`, from `make_spans`, resampled by operations of torch."""
    if how.cubic is not None:
        ways = (replace(how, interpolation=name, cubic=None) for name in ("bilinear", "bicubic"))
        bilinear, bicubic = (resample_by_torch(images, spans, flips, way) for way in ways)
        return torch.where(torch.from_numpy(how.cubic)[:, None, None, None], bicubic, bilinear)
    axes = torch.from_numpy(axes_of(spans, how.size))
    rows, columns = (
        _weights(axes[:, axis], _most_taps(spans[axis], size, how), limit, size, how)
        for axis, (limit, size) in enumerate(zip(images.shape[2:], how.size, strict=True))
    )
    columns = torch.where(torch.from_numpy(flips)[:, None, None], columns.flip(1), columns)
    # (B, H, W, C) is resampled along the lines first, then along the columns.
    pixels = images.permute(0, 2, 3, 1).double()
    lines = _to_levels(torch.einsum("bxw,bhwc->bhxc", columns, pixels))
    gray = _to_levels(torch.einsum("byh,bhxc->byxc", rows, lines)).to(torch.uint8).permute(0, 3, 1, 2)
    return normalized(gray.contiguous(), how.statistics, how.dtype).contiguous(memory_format=torch.channels_last)


def _to_levels(sums: torch.Tensor) -> torch.Tensor:
    """Rounds `sums` in place to whole numbers from 0 to 255, halves up. Returns `sums`."""
    return sums.add_(0.5).floor_().clamp_(0, 255)


def _most_taps(spans: NDArray[np.float64], size: int, how: Resampling) -> int:
    """Returns an upper bound of the number of input pixels that an output pixel depends on, along one axis."""
    largest = float(spans[:, 1].max(initial=0)) / size
    return int(2 * how.radius * (max(largest, 1.0) if how.antialias else 1.0)) + 2


def _weights(axes: torch.Tensor, taps: int, limit: int, size: int, how: Resampling) -> torch.Tensor:
    """Returns the weight of each input pixel for each output pixel along one axis, (B, size, limit).

    The weights of an image are rounded to multiples of 2^-n, with the largest n for which they fit in 16 bits. With
    `how.antialias`, the filter widens if the scale is above 1, and leaves out pixels outside of its limits. Otherwise
    the pixels at the limits are repeated outside.
    """
    starts, scale, low, high = (values[:, None] for values in axes.unbind(1))
    stretch = scale.clamp(min=1.0) if how.antialias else torch.ones_like(scale)
    centers = starts + (torch.arange(size, device=axes.device) + 0.5) * scale
    firsts = torch.floor(centers - how.radius * stretch + 0.5)
    lasts = torch.floor(centers + how.radius * stretch + 0.5)
    places = firsts[:, :, None] + torch.arange(taps, device=axes.device)
    weights = _filter((places - centers[:, :, None] + 0.5) * (1 / stretch)[:, :, None], how)
    weights = weights * (places < lasts[:, :, None])
    if how.antialias:
        weights = weights * ((places >= low[:, :, None]) & (places < high[:, :, None]))
    places = torch.minimum(torch.maximum(places, low[:, :, None]), high[:, :, None] - 1).long()
    dense = torch.zeros(len(axes), size, limit, dtype=axes.dtype, device=axes.device)
    dense = dense.scatter_add_(2, places, weights)
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


def _filter(x: torch.Tensor, how: Resampling) -> torch.Tensor:
    x = x.abs()
    if how.interpolation == "bilinear":
        return (1.0 - x).clamp(min=0.0)
    # Keys, "Cubic convolution interpolation for digital image processing", 1981.
    a = -0.5 if how.antialias else -0.75
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


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
