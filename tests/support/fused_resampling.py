"""Compares the Triton kernels that resample with torch's operations and the C kernel, where launches are emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from pictures import as_batch, random_picture

from shardio.augment import CenterCrop, Compose, HorizontalFlip, Normalize, RandomResizedCrop, Resize, ToDtype
from shardio.augment.boxes import Boxes, Draws
from shardio.augment.cut import SplitTransform, margin_of
from shardio.augment.resample import Interpolation, Resampling, make_spans, resample
from shardio.augment.resample_cuda import resample_fused
from shardio.augment.transforms import Transform
from shardio.kernels.resample import AVAILABLE

CHAINS: list[list[Transform]] = [
    [RandomResizedCrop((4, 6)), HorizontalFlip()],
    [RandomResizedCrop(5, interpolation="bicubic"), Normalize("imagenet"), ToDtype(torch.float16)],
    [RandomResizedCrop(6, antialias=False), HorizontalFlip(), ToDtype(torch.float32, scale=True)],
    [Resize((3, 2)), CenterCrop((2, 1))],  # of any number of taps
]


def check() -> None:
    """Checks pictures of several kinds, resampled in all ways."""
    rng = np.random.default_rng(0)
    count, height, width = 4, 16, 24
    pictures = [random_picture(rng, height, width) for _ in range(count)]
    images = np.stack([np.concatenate([pixels, pixels[::-1]], axis=2) for pixels in pictures])
    heights, widths = rng.uniform(1.5, height, count), rng.uniform(1.5, width, count)
    # The first sees nothing but its box, the second all of its picture. The third box is a whole picture, the fourth a
    # single pixel.
    boxes = np.stack([rng.uniform(0, height - heights), rng.uniform(0, width - widths), heights, widths])
    within = boxes.copy()
    within[:, 1] = (0, 0, height, width)
    boxes[:, 2] = within[:, 2] = (0, 0, height, width)
    boxes[:, 3] = within[:, 3] = (height - 1, width - 1, 1, 1)
    flips = np.array([True, False, False, True])

    # Kernels are compiled for a number of channels and of taps, which is most of the work: 2, 4 or 8 here.
    for channels in (1, 3, 4):
        ways: list[tuple[Interpolation, bool]] = [(kind, smooth) for smooth in (True, False) for kind in _KINDS]
        for interpolation, antialias in ways if channels == 3 else ways[channels == 4 :: 3]:
            how = Resampling((7, 12) if antialias else (11, 3), interpolation, antialias)
            check_equal(as_batch(images[..., :channels]), Boxes(*boxes), Boxes(*within), flips, how)
    given = as_batch(images[..., :4]), Boxes(*boxes), Boxes(*within), flips
    check_equal(*given, Resampling((33, 12), "bicubic"))
    normalized = Resampling((9, 13), "bicubic", statistics=([0.4, 0.5, 0.45, 0.3], [0.2, 0.25, 0.3, 0.5]))
    for how in (normalized, replace(normalized, statistics=None, dtype=torch.float16)):
        check_equal(*given, how)
    # Lines shared by several programs, none at an aligned place. Many sums are halfway between two gray levels.
    wide, whole = as_batch(rng.integers(0, 256, (2, 3, 401, 3), np.uint8)), Boxes.whole(2, 3, 401)
    for how in (Resampling((2, 201)), Resampling((2, 201), "bicubic", False)):
        check_equal(wide, whole, whole, flips[:2], how)
    for number, chain in enumerate(CHAINS):
        check_windows(images[:2, ..., :3], Compose(chain), Draws(1, 2, np.arange(2)), number % 2 * 4)


_KINDS: tuple[Interpolation, ...] = ("bilinear", "bicubic")


def check_equal(images: torch.Tensor, boxes: Boxes, within: Boxes, flips: NDArray[np.bool_], how: Resampling) -> None:
    """Checks that all values equal the results of torch's operations and of the C kernel."""
    found = resample_fused(images, make_spans(boxes, within, *images.shape[2:]), flips, how)
    assert found.is_contiguous(memory_format=torch.channels_last), how
    assert_right(found, images, boxes, within, flips, how)


def assert_right(
    found: torch.Tensor, images: torch.Tensor, boxes: Boxes, within: Boxes, flips: NDArray[np.bool_], how: Resampling
) -> None:
    for native in {False, AVAILABLE}:
        expected = resample(images, boxes, flips, how, within=within, native=native)
        assert found.dtype == expected.dtype == how.made, how
        assert torch.equal(found, expected), (how, native, images.shape, (found.float() - expected.float()).abs().max())


def check_windows(images: NDArray[np.uint8], transform: Compose, draws: Draws, whole_lines: int) -> None:
    """Checks that windows give the results of whole images, with any bytes in the margins around the windows."""
    split = SplitTransform.of(transform)
    assert split is not None
    cut = split.cut(draws, images.shape[1:], None, whole_lines=whole_lines)
    seen = np.concatenate([image[cut.windows.part(i)].reshape(-1) for i, image in enumerate(images)])
    assert len(seen) == cut.ends[-1]
    margin, batch = margin_of(*images.shape[2:]), cut.batch
    memory = torch.full((len(seen) + 2 * margin,), 255, dtype=torch.uint8)
    packed = memory[margin : margin + len(seen)]
    packed.copy_(torch.from_numpy(seen))
    found = cut.resampled_on_cuda(packed, torch.from_numpy(cut.parameters), torch.from_numpy(cut.places))
    within = batch.within or batch.region
    assert_right(found, as_batch(images), batch.region, within, batch.is_mirrored, batch.resampling)
