"""Crops and resizes, and each operation of shardio.augment.steps: microseconds for a picture, on one core.

The kernels in C, beside OpenCV where it is installed (pip install opencv-python-headless) and does the same. In turn;
times are medians over rounds, and the ratio is the median of the rounds' ratios of C to OpenCV. Results are written to
memory that was touched before. Boxes are those of RandomResizedCrop(224) in pictures of 256 x 256; OpenCV's
INTER_LINEAR does not antialias.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import describe_machine, in_turn, ratios, spread
from numpy.typing import NDArray

from shardio.augment import RandomResizedCrop
from shardio.augment.batch import Batch, sizes_of
from shardio.augment.boxes import Draws
from shardio.augment.resample import Cast, Filter
from shardio.augment.stage import Stage
from shardio.augment.steps import Op, Sampling, Step, Steps
from shardio.kernels.pixels import run_steps
from shardio.kernels.resample import Planes

try:
    import cv2
except ImportError:
    cv2 = None

TURNED = (0.94, -0.25, 34.0, 0.25, 0.94, -20.0)
SHEARED = (1.0, 0.09, -10.0, 0.0, 1.0, 0.0)
SHIFTED = (1.0, 0.0, 30.0, 0.0, 1.0, -12.0)
TILTED = (0.8, 0.1, 5.0, 0.05, 0.9, 3.0, 0.0004, -0.0003)
FILL = (10.0, 100.0, 200.0)
NO_FILL = (math.nan,) * 3

Operations = dict[str, tuple[tuple[Op, tuple[float, ...]], ...]]


def operations() -> Operations:
    """Returns the steps by the names of what they do."""
    made: Operations = {
        "brightness": ((Op.BRIGHTNESS, (1.3,)),),
        "contrast": ((Op.CONTRAST, (0.6,)),),
        "saturation": ((Op.SATURATION, (1.4,)),),
        "hue": ((Op.HUE, (0.1,)),),
        "sharpness": ((Op.SHARPNESS, (1.7,)),),
        "posterize": ((Op.POSTERIZE, (4,)),),
        "solarize": ((Op.SOLARIZE, (128,)),),
        "add to dark pixels": ((Op.SOLARIZE_ADD, (40, 128)),),
        "invert": ((Op.INVERT, ()),),
        "autocontrast": ((Op.AUTOCONTRAST, ()),),
        "equalize": ((Op.EQUALIZE, ()),),
        "gray": ((Op.GRAYSCALE, ()),),
        "blur 3 x 3": ((Op.BLUR, (3, 3, 0.5, 0.5)),),
        "blur 23 x 23": ((Op.BLUR, (23, 23, 1.1, 1.1)),),
        "mirror": ((Op.MIRROR, ()),),
        "flip": ((Op.FLIP, ()),),
        "shift, nearest": ((Op.AFFINE, (*SHIFTED, 0, 0, Sampling.NEAREST, *NO_FILL)),),
        "shear, nearest": ((Op.AFFINE, (*SHEARED, 0, 0, Sampling.NEAREST, *NO_FILL)),),
    }
    for sampling in Sampling:
        name = sampling.name.lower().replace("_", "'s ")
        made[f"turn, {name}"] = ((Op.AFFINE, (*TURNED, 0, 0, sampling, *FILL)),)
        made[f"perspective, {name}"] = ((Op.PERSPECTIVE, (*TILTED, sampling, *FILL)),)
    made["brightness, posterize and invert"] = made["brightness"] + made["posterize"] + made["invert"]
    made["turn, nearest, and equalize"] = made["turn, nearest"] + made["equalize"]
    return made


def opencv_operations() -> dict[str, Callable[[NDArray[np.uint8]], Any]]:
    """Returns what OpenCV has for an operation, by its name: a function of one picture, (H, W, 3)."""
    if cv2 is None:
        return {}
    cv2.setNumThreads(1)
    levels = np.arange(256)
    tables = {
        "brightness": np.minimum(levels * 1.3, 255),
        "posterize": levels & 0xF0,
        "solarize": np.where(levels < 128, levels, 255 - levels),
        "add to dark pixels": np.where(levels < 128, levels + 40, levels),
    }
    smooth = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13

    def gray(x: NDArray[np.uint8]) -> Any:
        return cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)

    def shift_hue(x: NDArray[np.uint8]) -> Any:
        hsv = cv2.cvtColor(x, cv2.COLOR_RGB2HSV_FULL)
        hsv[..., 0] += 26
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)

    def stretch(x: NDArray[np.uint8]) -> Any:
        return cv2.merge([cv2.normalize(channel, None, 0, 255, cv2.NORM_MINMAX) for channel in cv2.split(x)])

    def warp(numbers: tuple[float, ...], how: int) -> Callable[[NDArray[np.uint8]], Any]:
        how |= cv2.WARP_INVERSE_MAP
        if len(numbers) == 6:
            return lambda x: cv2.warpAffine(x, np.reshape(numbers, (2, 3)), x.shape[1::-1], flags=how)
        return lambda x: cv2.warpPerspective(x, np.reshape((*numbers, 1.0), (3, 3)), x.shape[1::-1], flags=how)

    made: dict[str, Callable[[NDArray[np.uint8]], Any]] = {
        **{name: partial(cv2.LUT, lut=table.astype(np.uint8)) for name, table in tables.items()},
        "contrast": lambda x: cv2.convertScaleAbs(x, alpha=0.6, beta=0.4 * cv2.mean(gray(x))[0]),
        "saturation": lambda x: cv2.addWeighted(x, 1.4, cv2.cvtColor(gray(x), cv2.COLOR_GRAY2RGB), -0.4, 0),
        "hue": shift_hue,
        "sharpness": lambda x: cv2.addWeighted(x, 1.7, cv2.filter2D(x, -1, smooth), -0.7, 0),
        "invert": cv2.bitwise_not,
        "autocontrast": stretch,
        "equalize": lambda x: cv2.merge([cv2.equalizeHist(channel) for channel in cv2.split(x)]),
        "gray": lambda x: cv2.cvtColor(gray(x), cv2.COLOR_GRAY2RGB),
        "blur 3 x 3": lambda x: cv2.GaussianBlur(x, (3, 3), 0.5),
        "blur 23 x 23": lambda x: cv2.GaussianBlur(x, (23, 23), 1.1),
        "mirror": lambda x: cv2.flip(x, 1),
        "flip": lambda x: cv2.flip(x, 0),
        "shift, nearest": warp(SHIFTED, cv2.INTER_NEAREST),
        "shear, nearest": warp(SHEARED, cv2.INTER_NEAREST),
    }
    for name, numbers in (("turn", TURNED), ("perspective", TILTED)):
        made[f"{name}, nearest"] = warp(numbers, cv2.INTER_NEAREST)
        made[f"{name}, bilinear"] = made[f"{name}, pillow's bilinear"] = warp(numbers, cv2.INTER_LINEAR)
        made[f"{name}, pillow's bicubic"] = warp(numbers, cv2.INTER_CUBIC)
    return made


def way(run: Callable[[Any], object], images: torch.Tensor | NDArray[np.uint8]) -> Callable[[], int]:
    def call() -> int:
        run(images)
        return len(images)

    return call


def pictures(count: int, size: int) -> torch.Tensor:
    """Returns smooth pictures with some noise, (B, 3, H, W) in channels_last memory."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 230, (count, -(-size // 16), -(-size // 16), 3))
    smooth = np.kron(coarse, np.ones((1, 16, 16, 1), int))[:, :size, :size]
    noisy = (smooth + rng.integers(0, 25, smooth.shape)).astype(np.uint8)
    return torch.from_numpy(noisy).permute(0, 3, 1, 2)


