"""The kernel that fits pictures to samples gives torch's bytes, and keeps to the memory that it is given."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
from command import run_python
from numpy.typing import NDArray

from shardio.conversion.images.fit import Fit, FitMode
from shardio.kernels import fit as kernel
from shardio.kernels.built import _fit

pytestmark = pytest.mark.skipif(not kernel.AVAILABLE, reason="no kernel for this processor")


def with_torch(fit: Fit, *picture: Any) -> NDArray[np.uint8]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "AVAILABLE", False)
        return fit.apply(*picture)


def random_fit(rng: np.random.Generator) -> Fit:
    height, width = rng.integers(1, rng.choice([5, 20, 100]), 2).tolist()
    size = (height, height) if rng.random() < 0.3 else (height, width)
    return Fit(size, str(rng.choice(get_args(FitMode))), str(rng.choice(["bicubic", "bilinear"])))  # type: ignore[arg-type]


def random_pixels(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    # Black and white make filters overshoot.
    return pixels if rng.random() < 0.5 else (pixels >> 7) * np.uint8(255)


def test_random_pictures_are_as_torch_makes_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(4000):
        fit, (height, width) = random_fit(rng), rng.integers(1, rng.choice([5, 20, 100, 250]), 2).tolist()
        pixels = random_pixels(rng, height, width)
        found = fit.apply(pixels)
        np.testing.assert_array_equal(found, with_torch(fit, pixels), err_msg=f"{height} x {width}, {fit}")


def test_random_reduced_pictures_are_as_torch_makes_them() -> None:
    rng = np.random.default_rng(1)
    reduced = 0
    while reduced < 500:
        fit, reduction = random_fit(rng), int(rng.choice([2, 4, 8]))
        height, width = rng.integers(1, rng.choice([50, 400, 2000]), 2).tolist()
        shape = (math.ceil(height / reduction), math.ceil(width / reduction))
        if any(side < least for side, least in zip(shape, fit.least_size(height, width), strict=True)):
            continue
        reduced += 1
        picture = random_pixels(rng, *shape), (height, width), reduction
        np.testing.assert_array_equal(fit.apply(*picture), with_torch(fit, *picture), err_msg=f"{picture[1:]}, {fit}")


@pytest.mark.parametrize("mode", get_args(FitMode))
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 5000), (3, 3)),
        ((5000, 1), (3, 3)),
        ((2, 20_000), (64, 64)),
        ((20_000, 2), (64, 64)),
        ((3000, 2000), (1, 1)),
        ((3, 2), (1, 700)),
        ((700, 1), (350, 1)),
    ],
)
def test_extreme_shapes_are_as_torch_makes_them(shape: tuple[int, int], size: tuple[int, int], mode: FitMode) -> None:
    fit = Fit(size, mode)
    pixels = random_pixels(np.random.default_rng(2), *shape)
    np.testing.assert_array_equal(fit.apply(pixels), with_torch(fit, pixels))


def test_a_sample_is_made_in_the_memory_that_is_given() -> None:
    pixels = random_pixels(np.random.default_rng(3), 40, 60)
    for mode in get_args(FitMode):
        fit = Fit((30, 20), mode)
        block = np.full((3, 30, 20, 3), 7, np.uint8)
        assert fit.apply(pixels, out=block[1]) is not None
        np.testing.assert_array_equal(block[1], fit.apply(pixels))
        np.testing.assert_array_equal(with_torch(fit, pixels, None, 1, block[2]), block[1])
        assert (block[0] == 7).all()


# Pictures and samples that end, or begin, where memory ends.
_AT_THE_EDGE = """
import ctypes, itertools, mmap
import numpy as np
from shardio.kernels._fit import fit
libc, page = ctypes.CDLL(None), 4096
def room(nbytes, at_the_end):
    pages = -(-nbytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for edge in (start, start + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(edge), page, 0) == 0
    first = page + (pages * page - nbytes if at_the_end else 0)
    return np.frombuffer(memory, np.uint8)[first : first + nbytes]
shapes = [(1, 1), (1, 2), (2, 1), (3, 3), (5, 40), (40, 5), (37, 61), (1, 900), (900, 1)]
sizes = [(1, 1), (2, 2), (7, 7), (5, 13), (32, 11)]
resized = [(1, 1), (3, 2), (9, 9), (37, 61), (80, 20), (33, 90)]
for shape, size, new, at_the_end, cubic in itertools.product(shapes, sizes, resized, (False, True), (False, True)):
    pixels, out = room(shape[0] * shape[1] * 3, at_the_end), room(size[0] * size[1] * 3, at_the_end)
    pixels[:] = 200
    scales = (shape[0] / new[0], shape[1] / new[1])
    for place in ((0, 0), (new[0] - 1, new[1] - 1), (1 - size[0], 1 - size[1]), ((new[0] - size[0]) // 2, 0)):
        if -size[0] < place[0] < new[0]:
            fit(pixels, out, shape, size, new, place, scales, cubic)
            assert set(out.tolist()) <= {0, 200}, (shape, size, new, place)
print("done")
"""


def test_the_kernel_touches_no_memory_but_the_picture_and_the_sample() -> None:
    done = run_python("-c", _AT_THE_EDGE)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


GOOD: dict[str, Any] = {
    "pixels": bytes(4 * 5 * 3),
    "out": bytearray(2 * 3 * 3),
    "size": (4, 5),
    "out_size": (2, 3),
    "resized_size": (2, 4),
    "place": (0, 0),
    "scales": (2.0, 1.25),
    "cubic": True,
}


@pytest.mark.parametrize(
    "change",
    [
        {"pixels": bytes(4 * 5 * 3 - 1)},
        {"out": bytearray(2 * 3 * 3 + 1)},
        {"size": (5, 5)},
        {"size": (-4, -5)},
        {"size": (1 << 62, 4)},
        {"out_size": (3, 3)},
        {"out_size": (0, 3), "out": bytearray()},
        {"resized_size": (0, 4)},
        {"resized_size": (1 << 40, 4)},
        {"place": (2, 0)},
        {"place": (0, -3)},
        {"place": (1 << 62, 0)},
        {"place": (-(1 << 63), 0)},
        {"scales": (3.0, 1.25)},
        {"scales": (0.0, 1.25)},
        {"scales": (2.0, float("nan"))},
        {"scales": (2.0, float("inf"))},
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(change: dict[str, Any]) -> None:
    assert _fit is not None
    _fit.fit(*GOOD.values())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="sizes that do not fit together"):
        _fit.fit(*{**GOOD, **change}.values())  # type: ignore[call-arg]
