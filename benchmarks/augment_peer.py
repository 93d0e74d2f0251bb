"""Another library's augmentation. augment.py starts this in an environment where shardio need not be installed.

python augment_peer.py LIBRARY SAMPLES.npy COUNT BATCH_SIZE SIZE prints the library's version and the names of its ways.
Then, for each line with the name of a way, it augments all the samples once and prints how many they were. One thread
does it. An error is a line that begins with an exclamation mark.

A way's name begins with its table: uint8 and float32 for the crop and the flip alone, or one of CHAINS. The library
"recipes" is torchvision, with a way for each of its recipes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Ways = dict[str, Callable[[], Any]]

# What follows the crop and the flip, each alone; results are uint8. Names and arguments are those of torchvision and of
# shardio.augment. All other arguments have their defaults, which are the same in all libraries.
CHAINS: dict[str, dict[str, Any]] = {
    "ColorJitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "RandAugment": {"num_ops": 2, "magnitude": 9},
    "RandomErasing": {"p": 0.25, "value": 0.0},
}
# The chains that a library does not have, or not for each picture by itself.
LACKS: dict[str, dict[str, str]] = {
    "torchvision": {},
    "kornia": {"RandAugment": "it draws the manipulations once for the whole batch, and from another list"},
    "albumentations": {"RandAugment": "it has none"},
    "ffcv": {
        "ColorJitter": "it changes no hue",
        "RandAugment": "it has none",
        "RandomErasing": "its Cutout erases a square of one size in every picture",
    },
}


def in_batches(augment: Callable[[Any], Any], images: Sequence[Any], batch_size: int) -> Callable[[], None]:
    """Returns a way that augments all the images, batch by batch."""

    def way() -> None:
        for first in range(0, len(images), batch_size):
            augment(images[first : first + batch_size])

    return way


def one_by_one(transform: Callable[[Any], Any], stack: Callable[[list[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a function of a batch that transforms one image after the other, and stacks the results."""
    return lambda images: stack([transform(image) for image in images])


def import_torchvision() -> Any:
    try:
        import torchvision
    except RuntimeError as error:
        # A wheel for CUDA cannot load its operators beside a torch for the CPU. No transform uses them, but two of
        # them must be known.
        if "torchvision::nms does not exist" not in str(error):
            raise
        known = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            known.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

        torchvision.declared = known  # keeps the two names known
    return torchvision


def ways_of_torchvision(samples: np.ndarray, batch_size: int, size: int, folder: Path) -> tuple[str, Ways]:
    """Augments uint8 (C, H, W), contiguous, or channels_last as the samples lie, and PIL images, and stacks them."""
    torchvision = import_torchvision()
    from PIL import Image
    from torchvision.transforms import v2

    crop = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    following = {
        "uint8": [],
        "float32": [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)],
        **{name: [getattr(v2, name)(**arguments)] for name, arguments in CHAINS.items()},
    }
    samples = np.array(samples)
    lie = [torch.from_numpy(sample).permute(2, 0, 1) for sample in samples]
    layouts = {
        "contiguous": [image.contiguous() for image in lie],
        "channels_last": lie,
        "PIL images": [Image.fromarray(sample) for sample in samples],
    }
    ways = {}
    for layout, images in layouts.items():
        for name, steps in following.items():
            if layout == "PIL images":
                # RandomErasing lets images of PIL pass as they are.
                late = name in ("float32", "RandomErasing")
                steps = [v2.PILToTensor(), *steps] if late else [*steps, v2.PILToTensor()]
            ways[f"{name}, {layout}"] = in_batches(
                one_by_one(v2.Compose([*crop, *steps]), torch.stack), images, batch_size
            )
    return torchvision.__version__, ways


