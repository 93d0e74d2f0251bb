"""The Triton kernel, line by line in Triton's interpreter on the CPU: what it computes, not how fast.

What this cannot show: that the kernel compiles for a GPU, which tests/test_gpu.py looks at where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from conftest import random_picture

from shardio.boxes import Boxes
from shardio.fused import can_fuse

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it has wheels for Linux")

# Triton decides when it is imported whether it interprets.
_CHECK = """\
import sys
import numpy as np
import torch
from shardio.boxes import Boxes
from shardio.fused import resample_fused
from shardio.resample import resample
from shardio.transform import _cast

data = np.load(sys.argv[1])
images = torch.from_numpy(data["images"]).permute(0, 3, 1, 2)
boxes, within = Boxes(*data["boxes"]), Boxes(*data["within"])
flips = data["flips"]
for size in ((7, 9), (16, 5), (33, 12)):
    for interpolation in ("bilinear", "bicubic"):
        for antialias in (True, False):
            kind = (size, interpolation)
            found = resample_fused(
                images, boxes, within, flips, *kind, antialias=antialias, statistics=None, dtype=None
            )
            expected = resample(images, boxes, flips, *kind, antialias=antialias, within=within, native=False)
            assert found.dtype == torch.uint8 and found.shape == expected.shape
            assert found.is_contiguous(memory_format=torch.channels_last)
            difference = (found.int() - expected.int()).abs()
            assert difference.max() <= 1, (size, interpolation, antialias, difference.max())
            assert difference.float().mean() < 0.02, difference.float().mean()
channels = images.shape[1]
statistics = ([0.4, 0.5, 0.45, 0.3][:channels], [0.2, 0.25, 0.3, 0.5][:channels])
grey = resample_fused(images, boxes, within, flips, (9, 11), "bilinear", antialias=True, statistics=None, dtype=None)
for dtype in (None, torch.float32, torch.float16):
    found = resample_fused(
        images, boxes, within, flips, (9, 11), "bilinear", antialias=True, statistics=statistics, dtype=dtype
    )
    assert found.dtype == (dtype or torch.float32)
    expected = _cast(grey, statistics, dtype)
    torch.testing.assert_close(found, expected, rtol=2**-9, atol=1e-3 if dtype == torch.float16 else 1e-5)
cast = resample_fused(
    images, boxes, within, flips, (9, 11), "bilinear", antialias=True, statistics=None, dtype=torch.float32
)
assert torch.equal(cast, grey.float())
print("equal")
"""


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_interpreted_kernel_gives_the_grey_levels_of_torch(channels: int, tmp_path: object) -> None:
    rng = np.random.default_rng(channels)
    count, height, width = 6, 40, 30
    picture = [random_picture(rng, height, width) for _ in range(count)]
    images = np.stack([np.concatenate([pixels, pixels], axis=2)[:, :, :channels] for pixels in picture])
    heights, widths = rng.uniform(1.5, height, count), rng.uniform(1.5, width, count)
    tops, lefts = rng.uniform(0, height - heights), rng.uniform(0, width - widths)
    # The second half sees whole pictures, the first its boxes only.
    boxes = np.stack([tops, lefts, heights, widths])
    within = boxes.copy()
    within[:, 3:] = np.array([0, 0, height, width], float)[:, None]
    # One that is the whole picture, and one of a single pixel.
    boxes[:, 0] = within[:, 0] = (0, 0, height, width)
    boxes[:, 1] = within[:, 1] = (height - 1, width - 1, 1, 1)
    path = f"{tmp_path}/data.npz"
    np.savez(path, images=images, boxes=boxes, within=within, flips=rng.random(count) < 0.5)
    run = subprocess.run(
        [sys.executable, "-c", _CHECK, path],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "equal\n"


def test_images_on_the_cpu_are_not_for_the_kernel() -> None:
    assert not can_fuse(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    assert Boxes.whole(2, 3, 4).heights.tolist() == [3, 3]
