"""Defines the result of each Op, by operations of torch: the oracle of `_pixels.c`.

All images of a step with the same Op are changed together. Arithmetic is float32, as in torchvision for uint8 images.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.steps import FILL_AT, SAMPLING_AT, Op, Sampling, Steps

# Coordinates are whole numbers of this part of a pixel, so that everyone chooses the same pixels.
_BITS = 32
_ONE = 1 << _BITS
# Beyond every image, and far from the limits of int64.
_FAR = float(1 << 24)

_GRAY = (0.2989, 0.587, 0.114)

_Operation = Callable[[Tensor, NDArray[np.float64]], Tensor]
_Table = Callable[[NDArray[np.float32], NDArray[np.float64]], NDArray[np.floating]]


def run_steps_by_torch(images: Tensor, steps: Steps) -> Tensor:
    """Returns the images after their steps, uint8 (B, C, H, W), in the memory format of `images`.

    `images` stay unchanged.
    """
    images = images.clone()
    for step in steps:
        for code in np.unique(step.codes[step.codes != Op.NOTHING]):
            chosen = np.flatnonzero(step.codes == code)
            index = torch.from_numpy(chosen)
            images[index] = _OPERATIONS[Op(int(code))](images[index], step.values[chosen])
    return images


def _numbers(values: NDArray[np.float64]) -> Tensor:
    """Returns the values, (n,), as a float32 tensor (n, 1, 1, 1)."""
    return torch.from_numpy(values.astype(np.float32))[:, None, None, None]


def _to_bytes(x: Tensor) -> Tensor:
    """Returns x as uint8, rounded down."""
    return x.clamp_(0, 255).to(torch.uint8)


def _gray(x: Tensor) -> Tensor:
    """Returns gray images, float32 (n, 1, H, W), rounded down. Images of one channel are gray already."""
    if x.shape[1] == 1:
        return x.float()
    red, green, blue = x.float().unbind(1)
    gray: Tensor = (red * _GRAY[0]).add_(green, alpha=_GRAY[1]).add_(blue, alpha=_GRAY[2]).floor_()
    return gray[:, None]


def _blended(x: Tensor, other: Tensor, values: NDArray[np.float64]) -> Tensor:
    """Returns x * factor + other * (1 - factor) as uint8. The factors are the first column of `values`."""
    factor, rest = _numbers(values[:, 0]), _numbers(1.0 - values[:, 0])
    return _to_bytes(x.float() * factor + other * rest)


def _contrast(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    return _blended(x, _gray(x).mean(dim=(1, 2, 3), keepdim=True), values)


def _saturation(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    return x if x.shape[1] == 1 else _blended(x, _gray(x), values)


def _hue(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    """Returns the images with their hue shifted, in the HSV cone.

    Smith, "Color gamut transform pairs", SIGGRAPH 1978.
    """
    if x.shape[1] == 1:
        return x
    red, green, blue = (x.float() / 255.0).unbind(1)
    most, least = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    chroma = most - least
    divisor = torch.where(chroma == 0, 1.0, chroma)
    sixths = torch.where(
        most == red,
        (green - blue) / divisor,
        torch.where(most == green, 2.0 + (blue - red) / divisor, 4.0 + (red - green) / divisor),
    )
    hue = torch.remainder(sixths / 6.0 + _numbers(values[:, 0])[:, 0], 1.0)
    # A channel falls from the most to the least, and rises again, along a third of the circle each.
    channels = []
    for phase in (5.0, 3.0, 1.0):
        place = torch.remainder(phase + hue * 6.0, 6.0)
        channels.append(most - chroma * torch.minimum(place, 4.0 - place).clamp_(0.0, 1.0))
    return _to_bytes(torch.stack(channels, dim=1).mul_(255.999))


def _sharpness(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    height, width = x.shape[2:]
    if height <= 2 or width <= 2:
        return x
    sums = torch.zeros_like(x[:, :, 1:-1, 1:-1], dtype=torch.float32)
    for down in range(3):
        for right in range(3):
            weight = 5.0 if down == right == 1 else 1.0
            sums.add_(x[:, :, down : height - 2 + down, right : width - 2 + right].float(), alpha=weight / 13.0)
    result = x.clone()
    inner = x[:, :, 1:-1, 1:-1].float()
    result[:, :, 1:-1, 1:-1] = _to_bytes(inner + (sums.round_() - inner) * _numbers(1.0 - values[:, 0]))
    return result


def _looked_up(x: Tensor, levels: Tensor) -> Tensor:
    """Returns x with each gray level g replaced by `levels[:, :, g]`. `levels` is (n, C, 256)."""
    return levels.gather(2, x.flatten(2).long()).reshape(x.shape)


def _autocontrast(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    least, most = x.float().amin(dim=(2, 3), keepdim=True), x.float().amax(dim=(2, 3), keepdim=True)
    flat = least == most
    step = torch.where(flat, 1.0, (most - least) * (1.0 / 255))
    return _to_bytes((x.float() - torch.where(flat, 0.0, least)) / step)


def _equalize(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    flat = x.flatten(2).long()
    counts = torch.zeros((*flat.shape[:2], 256), dtype=torch.int64)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    below = counts.cumsum(2)
    brightest = counts.gather(2, flat.amax(dim=2, keepdim=True))
    step = torch.div(flat.shape[2] - brightest, 255, rounding_mode="floor")
    # Pillow's table: half a step more than the pixels below, divided by the step.
    levels = torch.div(below - counts + step // 2, step.clamp(min=1), rounding_mode="floor").clamp_(0, 255)
    same = torch.arange(256).expand_as(levels)
    return _looked_up(x, torch.where(step == 0, same, levels).to(torch.uint8))


def _grayscale(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    return _gray(x).to(torch.uint8).expand_as(x)


def gaussian(sigmas: NDArray[np.float64], size: int) -> NDArray[np.float32]:
    """Returns the weights of a Gaussian filter for each of `sigmas`, (n,): float32 (n, size). Each filter sums to 1."""
    squares = (np.arange(size) - size // 2) ** 2
    weights = np.exp(-squares / (2.0 * sigmas[:, None] ** 2))
    shares: NDArray[np.float32] = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


def _blur(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    result = x.float()
    for axis, sizes, sigmas in ((3, values[:, 0], values[:, 2]), (2, values[:, 1], values[:, 3])):
        size = int(sizes.max())
        weights = np.zeros((len(x), size), np.float32)
        for one in np.unique(sizes):  # images of one batch may come from two transforms
            same, edge = sizes == one, (size - int(one)) // 2
            weights[same, edge : edge + int(one)] = gaussian(sigmas[same], int(one))
        reach = size // 2
        places = torch.arange(-reach, x.shape[axis] + reach).abs()
        places = torch.where(places >= x.shape[axis], 2 * x.shape[axis] - 2 - places, places)
        padded = result.index_select(axis, places)
        taps = torch.from_numpy(weights)
        result = torch.zeros_like(result)
        for tap in range(size):
            part = padded.narrow(axis, tap, x.shape[axis])
            result += part * taps[:, tap, None, None, None]
    return _to_bytes(result.round_())


def fixed_affine(values: NDArray[np.float64], height: int, width: int) -> NDArray[np.int64]:
    """Returns affine maps from pixels of the result to positions in the image, int64 (n, 2, 3), in 2^-32 pixels.

    `values`, (n, 6 or more), begin with the six values of AFFINE. [:, 0] is for the column to read, [:, 1] for the row.
    The three numbers are the change per column of the result, the change per row of the result, and the position that
    the first pixel reads.
    """
    matrix = values[:, :6].reshape(-1, 2, 3)
    limit = _FAR * np.array([1 / max(height, width), 1 / max(height, width), 1])
    matrix = np.clip(matrix, -limit, limit)
    steps = np.rint(matrix[:, :, :2] * _ONE).astype(np.int64)
    first = np.rint((matrix[:, :, 0] / 2 + matrix[:, :, 1] / 2 + matrix[:, :, 2]) * _ONE).astype(np.int64)
    return np.concatenate([steps, first[:, :, None]], axis=2)


def _affine(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    """Returns the images after an affine map, whose six values a to f are the first columns of `values`.

    Pixel (x, y) of the result is read at (a (x + 1/2) + b (y + 1/2) + c, d (x + 1/2) + e (y + 1/2) + f).
    """
    fixed = torch.from_numpy(fixed_affine(values, *x.shape[2:]))
    height, width = x.shape[2:]
    across = torch.arange(width)
    down = torch.arange(height)[:, None]
    a, b, c = fixed[:, :, :, None, None].unbind(2)
    places = a * across + b * down + c  # (n, 2, H, W)
    return _sampled(x, places[:, 0], places[:, 1], values)


def _perspective(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    """Returns the images warped as by Pillow's perspective transform.

    Pixel (x, y) of the result is read at the position that `_affine` reads, divided by g (x + 1/2) + h (y + 1/2) + 1.
    """
    numbers = torch.from_numpy(values[:, :8].copy())[:, :, None, None].unbind(1)
    a, b, c, d, e, f, g, h = numbers
    across = torch.arange(x.shape[3]).double() + 0.5
    down = (torch.arange(x.shape[2]).double() + 0.5)[:, None]
    depth = g * across + h * down + 1.0
    columns, rows = (
        torch.nan_to_num(place / depth, nan=_FAR).clamp_(-_FAR, _FAR).mul_(_ONE).round_().long()
        for place in (a * across + b * down + c, d * across + e * down + f)
    )
    return _sampled(x, columns, rows, values)


def _sampled(x: Tensor, columns: Tensor, rows: Tensor, values: NDArray[np.float64]) -> Tensor:
    """Returns the images read at the positions `columns` and `rows`, int64 (n, H, W) each, in 2^-32 pixels."""
    result = torch.empty_like(x)
    kinds = values[:, SAMPLING_AT]
    for kind in np.unique(kinds):
        chosen = np.flatnonzero(kinds == kind)
        index = torch.from_numpy(chosen)
        fill = torch.from_numpy(values[chosen, FILL_AT : FILL_AT + x.shape[1]].astype(np.float32))
        sample = _SAMPLINGS[Sampling(int(kind))]
        result[index] = sample(x[index], columns[index], rows[index], fill[:, :, None, None])
    return result


def _pixels_at(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Returns the pixels at `columns` and `rows`, int64 (n, H, W), as float32 (n, C, H, W).

    Positions outside of the image get the nearest pixel at its edge.
    """
    height, width = x.shape[2:]
    flat = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    index = flat.flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, index).reshape(*x.shape[:2], *flat.shape[1:]).float()


