"""Defines what each Op makes of an image, by operations of torch: the oracle of `_pixels.c`.

Arithmetic is float32, as in torchvision for uint8 images. Images are (C, H, W); values are one line of those of a Step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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

Values = NDArray[np.float64]


def run_steps_by_torch(images: NDArray[np.uint8], steps: Steps) -> NDArray[np.uint8]:
    """Returns images (B, H, W, C) after their steps."""
    made = []
    for number, image in enumerate(images):
        x = torch.from_numpy(image).permute(2, 0, 1)
        for step in steps:
            x = _OPERATIONS[Op(int(step.codes[number]))](x, step.values[number])
        made.append(x.permute(1, 2, 0).numpy())
    return np.stack(made)


def _to_bytes(x: Tensor) -> Tensor:
    """Returns x as uint8, rounded down."""
    return x.clamp(0, 255).to(torch.uint8)


def _gray(x: Tensor) -> Tensor:
    """Returns a gray image, float32 (1, H, W), rounded down. An image of one channel is gray already."""
    if len(x) == 1:
        return x.float()
    red, green, blue = x.float()
    return (red * 0.2989).add(green, alpha=0.587).add(blue, alpha=0.114).floor()[None]


def _blended(x: Tensor, other: Tensor, values: Values) -> Tensor:
    factor, rest = (float(np.float32(share)) for share in (values[0], 1.0 - values[0]))
    return _to_bytes(x.float() * factor + other * rest)


def _hue(x: Tensor, values: Values) -> Tensor:
    """Returns the image with its hue shifted, in the HSV cone.

    Smith, "Color gamut transform pairs", SIGGRAPH 1978.
    """
    if len(x) == 1:
        return x
    red, green, blue = x.float() / 255.0
    most, least = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    chroma = most - least
    divisor = torch.where(chroma == 0, 1.0, chroma)
    sixths = torch.where(
        most == red,
        (green - blue) / divisor,
        torch.where(most == green, 2.0 + (blue - red) / divisor, 4.0 + (red - green) / divisor),
    )
    hue = torch.remainder(sixths / 6.0 + float(np.float32(values[0])), 1.0)
    # A channel falls from the most to the least, and rises again, along a third of the circle each.
    channels = []
    for phase in (5.0, 3.0, 1.0):
        place = torch.remainder(phase + hue * 6.0, 6.0)
        channels.append(most - chroma * torch.minimum(place, 4.0 - place).clamp(0.0, 1.0))
    return _to_bytes(torch.stack(channels) * 255.999)


def _sharpness(x: Tensor, values: Values) -> Tensor:
    height, width = x.shape[1:]
    if height <= 2 or width <= 2:
        return x
    inner = x[:, 1:-1, 1:-1].float()
    sums = inner * (4.0 / 13.0)
    for down in range(3):
        for right in range(3):
            sums += x[:, down : height - 2 + down, right : width - 2 + right].float() / 13.0
    result = x.clone()
    result[:, 1:-1, 1:-1] = _to_bytes(inner + (sums.round() - inner) * float(np.float32(1.0 - values[0])))
    return result


def _autocontrast(x: Tensor, values: Values) -> Tensor:
    least, most = x.float().amin(dim=(1, 2), keepdim=True), x.float().amax(dim=(1, 2), keepdim=True)
    flat = least == most
    step = torch.where(flat, 1.0, (most - least) * (1.0 / 255))
    return _to_bytes((x.float() - torch.where(flat, 0.0, least)) / step)


def _equalize(x: Tensor, values: Values) -> Tensor:
    made = []
    for channel in x.long():
        counts = torch.bincount(channel.flatten(), minlength=256)
        step = (channel.numel() - counts[channel.max()]) // 255
        # Pillow's table: half a step more than the pixels below, divided by the step.
        levels = (counts.cumsum(0) - counts + step // 2) // step.clamp(min=1)
        made.append(levels.clamp(0, 255)[channel] if step else channel)
    return torch.stack(made).to(torch.uint8)


def _blur(x: Tensor, values: Values) -> Tensor:
    result = x.float()
    for axis, size, sigma in ((2, int(values[0]), values[2]), (1, int(values[1]), values[3])):
        reach, side = size // 2, x.shape[axis]
        weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2.0 * sigma**2))
        places = torch.arange(-reach, side + reach).abs()
        padded = result.index_select(axis, torch.where(places >= side, 2 * side - 2 - places, places))
        result = torch.zeros_like(result)
        for tap, weight in enumerate((weights / weights.sum()).astype(np.float32).tolist()):
            result += padded.narrow(axis, tap, side) * weight
    return _to_bytes(result.round())


def _affine(x: Tensor, values: Values) -> Tensor:
    """Returns the image after an affine map, whose numbers a to f are the first values.

    Pixel (x, y) of the result is read at (a (x + 1/2) + b (y + 1/2) + c, d (x + 1/2) + e (y + 1/2) + f).
    """
    height, width = x.shape[1:]
    limit = _FAR * np.array([1 / max(height, width), 1 / max(height, width), 1])
    matrix = np.clip(values[:6].reshape(2, 3), -limit, limit)
    columns, rows = (
        round(right * _ONE) * torch.arange(width)
        + round(down * _ONE) * torch.arange(height)[:, None]
        + round((right / 2 + down / 2 + first) * _ONE)
        for right, down, first in matrix.tolist()
    )
    return _sampled(x, columns, rows, values)


def _perspective(x: Tensor, values: Values) -> Tensor:
    """Returns the image warped as by Pillow's perspective transform.

    Pixel (x, y) of the result is read at the position that `_affine` reads, divided by g (x + 1/2) + h (y + 1/2) + 1.
    """
    a, b, c, d, e, f, g, h = values[:8].tolist()
    across, down = torch.arange(x.shape[2]).double() + 0.5, (torch.arange(x.shape[1]).double() + 0.5)[:, None]
    depth = g * across + h * down + 1.0
    columns, rows = (
        torch.nan_to_num(place / depth, nan=_FAR).clamp(-_FAR, _FAR).mul(_ONE).round().long()
        for place in (a * across + b * down + c, d * across + e * down + f)
    )
    return _sampled(x, columns, rows, values)


def _sampled(x: Tensor, columns: Tensor, rows: Tensor, values: Values) -> Tensor:
    """Returns the image read at the positions `columns` and `rows`, int64 (H, W) each, in 2^-32 pixels."""
    fill = torch.from_numpy(values[FILL_AT:].astype(np.float32))[:, None, None]
    return _SAMPLINGS[Sampling(int(values[SAMPLING_AT]))](x, columns, rows, fill)


def _pixels_at(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Returns the pixels at `columns` and `rows`. Positions outside of the image get the nearest pixel at its edge."""
    return x[:, rows.clamp(0, x.shape[1] - 1), columns.clamp(0, x.shape[2] - 1)].float()


