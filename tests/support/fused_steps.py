"""Compares the Triton kernels of steps with torch's operations, where launches are emulated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from drawn_steps import drawn_step, pictures
from numpy.typing import NDArray
from pictures import as_batch

from shardio.augment import pixels
from shardio.augment.pixels_cuda import run_steps_fused
from shardio.augment.resample import normalized
from shardio.augment.steps import NEEDS_RGB, SAMPLING_AT, WARPS, Op, Step, Steps

ALONE = [op for op in Op if op is not Op.NOTHING]
# The kernels do not add products before they are rounded, nor need sums come in the same order.
NEAR = {Op.CONTRAST, Op.SATURATION, Op.HUE, Op.GRAYSCALE, Op.BLUR}


def check() -> None:
    """Checks all operations, alone and one after the other."""
    rng = np.random.default_rng(0)
    for channels in (1, 3, 5):
        for size in ((1, 1), (12, 13)) if channels == 3 else ((3, 9),):
            codes = np.repeat(ops_of(channels), 2)
            changed = check_each(rng, codes, size, channels)
            assert size != (12, 13) or len(changed) > len(codes) // 3, changed
    # The first pictures are made by two programs of a kernel each. One may not see what the other has written.
    check_program(rng, EXACT, (11, 19), 3)
    check_program(rng, TABLED, (5, 7), 1)
    check_program(rng, TABLED, (4, 33), 5)
    check_counts(rng)
    # Several blurs of other sizes in one batch, and again in a later step.
    some = [[Op.BLUR, Op.BLUR, Op.SHARPNESS, Op.NOTHING], [Op.SHARPNESS, Op.BLUR, Op.BLUR, Op.BLUR]]
    blurs = [drawn_step(rng, np.array(codes, np.uint8), (20, 20), 3) for codes in some]
    check_steps(as_batch(pictures(rng, 4, 20, 20, 3)), tuple(blurs))
    check_casts(torch.from_numpy(pictures(rng, 2, 9, 7, 3)).permute(0, 3, 1, 2).contiguous())


def compared(images: torch.Tensor, steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how far each value is from torch's, and torch's results."""
    before = images.clone()
    expected = pixels.run_steps_by_torch(images, steps)
    found = run_steps_fused(images, steps)
    assert found.dtype == torch.uint8
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)
    return (found.int() - expected.int()).abs(), expected


def check_steps(images: torch.Tensor, steps: Steps, most: int = 1) -> None:
    """Checks that few values differ, and none by more than `most`."""
    beside, _ = compared(images, steps)
    assert beside.max() <= most, (steps, images.shape, beside.amax(dim=(1, 2, 3)))
    assert (beside > 0).sum() <= max(3, 0.003 * beside.numel()), (steps, images.shape, beside)


def ops_of(channels: int) -> NDArray[np.uint8]:
    """Returns the operations that there are on images of so many channels."""
    return np.array([op for op in ALONE if channels in (1, 3) or op not in NEEDS_RGB], np.uint8)


def check_each(rng: np.random.Generator, codes: NDArray[np.uint8], size: tuple[int, int], channels: int) -> set[int]:
    """Checks a batch with an operation for each picture. Returns the operations that changed theirs."""
    images, step = as_batch(pictures(rng, len(codes), *size, channels)), drawn_step(rng, codes, size, channels)
    warps = np.isin(codes, list(WARPS))
    # Bicubic and others in turn, with and without a fill.
    step.values[warps, SAMPLING_AT] = np.arange(warps.sum()) + rng.integers(0, 4)
    step.values[:, SAMPLING_AT] %= np.where(warps, 4, 1e9)
    beside, expected = compared(images, (step,))
    exact = ~np.isin(codes, list(NEAR)) & (~warps | (step.values[:, SAMPLING_AT] == 0))
    case = (channels, size)
    assert beside[exact].sum() == 0, (case, codes[exact], beside[exact].amax(dim=(1, 2, 3)))
    assert beside.max() <= 1, (case, codes, beside.amax(dim=(1, 2, 3)))
    return set(codes[(expected != images).flatten(1).any(dim=1).numpy()].tolist())


EXACT = (Op.NOTHING, *(op for op in ALONE if op not in NEAR | WARPS), Op.AFFINE)
# Most of these are tables, some of which follow each other.
TABLED = (Op.INVERT, Op.POSTERIZE, Op.SOLARIZE_ADD, Op.BRIGHTNESS, Op.SOLARIZE, Op.NOTHING, Op.EQUALIZE)


def check_program(rng: np.random.Generator, ops: Sequence[Op], size: tuple[int, int], channels: int) -> None:
    """Checks a batch of five programs of five of these operations, of which some do nothing."""
    chosen = np.array(ops, np.uint8)
    steps = [drawn_step(rng, rng.choice(chosen, 5), size, channels) for _ in range(5)]
    for step in steps:
        step.values[step.codes == Op.AFFINE, SAMPLING_AT] = 0
    check_steps(as_batch(pictures(rng, 5, *size, channels)), tuple(steps), most=0)


def check_counts(rng: np.random.Generator) -> None:
    """Checks gray levels of more pixels than are counted at once, and more than there are levels."""
    codes = np.array([Op.EQUALIZE, Op.AUTOCONTRAST, Op.CONTRAST], np.uint8)
    images = as_batch(pictures(rng, 3, 40, 60, 3) // 2 + 30)
    beside, expected = compared(images, (Step.of(3, 3, codes, 1.7),))
    assert beside[:2].sum() == 0, beside.amax(dim=(1, 2, 3))
    assert beside.max() <= 1, beside.amax(dim=(1, 2, 3))
    assert (expected != images).flatten(1).any(dim=1).all()


def check_casts(images: torch.Tensor) -> None:
    """Checks results that are normalized and cast, with steps and without, of memory that is not channels_last."""
    statistics = ([0.4, 0.5, 0.45], [0.2, 0.25, 0.3])
    two = (Step.of(2, 3, Op.EQUALIZE), Step.of(2, 3, Op.MIRROR))
    for dtype in (None, torch.float32, torch.float16, torch.float64):
        # A kernel with steps takes five times as long to compile.
        for steps in ((), two) if dtype == torch.float16 else ((),):
            expected = pixels.run_steps_by_torch(images, steps)
            found = run_steps_fused(images, steps, statistics=statistics, dtype=dtype)
            assert found.dtype == (dtype or torch.float32)
            assert found.is_contiguous(memory_format=torch.channels_last)
            exact = normalized(expected, statistics).to(found.dtype)
            torch.testing.assert_close(found, exact, rtol=0, atol=0)
        assert torch.equal(run_steps_fused(images, (), dtype=dtype), images.to(dtype or torch.uint8))
