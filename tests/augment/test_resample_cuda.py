"""The Triton kernel, without a GPU: its results in Triton's interpreter, and that it compiles for GPUs.

This cannot show that the compiled kernel computes the same, which tests/loading/test_gpu.py looks at, nor how
fast.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from interpreted import assert_compiles, assert_interprets, needs_triton
from pictures import random_picture

from shardio.augment.boxes import Boxes
from shardio.augment.resample_cuda import can_fuse

pytestmark = needs_triton

_CHECK = """\
import sys
import numpy as np
import torch
from shardio.augment.boxes import Boxes
from shardio.augment.resample_cuda import resample_fused
from shardio.augment.resample import normalized, resample

data = np.load(sys.argv[1])
boxes, within, flips = Boxes(*data["boxes"]), Boxes(*data["within"]), data["flips"]


def fused(images, size, interpolation="bilinear", antialias=True, statistics=None, dtype=None):
    return resample_fused(
        images, boxes, within, flips, size, interpolation, antialias=antialias, statistics=statistics, dtype=dtype
    )


def check_grey_levels(images, size, interpolation, antialias):
    found = fused(images, size, interpolation, antialias)
    expected = resample(images, boxes, flips, size, interpolation, antialias=antialias, within=within, native=False)
    assert found.dtype == torch.uint8 and found.shape == expected.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    difference = (found.int() - expected.int()).abs()
    assert difference.max() <= 1, (size, interpolation, antialias, difference.max())
    assert difference.float().mean() < 0.02, difference.float().mean()


for channels in (1, 3, 4):
    images = torch.from_numpy(data["images"][..., :channels].copy()).permute(0, 3, 1, 2)
    ways = [("bilinear", True), ("bicubic", True), ("bilinear", False), ("bicubic", False)]
    for interpolation, antialias in ways if channels == 3 else ways[channels == 4 :: 3]:
        check_grey_levels(images, (7, 9) if antialias else (11, 3), interpolation, antialias)
check_grey_levels(images, (33, 12), "bilinear", True)
grey = fused(images, (9, 11))
statistics = ([0.4, 0.5, 0.45, 0.3], [0.2, 0.25, 0.3, 0.5])
for dtype in (None, torch.float32, torch.float16):
    found = fused(images, (9, 11), statistics=statistics, dtype=dtype)
    assert found.dtype == (dtype or torch.float32)
    tolerance = {"rtol": 2**-9, "atol": 1e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, normalized(grey, statistics).to(dtype or torch.float32), **tolerance)
assert torch.equal(fused(images, (9, 11), dtype=torch.float32), grey.float())
print("equal")
"""


def test_the_interpreted_kernel_gives_the_grey_levels_of_torch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count, height, width = 4, 30, 24
    pictures = [random_picture(rng, height, width) for _ in range(count)]
    images = np.stack([np.concatenate([pixels, pixels[::-1]], axis=2) for pixels in pictures])
    heights, widths = rng.uniform(1.5, height, count), rng.uniform(1.5, width, count)
    tops, lefts = rng.uniform(0, height - heights), rng.uniform(0, width - widths)
    # The first sees nothing but its box, the second all of its picture.
    boxes = np.stack([tops, lefts, heights, widths])
    within = boxes.copy()
    within[:, 1] = (0, 0, height, width)
    # One that is the whole picture, and one of a single pixel.
    boxes[:, 2] = within[:, 2] = (0, 0, height, width)
    boxes[:, 3] = within[:, 3] = (height - 1, width - 1, 1, 1)
    path = tmp_path / "data.npz"
    np.savez(path, images=images, boxes=boxes, within=within, flips=np.array([True, False, False, True]))
    assert_interprets(_CHECK, path)


_COMPILE = """\
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shardio.augment.resample_cuda import _resample

names = _resample.arg_names
for dtype, size, flags in (("bf16", 224, (True, True, True)), ("u8", 97, (False, False, False))):
    values = [256, 256, 3, size, size, *flags, 4, 1024, 1024]
    constants = dict(zip(names[4:], values, strict=True))
    types = {"images": "*u8", "out": "*" + dtype, "parameters": "*fp32", "affine": "*fp32"}
    source = ASTSource(_resample, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
    for capability in (80, 90):
        assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
print("compiled")
"""


def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert_compiles(_COMPILE, tmp_path)


def test_images_on_the_cpu_are_not_for_the_kernel() -> None:
    assert not can_fuse(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), (4, 4))
    assert Boxes.whole(2, 3, 4).heights.tolist() == [3, 3]