def _are_inside(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    return (columns >= 0) & (columns < x.shape[2]) & (rows >= 0) & (rows < x.shape[1])


def _fraction(places: Tensor) -> Tensor:
    """Returns 24 bits of the fractional part of positions in 2^-32 pixels, below 1."""
    return ((places & (_ONE - 1)) >> (_BITS - 24)).float() * 2.0**-24


def _nearest(x: Tensor, columns: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    place = columns >> _BITS, rows >> _BITS
    return _to_bytes(torch.where(_are_inside(x, *place), _pixels_at(x, *place), torch.nan_to_num(fill)).round())


def _bilinear(x: Tensor, columns: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    columns, rows = columns - _ONE // 2, rows - _ONE // 2
    right, low = _fraction(columns), _fraction(rows)
    total, covered = torch.zeros(x.shape), torch.zeros(x.shape[1:])
    for down, by_row in ((0, 1.0 - low), (1, low)):
        for across, by_column in ((0, 1.0 - right), (1, right)):
            place = (columns >> _BITS) + across, (rows >> _BITS) + down
            weight = torch.where(_are_inside(x, *place), by_row * by_column, 0.0)
            total += _pixels_at(x, *place) * weight
            covered += weight
    # With a fill, torchvision weighs what it has read twice; without one, it reads black outside.
    return _to_bytes(torch.where(fill.isnan(), total, (total - fill) * covered + fill).round())


def _cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
    # Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -1: between b and c. A
    # constant image stays constant, however it is rounded.
    return b + ((c - a) + (((a - b) * 2 + (c - d)) + ((b - a) + (d - c)) * t) * t) * t


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
    Sampling.PILLOW_BILINEAR: partial(_as_pillow, taps=range(2), between=lambda a, b, t: a + (b - a) * t),
    Sampling.PILLOW_BICUBIC: partial(_as_pillow, taps=range(-1, 3), between=_cubic),
}


def _erase(x: Tensor, values: Values) -> Tensor:
    top, left, height, width = values[:4].astype(int)
    made = x.clone()
    made[:, top : top + height, left : left + width] = torch.from_numpy(values[FILL_AT:]).byte()[:, None, None]
    return made


def _levels(table: Callable[[Tensor, list[float]], Tensor]) -> Callable[[Tensor, Values], Tensor]:
    """Replaces each gray level by another one, whatever the image is."""
    return lambda x, values: _to_bytes(table(x.float(), values.tolist()))


_OPERATIONS: dict[Op, Callable[[Tensor, Values], Tensor]] = {
    Op.NOTHING: lambda x, values: x,
    Op.BRIGHTNESS: _levels(lambda x, values: x * float(np.float32(values[0]))),
    Op.POSTERIZE: _levels(lambda x, values: (x / 2 ** (8 - values[0])).floor() * 2 ** (8 - values[0])),
    Op.SOLARIZE: _levels(lambda x, values: torch.where(x >= values[0], 255 - x, x)),
    Op.SOLARIZE_ADD: _levels(lambda x, values: torch.where(x < values[1], x + int(values[0]), x)),
    Op.INVERT: _levels(lambda x, values: 255 - x),
    Op.CONTRAST: lambda x, values: _blended(x, _gray(x).mean(), values),
    Op.SATURATION: lambda x, values: x if len(x) == 1 else _blended(x, _gray(x), values),
    Op.HUE: _hue,
    Op.SHARPNESS: _sharpness,
    Op.AUTOCONTRAST: _autocontrast,
    Op.EQUALIZE: _equalize,
    Op.GRAYSCALE: lambda x, values: _gray(x).byte().expand_as(x),
    Op.BLUR: _blur,
    Op.AFFINE: _affine,
    Op.PERSPECTIVE: _perspective,
    Op.MIRROR: lambda x, values: x.flip(2),
    Op.FLIP: lambda x, values: x.flip(1),
    Op.ERASE: _erase,
}