def measure_resizes(images: torch.Tensor, size: int, rounds: int) -> None:
    """Crops and resizes to `size`, mirrors half of the pictures, and normalizes and casts."""
    count, whole = len(images), images.permute(0, 2, 3, 1).numpy()
    flips, planes = np.arange(count) % 2 == 0, Planes.of_images(np.ascontiguousarray(whole))
    batch = Batch(images, Draws(0, 0, np.arange(count)), sizes_of(images))
    boxes = RandomResizedCrop(size).apply(batch, "RandomResizedCrop").region
    statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    ways = {
        "crop, resize and mirror": (Filter(), Cast()),
        **{
            f"the same, normalized, {str(dtype).removeprefix('torch.')}": (Filter(), Cast(statistics, dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        },
        "the same, bicubic": (Filter("bicubic"), Cast()),
    }

    def by_opencv(how: int, out: NDArray[np.uint8], x: NDArray[np.uint8]) -> None:
        edges = np.stack([boxes.tops, boxes.lefts, boxes.tops + boxes.heights, boxes.lefts + boxes.widths], axis=1)
        for i, (top, left, bottom, right) in enumerate(edges.astype(int).tolist()):
            cv2.resize(x[i, top:bottom, left:right], (size, size), dst=out[i], interpolation=how)
            if flips[i]:
                cv2.flip(out[i], 1, dst=out[i])

    for name, (how, cast) in ways.items():
        stage = Stage(whole.shape[1:], (size, size), boxes, boxes, flips, how)
        out = np.zeros((count, size, size, 3), cast.kernel_dtype)
        some = {"C": way(partial(stage.resample, some=np.arange(count), out=out, cast=cast), planes)}
        if cv2 is not None:
            kind = cv2.INTER_CUBIC if how.interpolation == "bicubic" else cv2.INTER_LINEAR
            some["OpenCV"] = way(partial(by_opencv, kind, np.zeros((count, size, size, 3), np.uint8)), whole)
        in_turn(some, 1)
        print_row(name, in_turn(some, rounds))


def measure_steps(name: str, steps: Steps, images: torch.Tensor, rounds: int) -> None:
    pixels = images.permute(0, 2, 3, 1).numpy()
    codes, values = np.stack([step.codes for step in steps]), np.stack([step.values for step in steps])
    # The kernel changes its pictures again and again: most operations take as long for all of them.
    ways = {"C": way(lambda x: run_steps(x, codes, values), pixels.copy())}
    if name in (known := opencv_operations()):
        ways["OpenCV"] = way(lambda x: [known[name](picture) for picture in x], pixels)
    in_turn(ways, 1)
    print_row(name, in_turn(ways, rounds))


def print_row(name: str, rates: dict[str, list[float]]) -> None:
    times = {way: spread([1e6 / value for value in values], 0) for way, values in rates.items()}
    cells = [times.get(way, "-") for way in ("C", "OpenCV")]
    cells += [ratios(rates["OpenCV"], rates["C"], 2)] if "OpenCV" in rates else []
    print(f"{name:34}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(describe_machine(), f"OpenCV {cv2.__version__}" if cv2 else "without OpenCV", sep=", ")
    print(f"{'microseconds for a picture':34}" + "".join(f"{head:>26}" for head in ("C", "OpenCV", "ratio")))
    measure_resizes(pictures(options.batch_size, options.size * 8 // 7), options.size, options.rounds)
    images = pictures(options.batch_size, options.size)
    for name, each in operations().items():
        steps = tuple(Step.of(len(images), 3, op, *values) for op, values in each)
        measure_steps(name, steps, images, options.rounds)


if __name__ == "__main__":
    main()
