"""Writes tests/data/golden_pixels.npz: what torchvision makes of a drawn picture. tests/augment/test_pixels.py
reads it.

It was run with torchvision 0.28.0. torchvision is not needed for anything else, and is in no list of dependencies.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

HEIGHT, WIDTH = 24, 32


def drawn_picture() -> NDArray[np.uint8]:
    """Returns (24, 32, 3): slopes of color, a disc, and some noise, from whole numbers alone."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    disc = ((x - 12) ** 2 + (y - 10) ** 2 < 49) * 90
    noise = (x * 7919 + y * 104729 + x * y * 31) % 23
    planes = [x * 6 + noise + 10, y * 8 + disc // 2 + noise, 200 - x * 3 - y * 2 + disc // 3]
    pixels: NDArray[np.uint8] = np.clip(np.stack(planes, axis=2), 5, 250).astype(np.uint8)
    return pixels


def made_by_torchvision() -> dict[str, NDArray[np.uint8]]:
    """Returns (H, W, C) by name."""
    if not hasattr(torch.ops.torchvision, "nms"):  # a wheel for CUDA beside a torch for the CPU
        define: Any = torch.library.define
        for name in ("nms", "qnms"):
            define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision.transforms.v2.functional as functional  # type: ignore[import-not-found,unused-ignore]

    f: Any = functional
    x = torch.from_numpy(drawn_picture()).permute(2, 0, 1)[None]
    made = {}
    for factor in (0.3, 1.7):
        made[f"contrast {factor}"] = f.adjust_contrast(x, factor)
        made[f"saturation {factor}"] = f.adjust_saturation(x, factor)
        made[f"sharpness {factor}"] = f.adjust_sharpness(x, factor)
    made["brightness 1.7"] = f.adjust_brightness(x, 1.7)
    for turn in (-0.3, 0.1):
        made[f"hue {turn}"] = f.adjust_hue(x, turn)
    made["posterize 3"] = f.posterize(x, 3)
    made["solarize 100"] = f.solarize(x, 100)
    made["invert"] = f.invert(x)
    made["autocontrast"] = f.autocontrast(x)
    made["equalize"] = f.equalize(x)
    made["grayscale"] = f.rgb_to_grayscale(x, 3)
    made["blur 3 0.5"] = f.gaussian_blur(x, [3, 3], [0.5, 0.5])
    made["blur 9 1.6"] = f.gaussian_blur(x, [9, 9], [1.6, 1.6])
    made["mirror"] = f.horizontal_flip(x)
    made["flip"] = f.vertical_flip(x)
    for mode in ("nearest", "bilinear"):
        for fill in (None, [10.0, 100.0, 200.0]):
            about = {"interpolation": mode, "fill": fill}
            made[f"affine {mode} {fill is not None}"] = f.affine(x, 20.0, [3, -2], 0.9, [5.0, -4.0], **about)
            made[f"perspective {mode} {fill is not None}"] = f.perspective(
                x, [[0, 0], [31, 0], [31, 23], [0, 23]], [[3, 2], [29, 0], [30, 20], [1, 22]], **about
            )
    return {name: result[0].permute(1, 2, 0).numpy() for name, result in made.items()}


def places_of_torchvision() -> dict[str, NDArray[np.float64]]:
    """Returns the numbers of `affine` and `perspective` above, as AFFINE and PERSPECTIVE take them."""
    import torchvision.transforms.v2.functional._geometry as geometry  # type: ignore[import-not-found,unused-ignore]

    inverse = np.array(geometry._get_inverse_affine_matrix([0.0, 0.0], 20.0, [3.0, -2.0], 0.9, [5.0, -4.0]))
    matrix, middle = inverse.reshape(2, 3), np.array([WIDTH / 2, HEIGHT / 2])
    matrix[:, 2] += middle - matrix[:, :2] @ middle  # torchvision's origin is the middle
    corners = [[0, 0], [31, 0], [31, 23], [0, 23]], [[3, 2], [29, 0], [30, 20], [1, 22]]
    return {
        "numbers affine": matrix.reshape(-1),
        "numbers perspective": np.array(geometry._perspective_coefficients(*corners, None)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="tests/data/golden_pixels.npz")
    out = parser.parse_args().out
    made: dict[str, Any] = {**made_by_torchvision(), **places_of_torchvision()}
    np.savez_compressed(out, **made)


if __name__ == "__main__":
    main()
