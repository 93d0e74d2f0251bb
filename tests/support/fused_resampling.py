"""Compares the Triton kernel that resamples with torch's operations, where launches are interpreted or emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from pictures import as_batch, random_picture

from shardio.augment import CenterCrop, Compose, HorizontalFlip, Normalize, RandomResizedCrop, Resize, ToDtype
from shardio.augment.boxes import Boxes, Draws
from shardio.augment.cut import Split, margin_of
from shardio.augment.resample import Interpolation, Resampling, Statistics, make_spans, normalized, resample
from shardio.augment.resample_cuda import resample_fused
from shardio.augment.transforms import Transform

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

    for channels in (1, 3, 4):
        ways: list[tuple[Interpolation, bool]] = [(kind, smooth) for smooth in (True, False) for kind in _KINDS]
        for interpolation, antialias in ways if channels == 3 else ways[channels == 4 :: 3]:
            how = Resampling((7, 9) if antialias else (11, 3), interpolation, antialias)
            check_grey_levels(as_batch(images[..., :channels]), Boxes(*boxes), Boxes(*within), flips, how)
    check_grey_levels(as_batch(images[..., :4]), Boxes(*boxes), Boxes(*within), flips, Resampling((33, 12)))
    # Lines that several programs share, of which none begins at an aligned place.
    wide, whole = as_batch(rng.integers(0, 256, (2, 3, 701, 3), np.uint8)), Boxes.whole(2, 3, 701)
    for how in (Resampling((2, 201)), Resampling((2, 201), "bicubic", False)):
        check_grey_levels(wide, whole, whole, flips[:2], how, most_on_average=1.0)
    # Two images are enough for what follows.
    two = as_batch(images[:2, ..., :4]), Boxes(*boxes[:, :2]), Boxes(*within[:, :2]), flips[:2]
    check_casts(*two, Resampling((9, 11)), ([0.4, 0.5, 0.45, 0.3], [0.2, 0.25, 0.3, 0.5]), torch.float16)
    for number, chain in enumerate(CHAINS):
        check_windows(images[:2, ..., :3], Compose(chain), Draws(1, 2, np.arange(2)), number % 2 * 4)


def fused(images: torch.Tensor, boxes: Boxes, within: Boxes, flips: NDArray[np.bool_], how: Resampling) -> torch.Tensor:
    return resample_fused(images, make_spans(boxes, within, *images.shape[2:]), flips, how)


_KINDS: tuple[Interpolation, ...] = ("bilinear", "bicubic")


def check_grey_levels(
    images: torch.Tensor,
    boxes: Boxes,
    within: Boxes,
    flips: NDArray[np.bool_],
    how: Resampling,
    most: int = 1,
    most_on_average: float = 0.02,
) -> None:
    """Checks that no grey level differs by more than `most`, and by `most_on_average` on average."""
    found = fused(images, boxes, within, flips, how)
    expected = resample(
        images, boxes, flips, how.size, how.interpolation, antialias=how.antialias, within=within, native=False
    )
    assert found.dtype == torch.uint8, how
    assert found.shape == expected.shape, how
    assert found.is_contiguous(memory_format=torch.channels_last), how
    difference = (found.int() - expected.int()).abs()
    assert difference.max() <= most, (how, images.shape, difference.max())
    assert difference.float().mean() < most_on_average, (how, images.shape, difference.float().mean())


def check_casts(
    images: torch.Tensor,
    boxes: Boxes,
    within: Boxes,
    flips: NDArray[np.bool_],
    how: Resampling,
    statistics: Statistics,
    dtype: torch.dtype,
) -> None:
    """Checks that results normalized, cast or both are those of the grey levels. `how` does neither."""
    grey = fused(images, boxes, within, flips, how)
    for some, made in ((statistics, None), (statistics, dtype), (None, dtype)):
        found = fused(images, boxes, within, flips, replace(how, statistics=some, dtype=made))
        assert found.dtype == (made or torch.float32), how
        exact = grey.float() if some is None else normalized(grey, some)
        rtol = max(1e-5, torch.finfo(found.dtype).eps)
        torch.testing.assert_close(found, exact.to(found.dtype), rtol=rtol, atol=max(1e-5, rtol))


def check_windows(images: NDArray[np.uint8], transform: Compose, draws: Draws, whole_lines: int) -> None:
    """Checks that results of windows equal those of whole images, whatever is in the margins around the windows."""
    split = Split.of(transform)
    assert split is not None
    cut = split.cut(draws, images.shape[1:], None, whole_lines=whole_lines)
    seen = np.concatenate([image[cut.windows.part(i)].reshape(-1) for i, image in enumerate(images)])
    assert len(seen) == cut.ends[-1]
    margin, batch = margin_of(*images.shape[2:]), cut.batch
    memory = torch.full((len(seen) + 2 * margin,), 255, dtype=torch.uint8)
    packed = memory[margin : margin + len(seen)]
    packed.copy_(torch.from_numpy(seen))
    found = cut.resampled_on_cuda(packed, torch.from_numpy(cut.parameters), torch.from_numpy(cut.places))
    stored, within = as_batch(images), batch.within or batch.region
    expected = fused(stored, batch.region, within, batch.is_mirrored, batch.resampling)
    assert found.dtype == expected.dtype, transform
    assert torch.equal(found, expected), (transform, images.shape, draws)
