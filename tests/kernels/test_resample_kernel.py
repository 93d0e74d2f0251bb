"""The kernel that resamples: its forms agree to the bit, and it keeps to the memory that it is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from command import run_python
from numpy.typing import NDArray

from shardio.kernels import _resample
from shardio.kernels import resample as kernel
from shardio.kernels.rowcopy import Windows

DTYPES = {np.uint8: torch.uint8, np.float32: torch.float32, np.uint16: torch.bfloat16, np.float16: torch.float16}


def draw_windows(rng: np.random.Generator, count: int, channels: int) -> dict[str, Any]:
    """Returns windows of images, and boxes that may have fractional sides, as arguments of the kernel."""
    windows, axes, pixels = [], [], []
    for _ in range(count):
        top, left = rng.integers(0, 50, 2)
        height, width = rng.integers(1, rng.choice([3, 20, 90]), 2)
        windows.append((top, left, height, width))
        pixels.append(rng.integers(0, 256, height * width * channels, dtype=np.uint8))
        axes.append([_draw_span(rng, int(start), int(side)) for start, side in ((top, height), (left, width))])
    spans = np.array(axes, np.float64)
    # Black and white make filters overshoot.
    made = np.concatenate(pixels) if rng.random() < 0.5 else (np.concatenate(pixels) >> 7) * np.uint8(255)
    planes = kernel.Planes.packed(made, Windows(*np.array(windows).T), channels)
    return {"planes": planes, "axes": spans, "flips": rng.random(count) < 0.5}


def _draw_span(rng: np.random.Generator, start: int, side: int) -> tuple[float, float, int, int]:
    if rng.random() < 0.2:
        return start, side, start, start + side
    length = rng.uniform(0.3, side)
    return start + rng.uniform(0, side - length), length, start, start + side


def test_all_forms_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        count, channels, size = rng.integers(1, 4), int(rng.choice([1, 2, 3, 4])), rng.integers(1, 60, 2)
        given = draw_windows(rng, count, channels)
        given["axes"][:, :, 1] /= size
        dtype = rng.choice(list(DTYPES))
        affine = None if dtype == np.uint8 else rng.normal(size=(2, channels)).astype(np.float32)
        how = {name: bool(rng.integers(2)) for name in ("cubic", "antialias", "box", "wide")}
        made = []
        for form in range(len(_resample.FORMS)):
            monkeypatch.setattr(kernel, "_FORM", form)
            out = np.zeros((count, *size, channels), dtype)
            kernel.resample(**given, out=out, affine=affine, **how)
            made.append(out)
            lines, larger = rng.permutation(count + 2)[:count], np.full((count + 2, *size, channels), 7, dtype)
            expected = larger.copy()
            expected[lines] = out
            kernel.resample(**given, out=larger, affine=affine, lines=lines, **how)
            np.testing.assert_array_equal(larger.view(np.uint8), expected.view(np.uint8), err_msg=f"{form} {lines}")
        for form, out in zip(_resample.FORMS, made, strict=True):
            np.testing.assert_array_equal(out.view(np.uint8), made[0].view(np.uint8), err_msg=f"{form} {size} {how}")


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
        planes = kernel.Planes.of_images(levels[None, :, None])
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


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (ValueError, {"pixels": bytes(23)}),
        (ValueError, {"places": array(0)}),
        (ValueError, {"places": array(0, 13)}),
        (ValueError, {"places": array(-1, 12)}),
        (ValueError, {"places": array(0, 1 << 62)}),
        (ValueError, {"stride": -6}),
        (ValueError, {"stride": 5}),
        (ValueError, {"stride": 7}),
        (ValueError, {"stride": 1 << 62}),
        (ValueError, {"windows": array((0, 0, 2, 2))}),
        (ValueError, {"windows": array((0, 0, 2, 2), (0, 0, 0, 2))}),
        (ValueError, {"windows": array((0, 0, 2, 2), (-1, 0, 2, 2))}),
        (ValueError, {"windows": array((0, 0, 2, 2), (0, 0, 1 << 62, 1 << 62))}),
        (IndexError, {"windows": array((0, 0, 2, 2), (1, 0, 2, 2))}),
        (IndexError, {"windows": array((0, 0, 2, 2), (0, 1, 2, 2))}),
        (ValueError, {"axes": np.zeros(15)}),
        (IndexError, {"axes": np.array([[(0, 1, 0, 3), (0, 2, 0, 2)]] * 2)}),
        (IndexError, {"axes": np.array([[(0, 1, 0, 2), (0, 2, 0, 2)]] * 2)}),
        (IndexError, {"axes": np.array([[(0, 0, 0, 2), (0, 2, 0, 2)]] * 2)}),
        (IndexError, {"axes": np.array([[(np.nan, 0.5, 0, 2), (0, 2, 0, 2)]] * 2)}),
        (IndexError, {"axes": np.array([[(0, np.inf, 0, 2), (0, 2, 0, 2)]] * 2)}),
        (ValueError, {"lines": array(0, 2)}),
        (ValueError, {"lines": array(-1, 0)}),
        (ValueError, {"lines": array(0)}),
        (ValueError, {"lines": array(0, 1), "out": bytearray(19)}),
        (ValueError, {"out": bytearray(17)}),
        (ValueError, {"out": bytearray(19)}),
        (ValueError, {"channels": 0}),
        (ValueError, {"channels": -3}),
        (ValueError, {"channels": 65}),
        (ValueError, {"resized": (0, 1)}),
        (ValueError, {"resized": (1 << 40, 1)}),
        (ValueError, {"first": (3, 0)}),
        (ValueError, {"first": (0, -1)}),
        (ValueError, {"first": (1 << 62, 0)}),
        (ValueError, {"first": (-(1 << 63), 0)}),
        (ValueError, {"size": (0, 1), "out": bytearray()}),
        (ValueError, {"size": (1 << 62, 1)}),
        (ValueError, {"depth": 4}),
        (ValueError, {"depth": -1}),
        (ValueError, {"form": len(_resample.FORMS)}),
        (ValueError, {"form": -1}),
        (ValueError, {"affine": np.ones(6, np.float32)}),
        (ValueError, {**NORMAL, "out": bytearray(18)}),
        (ValueError, {**NORMAL, "out": memoryview(bytearray(73))[1:]}),
        (ValueError, {**NORMAL, "affine": b""}),
        (ValueError, {**NORMAL, "affine": np.ones(5, np.float32)}),
        (ValueError, {**NORMAL, "affine": np.full(6, np.nan, np.float32)}),
        (ValueError, {**HALVED, "pixels": bytes(17)}),
        (ValueError, {**HALVED, "places": array(0, 13)}),
        (ValueError, {**HALVED, "places": array(0, 1 << 62)}),
        (ValueError, {**HALVED, "stride": 4}),
        (ValueError, {**HALVED, "windows": array((0, 0, 2, 4), (1, 0, 2, 2))}),
        (ValueError, {**HALVED, "windows": array((0, 0, 2, 4), (0, 1, 2, 2))}),
        (ValueError, {**HALVED, "windows": array((0, 0, 2, 4), (0, 0, 1, 2)), "axes": np.ones((2, 2, 4)) - 1}),
        (ValueError, {**HALVED, "windows": array((0, 0, 2, 3), (0, 0, 2, 2))}),
        (ValueError, {**HALVED, "windows": array((0, 0, 2, 4), (0, 0, 4, 2))}),
        (IndexError, {**HALVED, "axes": np.array([[(0, 2 / 3, 0, 2), (0, 2, 0, 4)]] * 2)}),
        (ValueError, {**HALVED, "channels": 1, "out": bytearray(6)}),
        (ValueError, {**HALVED, "channels": 4, "out": bytearray(24)}),
    ],
)
def test_arguments_that_would_lead_out_of_memory_are_refused(error: type[Exception], change: dict[str, Any]) -> None:
    assert _resample is not None
    _resample.resample(*GOOD.values())
    _resample.resample(*{**GOOD, **NORMAL}.values())
    _resample.resample(*{**GOOD, **HALVED}.values())
    _resample.resample(*{**GOOD, "stride": 6}.values())
    _resample.resample(*{**GOOD, "stride": 18, "places": array(0, 0)}.values())
    with pytest.raises(error):
        _resample.resample(*{**GOOD, **change}.values())


COLORS: dict[str, Any] = {"images": bytes(48), "out": bytearray(24), "height": 2, "width": 4, "form": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"images": bytes(47)},
        {"out": bytearray(23)},
        {"out": bytearray(25)},
        {"images": bytes(60), "out": bytearray(30)},
        {"height": 1, "width": 8},
        {"height": 8, "width": 1},
        {"height": 0},
        {"width": -4},
        {"height": 1 << 62},
        {"form": len(_resample.FORMS)},
        {"form": -1},
    ],
)
def test_pictures_that_would_lead_out_of_memory_are_refused(change: dict[str, Any]) -> None:
    _resample.to_yuv420(*COLORS.values())
    with pytest.raises(ValueError, match="expected even sides"):
        _resample.to_yuv420(*{**COLORS, **change}.values())
    memory = memoryview(bytearray(71))
    with pytest.raises(ValueError, match="share no memory"):
        _resample.to_yuv420(memory[:48], memory[47:], 2, 4, 0)