def ways_of_recipes(samples: np.ndarray, batch_size: int, size: int, folder: Path) -> tuple[str, Ways]:
    """Applies the transforms of published recipes, as torchvision has them, to tensors.

    Their sizes are those of the recipes. Pillow's blur, which some sources have, is a Gaussian here.
    """
    torchvision = import_torchvision()
    from torchvision.transforms import v2

    floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    cubic = v2.InterpolationMode.BICUBIC

    def crop(side: int, low: float, high: float = 1.0, filter: Any = v2.InterpolationMode.BILINEAR) -> Any:
        return v2.RandomResizedCrop(side, scale=(low, high), interpolation=filter, antialias=True)

    def blur(side: int, p: float) -> Any:
        return v2.RandomApply([v2.GaussianBlur(side, (0.1, 2.0))], p)

    def color(strength: float, saturation: float, hue: float) -> list[Any]:
        return [v2.RandomApply([v2.ColorJitter(strength, strength, saturation, hue)], 0.8), v2.RandomGrayscale(0.2)]

    def dino(side: int, low: float, high: float, *more: Any, flips: bool = True) -> Any:
        flip = [v2.RandomHorizontalFlip()] if flips else []
        return v2.Compose([crop(side, low, high, cubic), *flip, *color(0.4, 0.2, 0.1), *more, *floats])

    solarize = v2.RandomSolarize(128, 0.2)
    halves = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    trivial = [crop(176, 0.08), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide(), *floats, v2.RandomErasing(0.1)]
    simclr = [crop(224, 0.08, 1.0, cubic), v2.RandomHorizontalFlip(), *color(0.8, 0.8, 0.2), blur(23, 0.5), floats[0]]
    moco = [crop(224, 0.2), *color(0.4, 0.4, 0.1), blur(13, 0.5), v2.RandomHorizontalFlip(), *floats]
    views: dict[str, list[Any]] = {
        "torchvision-v2": [v2.Compose(trivial)],
        "simclr": [v2.Compose(simclr)] * 2,
        "moco-v2": [v2.Compose(moco)] * 2,
        "dino": [
            dino(224, 0.4, 1.0, blur(13, 1.0)),
            dino(224, 0.4, 1.0, blur(13, 0.1), solarize),
            *[dino(96, 0.05, 0.4, blur(13, 0.5))] * 8,
        ],
        "dinov3": [
            dino(256, 0.32, 1.0, flips=False),
            dino(256, 0.32, 1.0, blur(9, 0.9), solarize, flips=False),
            *[dino(112, 0.05, 0.32, blur(9, 0.5), flips=False)] * 8,
        ],
        "mae": [v2.Compose([crop(224, 0.2, 1.0, cubic), v2.RandomHorizontalFlip(), *floats])],
        "ijepa": [v2.Compose([crop(224, 0.3), *floats])],
        "sit": [v2.Compose([v2.RandomHorizontalFlip(), *halves])],
        "edm2": [v2.Compose(halves)],
    }
    images = [torch.from_numpy(sample).permute(2, 0, 1).contiguous() for sample in np.array(samples)]

    def augmented(transforms: list[Any]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        return lambda some: [torch.stack([transform(image) for image in some]) for transform in transforms]

    return torchvision.__version__, {
        name: in_batches(augmented(transforms), images, batch_size) for name, transforms in views.items()
    }


def ways_of_kornia(samples: np.ndarray, batch_size: int, size: int, folder: Path) -> tuple[str, Ways]:
    """Augments batches as float32 from 0 to 1, which they become and cease to be; its filter is not antialiased.

    ColorJitter's order of the four changes is one for the batch; their factors are not.
    """
    import kornia
    from kornia import augmentation

    crop = [augmentation.RandomResizedCrop((size, size)), augmentation.RandomHorizontalFlip()]
    following = {
        "uint8": [],
        "float32": [augmentation.Normalize(MEAN, STD)],
        **{
            name: [getattr(augmentation, name)(**arguments, same_on_batch=False)]
            for name, arguments in CHAINS.items()
            if name not in LACKS["kornia"]
        },
    }

    def augmented(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        transform = torch.nn.Sequential(*crop, *following[name])

        def augment(images: torch.Tensor) -> torch.Tensor:
            images = transform(images.float() / 255)
            return images if name == "float32" else (255 * images).round_().to(torch.uint8)

        return augment

    images = torch.from_numpy(np.array(samples)).permute(0, 3, 1, 2)
    return kornia.__version__, {name: in_batches(augmented(name), images, batch_size) for name in following}


def channels_last(images: list[np.ndarray]) -> torch.Tensor:
    """Stacks (H, W, C) to (B, C, H, W), whose memory is as that of the images; with torch.stack it takes longer."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def ways_of_albumentations(samples: np.ndarray, batch_size: int, size: int, folder: Path) -> tuple[str, Ways]:
    """Augments one by one, by OpenCV, whose filter is not antialiased, and stacks.

    Its rectangles to erase are drawn from a slightly different distribution: of at most 0.3 of the area.
    """
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # on import, it would ask the network for its newest version
    import albumentations
    import cv2

    cv2.setNumThreads(1)
    crop = [albumentations.RandomResizedCrop((size, size)), albumentations.HorizontalFlip()]
    erasing = CHAINS["RandomErasing"]
    following = {
        "uint8": [],
        "float32": [albumentations.Normalize(MEAN, STD)],
        "ColorJitter": [albumentations.ColorJitter(**CHAINS["ColorJitter"], p=1)],
        "RandomErasing": [albumentations.Erasing(p=erasing["p"], fill=erasing["value"])],
    }

    def augmented(name: str) -> Callable[[Sequence[np.ndarray]], torch.Tensor]:
        transform = albumentations.Compose([*crop, *following[name]])
        return one_by_one(lambda image: transform(image=image)["image"], channels_last)

    images = np.array(samples)
    return albumentations.__version__, {name: in_batches(augmented(name), images, batch_size) for name in following}


class Indexed:
    """The indexed dataset that FFCV's writer takes."""

    def __init__(self, samples: np.ndarray) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> tuple[np.ndarray]:
        return (np.array(self._samples[i]),)


def ways_of_ffcv(samples: np.ndarray, batch_size: int, size: int, folder: Path) -> tuple[str, Ways]:
    """Runs its loader with one worker: raw pixels from the page cache, OpenCV's filter, which is not antialiased."""
    from importlib.metadata import version

    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    path = str(folder / "samples.beton")
    writer = DatasetWriter(path, {"image": RGBImageField(write_mode="raw")}, num_workers=1)
    writer.from_indexed_dataset(Indexed(samples))
    normalize = NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32)
    loaders = {
        output: Loader(
            path,
            batch_size,
            num_workers=1,
            os_cache=True,
            order=OrderOption.SEQUENTIAL,
            drop_last=False,
            pipelines={
                "image": [
                    RandomResizedCropRGBImageDecoder((size, size)),
                    RandomHorizontalFlip(),
                    *last,
                    ToTensor(),
                    ToTorchImage(),
                ]
            },
        )
        for output, last in {"uint8": [], "float32": [normalize]}.items()
    }
    return version("ffcv"), {name: lambda loader=loader: [None for _ in loader] for name, loader in loaders.items()}


def main() -> None:
    library, path, count, batch_size, size = sys.argv[1:]
    torch.set_num_threads(1)
    samples = np.load(path, mmap_mode="r")[: int(count)]
    # A line that the library prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    ways_of = {
        "torchvision": ways_of_torchvision,
        "kornia": ways_of_kornia,
        "albumentations": ways_of_albumentations,
        "ffcv": ways_of_ffcv,
        "recipes": ways_of_recipes,
    }[library]
    with TemporaryDirectory() as folder:
        try:
            version, ways = ways_of(samples, int(batch_size), int(size), Path(folder))
            print("|".join([version, *ways]), file=answers, flush=True)
            for line in sys.stdin:
                ways[line.strip()]()
                print(len(samples), file=answers, flush=True)
        except Exception as error:
            reason = " ".join(str(error).split())
            print(f"!{type(error).__name__}: {reason}", file=answers, flush=True)
            raise


if __name__ == "__main__":
    main()
