"""The kernel that resamples: each form does what plain arithmetic does, to the bit, in the memory that it is given."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from command import run_python
from numpy.typing import NDArray
from plain_yuv420 import Pixels, plain_rgb, plain_weights, plain_window

from shardio.kernels import _resample
from shardio.kernels import resample as kernel
from shardio.kernels.resample import Planes
from shardio.kernels.rowcopy import Windows

DTYPES = {np.uint8: torch.uint8, np.float32: torch.float32, np.uint16: torch.bfloat16, np.float16: torch.float16}


def drawn_sample(rng: np.random.Generator, shape: tuple[int, ...]) -> Pixels:
    if rng.random() < 0.3:  # where filters overshoot, and colors that are none
        return rng.integers(0, 2, shape, dtype=np.uint8) * np.uint8(255)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def drawn_axis(rng: np.random.Generator, side: int, resized: int) -> tuple[float, float, int, int]:
    kind = rng.choice(["whole", "copy", "pixels", "fraction"])
    start, length = 0.0, float(side)
    if kind == "copy" and resized <= side:
        start, length = float(rng.integers(side - resized + 1)), float(resized)
    elif kind == "pixels":
        length = float(rng.integers(1, side + 1))
        start = float(rng.integers(side - int(length) + 1))
    elif kind == "fraction":
        length = rng.uniform(0.3, side)
        start = rng.uniform(0, side - length)
    low, high = math.floor(start), math.ceil(start + length)
    if rng.random() < 0.5:
        low, high = int(rng.integers(low + 1)), int(rng.integers(high, side + 1))
    return start, length / resized, low, high


def plain_resized(
    image: Pixels, axes: NDArray[np.float64], resized: tuple[int, int], kind: str, antialias: bool, wide: bool
) -> Pixels:
    """Returns the whole resized image: as `plain_rgb`, but of pixels."""
    for number in (1, 0):
        side = image.shape[number]
        weights, bits = plain_weights(tuple(axes[number]), side, resized[number], kind, antialias, wide)
        sums = np.tensordot(weights, np.moveaxis(image, number, 0).astype(np.int64), 1)
        levels = ((sums + (1 << bits >> 1)) >> bits).clip(0, 255).astype(np.uint8)
        image = np.moveaxis(levels, 0, number)
    return image


def check_drawn_batch(rng: np.random.Generator) -> None:
    """Checks the results of a drawn batch in each form, alone, in lines, in several threads, and normalized."""
    count, halved = int(rng.integers(1, 4)), bool(rng.integers(2))
    channels = 3 if halved else int(rng.choice([1, 2, 3, 4]))
    sides = rng.integers(1, rng.choice([3, 8, 24]), (count, 2)) * 2
    if not halved:
        sides -= rng.integers(2, size=(count, 2))
    is_row, is_one = rng.random(2) < 0.5
    if is_row or is_one:
        sides[:] = sides[0]
    shapes = [(tall * 3 // 2, wide) if halved else (tall, wide, channels) for tall, wide in sides.tolist()]
    samples = [drawn_sample(rng, shape) for shape in shapes]
    windows = Windows(*np.pad(sides, [(0, 0), (2, 0)]).T)
    if is_row:
        order = rng.permutation(count + 1)[:count]
        rows = np.zeros((count + 1, samples[0].size), np.uint8)
        rows[order] = [sample.ravel() for sample in samples]
        planes = Planes.of_rows(rows, order, windows, (*sides[0].tolist(), channels), halved)
    else:
        planes = Planes.packed(np.concatenate([sample.ravel() for sample in samples]), windows, channels, halved)
    resized = tuple(rng.integers(1, rng.choice([5, 50]), 2).tolist())
    size, first = resized, (0, 0)
    if rng.random() < 0.4:
        size = tuple(rng.integers(1, 60, 2).tolist())
        first = tuple(int(rng.integers(1 - n, of)) for n, of in zip(size, resized, strict=True))
    axes = np.array([[drawn_axis(rng, *pair) for pair in zip(side, resized, strict=True)] for side in sides.tolist()])
    if is_one:
        axes[:] = axes[0]
    flips, antialias, wide = rng.random(count) < 0.5, bool(rng.random() < 0.7), bool(rng.random() < 0.2)
    kinds = rng.choice(["bilinear", "cubic"], count) if rng.random() < 0.7 else [rng.choice(["box", "lanczos"])] * count
    how = {"cubic": np.equal(kinds, "cubic"), "box": kinds[0] == "box", "lanczos": kinds[0] == "lanczos", "wide": wide}
    how |= {"antialias": antialias, "resized": resized, "first": first}
    given = f"{shapes} {axes.tolist()} {flips} {kinds} {size} {how}"

    def plainly(sample: Pixels, axis: NDArray[np.float64], kind: str, flip: bool) -> Pixels:
        whole = (plain_rgb if halved else plain_resized)(sample, axis, resized, kind, antialias, wide)
        several = [plain_window(whole[..., [i] * 3], size, first, flip)[..., :1] for i in range(channels)]
        return np.concatenate(several, axis=2)

    def make(form: int, dtype: Any = np.uint8, some: slice = slice(None), **options: Any) -> NDArray[Any]:
        out = np.zeros((len(flips[some]) + 2 * ("lines" in options), *size, channels), dtype)
        with mock.patch.object(kernel, "_FORM", form):
            cubic = how["cubic"][some]
            kernel.resample(planes[some], axes[some], flips[some], out, **how | {"cubic": cubic}, **options)
        return out

    expected = np.stack([*map(plainly, samples, axes, kinds, flips.tolist())])
    affine, dtype = rng.normal(size=(2, channels)).astype(np.float32), rng.choice([np.float32, np.uint16, np.float16])
    copy = np.array([[(0, 1, 0, side) for side in size]] * count, np.float64)
    normalized = np.zeros(expected.shape, dtype)
    kernel.resample(Planes.of_images(expected), copy, np.zeros(count, bool), normalized, affine, cubic=False)
    lines = rng.permutation(count + 2)[:count]
    for form in range(len(_resample.FORMS)):
        np.testing.assert_array_equal(make(form), expected, err_msg=f"{form} {given}")
        made = make(form, dtype, affine=affine, lines=lines)
        np.testing.assert_array_equal(made[lines].view(np.uint8), normalized.view(np.uint8), err_msg=f"{form} {given}")
        assert not np.delete(made, lines, axis=0).any()
        for i in range(count):
            np.testing.assert_array_equal(make(form, some=slice(i, i + 1))[0], expected[i], err_msg=f"{form} {given}")
    if rng.random() < 0.1:
        with ThreadPoolExecutor(4) as pool:
            for made in pool.map(make, [0] * 8):
                np.testing.assert_array_equal(made, expected, err_msg=given)


def test_results_are_as_the_definition_has_them() -> None:
    seed = int(np.random.default_rng().integers(2**32))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(150):
        check_drawn_batch(rng)


@pytest.mark.parametrize("form", range(len(_resample.FORMS)))
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float16])
def test_levels_are_normalized_and_cast_as_torch_does_it(
    form: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_FORM", form)
    levels = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 3))
    rng = np.random.default_rng(1)
    # Halves of the last place, numbers too small and too large for 16 bits, and usual ones.
    scales = [(1, 0), (2**-8, 1), (2**-8, 1 + 2**-8), (2**-26, 0), (2**-26, 2**-14), (1e4, -1e6), (300, -65504)]
    for factor, offset in [*scales, *rng.normal(size=(200, 2)).tolist()]:
        affine = np.array([[factor, -factor, factor / 3], [offset, -offset, offset]], np.float32)
        out = np.empty((1, 256, 1, 3), dtype)
        axes = np.array([[(0, 1, 0, 256), (0, 1, 0, 1)]])
        planes = Planes.of_images(levels[None, :, None])
        kernel.resample(planes, axes, np.zeros(1, bool), out, affine, cubic=False)
        expected = (torch.from_numpy(levels).float() * torch.from_numpy(affine[0]) + torch.from_numpy(affine[1])).to(
            DTYPES[dtype]
        )
        found = torch.from_numpy(out[0, :, 0]).view(DTYPES[dtype])
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (factor, offset)


# Images and results that end, or begin, where memory ends.
_AT_THE_EDGE = """
import ctypes, itertools, mmap
import numpy as np
from shardio.kernels import resample as kernel
from shardio.kernels.resample import Planes, resample, to_yuv420
libc, page = ctypes.CDLL(None), 4096
def room(shape, at_the_end):
    nbytes = int(np.prod(shape))
    pages = -(-nbytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for edge in (start, start + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(edge), page, 0) == 0
    first = page + (pages * page - nbytes if at_the_end else 0)
    return np.frombuffer(memory, np.uint8)[first : first + nbytes].reshape(shape)
shapes = [(1, 1), (2, 1), (3, 3), (5, 40), (37, 61), (1, 900), (900, 1)]
halved = [(2, 2), (4, 70), (36, 2)]
sizes = [(1, 1), (7, 7), (5, 13)]
resized = [(1, 1), (9, 9), (37, 61), (80, 20)]
filters = [dict(cubic=cubic, antialias=antialias) for cubic in (False, True) for antialias in (True, False)]
filters += [dict(cubic=False, box=True), dict(cubic=True, wide=True)]
for at_the_end, filter, kernel._FORM in itertools.product((False, True), filters, range(len(kernel._native.FORMS))):
    for shape, size, new in itertools.product(shapes + halved, sizes, resized):
        pixels, out = room((2, *shape, 3), at_the_end), room((2, *size, 3), at_the_end)
        pixels[:] = 200
        axes = np.array([[(0, side / n, 0, side) for side, n in zip(shape, new)]] * 2, np.float64)
        for place in ((0, 0), (new[0] - 1, new[1] - 1), (1 - size[0], 1 - size[1]), ((new[0] - size[0]) // 2, 0)):
            if -size[0] < place[0] < new[0]:
                how = dict(**filter, resized=new, first=place)
                packed = Planes.of_images(pixels)
                some, rows = [packed], (pixels.reshape(2, -1), np.arange(2), packed.windows, (*shape, 3))
                if shape in halved:
                    yuv = room((2, shape[0] * 3 // 2, shape[1]), at_the_end)
                    to_yuv420(pixels, yuv)
                    some, rows = [Planes.packed(yuv, packed.windows, 3, True)], (yuv.reshape(2, -1), *rows[1:], True)
                for planes in (*some, Planes.of_rows(*rows)):
                    resample(planes, axes, np.array([False, True]), out, **how)
                    assert set(out.ravel().tolist()) <= {0, 200}, (shape, size, new, place)
print("done")
"""


def test_the_kernel_touches_no_memory_but_the_images_and_the_results() -> None:
    done = run_python("-c", _AT_THE_EDGE)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def array(*rows: Any) -> NDArray[np.int64]:
    return np.array(rows, np.int64)


GOOD: dict[str, Any] = {
    "pixels": bytes(24),
    "places": array(0, 12),
    "stride": 0,
    "halved": False,
    "windows": array((0, 0, 2, 2), (0, 0, 2, 2)),
    "axes": np.array([[(0, 2 / 3, 0, 2), (0, 2, 0, 2)]] * 2),
    "flags": bytes(2),
    "lines": None,
    "out": bytearray(18),
    "affine": b"",
    "channels": 3,
    "resized": (3, 1),
    "first": (0, 0),
    "size": (3, 1),
    "antialias": True,
    "depth": 0,
    "form": 0,
}
# A whole image, and an image of 2 x 2 whose bytes follow.
HALVED: dict[str, Any] = {
    "halved": True,
    "pixels": bytes(18),
    "places": array(0, 12),
    "windows": array((0, 0, 2, 4), (0, 0, 2, 2)),
    "axes": np.array([[(0, 2 / 3, 0, 2), (0, 2, 0, 2)]] * 2),
}
NORMAL: dict[str, Any] = {"out": bytearray(72), "affine": np.ones(6, np.float32), "depth": 1}


REFUSED: list[dict[str, Any]] = [
    {"pixels": bytes(23)},
    *({"places": places} for places in (array(0), array(0, 13), array(-1, 12), array(0, 1 << 62))),
    *({"stride": stride} for stride in (-6, 5, 7, 1 << 62)),
    {"windows": array((0, 0, 2, 2))},
    *(
        {"windows": array((0, 0, 2, 2), window)}
        for window in ((0, 0, 0, 2), (-1, 0, 2, 2), (0, 0, 1 << 62, 1 << 62), (1, 0, 2, 2), (0, 1, 2, 2))
    ),
    {"axes": np.zeros(15)},
    *(
        {"axes": np.array([[axis, (0, 2, 0, 2)]] * 2, np.float64)}
        for axis in ((0, 1, 0, 3), (0, 1, 0, 2), (0, 0, 0, 2), (np.nan, 0.5, 0, 2), (0, np.inf, 0, 2))
    ),
    *({"lines": lines} for lines in (array(0, 2), array(-1, 0), array(0))),
    {"lines": array(0, 1), "out": bytearray(19)},
    *({"out": bytearray(nbytes)} for nbytes in (17, 19)),
    *({"channels": channels} for channels in (0, -3, 65)),
    *({"resized": size} for size in ((0, 1), (1 << 40, 1))),
    *({"first": first} for first in ((3, 0), (0, -1), (1 << 62, 0), (-(1 << 63), 0))),
    {"size": (0, 1), "out": bytearray()},
    {"size": (1 << 62, 1)},
    *({"depth": depth} for depth in (4, -1)),
    *({"form": form} for form in (len(_resample.FORMS), -1)),
    {"affine": np.ones(6, np.float32)},
    *({**NORMAL, "out": out} for out in (bytearray(18), memoryview(bytearray(73))[1:])),
    *({**NORMAL, "affine": affine} for affine in (b"", np.ones(5, np.float32), np.full(6, np.nan, np.float32))),
    {**HALVED, "pixels": bytes(17)},
    *({**HALVED, "places": places} for places in (array(0, 13), array(0, 1 << 62))),
    {**HALVED, "stride": 4},
    *({**HALVED, "windows": array((0, 0, 2, 4), window)} for window in ((1, 0, 2, 2), (0, 1, 2, 2), (0, 0, 4, 2))),
    {**HALVED, "windows": array((0, 0, 2, 4), (0, 0, 1, 2)), "axes": np.ones((2, 2, 4)) - 1},
    {**HALVED, "windows": array((0, 0, 2, 3), (0, 0, 2, 2))},
    {**HALVED, "axes": np.array([[(0, 2 / 3, 0, 2), (0, 2, 0, 4)]] * 2)},
    *({**HALVED, "channels": channels, "out": bytearray(6 * channels)} for channels in (1, 4)),
]


@pytest.mark.parametrize("change", REFUSED)
def test_arguments_that_would_lead_out_of_memory_are_refused(change: dict[str, Any]) -> None:
    for good in ({}, NORMAL, HALVED, {"stride": 6}, {"stride": 18, "places": array(0, 0)}):
        _resample.resample(*{**GOOD, **good}.values())
    with pytest.raises((ValueError, IndexError)):
        _resample.resample(*{**GOOD, **change}.values())


COLORS: dict[str, Any] = {"images": bytes(48), "out": bytearray(24), "height": 2, "width": 4, "form": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"images": bytes(47)},
        *({"out": bytearray(nbytes)} for nbytes in (23, 25)),
        {"images": bytes(60), "out": bytearray(30)},
        *({"height": height, "width": 8 // height} for height in (1, 8)),
        *({"height": height} for height in (0, 1 << 62)),
        {"width": -4},
        *({"form": form} for form in (len(_resample.FORMS), -1)),
    ],
)
def test_pictures_that_would_lead_out_of_memory_are_refused(change: dict[str, Any]) -> None:
    _resample.to_yuv420(*COLORS.values())
    with pytest.raises(ValueError, match="even sides"):
        _resample.to_yuv420(*{**COLORS, **change}.values())
    memory = memoryview(bytearray(71))
    with pytest.raises(ValueError, match="share no memory"):
        _resample.to_yuv420(memory[:48], memory[47:], 2, 4, 0)
