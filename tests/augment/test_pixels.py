"""The kernel in C does to pixels what the operations of torch do."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from draw_golden_pixels import drawn_picture
from numpy.typing import NDArray
from pictures import psnr, random_picture
from pixels_by_torch import run_steps_by_torch

from shardio.augment.steps import FILL_AT, NEEDS_RGB, SAMPLING_AT, WARPS, Op, Sampling, Step, Steps
from shardio.kernels import pixels as kernel
from shardio.kernels.pixels import in_slices

NAN = math.nan


def pictures(rng: np.random.Generator, count: int, height: int, width: int, channels: int) -> NDArray[np.uint8]:
    """Smooth pictures and noise in turn."""
    smooth = np.stack([random_picture(rng, height, width * channels)[:, :, 0] for _ in range(count)])
    noise = rng.integers(0, 256, (count, height, width * channels), dtype=np.uint8)
    chosen = (np.arange(count) % 2 == 0)[:, None, None]
    return np.where(chosen, smooth, noise).reshape(count, height, width, channels)


def drawn_values(rng: np.random.Generator, op: Op, height: int, width: int, channels: int) -> NDArray[np.float64]:
    """Returns what one picture's operation takes: usual values, and some at the ends of their ranges."""
    values = np.zeros(FILL_AT + channels)
    if op in (Op.BRIGHTNESS, Op.CONTRAST, Op.SATURATION, Op.SHARPNESS):
        values[0] = rng.choice([0.0, 1.0, rng.uniform(0, 3), 100.0])
    elif op is Op.HUE:
        values[0] = rng.choice([-0.5, 0.0, 0.5, rng.uniform(-0.5, 0.5)])
    elif op is Op.POSTERIZE:
        values[0] = rng.integers(0, 9)
    elif op is Op.SOLARIZE:
        values[0] = rng.choice([0.0, 100.5, 255.0, 256.0])
    elif op is Op.SOLARIZE_ADD:
        values[:2] = rng.uniform(-110.0, 110.0), rng.choice([0.0, 128.0, 256.0])
    elif op is Op.BLUR:
        reach = rng.integers(0, min(width, 12)), rng.integers(0, min(height, 12))
        values[:4] = 2 * reach[0] + 1, 2 * reach[1] + 1, *rng.uniform(0.1, 3.0, 2)
    elif op is Op.ERASE:
        top, left = rng.integers(0, height + 1), rng.integers(0, width + 1)
        values[:4] = top, left, rng.integers(0, height - top + 1), rng.integers(0, width - left + 1)
        values[FILL_AT:] = rng.choice([0.0, 255.0, rng.uniform(0, 255)], channels)
    elif op in WARPS:
        spread = np.array([0.5, 0.5, width / 4, 0.5, 0.5, height / 4])
        values[[0, 4]] = 1
        kind = rng.integers(0, 4)
        if kind == 0:  # by whole pixels
            values[[2, 5]] = rng.integers(-width, width + 1), rng.integers(-height, height + 1)
        elif kind == 1:  # a shear
            values[1] = rng.uniform(-0.5, 0.5)
        elif kind == 2:
            values[:6] += rng.uniform(-1, 1, 6) * spread
        else:
            values[:6] = rng.choice([0.0, -1.0, 0.5, 1e30, -1e30, 3.0], 6)
        if op is Op.PERSPECTIVE:
            values[6:8] = rng.choice([0.0, rng.uniform(-0.02, 0.02)], 2)
        values[SAMPLING_AT] = rng.integers(0, 4)
        values[FILL_AT:] = NAN if rng.random() < 0.3 else rng.uniform(0, 255, channels)
    return values


def drawn_step(rng: np.random.Generator, ops: NDArray[np.uint8], size: tuple[int, int], channels: int) -> Step:
    return Step(ops, np.stack([drawn_values(rng, Op(int(op)), *size, channels) for op in ops]))


EXACT = frozenset(Op) - {Op.SATURATION, Op.HUE, Op.BLUR, Op.CONTRAST}
SIZES = [(1, 1), (1, 7), (7, 1), (2, 2), (3, 3), (5, 224), (33, 47)]


def run_in_place(images: NDArray[np.uint8], steps: Steps) -> None:
    kernel.run_steps(images, np.stack([step.codes for step in steps]), np.stack([step.values for step in steps]))


