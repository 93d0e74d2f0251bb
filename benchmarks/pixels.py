"""Each operation of shardio.augment.steps on batches of 224 x 224 x 3: microseconds for a picture, on one core.

The kernel in C beside the operations of torch that do the same, in turn, and the medians over rounds. A random crop and
its resize are beside them: what a transform of several operations is to be compared with.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable

import numpy as np
import torch
from common import describe_machine, in_turn

from shardio.augment import pixels
from shardio.augment.boxes import Boxes
from shardio.augment.resample import resample
from shardio.augment.steps import Op, Sampling, Step, Steps
from shardio.kernels import pixels as kernel

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
        "grey": ((Op.GRAYSCALE, ()),),
        "add": ((Op.ADD, (3.2, -4.1, 9.0)),),
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


def way(run: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> Callable[[], int]:
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


def measure(name: str, steps: Steps, images: torch.Tensor, rounds: int) -> None:
    few = images[:8].clone(memory_format=torch.preserve_format)
    # The kernel changes its pictures again and again: most operations take as long for all of them.
    ways = {"torch": way(lambda x: pixels.run_steps_by_torch(x, tuple(step_of_few(step) for step in steps)), few)}
    if kernel.AVAILABLE:
        ours = images.clone(memory_format=torch.preserve_format)
        ways["C"] = way(lambda x: pixels.run_steps(x, steps, native=True), ours)
    in_turn(ways, 1)
    print_row(name, in_turn(ways, rounds))


def step_of_few(step: Step) -> Step:
    return Step(step.codes[:8], step.values[:8])


def print_row(name: str, rates: dict[str, list[float]]) -> None:
    times = {way: 1e6 / statistics.median(values) for way, values in rates.items()}
    ours, theirs = (f"{times[way]:10.0f}" if way in times else f"{'-':>10}" for way in ("C", "torch"))
    print(f"{name:34}{ours}{theirs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(describe_machine())
    print(f"{'microseconds for a picture':34}{'C':>10}{'torch':>10}")
    images = pictures(options.batch_size, options.size)
    large = pictures(options.batch_size, options.size * 8 // 7)
    count, side = len(large), float(large.shape[2])
    boxes = Boxes(*(np.full(count, value) for value in (0.1 * side, 0.05 * side, 0.8 * side, 0.7 * side)))
    flips = np.arange(count) % 2 == 0
    ways = {
        "C" if native else "torch": way(
            lambda x, native=native: resample(x, boxes, flips, (options.size, options.size), native=native),  # type: ignore[misc]
            large,
        )
        for native in ([False, True] if kernel.AVAILABLE else [False])
    }
    in_turn(ways, 1)
    print_row("crop, resize and mirror", in_turn(ways, options.rounds))
    for name, each in operations().items():
        steps = tuple(Step.of(len(images), 3, op, *values) for op, values in each)
        measure(name, steps, images, options.rounds)


if __name__ == "__main__":
    main()
