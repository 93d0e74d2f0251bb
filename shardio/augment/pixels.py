"""The steps of a batch, and its normalising: by kernels on the CPU and on CUDA, or by operations of torch anywhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardio.augment import pixels_torch
from shardio.augment.resample import Statistics, affine_of
from shardio.augment.resample import normalized as normalized_by_torch
from shardio.augment.steps import Steps
from shardio.kernels import pixels as kernel
from shardio.system.eager import is_recorded


def run_steps(images: Tensor, steps: Steps, *, native: bool = kernel.AVAILABLE) -> Tensor:
    """Returns uint8 (B, C, H, W) in channels_last memory, to which each picture's steps have been done.

    The caller gives `images` up: they may be changed in place, and may be what is returned. They are a fresh result of
    `resample`, or a clone. With `native`, the kernel in C does it on the CPU, in as many threads as torch has. Each
    raises ValueError, and changes nothing in its part of the batch, for values that an operation cannot take.
    """
    steps = tuple(step for step in steps if not step.does_nothing)
    if not steps or not images.numel():
        return images
    # torch.export records operations of torch, and no kernel of ours.
    if not native or images.device.type != "cpu" or is_recorded(images):
        return pixels_torch.run_steps(images, steps)
    pixels = images.detach().permute(0, 2, 3, 1).contiguous().numpy()
    kernel.run_steps(pixels, np.stack([step.codes for step in steps]), np.stack([step.values for step in steps]))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def normalized(images: Tensor, statistics: Statistics, *, native: bool = kernel.AVAILABLE) -> Tensor:
    """Returns (x / 255 - mean) / std of uint8 images, (B, C, H, W), as float32, in the memory format of `images`."""
    is_last = images.is_contiguous(memory_format=torch.channels_last)
    if not native or images.device.type != "cpu" or is_recorded(images) or not is_last:
        return normalized_by_torch(images, statistics)
    pixels = images.detach().permute(0, 2, 3, 1).numpy()
    return torch.from_numpy(kernel.normalize(pixels, affine_of(statistics).numpy())).permute(0, 3, 1, 2)


def fused(images: Tensor, steps: Steps, statistics: Statistics | None, dtype: torch.dtype | None) -> Tensor | None:
    """Returns what is left to be done to these images, all of it by kernels on CUDA; None where these cannot be had.

    The images are only read. The result is in channels_last memory.
    """
    if not images.is_cuda:
        return None
    from shardio.augment.pixels_cuda import can_fuse, run_steps_fused  # Triton takes its time to import

    if not can_fuse(images, steps, statistics, dtype):
        return None
    return run_steps_fused(images, steps, statistics=statistics, dtype=dtype)
