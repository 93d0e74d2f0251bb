"""What torchvision, Pillow and timm make of pictures. compare_torchvision.py starts this in another environment.

python compare_torchvision_peer.py SOURCE.npy RESULT.npy prints the versions, and then, for each line with a JSON list
of library, call and arguments, writes the result for all pictures, uint8 (B, H, W, 3), and prints "done", or why not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from augment_peer import import_torchvision
from PIL import Image, ImageEnhance, ImageOps

torchvision = import_torchvision()
from torchvision.transforms import InterpolationMode, v2  # noqa: E402
from torchvision.transforms.v2 import functional  # noqa: E402

READINGS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def by_torchvision(x: torch.Tensor, call: str, *arguments: Any) -> torch.Tensor:
    if call == "affine":
        numbers, reading, fill = arguments
        return functional.affine(
            x,
            numbers.get("angle", 0.0),
            list(numbers.get("translate", (0, 0))),
            numbers.get("scale", 1.0),
            list(numbers.get("shear", (0.0, 0.0))),
            interpolation=InterpolationMode(reading),
            fill=fill,
        )
    if call == "rotate":
        angle, reading, fill = arguments
        return functional.rotate(x, angle, interpolation=InterpolationMode(reading), fill=fill)
    if call == "perspective":
        corners, seen, reading, fill = arguments
        return functional.perspective(x, corners, seen, interpolation=InterpolationMode(reading), fill=fill)
    if call == "blur":
        size, sigma = arguments
        return functional.gaussian_blur(x, [size, size], [sigma, sigma])
    if call == "grayscale":
        return functional.rgb_to_grayscale(x, 3)
    name = call.replace(" ", "_")
    return getattr(functional, name if hasattr(functional, name) else f"adjust_{name}")(x, *arguments)


POLICIES: dict[str, Callable[[], Any]] = {
    "RandAugment": v2.RandAugment,
    "TrivialAugmentWide": v2.TrivialAugmentWide,
}


def by_policy(x: torch.Tensor, library: str, name: str, bins: int, magnitude: int, negative: bool, reading: str) -> Any:
    policy = POLICIES[library]()
    make, signed = policy._AUGMENTATION_SPACE[name]
    magnitudes = make(bins, *x.shape[2:])
    value = 0.0 if magnitudes is None else float(magnitudes[magnitude])
    if signed and negative:
        value = -value
    return policy._apply_image_or_video_transform(x, name, value, InterpolationMode(reading), {torch.Tensor: None})


def by_autoaugment(x: torch.Tensor, name: str, pair: int, negative: bool) -> Any:
    kind = v2.AutoAugmentPolicy(name)
    policy = v2.AutoAugment(kind)
    for place, (call, _, magnitude) in enumerate(policy._get_policies(kind)[pair]):
        make, signed = policy._AUGMENTATION_SPACE[call]
        magnitudes = make(10, *x.shape[2:])
        value = 0.0 if magnitudes is None else float(magnitudes[magnitude])
        probability = policy._get_policies(kind)[pair][place][1]
        if probability == 0:
            continue
        if signed and negative != bool(place):  # the second part has the other sign
            value = -value
        x = policy._apply_image_or_video_transform(x, call, value, InterpolationMode.NEAREST, {torch.Tensor: None})
    return x


def by_pillow(image: Image.Image, call: str, *arguments: Any) -> Image.Image:
    enhancers = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "saturation": ImageEnhance.Color,
        "sharpness": ImageEnhance.Sharpness,
    }
    if call in enhancers:
        return enhancers[call](image).enhance(*arguments)
    if call == "affine":
        numbers, reading, fill = arguments
        color = tuple(map(int, fill))
        return image.transform(image.size, Image.Transform.AFFINE, numbers, READINGS[reading], fillcolor=color)
    names = {"horizontal flip": "mirror", "vertical flip": "flip"}
    if call == "grayscale":
        return ImageOps.grayscale(image).convert("RGB")
    if call == "solarize":
        arguments = (int(np.ceil(arguments[0])),)  # a gray level is not below 100.5 if it is not below 101
    return getattr(ImageOps, names.get(call, call))(image, *arguments)


def by_timm(images: list[Image.Image], name: str, level: int, share: float, increasing: bool, reading: str) -> Any:
    from timm.data import auto_augment

    names = auto_augment._RAND_INCREASING_TRANSFORMS if increasing else auto_augment._RAND_TRANSFORMS
    (full,) = [one for one in names if one.replace("Increasing", "").replace("Rel", "") == name]
    options = {"img_mean": (10, 100, 200), "interpolation": READINGS[reading]}
    made = auto_augment.AugmentOp(full, prob=1.0, magnitude=level, hparams=options)
    with mock.patch.object(auto_augment.random, "random", return_value=share):
        return [made(image) for image in images]


def main() -> None:
    source, result = sys.argv[1:]
    torch.set_num_threads(1)
    pixels = np.load(source)
    images = [Image.fromarray(picture) for picture in pixels]
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    try:
        from timm import __version__ as timm_version
    except ImportError:
        timm_version = "is not here"
    print(f"torchvision {torchvision.__version__}, Pillow {Image.__version__}, timm {timm_version}", flush=True)
    for line in sys.stdin:
        library, call, arguments = json.loads(line)
        try:
            if library == "torchvision":
                found = by_torchvision(x, call, *arguments).permute(0, 2, 3, 1).numpy()
            elif library in POLICIES:
                found = by_policy(x, library, call, *arguments).permute(0, 2, 3, 1).numpy()
            elif library == "AutoAugment":
                found = by_autoaugment(x, call, *arguments).permute(0, 2, 3, 1).numpy()
            elif library == "timm":
                found = np.stack([np.array(image) for image in by_timm(images, call, *arguments)])
            else:
                found = np.stack([np.array(by_pillow(image, call, *arguments)) for image in images])
            np.save(result, found)
            print("done", flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)


if __name__ == "__main__":
    main()