def _are_inside(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    height, width = x.shape[2:]
    return ((columns >= 0) & (columns < width) & (rows >= 0) & (rows < height))[:, None]


def _fraction(places: Tensor) -> Tensor:
    """Returns 24 bits of the fractional part of positions in 2^-32 pixels, float32 (n, 1, H, W), below 1."""
    return ((places & (_ONE - 1)) >> (_BITS - 24)).float()[:, None] * 2.0**-24


def _nearest(x: Tensor, columns: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    columns, rows = columns >> _BITS, rows >> _BITS
    there = _pixels_at(x, columns, rows)
    return _to_bytes(torch.where(_are_inside(x, columns, rows), there, torch.nan_to_num(fill)).round_())


def _bilinear(x: Tensor, columns: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    columns, rows = columns - _ONE // 2, rows - _ONE // 2
    right, low = _fraction(columns), _fraction(rows)
    columns, rows = columns >> _BITS, rows >> _BITS
    total = torch.zeros_like(x, dtype=torch.float32)
    covered = torch.zeros_like(right)
    for down, by_row in ((0, 1.0 - low), (1, low)):
        for across, by_column in ((0, 1.0 - right), (1, right)):
            place = columns + across, rows + down
            weight = torch.where(_are_inside(x, *place), by_row * by_column, 0.0)
            total += _pixels_at(x, *place) * weight
            covered += weight
    # With a fill, torchvision weighs what it has read twice; without one, it reads black outside.
    filled = (total - fill) * covered + fill
    return _to_bytes(torch.where(fill.isnan(), total, filled).round_())


def _pillow_bilinear(x: Tensor, columns: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    return _as_pillow(x, columns, rows, fill, range(2), lambda a, b, t: a + (b - a) * t)


def _pillow_bicubic(x: Tensor, columns: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    # Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -1: between b and c. A
    # constant image stays constant, however it is rounded.
    def between(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
        return b + ((c - a) + (((a - b) * 2 + (c - d)) + ((b - a) + (d - c)) * t) * t) * t

    return _as_pillow(x, columns, rows, fill, range(-1, 3), between)


def _as_pillow(
    x: Tensor, columns: Tensor, rows: Tensor, fill: Tensor, taps: range, between: Callable[..., Tensor]
) -> Tensor:
    inside = _are_inside(x, columns >> _BITS, rows >> _BITS)
    columns, rows = columns - _ONE // 2, rows - _ONE // 2
    right, low = _fraction(columns), _fraction(rows)
    columns, rows = columns >> _BITS, rows >> _BITS
    line = [between(*(_pixels_at(x, columns + across, rows + down) for down in taps), low) for across in taps]
    return _to_bytes(torch.where(inside, between(*line, right), torch.nan_to_num(fill)))


_SAMPLINGS: dict[Sampling, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    Sampling.NEAREST: _nearest,
    Sampling.BILINEAR: _bilinear,
    Sampling.PILLOW_BILINEAR: _pillow_bilinear,
    Sampling.PILLOW_BICUBIC: _pillow_bicubic,
}


# Operations that replace each gray level by another one, whatever the image is.
_TABLES: dict[Op, _Table] = {
    Op.BRIGHTNESS: lambda levels, values: levels * values[:, :1].astype(np.float32),
    Op.POSTERIZE: lambda levels, values: np.floor(levels / 2.0 ** (8 - values[:, :1])) * 2.0 ** (8 - values[:, :1]),
    Op.SOLARIZE: lambda levels, values: np.where(levels >= values[:, :1], 255 - levels, levels),
    Op.SOLARIZE_ADD: lambda levels, values: np.where(levels < values[:, 1:2], levels + np.trunc(values[:, :1]), levels),
    Op.INVERT: lambda levels, values: np.broadcast_to(255 - levels, (len(values), 256)),
}


def levels_by(op: Op, values: NDArray[np.float64], channels: int) -> NDArray[np.uint8]:
    """Returns the new gray level of each of the 256 gray levels, uint8 (n, C, 256), for n images with `values`."""
    made = np.clip(_TABLES[op](np.arange(256, dtype=np.float32), values), 0, 255).astype(np.uint8)
    return np.broadcast_to(made[:, None], (len(values), channels, 256)).copy()


def _by_table(op: Op) -> _Operation:
    return lambda x, values: _looked_up(x, torch.from_numpy(levels_by(op, values, x.shape[1])))


def _erase(x: Tensor, values: NDArray[np.float64]) -> Tensor:
    made = x.clone()
    for one, numbers in zip(made, values, strict=True):
        top, left, height, width = numbers[:4].astype(int)
        color = torch.from_numpy(numbers[FILL_AT:]).to(torch.uint8)
        one[:, top : top + height, left : left + width] = color[:, None, None]
    return made


_OPERATIONS: dict[Op, _Operation] = {
    **{op: _by_table(op) for op in _TABLES},
    Op.CONTRAST: _contrast,
    Op.SATURATION: _saturation,
    Op.HUE: _hue,
    Op.SHARPNESS: _sharpness,
    Op.AUTOCONTRAST: _autocontrast,
    Op.EQUALIZE: _equalize,
    Op.GRAYSCALE: _grayscale,
    Op.BLUR: _blur,
    Op.AFFINE: _affine,
    Op.PERSPECTIVE: _perspective,
    Op.MIRROR: lambda x, values: x.flip(3),
    Op.FLIP: lambda x, values: x.flip(2),
    Op.ERASE: _erase,
}
