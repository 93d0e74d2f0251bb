"""Filter, which resizes images, and Cast, which normalizes them.

Resized images equal torch's antialiased `interpolate` of the cropped uint8 images: lines are filtered with weights of
16 bits and rounded to gray levels, then columns are filtered in the same way. Pillow's `crop` and `resize` differ by
one gray level, seldom by two, and by more where Pillow 13 or later filters the columns of tall images first. Boxes may
have fractional sides, for example in images that were squashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.kernels import resample as kernel
from shardio.kernels.resample import Planes

Interpolation = Literal["bilinear", "bicubic", "random"]
Statistics = tuple[Sequence[float], Sequence[float]]
"""The mean and the standard deviation of each channel, for pixels from 0 to 1."""


@dataclass(frozen=True)
class Filter:
    """How a resize reads pixels. `cubic`, bool (B,), says for which images "random" means bicubic, not bilinear."""

    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    cubic: NDArray[np.bool_] | None = field(default=None, compare=False)

    @property
    def radius(self) -> float:
        """The filter's radius, in pixels of the box; with `antialias`, in pixels of the result if the box shrinks."""
        return 1.0 if self.interpolation == "bilinear" else 2.0

    def is_cubic(self, some: slice | NDArray[np.int64]) -> bool | NDArray[np.bool_]:
        """Returns whether the filter of the images `some` is bicubic: one bool for all, or one for each."""
        return self.interpolation == "bicubic" if self.cubic is None else self.cubic[some]


@dataclass(frozen=True)
class Cast:
    """How uint8 images are normalized and cast: not at all if both fields are None."""

    statistics: Statistics | None = None
    dtype: torch.dtype | None = None

    @property
    def made(self) -> torch.dtype:
        """The dtype of the result: `dtype`; if it is None, float32 with `statistics` and uint8 without."""
        return self.dtype or (torch.uint8 if self.statistics is None else torch.float32)

    @property
    def kernel_dtype(self) -> Any:
        """The NumPy dtype that the kernel in C writes. uint16 stands for the bits of bfloat16: see `as_made`."""
        return _KERNEL_DTYPES.get(self.made, np.uint8 if self.statistics is None else np.float32)

    def affine(self, channels: int) -> NDArray[np.float32] | None:
        """Returns a factor and an offset per channel, float32 (2, C), for the kernel in C: see `affine_on`. None if the
        kernel writes uint8."""
        if self.kernel_dtype == np.uint8:
            return None
        statistics = self.statistics or ((0.0,) * channels, (1 / 255,) * channels)
        values: NDArray[np.float32] = affine_on(torch.device("cpu"), *map(tuple, statistics)).numpy()
        return values


UNCAST = Cast()
_KERNEL_DTYPES = {
    torch.uint8: np.uint8,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # numpy has no bfloat16
}


@cache
def affine_on(device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Returns a factor and an offset per channel, float32 (2, C): gray level * factor + offset is the normalized value.

    `mean` and `std` are of gray levels / 255. The result is cached: a copy to the device for each batch would have to
    wait for the copies of images.
    """
    with torch.inference_mode(False):
        means, stds = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in (mean, std))
        # This waits, so any stream may use it.
        return torch.stack([1 / (255 * stds), -means / stds]).float().to(device)


def normalized(images: torch.Tensor, cast: Cast) -> torch.Tensor:
    """Returns images, (B, C, H, W) on any device, normalized (if uint8) and cast by operations of torch."""
    if cast.statistics is None:
        return images if cast.dtype is None else images.to(cast.dtype)
    factor, offset = affine_on(images.device, *map(tuple, cast.statistics))[:, :, None, None]
    # Rounded after the product, as the kernel in C does it.
    made = images.to(torch.float32).mul_(factor).add_(offset)
    return made if cast.dtype is None else made.to(cast.dtype)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a small CPU tensor copied to `device`. A copy to CUDA uses pinned memory, so the host does not wait."""
    if device.type != "cuda":
        return values.to(device)
    with torch.cuda.device(device):
        return values.pin_memory().to(device, non_blocking=True)


def as_made(images: torch.Tensor, cast: Cast) -> torch.Tensor:
    """Returns images that the kernel in C wrote as dtype `cast.made`: uint16 viewed as bfloat16, other dtypes cast.

    Without normalization and cast, images are returned as they are.
    """
    if cast.made == torch.uint8:
        return images
    return images.view(cast.made) if images.dtype == torch.uint16 else images.to(cast.made)


def cast_images(planes: Planes, out: NDArray[Any], cast: Cast, lines: NDArray[np.int64]) -> None:
    """Writes image i of `planes`, whole images, to `out[lines[i]]`, normalized and cast, in the calling thread.

    `out` is (n, height, width, channels), of dtype `cast.kernel_dtype`.
    """
    axes = np.tile([[0.0, 1.0, 0.0, side] for side in out.shape[1:3]], (len(planes), 1, 1))
    flips = np.zeros(len(planes), bool)
    kernel.resample(planes, axes, flips, out, cast.affine(planes.channels), cubic=False, lines=lines)