def run(images: NDArray[np.uint8], steps: Steps) -> NDArray[np.uint8]:
    found = images.copy()
    run_in_place(found, steps)
    return found


def both(images: NDArray[np.uint8], steps: Steps) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the images by the kernel and by torch."""
    return run(images, steps), run_steps_by_torch(images, steps)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("op", [op for op in Op if op is not Op.NOTHING])
def test_the_kernel_does_what_torch_does(op: Op, channels: int) -> None:
    if op in NEEDS_RGB and channels == 4:
        with pytest.raises(ValueError, match="one channel or three"):
            run(np.zeros((1, 4, 4, 4), np.uint8), (Step.of(1, 4, op),))
        return
    rng = np.random.default_rng([op, channels])
    for size in SIZES:
        images, step = pictures(rng, 16, *size, channels), drawn_step(rng, np.full(16, op, np.uint8), size, channels)
        if op not in EXACT - WARPS:
            found, expected = both(images, (step,))
            beside = np.abs(found.astype(int) - expected)
            assert beside.max() <= 1
            assert (beside > 0).sum() <= max(2, 0.002 * beside.size)
        if op in EXACT:
            step.values[:, SAMPLING_AT] = 0  # nearest pixels are the same ones
            np.testing.assert_array_equal(*both(images, (step,)))


def test_bilinear_pixels_are_rounded_the_same_on_every_processor() -> None:
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (1, 33, 47, 3), dtype=np.uint8)
    levels = images[0].astype(np.float32)

    def between(a: NDArray[np.float32], b: NDArray[np.float32], share: np.float32) -> NDArray[np.float32]:
        return a + (b - a) * share

    for right, low in (0.5 + rng.integers(-9, 10, (20, 2)) * 2.0**-24).astype(np.float32):  # almost halves
        step = Step.of(1, 3, Op.AFFINE, 1, 0, right, 0, 1, low, 0, 0, Sampling.BILINEAR)
        columns = between(levels[:-1], levels[1:], low)
        expected = np.rint(between(columns[:, :-1], columns[:, 1:], right))
        np.testing.assert_array_equal(run(images, (step,))[0, :-1, :-1], expected)


@pytest.mark.parametrize("seed", range(4))
def test_programs_of_several_steps_do_what_torch_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ops = np.array(sorted({*EXACT - WARPS, Op.AFFINE}), np.uint8)
    for size in [(9, 11), (40, 25)]:
        channels = int(rng.choice([1, 3]))
        steps = tuple(drawn_step(rng, rng.choice(ops, 10), size, channels) for _ in range(5))
        for step in steps:
            step.values[step.codes == Op.AFFINE, SAMPLING_AT] = 0
        np.testing.assert_array_equal(*both(pictures(rng, 10, *size, channels), steps))


def hostile() -> Iterator[tuple[str, Step]]:
    for number in (NAN, math.inf, -math.inf, 1e31):
        for op in (Op.BRIGHTNESS, Op.HUE, Op.POSTERIZE, Op.AFFINE, Op.PERSPECTIVE):
            yield "no number", Step.of(1, 3, op, number)
    for code in (19, 255):
        yield "unknown code", Step.of(1, 3, np.array([code], np.uint8))
    for top, left, high, wide in np.array(
        [(-1, 0, 1, 1), (0, 3, 1, 2), (0, 0, 5, 1), (4, 0, 1, 1), (0.5, 0, 1, 1), (0, 0, 1, 1.5), (0, -2, 1, 2)]
    ):
        yield "inside", Step.of(1, 3, Op.ERASE, top, left, high, wide)
    for color in (-1.0, 255.5, NAN):
        yield "color", Step.of(1, 3, Op.ERASE, 0, 0, 1, 1, *[0.0] * 5, color)
    for wide, high in ((2, 3), (3, 0), (-1, 3), (9, 3), (3, 9), (2.5, 3)):
        yield "kernel of blur", Step.of(1, 3, Op.BLUR, wide, high, 1, 1)
    yield "kernel of blur", Step.of(1, 3, Op.BLUR, 3, 3, 0, 1)
    for sampling in (-1, 4, 0.5, NAN, 1e300):
        yield "interpolation", Step.of(1, 3, Op.AFFINE, 1, 0, 0, 0, 1, 0, 0, 0, sampling)
    yield "fill", Step.of(1, 3, Op.AFFINE, 1, 0, 0, 0, 1, 0, 0, 0, 0, math.inf, 0, 0)


@pytest.mark.parametrize(("reason", "step"), list(hostile()))
def test_what_no_operation_takes_is_refused_before_a_pixel_changes(reason: str, step: Step) -> None:
    images = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(1, 4, 4, 3)
    before = images.copy()
    with pytest.raises(ValueError, match=reason):
        run_in_place(images, (Step.of(1, 3, Op.INVERT), step))
    np.testing.assert_array_equal(images, before)


def test_sizes_that_do_not_fit_are_refused() -> None:
    run = kernel._native.run
    images, codes, values = np.zeros((2, 4, 5, 3), np.uint8), np.zeros((1, 2), np.uint8), np.zeros((1, 2, FILL_AT + 3))
    run(images, codes, values, 4, 5, 3)
    run(images[:0], codes[:, :0], values[:, :0], 4, 5, 3)
    run(images, codes[:0], values[:0], 4, 5, 3)
    wrong = [(0, 5, 3), (-4, 5, 3), (4, 5, 0), (4, 5, 65), (1 << 40, 5, 3), (4, 7, 3), (4, 5, 4), (2**62, 2**62, 3)]
    for some, numbers, sizes in (
        *((codes, values, sizes) for sizes in wrong),
        (codes[:, :1], values, (4, 5, 3)),
        (codes, values[:, :1], (4, 5, 3)),
        (codes, values[:, :, :-1], (4, 5, 3)),
        (codes[:0], values, (4, 5, 3)),
    ):
        with pytest.raises(ValueError, match="fit"):
            run(images, np.ascontiguousarray(some), np.ascontiguousarray(numbers), *sizes)
    images.flags.writeable = False
    with pytest.raises((BufferError, TypeError)):
        run(images, codes, values, 4, 5, 3)


def test_slices_are_done_in_threads_and_their_errors_are_raised_when_all_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    done: list[tuple[int, slice]] = []
    in_slices(12, lambda some: done.append((threading.get_ident(), some)))
    assert sorted(some.start for _, some in done) == [0, 4, 8]
    assert len(done) == 3
    assert any(thread != threading.get_ident() for thread, _ in done)

    ended = []

    def fail(some: slice) -> None:
        if some.start != 8:
            raise KeyError(some.start)
        time.sleep(0.05)
        ended.append(some.start)

    with pytest.raises(KeyError):
        in_slices(12, fail)
    assert ended == [8]


# --- what torchvision 0.28.0 has made of a drawn picture: tools/draw_golden_pixels.py ---------------------------------

GOLDEN = Path(__file__).parents[1] / "data" / "golden_pixels.npz"
UNROUNDED = ("posterize", "solarize", "invert", "equalize", "mirror", "flip")
FILL = (10.0, 100.0, 200.0)


with np.load(GOLDEN) as _file:
    RESULTS = dict(_file)


def step_of(name: str) -> Step:
    word, *numbers = name.split()
    if word in ("affine", "perspective"):
        places = np.zeros(8)
        given = RESULTS[f"numbers {word}"]
        places[: len(given)] = given
        sampling = ("nearest", "bilinear").index(numbers[0])
        return Step.of(1, 3, Op[word.upper()], *places, sampling, *(FILL if numbers[1] == "True" else (NAN,) * 3))
    values = [float(number) for number in numbers]
    if word == "blur":
        size, sigma = values
        values = [size, size, sigma, sigma]
    return Step.of(1, 3, Op[word.upper()], *values)


@pytest.mark.parametrize("name", [name for name in RESULTS if not name.startswith("numbers")])
def test_it_is_what_torchvision_makes(name: str) -> None:
    found = run(drawn_picture()[None], (step_of(name),))[0]
    expected = RESULTS[name]
    beside = np.abs(found.astype(int) - expected)
    if name.startswith(UNROUNDED):
        assert beside.max() == 0
    elif "nearest" in name:  # torchvision finds the place of a pixel in floats
        assert (beside.max(axis=2) > 0).sum() <= 2
    else:
        assert beside.max() <= 1
        assert psnr(found, expected) >= 60
